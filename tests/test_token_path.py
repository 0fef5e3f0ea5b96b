"""The way of a decoded token is short: docs/design.md has the figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine import device_of
from token_path import trace_token

# at most: files, classes, threads. On mlx one thread computes and another one reads.
LIMITS = {"cpu": (16, 18, 1), "mlx": (17, 26, 2), "cuda": (19, 23, 1)}


def test_a_token_crosses_few_files_and_classes(backend):
    if device_of(backend) != "cpu":
        pytest.skip("a GPU's steps are other ones")
    path = trace_token(backend.name, "cpu")
    counts = len(path.files), len(path.classes), len(path.threads)
    assert all(count <= limit for count, limit in zip(counts, LIMITS[backend.name])), str(path)
    names = [Path(file).name for file in path.files]
    assert names.index("loop.py") < names.index("scheduler.py") < names.index("model.py")
