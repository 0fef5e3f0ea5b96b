"""A model's tokenizer for tests of tools."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from scripting import make_scripted_checkpoint
from transformers import AutoTokenizer

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text.hf_tokenizer import load_tokenizer


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """A tokenizer with the special tokens of all formats, and transformers' of the same files."""
    folder = make_scripted_checkpoint(tmp_path_factory.mktemp("tools") / "m", "")
    ours = load_tokenizer(folder, LlamaConfig.from_file(folder))
    return SimpleNamespace(tokenizer=ours, judge=AutoTokenizer.from_pretrained(folder))
