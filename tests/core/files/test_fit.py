"""Tensors against the config: tied heads, leftovers, and weights of another model."""

import numpy as np
import pytest
from making import drop, edit_json, make_checkpoint, put_zeros, refusal, write_safetensors
from safetensors.numpy import load_file

from mlx_llama.core.files.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"]
)
def test_known_leftovers_are_passed_over(name, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    rewrite(folder, put_zeros(name, "F32", 8))
    assert name not in open_checkpoint(folder).tensors


def test_a_tied_head_is_one_matrix(tmp_path):
    folder = make_checkpoint(tmp_path / "m", tie_word_embeddings=True)
    both = rewrite(folder, lambda t: t.update({HEAD: t["model.embed_tokens.weight"]}))
    expected = np.frombuffer(both["lm_head.weight"][2], np.float32)
    opened = open_checkpoint(folder)
    assert "lm_head.weight" not in opened.tensors
    # some writers keep only the head's name
    rewrite(folder, drop("model.embed_tokens.weight"))
    tensor = open_checkpoint(folder).tensors["model.embed_tokens.weight"]
    assert tensor.name == "model.embed_tokens.weight"
    np.testing.assert_array_equal(tensor.bits.ravel(), expected)


def rewrite(folder, change):
    """Replaces the tensors of a float32 checkpoint of one file; returns the new ones."""
    path = folder / "model.safetensors"
    stored = {name: ("F32", x.shape, x.tobytes()) for name, x in load_file(path).items()}
    change(stored)
    write_safetensors(path, stored)
    return stored


NORM, HEAD = "model.layers.1.input_layernorm.weight", "lm_head.weight"
UP = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop(NORM), [NORM, "missing", "[64]"]),
        (drop(HEAD), [HEAD, "missing", "[384, 64]", "tie_word_embeddings"]),
        (put_zeros(UP, "F32", 1, 2), [UP, "[1, 2]", "not part"]),
        (put_zeros(NORM, "F32", 32), [NORM, "[32]", "[64]"]),
        (put_zeros(HEAD, "F32", 64, 384), [HEAD, "[64, 384]", "[384, 64]"]),
        (put_zeros(NORM, "I64", 64), [NORM, "I64", "F64, F32, F16 or BF16"]),
        (put_zeros(NORM, "U8", 64), [NORM, "U8", "quantised"]),
        (put_zeros(NORM, "I32", 64), [NORM, "I32"]),
        (put_zeros(NORM, "F8_E4M3", 64), [NORM, "F8_E4M3"]),
    ],
    ids=["missing", "no-head", "extra", "short", "transposed", "i64", "u8", "i32", "f8"],
)
def test_a_wrong_tensor_is_named_with_both_shapes(change, expected, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    rewrite(folder, change)
    refusal(open_checkpoint, folder, words=[str(folder), *expected])


def test_a_missing_bias_names_the_config_field(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    edit_json(folder / "config.json", attention_bias=True)
    words = ["self_attn.q_proj.bias", "attention_bias", "and 7 more"]
    refusal(open_checkpoint, folder, words=words)
