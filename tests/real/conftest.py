"""Real checkpoints as fixtures. A model in MLX_LLAMA_REQUIRED_MODELS ("smollm2 gemma3") may fail but not skip."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from machine import device_of

from mlx_llama import LLM, load
from real.checkpoints import MODELS, FetchError
from real.golden import Golden, Judge, read_golden


@functools.cache
def _fetch(name: str) -> Path | str:
    """The file's path, or the reason why it is not here."""
    try:
        return MODELS[name].fetch()
    except FetchError as error:
        return str(error)


def fetch(name: str) -> Path:
    """The file's path; skips with the reason where it cannot be had, and fails where it is required."""
    found = _fetch(name)
    if isinstance(found, Path):
        return found
    if name in os.environ.get("MLX_LLAMA_REQUIRED_MODELS", "").split():
        pytest.fail(f"{name} is required here: {found}")
    pytest.skip(found)


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


@pytest.fixture(scope="module")
def open_real(backend):
    """open_real(name, **options of load): the model on this test's backend, float32 unless the options say otherwise."""

    @functools.cache
    def loader(name: str, **options) -> LLM:
        return load(fetch(name), backend=backend.name, device=device_of(backend), **{"dtype": "float32"} | options)

    return loader
