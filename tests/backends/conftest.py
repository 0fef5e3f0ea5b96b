from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_llama.core.files.checkpoint import open_checkpoint


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


def transformers_logits(folder: Path, tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Logits of a checkpoint by transformers, float32 [B, T, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()
