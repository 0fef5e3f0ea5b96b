"""Real checkpoints as fixtures. A model in MLX_LLAMA_REQUIRED_MODELS ("smollm2 gemma3") may fail
but not skip.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from filelock import FileLock
from machine import device_of

from mlx_llama import LLM, load
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.parity.probes import measure_perplexity
from mlx_llama.quantize.gguf_export import write_gguf
from real.checkpoints import MODELS, FetchError
from real.golden import Golden, Judge, read_golden
from real.texts import LOGITS


def perplexity(llm: LLM) -> float:
    """Perplexity of a story of some 290 tokens."""
    tokens = llm.encode(LOGITS[6])
    return measure_perplexity(llm, tokens, len(tokens), len(tokens) - 1).value


@functools.cache
def _fetch(name: str) -> Path | str:
    """The file's path, or the reason why it is not here."""
    try:
        return MODELS[name].fetch()
    except FetchError as error:
        return str(error)


def fetch(name: str) -> Path:
    """The file's path; skips with the reason where it cannot be had, and fails where it is
    required.
    """
    folder = _fetch(name)
    if isinstance(folder, Path):
        return folder
    if name in os.environ.get("MLX_LLAMA_REQUIRED_MODELS", "").split():
        pytest.fail(f"{name} is required here: {folder}")
    pytest.skip(folder)


@pytest.fixture(scope="session", params=MODELS)
def name(request) -> str:
    fetch(request.param)
    return request.param


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return fetch("smollm2")


@pytest.fixture(scope="session")
def golden(name) -> Golden:
    return read_golden(name)


@pytest.fixture(scope="session")
def judge(name) -> Judge:
    """transformers' own model; takes a minute to load."""
    return Judge(fetch(name))


@pytest.fixture(scope="session")
def widen(tmp_path_factory):
    """widen(name): the same values in float32, written once for all processes of a run."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def copy(name: str) -> Path:
        path = folder / f"{name}.F32.gguf"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                write_gguf(open_checkpoint(fetch(name)), path, "F32")
        return path

    return copy


@pytest.fixture(scope="module")
def open_real(backend, widen):
    """open_real(name, **options of load): the model on this test's backend, float32 unless the
    options say otherwise.

    On CPUs mlx and torch take seconds for a token of low-bit weights, so they get a float32 copy,
    unless as_stored.
    """

    @functools.cache
    def loader(name: str, as_stored: bool = False, **options) -> LLM:
        device = device_of(backend)
        is_slow = backend.name != "cpu" and device == "cpu"
        path = widen(name) if is_slow and not as_stored else fetch(name)
        return load(path, backend=backend.name, device=device, **{"dtype": "float32"} | options)

    return loader
