"""Every backend against transformers, for a random checkpoint of every config feature."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from making import make_checkpoint
from transformers import AutoModelForCausalLM

from backends import conftest
from backends.conftest import in_chunks, probes, relative_error
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint

MISTRAL = {"architectures": ["MistralForCausalLM"]}
FEATURES = {
    "llama1-plain-heads": dict(num_key_value_heads=4),
    "llama2-grouped": dict(),
    "one-kv-head": dict(num_key_value_heads=1),
    "llama3-rope": dict(
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "linear-rope": dict(rope_scaling=dict(type="linear", factor=2.5)),
    "dynamic-rope": dict(
        rope_scaling=dict(rope_type="dynamic", factor=4.0), max_position_embeddings=16
    ),
    "yarn-rope": dict(
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "llama3.2-tied": dict(tie_word_embeddings=True),
    "explicit-head-dim": dict(head_dim=32),
    "attention-bias": dict(attention_bias=True),
    "mlp-bias": dict(mlp_bias=True),
    "mistral-sliding": dict(**MISTRAL, sliding_window=7),
    "gelu": dict(hidden_act="gelu_pytorch_tanh"),
}
LENGTH = 40


@functools.cache
def checkpoint(feature: str, dtype: str = "float32") -> Path:
    return make_checkpoint(Path(tempfile.mkdtemp()) / feature, dtype=dtype, **FEATURES[feature])


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 384, (2, LENGTH)).astype(np.int32)


@functools.cache
def transformers_logits(feature: str, dtype: str = "float32") -> np.ndarray:
    return conftest.transformers_logits(checkpoint(feature, dtype), tokens())


@pytest.mark.parametrize(
    "feature, dtype",
    [
        *((feature, "float32") for feature in FEATURES),
        ("llama2-grouped", "bfloat16"),
        ("llama2-grouped", "float16"),
    ],
)
def test_logits_are_those_of_transformers(feature, dtype, load):
    """Of a prompt as a whole, in chunks and token by token."""
    model, to_numpy = load(checkpoint(feature, dtype))
    every_cut = [(0, LENGTH), (0, 16, 17, 18, LENGTH), range(LENGTH + 1)]
    for cuts in every_cut[: 1 if feature == "dynamic-rope" else None]:
        got = in_chunks(model, to_numpy, tokens(), cuts)
        assert relative_error(got, transformers_logits(feature, dtype)) < 1e-4


def test_dynamic_rope_with_a_cache_equals_transformers(load):
    """Past the trained length each call rotates by the length so far; cached keys are unchanged."""
    folder = checkpoint("dynamic-rope")
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(tokens()).long()
    with torch.no_grad():
        first = peer(ids[:, :30], use_cache=True)
        wanted = [peer(ids[:, 30:31], past_key_values=first.past_key_values).logits.numpy()]
        wanted.append(peer(ids[:, 31:], past_key_values=first.past_key_values).logits.numpy())
    got = in_chunks(*load(folder), tokens(), (0, 30, 31, LENGTH))[:, 30:]
    assert relative_error(got, np.concatenate(wanted, 1)) < 1e-4


@functools.cache
def reference_probes(feature: str) -> dict[str, np.ndarray]:
    backend = select("cpu")
    model = backend.load(open_checkpoint(checkpoint(feature)), "float32")
    return probes(model, backend.runtime.to_numpy, tokens())


@pytest.mark.parametrize(
    "feature", ["llama2-grouped", "llama3-rope", "yarn-rope", "mistral-sliding", "attention-bias"]
)
def test_backends_agree_at_every_probe(feature, load):
    seen, wanted = probes(*load(checkpoint(feature)), tokens()), reference_probes(feature)
    assert seen.keys() == wanted.keys() and len(seen) == 3 + 10 * 2
    for name in seen:
        assert relative_error(seen[name], wanted[name]) < 1e-5, name


def test_the_probes_are_transformers_hidden_states(load):
    peer = AutoModelForCausalLM.from_pretrained(checkpoint("llama2-grouped"), dtype=torch.float32)
    inside: dict[str, np.ndarray] = {}

    def keep(name: str):
        def hook(module, args, out) -> None:
            inside[name] = (out[0] if isinstance(out, tuple) else out).detach().numpy()

        return hook

    for i, layer in enumerate(peer.model.layers):
        layer.input_layernorm.register_forward_hook(keep(f"{i}.attention_norm"))
        layer.self_attn.register_forward_hook(keep(f"{i}.attention"))
        layer.post_attention_layernorm.register_forward_hook(keep(f"{i}.ffn_norm"))
        layer.mlp.register_forward_hook(keep(f"{i}.ffn"))
        layer.register_forward_hook(keep(f"{i}.block"))
        layer.self_attn.v_proj.register_forward_hook(keep(f"{i}.value"))
    peer.model.embed_tokens.register_forward_hook(keep("embedding"))
    peer.model.norm.register_forward_hook(keep("norm"))
    with torch.no_grad():
        peer(torch.from_numpy(tokens()).long())
    seen = probes(*load(checkpoint("llama2-grouped")), tokens())
    for name, wanted in inside.items():
        if name.endswith(".value"):
            wanted = wanted.reshape(2, LENGTH, 2, 16).transpose(0, 2, 1, 3)
        assert relative_error(seen[name], wanted) < 1e-4, name
    assert len(inside) == 2 * 6 + 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_stored_width_is_the_default_and_close(dtype, backend):
    """By default MLX and torch have 16-bit activations, within 16-bit rounding of the float32
    logits.
    """
    model = backend.load(open_checkpoint(checkpoint("llama2-grouped", dtype)), "auto")
    assert str(model.dtype).split(".")[-1] == ("float32" if backend.name == "cpu" else dtype)
    got = in_chunks(model, backend.runtime.to_numpy, tokens(), (0, LENGTH))
    bound = {"bfloat16": 4e-2, "float16": 6e-3}[dtype]
    assert relative_error(got, transformers_logits("llama2-grouped", dtype)) < bound


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("feature", ["llama2-grouped", "mistral-sliding"])
def test_the_last_position_alone_is_the_last_of_all(feature, compile, backend):
    """The last layer of a prompt computes one position, and still stores all keys and values."""
    model = backend.load(open_checkpoint(checkpoint(feature)), "float32", compile=compile)
    to_numpy = backend.runtime.to_numpy
    whole, last = model.make_cache(LENGTH, 2), model.make_cache(LENGTH, 2)
    for start, end in ((0, 13), (13, 14), (14, LENGTH)):
        part = tokens()[:, start:end]
        wanted = to_numpy(model.forward(part, start, whole, all_positions=True))
        got = to_numpy(model.forward(part, start, last))
        assert relative_error(got, wanted[:, -1]) < 1e-5
    for name, part in whole.state().items():
        assert relative_error(last.state()[name].astype(float), part.astype(float)) < 1e-5
