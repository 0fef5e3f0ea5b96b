"""A model's tokenizer for tests of tools."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from making import config_fields, make_tokenizer
from scripting import SPECIALS
from transformers import AutoTokenizer

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text.hf_tokenizer import load_tokenizer


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """A tokenizer with the special tokens of all formats, and transformers' of the same files."""
    flags = {
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    added = {str(384 + i): {"content": text, **flags} for i, text in enumerate(SPECIALS)}
    folder = make_tokenizer(
        tmp_path_factory.mktemp("tools"), "sentencepiece", added_tokens_decoder=added
    )
    (folder / "config.json").write_text(json.dumps(config_fields(vocab_size=400)))
    ours = load_tokenizer(folder, LlamaConfig.from_file(folder))
    return SimpleNamespace(tokenizer=ours, judge=AutoTokenizer.from_pretrained(folder))
