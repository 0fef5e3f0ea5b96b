"""Tensors against the config: tied heads, leftovers, and weights of another model."""

import json

import numpy as np
import pytest
from making import encode_tensor, make_checkpoint, random_tensors, refusal, write_safetensors
from safetensors import safe_open

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
    rewrite(
        folder, lambda t: {name: x for name, x in t.items() if name != "model.embed_tokens.weight"}
    )
    tensor = open_checkpoint(folder).tensors["model.embed_tokens.weight"]
    assert tensor.name == "model.embed_tokens.weight"
    np.testing.assert_array_equal(tensor.bits.ravel(), expected)


def rewrite(folder, change):
    """Replaces the tensors of a one-file checkpoint; returns the new ones."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: encode_tensor(x, config["torch_dtype"]) for name, x in random_tensors(config).items()
    }
    path = folder / "model.safetensors"
    if path.exists():
        with safe_open(path, "np") as f:
            codes = {"float32": "F32", "float16": "F16"}
            tensors = {
                n: (
                    codes[str(f.get_tensor(n).dtype)],
                    f.get_tensor(n).shape,
                    f.get_tensor(n).tobytes(),
                )
                for n in f.keys()
            }
    tensors = change(tensors)
    write_safetensors(path, tensors)
    return tensors


def without(name):
    return lambda tensors: {n: x for n, x in tensors.items() if n != name}


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without(NORM), [NORM, "missing", "[64]"]),
        (
            without("lm_head.weight"),
            ["lm_head.weight", "missing", "[384, 64]", "tie_word_embeddings"],
        ),
        (
            lambda t: t | {"model.layers.2.mlp.up_proj.weight": ("F32", (1, 2), bytes(8))},
            ["model.layers.2.mlp.up_proj.weight", "[1, 2]", "not part"],
        ),
        (lambda t: t | {NORM: ("F32", (32,), bytes(128))}, [NORM, "[32]", "[64]"]),
        (
            lambda t: t | {"lm_head.weight": ("F32", (64, 384), bytes(64 * 384 * 4))},
            ["lm_head.weight", "[64, 384]", "[384, 64]"],
        ),
        (lambda t: t | {NORM: ("F64", (64,), bytes(512))}, [NORM, "F64", "F32, F16 or BF16"]),
        (lambda t: t | {NORM: ("U8", (64,), bytes(64))}, [NORM, "U8", "quantised"]),
        (lambda t: t | {NORM: ("I32", (64,), bytes(256))}, [NORM, "I32"]),
        (lambda t: t | {NORM: ("F8_E4M3", (64,), bytes(64))}, [NORM, "F8_E4M3"]),
    ],
    ids=["missing", "no-head", "extra", "short", "transposed", "f64", "u8", "i32", "f8"],
)
def test_a_wrong_tensor_is_named_with_both_shapes(change, expected, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    rewrite(folder, change)
    message = refusal(open_checkpoint, folder)
    assert str(folder) in message
    for word in expected:
        assert word in message


def test_a_missing_bias_names_the_config_field(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    message = refusal(open_checkpoint, folder)
    assert "self_attn.q_proj.bias" in message and "attention_bias" in message
    assert "and 7 more" in message
