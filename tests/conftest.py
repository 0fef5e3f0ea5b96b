"""Which backends this machine must have, and each test once per backend.

A backend listed in the environment variable MLX_LLAMA_REQUIRED_BACKENDS (or, without it, in the file
tests/required_backends), such as "cpu,mlx,cuda" or "mlx-gpu", may fail but not skip. Others skip with the reason.
"mlx" and "cuda" mean their CPU devices; "mlx-gpu" and "cuda-gpu" run where there is a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Tests never reach a network, whatever they import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest

from making import make_checkpoint
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


@pytest.fixture(scope="session", params=ALL)
def backend(request) -> backends.Backend:
    return open_backend(request.param)


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A random checkpoint, float32, with a tokenizer and a template."""
    return make_checkpoint(tmp_path_factory.mktemp("toy") / "toy")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"backends required here: {', '.join(sorted(required()))} (python {sys.version.split()[0]})")
