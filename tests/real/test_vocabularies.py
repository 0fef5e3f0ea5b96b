"""llama.cpp's own vocabulary files, whole, from llama-cpp-python's source archive."""

from __future__ import annotations

import tarfile

import pytest
from cases.texts import load_vocabulary

from mlx_llama.core.files.gguf import GGUFFile
from real.test_llama_server_suite import fetch_archive

MODELS = "vendor/llama.cpp/models/ggml-vocab-"
NAMES = """command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3
qwen2 qwen35 refact starcoder""".split()


@pytest.fixture(scope="module")
def archived() -> dict[str, bytes]:
    """{name: contents}"""
    with tarfile.open(fetch_archive()) as archive:
        members = [member for member in archive if MODELS in member.name]
        return {m.name.partition(MODELS)[2]: archive.extractfile(m).read() for m in members}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_llama_cpps(name, archived, tmp_path):
    (tmp_path / "vocabulary.gguf").write_bytes(archived[f"{name}.gguf"])
    ours = load_vocabulary(GGUFFile(tmp_path / "vocabulary.gguf").metadata, rows=1 << 18)
    texts = archived[f"{name}.gguf.inp"].decode().split("\n__ggml_vocab_test__\n")
    lines = archived[f"{name}.gguf.out"].decode().splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines):
        ids = list(map(int, line.split()))
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text
