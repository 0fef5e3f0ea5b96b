"""Tokenizers of every kind, beside the judges of each."""

import json
import lzma
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers
from cases.texts import KINDS, VOCABULARIES, load_folder, load_vocabulary
from making import make_tokenizer, sentencepiece_model

from mlx_llama.core.files.gguf import GGUFFile

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """{kind: (folder, ours, the library's own)}"""
    tokenizers_made = {}
    for kind in KINDS:
        folder = make_tokenizer(tmp_path_factory.mktemp(kind), kind)
        if kind == "sentencepiece":
            library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
        else:
            library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizers_made[kind] = SimpleNamespace(
            folder=folder, ours=load_folder(folder), library=library, kind=kind
        )
    return tokenizers_made


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory):
    """{name: (metadata, tokenizer)} of llama.cpp's vocabulary files"""
    folder, loaded = tmp_path_factory.mktemp("vocabularies"), {}
    for name in VOCABULARIES:
        path = folder / f"{name}.gguf"
        path.write_bytes(lzma.decompress((DATA / f"ggml-vocab-{name}.gguf.xz").read_bytes()))
        metadata = GGUFFile(path).metadata
        loaded[name] = metadata, load_vocabulary(metadata)
    return loaded


@pytest.fixture(scope="session")
def judged():
    """Token ids by llama.cpp itself: see data/make_vocab.py."""
    return json.loads(lzma.decompress((DATA / "vocab-llama-cpp.json.xz").read_bytes()))
