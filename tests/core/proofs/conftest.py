"""Fixtures of the proofs' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import make_checkpoint

from mlx_llama.api.llm import LLM
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint

SMALL = dict(num_hidden_layers=3, max_position_embeddings=256)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A random float32 checkpoint of three layers for 256 positions."""
    return make_checkpoint(tmp_path_factory.mktemp("small") / "small", **SMALL)


@pytest.fixture(scope="session")
def open_llm(small):
    """open_llm(backend=the cpu's, **options of load): the small model at float32."""

    def opened(backend=None, **how) -> LLM:
        backend, checkpoint = backend or select("cpu"), open_checkpoint(small)
        return LLM(
            checkpoint,
            backend,
            backend.load(checkpoint, "float32", **how),
            checkpoint.template,
            256,
        )

    return opened
