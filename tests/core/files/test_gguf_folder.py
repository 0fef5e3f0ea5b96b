"""GGUF files as sources: the folder that they become, for our reader, transformers and mlx_lm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from making import SENTENCES, make_checkpoint

from core.files.test_gguf_export import ROPES, gguf_fields, gguf_tensors
from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.gguf_export import write_gguf
from mlx_llama.core.files.quantize import write_mlx


@pytest.fixture(scope="module", params=["sentencepiece", "bytelevel"])
def gguf_source(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(folder / "in", tokenizer=request.param, head_dim=64, **ROPES["llama3"])
    write_gguf(open_checkpoint(source), folder / "in.gguf")
    return folder / "in.gguf"


def test_a_gguf_file_becomes_a_folder(gguf_source, tmp_path):
    """One that our reader, transformers' tokenizers and mlx_lm read as the same model."""
    from transformers import AutoTokenizer

    before = open_checkpoint(gguf_source)
    written = write_mlx(before, tmp_path / "out", 8, 32)
    assert "quantised already (Q8_0)" in written.notices[0]
    after = open_checkpoint(tmp_path / "out")
    assert after.config.rope.type == "llama3" and after.config.rope.original_max_position_embeddings == 64
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*SENTENCES, "a\n\n b  c ", "Ünïcödé 🦙 12345"]:
        ids = before.tokenizer.encode(text, add_bos=True)
        assert after.tokenizer.encode(text, add_bos=True) == ids == theirs(text)["input_ids"], text
    assert after.eos_token_ids == before.eos_token_ids and after.bos_token_id == before.bos_token_id
    assert after.template.source == before.template.source
    for name, tensor in before.tensors.items():
        if len(tensor.shape) == 2:
            assert after.tensors[name].bits == 8 and after.tensors[name].scale_dtype == "float16"
            weights = tensor.float32()
            assert np.abs(after.tensors[name].float32() - weights).max() < np.abs(weights).max() / 100
    # and back
    write_gguf(after, tmp_path / "again.gguf")
    first, again = gguf_fields(gguf_source), gguf_fields(tmp_path / "again.gguf")
    assert {name for name in first | again if first.get(name) != again.get(name)} <= {"general.name"}


def test_mlx_lm_opens_what_came_from_a_gguf_file(gguf_source, tmp_path):
    mx = pytest.importorskip("mlx.core", reason="the judge is mlx_lm")
    import mlx_lm

    write_mlx(open_checkpoint(gguf_source), tmp_path / "out", 8, 32)
    llama, _ = mlx_lm.load(str(tmp_path / "out"))
    tokens = list(range(10, 30))
    with mx.stream(mx.cpu):
        theirs = np.array(llama(mx.array([tokens])).astype(mx.float32))[0]
    from mlx_llama import load

    ours = load(gguf_source, backend="cpu", dtype="float32").logits(tokens)
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.9995  # two quantisations of 8 bits apart


def test_a_gguf_file_becomes_another(gguf_source, tmp_path):
    write_gguf(open_checkpoint(gguf_source), tmp_path / "out.gguf", "Q4_0")
    before, after = gguf_fields(gguf_source), gguf_fields(tmp_path / "out.gguf")
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"general.file_type"}
    before, after = open_checkpoint(gguf_source), open_checkpoint(tmp_path / "out.gguf")
    assert before.config == after.config and before.eos_token_ids == after.eos_token_ids
    assert after.tensors["model.layers.0.mlp.up_proj.weight"].format == "Q4_0"


def test_factors_that_config_json_cannot_express(tmp_path):
    from gguf import GGUFReader

    source = make_checkpoint(tmp_path / "in", head_dim=64, **ROPES["llama3"])
    write_gguf(open_checkpoint(source), tmp_path / "in.gguf")
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "in.gguf", "r+").tensors}
    tensors["rope_freqs.weight"][:] = np.linspace(1, 3, 32)
    with pytest.raises(ConfigError, match="rope_freqs.weight holds factors that are not Llama 3's"):
        write_mlx(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out", 4, 32)
    written = write_gguf(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out.gguf")
    assert np.array_equal(gguf_tensors(written.path)["rope_freqs.weight"], np.linspace(1, 3, 32).astype(np.float32))


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_other_families_there_and_back(family, tmp_path):
    """config.json -> GGUF -> config.json, which mlx_lm reads as the same model."""
    mx = pytest.importorskip("mlx.core", reason="the judge is mlx_lm")
    from mlx_lm.utils import load_model

    source = open_checkpoint(make_checkpoint(tmp_path / "in", architectures=[family], head_dim=64, hidden_size=256))
    write_gguf(source, tmp_path / "m.gguf", "Q8_0")
    file = open_checkpoint(tmp_path / "m.gguf")
    assert file.gguf_metadata["general.architecture"] == source.config.architecture[:5].lower()
    write_mlx(file, tmp_path / "out", 8, 32)
    after = open_checkpoint(tmp_path / "out")
    for name in ("architecture", "attention_bias", "output_bias", "query_key_norm", "head_dim", "num_key_value_heads", "rope"):
        assert getattr(after.config, name) == getattr(file.config, name) == getattr(source.config, name), name
    from mlx_llama import load

    tokens = list(range(10, 30))
    with mx.stream(mx.cpu):
        theirs = np.array(load_model(tmp_path / "out")[0](mx.array([tokens])).astype(mx.float32))[0]
    ours = load(tmp_path / "m.gguf", backend="cpu", dtype="float32").logits(tokens)
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.999


def test_biases_that_config_json_cannot_express(tmp_path):
    from making import config_fields
    from making_gguf import make_gguf, random_tensors

    tensors = random_tensors(config_fields(attention_bias=True))
    make_gguf(tmp_path / "m.gguf", tensors={name: one for name, one in tensors.items() if "o_proj.bias" not in name})
    with pytest.raises(ConfigError, match="output_bias is False, which config.json cannot express for LlamaForCausalLM"):
        write_mlx(open_checkpoint(tmp_path / "m.gguf"), tmp_path / "out", 4, 32)
