from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import open_backend, to_run

from mlx_llama.core.backends.profile import matrix_parts, name_matrices
from mlx_llama.core.files.checkpoint import open_checkpoint

# Options of sampling that use every kernel
EVERYTHING = dict(
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    xtc_probability=0.5,
    xtc_threshold=0.01,
    logit_bias={5: 1.0},
    seed=3,
)


@pytest.fixture(scope="session")
def load(backend):
    """load(folder) -> (model on this test's backend at float32, function from its arrays to
    NumPy).
    """

    def loader(folder):
        return backend.load(open_checkpoint(folder), "float32"), backend.runtime.to_numpy

    return loader


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest absolute error over the largest wanted value."""
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def relative_rms(got: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the errors over that of the wanted values."""
    return float(np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean()))


def same_state(state: dict, other: dict) -> bool:
    """True if two saved rows of a cache have the same bits."""
    return state.keys() == other.keys() and all(
        state[name].tobytes() == other[name].tobytes() for name in state
    )


def in_chunks(model, to_numpy, tokens: np.ndarray, cuts: Iterable[int]) -> np.ndarray:
    """Logits of `tokens` [B, T] in float32 [B, T, V], read in pieces from a cut to the next."""
    cache, parts = model.make_cache(tokens.shape[1], len(tokens)), []
    for start, end in itertools.pairwise(cuts):
        logits = model.forward(tokens[:, start:end], start, cache, all_positions=True)
        parts.append(to_numpy(logits))
    return np.concatenate(parts, axis=1)


def matrices_of(model) -> list:
    """Every matrix of a model's products, layer by layer, then the head's."""
    return [part for _, matrix in name_matrices(model) for part in matrix_parts(matrix)]


def probes(model, to_numpy, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Every probe of a prompt of several rows."""
    seen: dict[str, np.ndarray] = {}
    model.forward(
        tokens,
        0,
        model.make_cache(tokens.shape[1], len(tokens)),
        all_positions=True,
        probe=lambda name, array: seen.__setitem__(name, to_numpy(array)),
    )
    return seen


def transformers_logits(
    folder: Path, tokens: np.ndarray, dtype: str = "float32", **fields
) -> np.ndarray:
    """Logits of a checkpoint by transformers, float32 [B, T, V]. fields: of its config."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **fields)
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def mlx_lm_model(folder: Path) -> Any:
    """A checkpoint's model by mlx-lm, its scales, biases and norms widened to float32."""
    mx = pytest.importorskip("mlx.core", reason="the judge is mlx-lm")
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return model


def mlx_lm_logits(folder: Path, tokens: Any) -> np.ndarray:
    """Logits of `mlx_lm_model`, float32 [B, T, V]."""
    mx = pytest.importorskip("mlx.core", reason="the judge is mlx-lm")
    with mx.stream(mx.cpu):
        return np.array(mlx_lm_model(folder)(mx.array(tokens)).astype(mx.float32))


@pytest.fixture(scope="module", params=[name for name in to_run() if name.startswith("mlx")])
def mlx(request):
    """MLX's backends of this machine."""
    return open_backend(request.param)
