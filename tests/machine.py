"""Backends that this machine must have.

A backend listed in the environment variable MLX_LLAMA_REQUIRED_BACKENDS (or, without it, in the
file tests/required_backends), such as "cpu,mlx,cuda" or "mlx-gpu", may fail but not skip. Others
skip with the reason. "mlx" and "cuda" mean their CPU devices; "mlx-gpu" and "cuda-gpu" need a GPU.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import BackendError

ALL = ("cpu", "mlx", "cuda", "mlx-gpu", "cuda-gpu")
# compile the CUDA kernels for every size rather than a cut
EVERY_SIZE = os.environ.get("MLX_LLAMA_MACHINE_CODE") == "all"


def required() -> set[str]:
    listed = os.environ.get("MLX_LLAMA_REQUIRED_BACKENDS")
    file = Path(__file__).parent / "required_backends"
    if listed is None and file.exists():
        listed = file.read_text()
    names = set((listed or "cpu").replace(",", " ").split())
    if names - set(ALL):
        raise pytest.UsageError(
            f"MLX_LLAMA_REQUIRED_BACKENDS names {sorted(names - set(ALL))}; known are {ALL}"
        )
    return names


@functools.cache
def missing(name: str) -> str:
    """Reason why a backend cannot run here, or ""."""
    kind, _, device = name.partition("-")
    try:
        backends.select(kind, device or "cpu")
    except BackendError as error:
        return str(error)
    return ""


def to_run() -> list[str]:
    """Backends to test: the required and the available ones."""
    return [name for name in ALL if name in required() or not missing(name)]


def open_backend(name: str) -> backends.Backend:
    """Open a backend by its name in tests. Skips with the reason if it is missing and not
    required.
    """
    if reason := missing(name):
        if name in required():
            pytest.fail(f"{name} is required here: {reason}")
        pytest.skip(reason)
    kind, _, device = name.partition("-")
    return backends.select(kind, device or "cpu")


def device_of(backend: backends.Backend) -> str:
    """Value of --device that opens this backend again."""
    return "cpu" if str(backend.device).startswith(("cpu", "Device(cpu")) else "gpu"
