"""A cache folder of the hub."""

from __future__ import annotations

import os
import shutil

import pytest
from making import make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, offline. huggingface_hub reads its environment at import, so both are
    set.
    """
    from huggingface_hub import constants

    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return root


def put_in_cache(cache, name="toy/llama", commit=COMMIT, ref="main", **fields):
    """A model as huggingface_hub leaves it: blobs, links to them per commit, and a ref."""
    repository = cache / ("models--" + name.replace("/", "--"))
    made = make_checkpoint(cache.parent / "made", **fields)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for file in made.iterdir():
        blob = repository / "blobs" / f"{commit[:4]}-{file.name}"
        shutil.move(file, blob)
        os.symlink(os.path.relpath(blob, snapshot), snapshot / file.name)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return snapshot
