"""Tensors against the config: tied heads, leftovers, and weights of another model."""

import json
import math

import numpy as np
import pytest
from making import make_checkpoint, refusal, write_safetensors
from safetensors.numpy import load_file

from mlx_llama.core.files.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"]
)
def test_known_leftovers_are_passed_over(name, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    rewrite(folder, lambda tensors: tensors | {name: ("F32", (8,), bytes(32))})
    assert name not in open_checkpoint(folder).tensors


def test_a_tied_head_is_one_matrix(tmp_path):
    folder = make_checkpoint(tmp_path / "m", tie_word_embeddings=True)
    both = rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    expected = np.frombuffer(both["lm_head.weight"][2], np.float32)
    opened = open_checkpoint(folder)
    assert "lm_head.weight" not in opened.tensors
    # some writers keep only the head's name
    rewrite(folder, without("model.embed_tokens.weight"))
    tensor = open_checkpoint(folder).tensors["model.embed_tokens.weight"]
    assert tensor.name == "model.embed_tokens.weight"
    np.testing.assert_array_equal(tensor.bits.ravel(), expected)


def rewrite(folder, change):
    """Replaces the tensors of a float32 checkpoint of one file; returns the new ones."""
    path = folder / "model.safetensors"
    stored = {name: ("F32", x.shape, x.tobytes()) for name, x in load_file(path).items()}
    write_safetensors(path, change(stored))
    return change(stored)


def without(name):
    return lambda tensors: {n: x for n, x in tensors.items() if n != name}


def zeros(name, code, *shape):
    size = {"U8": 1, "F8_E4M3": 1, "F64": 8}.get(code, 4)
    return lambda tensors: tensors | {name: (code, shape, bytes(math.prod(shape) * size))}


NORM, HEAD = "model.layers.1.input_layernorm.weight", "lm_head.weight"
UP = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without(NORM), [NORM, "missing", "[64]"]),
        (without(HEAD), [HEAD, "missing", "[384, 64]", "tie_word_embeddings"]),
        (zeros(UP, "F32", 1, 2), [UP, "[1, 2]", "not part"]),
        (zeros(NORM, "F32", 32), [NORM, "[32]", "[64]"]),
        (zeros(HEAD, "F32", 64, 384), [HEAD, "[64, 384]", "[384, 64]"]),
        (zeros(NORM, "F64", 64), [NORM, "F64", "F32, F16 or BF16"]),
        (zeros(NORM, "U8", 64), [NORM, "U8", "quantised"]),
        (zeros(NORM, "I32", 64), [NORM, "I32"]),
        (zeros(NORM, "F8_E4M3", 64), [NORM, "F8_E4M3"]),
    ],
    ids=["missing", "no-head", "extra", "short", "transposed", "f64", "u8", "i32", "f8"],
)
def test_a_wrong_tensor_is_named_with_both_shapes(change, expected, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    rewrite(folder, change)
    message = refusal(open_checkpoint, folder)
    assert all(word in message for word in [str(folder), *expected]), message


def test_a_missing_bias_names_the_config_field(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    message = refusal(open_checkpoint, folder)
    assert "self_attn.q_proj.bias" in message and "attention_bias" in message
    assert "and 7 more" in message
