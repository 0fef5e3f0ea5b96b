"""GGUF files as sources: the folder that they become, for our reader, transformers and mlx_lm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from backends.conftest import mlx_lm_logits
from cases.gguf_files import ROPES, gguf_fields, gguf_tensors
from gguf import GGUFReader
from making import SENTENCES, config_fields, make_checkpoint, random_tensors
from making_gguf import make_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mlx_llama import load
from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx


@pytest.fixture(scope="module", params=["sentencepiece", "bytelevel"])
def gguf_source(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(folder / "in", tokenizer=request.param, head_dim=64, **ROPES["llama3"])
    write_gguf(open_checkpoint(source), folder / "in.gguf")
    return folder / "in.gguf"


def test_a_gguf_file_becomes_a_folder(gguf_source, tmp_path):
    """One that our reader, transformers' tokenizers and mlx_lm read as the same model."""
    before = open_checkpoint(gguf_source)
    written = write_mlx(before, tmp_path / "out", 8, 32)
    # nothing is lost: 8 bits in groups of 32 have a Q8_0's codes and scales
    assert not written.notices
    after = open_checkpoint(tmp_path / "out")
    assert after.config.rope.type == "llama3"
    assert after.config.rope.original_max_position_embeddings == 64
    judge = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*SENTENCES, "a\n\n b  c ", "Ünïcödé 🦙 12345"]:
        ids = before.tokenizer.encode(text, add_bos=True)
        assert after.tokenizer.encode(text, add_bos=True) == ids == judge(text)["input_ids"], text
    assert after.eos_token_ids == before.eos_token_ids and after.bos_token_id == before.bos_token_id
    assert after.template.source == before.template.source
    for name, tensor in before.tensors.items():
        if len(tensor.shape) == 2:
            assert after.tensors[name].bits == 8 and after.tensors[name].scale_dtype == "float16"
            np.testing.assert_array_equal(after.tensors[name].float32(), tensor.float32())
    ours = load(gguf_source, backend="cpu", dtype="float32").logits(TOKENS)
    theirs = mlx_lm_logits(tmp_path / "out", [TOKENS])[0]
    # two quantisations of 8 bits apart
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.9995
    # and back
    write_gguf(after, tmp_path / "again.gguf")
    first, again = gguf_fields(gguf_source), gguf_fields(tmp_path / "again.gguf")
    assert {name for name in first | again if first.get(name) != again.get(name)} <= {
        "general.name"
    }


# {format: (bits and group size in the folder, largest relative RMS error of a matrix)}: codes kept
# with exact scales, with scales rounded to float16, or quantised again with a quarter of the step
KEPT = {
    **{"Q4_0": (4, 32, 1e-6), "Q4_1": (4, 32, 1e-6), "Q5_0": (5, 32, 1e-6)},
    **{"Q5_1": (5, 32, 1e-6), "Q8_0": (8, 32, 1e-6), "IQ4_NL": (8, 32, 1e-6)},
    **{"Q4_K": (4, 32, 5e-4), "Q5_K": (5, 32, 5e-4), "IQ4_XS": (8, 32, 5e-4)},
    **{"Q6_K": (8, 32, 1e-2), "Q3_K": (5, 32, 6e-2), "Q2_K": (4, 32, 1e-1)},
}
SIZES = dict(hidden_size=256, intermediate_size=256, head_dim=64)


@pytest.mark.parametrize("kind", KEPT)
def test_low_bit_files_keep_their_own_width(kind, tmp_path):
    """Against gguf's dequantiser. Embedding and one projection have other types, and settings of
    their own in config.json.
    """
    others = {"model.embed_tokens.weight": "Q8_0", "model.layers.0.mlp.up_proj.weight": "F16"}
    judge = make_gguf(tmp_path / "in.gguf", kinds=lambda name: others.get(name, kind), **SIZES)
    written = write_mlx(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out", keep=True)
    bits, group_size, limit = KEPT[kind]
    for name, tensor in open_checkpoint(tmp_path / "out").tensors.items():
        if len(tensor.shape) < 2:
            continue
        stored = others.get(name, kind)
        if stored == "F16":
            assert tensor.dtype == "float16"
            np.testing.assert_array_equal(tensor.float32(), judge[name])
            continue
        assert (tensor.bits, tensor.group_size) == KEPT[stored][:2], name
        error = np.sqrt(np.mean((tensor.float32() - judge[name]) ** 2) / np.mean(judge[name] ** 2))
        assert error <= KEPT[stored][2], name
    lost = " ".join(written.notices)
    assert (kind in lost) == (limit > 1e-6), lost
    assert ("scales are rounded to float16" in lost) == (limit == 5e-4), lost
    assert ("no groups of 16" in lost) == (limit > 5e-4), lost


TOKENS = list(range(10, 30))


@pytest.mark.slow
def test_mlx_lm_opens_a_mixed_folder(tmp_path):
    types = {"down_proj": "Q5_K", "embed_tokens": "Q8_0", "v_proj": "Q5_0", "o_proj": "F16"}
    kinds = lambda name: types.get(name.split(".")[-2], "Q4_K")  # noqa: E731
    make_gguf(tmp_path / "in.gguf", kinds=kinds, tokenizer="bytelevel", **SIZES)
    write_mlx(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out", keep=True)
    ours = load(tmp_path / "in.gguf", backend="cpu", dtype="float32").logits(TOKENS)
    theirs = mlx_lm_logits(tmp_path / "out", [TOKENS])[0]
    assert np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(ours**2)) < 5e-3


def test_a_gguf_file_becomes_another(gguf_source, tmp_path):
    write_gguf(open_checkpoint(gguf_source), tmp_path / "out.gguf", "Q4_0")
    before, after = gguf_fields(gguf_source), gguf_fields(tmp_path / "out.gguf")
    assert {name for name in before | after if before.get(name) != after.get(name)} == {
        "general.file_type"
    }
    before, after = open_checkpoint(gguf_source), open_checkpoint(tmp_path / "out.gguf")
    assert before.config == after.config and before.eos_token_ids == after.eos_token_ids
    assert after.tensors["model.layers.0.mlp.up_proj.weight"].format == "Q4_0"


def test_factors_that_config_json_cannot_express(tmp_path):
    source = make_checkpoint(tmp_path / "in", head_dim=64, **ROPES["llama3"])
    write_gguf(open_checkpoint(source), tmp_path / "in.gguf")
    for tensor in GGUFReader(tmp_path / "in.gguf", "r+").tensors:
        if tensor.name == "rope_freqs.weight":
            tensor.data[:] = np.linspace(1, 3, 32)
    with pytest.raises(ConfigError, match="rope_freqs.weight holds factors that are not Llama 3's"):
        write_mlx(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out", 4, 32)
    written = write_gguf(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out.gguf")
    factors = gguf_tensors(written.path)["rope_freqs.weight"]
    assert np.array_equal(factors, np.linspace(1, 3, 32).astype(np.float32))


WINDOW = lambda writer: writer.add_sliding_window(32)  # noqa: E731  more than the tokens below; mlx_lm has no windows
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], head_dim=24, tie_word_embeddings=True)
# (fields, endings of tensors that are left out, the folder's architecture)
FAMILIES = {
    "qwen2": (dict(architectures=["Qwen2ForCausalLM"]), (), "Qwen2"),
    "qwen3": (QWEN3, (), "Qwen3"),
    "llama with query, key and value biases": (dict(attention_bias=True), "o_proj.bias", "Qwen2"),
    "llama with a window": ({}, (), "Mistral"),
    "llama with all biases": (dict(attention_bias=True, mlp_bias=True), (), "Llama"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_becomes_a_folder_of_its_own_architecture(name, tmp_path):
    """transformers' class of that architecture, with the file's weights, has the logits of mlx_lm
    over the folder.
    """
    fields, missing, architecture = FAMILIES[name]
    tensors = random_tensors(config_fields(**fields))
    tensors = {name: x for name, x in tensors.items() if not name.endswith(missing)}
    edit = WINDOW if "window" in name else None
    weights = make_gguf(tmp_path / "m.gguf", tensors=tensors, edit=edit, **fields)
    source = open_checkpoint(tmp_path / "m.gguf")
    write_mlx(source, tmp_path / "out", 8, 32)
    after = open_checkpoint(tmp_path / "out").config
    assert after.architecture == f"{architecture}ForCausalLM"
    differ = ("architecture", "eos_token_ids", "quantization", "dtype")
    assert all(
        getattr(after, field) == value
        for field, value in vars(source.config).items()
        if field not in differ and field != "layers"
    )

    judge = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path / "out"), dtype=torch.float32
    ).eval()
    missing, unexpected = judge.load_state_dict(
        {key: torch.from_numpy(x) for key, x in weights.items()}, strict=False
    )
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    judge.tie_weights()
    with torch.no_grad():
        expected = judge(torch.tensor([TOKENS])).logits[0].numpy()
    logits = mlx_lm_logits(tmp_path / "out", [TOKENS])[0]
    # the folder's weights have 8 bits
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.9995


def test_a_plain_rope_of_gpt_oss_is_named_since_its_default_is_yarn(tmp_path):
    fields = dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_local_experts=4)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    source = make_checkpoint(tmp_path / "m", head_dim=16, rope_parameters=rope, **fields)
    write_gguf(open_checkpoint(source), tmp_path / "m.gguf", "F16")
    write_mlx(open_checkpoint(tmp_path / "m.gguf"), tmp_path / "out", None)
    assert open_checkpoint(tmp_path / "out").config.rope.type == "default"


def test_no_architecture_has_a_window_and_biases_of_the_mlp(tmp_path):
    make_gguf(tmp_path / "m.gguf", edit=WINDOW, mlp_bias=True)
    message = "no architecture of config.json has its sliding window and biases"
    with pytest.raises(ConfigError, match=message):
        write_mlx(open_checkpoint(tmp_path / "m.gguf"), tmp_path / "out", 8, 32)
