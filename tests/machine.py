"""Which backends this machine must have.

A backend listed in the environment variable MLX_LLAMA_REQUIRED_BACKENDS (or, without it, in the file
tests/required_backends), such as "cpu,mlx,cuda" or "mlx-gpu", may fail but not skip. Others skip with the reason.
"mlx" and "cuda" mean their CPU devices; "mlx-gpu" and "cuda-gpu" run where there is a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_llama.core import backend as backends
from mlx_llama.core.errors import BackendError

ALL = ("cpu", "mlx", "cuda", "mlx-gpu", "cuda-gpu")


def required() -> set[str]:
    listed = os.environ.get("MLX_LLAMA_REQUIRED_BACKENDS")
    file = Path(__file__).parent / "required_backends"
    if listed is None and file.exists():
        listed = file.read_text()
    names = set((listed or "cpu").replace(",", " ").split())
    if names - set(ALL):
        raise pytest.UsageError(f"MLX_LLAMA_REQUIRED_BACKENDS names {sorted(names - set(ALL))}; known are {ALL}")
    return names


def open_backend(name: str) -> backends.Backend:
    """The backend behind a test's name; skips, with the reason, unless this machine must have it."""
    kind, _, device = name.partition("-")
    try:
        return backends.select(kind, device or "cpu")
    except BackendError as error:
        if name in required():
            pytest.fail(f"{name} is required here: {error}")
        pytest.skip(str(error))
