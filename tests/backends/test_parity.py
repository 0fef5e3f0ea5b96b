"""Every backend against transformers, for a random checkpoint of every config feature."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from making import make_checkpoint

from backends import conftest
from backends.conftest import probes, relative_error
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
    "new-rope-spelling": dict(
        rope_theta=None,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
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
    "mistral": dict(**MISTRAL, sliding_window=None),
    "mistral-sliding": dict(**MISTRAL, sliding_window=7),
    "smollm2": dict(
        num_attention_heads=3,
        hidden_size=48,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_theta=100000.0,
    ),
    "gelu": dict(hidden_act="gelu_pytorch_tanh"),
    "qwen2": dict(
        architectures=["Qwen2ForCausalLM"], use_sliding_window=False, max_window_layers=1
    ),
    "qwen2-tied": dict(
        architectures=["Qwen2ForCausalLM"],
        tie_word_embeddings=True,
        num_attention_heads=7,
        hidden_size=56,
        num_key_value_heads=1,
        rms_norm_eps=1e-6,
    ),
    "qwen2-sliding": dict(
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], head_dim=24, rms_norm_eps=1e-6),
    "qwen3-biases-tied": dict(
        architectures=["Qwen3ForCausalLM"],
        head_dim=20,
        attention_bias=True,
        tie_word_embeddings=True,
        num_attention_heads=6,
        num_key_value_heads=3,
    ),
    "yi": dict(
        rope_theta=5000000.0, rms_norm_eps=1e-5, num_key_value_heads=1, num_attention_heads=8
    ),
}
LENGTH = 40


@functools.cache
def checkpoint(feature: str, dtype: str = "float32") -> Path:
    fields = {
        name: value
        for name, value in FEATURES[feature].items()
        if value is not None or name == "sliding_window"
    }
    folder = make_checkpoint(Path(tempfile.mkdtemp()) / feature, dtype=dtype, **fields)
    if FEATURES[feature].get("rope_parameters"):
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"rope_theta": 10000.0, "tie', '"tie'))
    return folder


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 384, (2, LENGTH)).astype(np.int32)


@functools.cache
def transformers_logits(feature: str, dtype: str = "float32") -> np.ndarray:
    return conftest.transformers_logits(checkpoint(feature, dtype), tokens())


@pytest.mark.parametrize("feature", FEATURES)
def test_logits_are_those_of_transformers(feature, load):
    model, to_numpy = load(checkpoint(feature))
    got = to_numpy(model.forward(tokens(), 0, model.make_cache(LENGTH, 2), all_positions=True))
    assert relative_error(got, transformers_logits(feature)) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_weights_at_float32(dtype, load):
    model, to_numpy = load(checkpoint("llama2-grouped", dtype))
    got = to_numpy(model.forward(tokens(), 0, model.make_cache(LENGTH, 2), all_positions=True))
    assert relative_error(got, transformers_logits("llama2-grouped", dtype)) < 1e-4


# Features that mlx-lm lacks, compared with transformers alone: rope_parameters, Mistral's


@pytest.mark.parametrize("chunks", [[7, 20, 13], [1] * LENGTH, [16, 1, 1, 22]], ids=str)
@pytest.mark.parametrize("feature", [f for f in FEATURES if f != "dynamic-rope"])
def test_in_chunks_and_token_by_token(feature, chunks, load):
    model, to_numpy = load(checkpoint(feature))
    cache, got = model.make_cache(LENGTH, 2), []
    for size in chunks:
        at = cache.length
        got.append(
            to_numpy(model.forward(tokens()[:, at : at + size], at, cache, all_positions=True))
        )
    assert relative_error(np.concatenate(got, axis=1), transformers_logits(feature)) < 1e-4


def test_dynamic_rope_with_a_cache_equals_transformers(load):
    """Past the trained length each call rotates by the length so far; cached keys are unchanged."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = checkpoint("dynamic-rope")
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(tokens()).long()
    with torch.no_grad():
        first = peer(ids[:, :30], use_cache=True)
        wanted = [peer(ids[:, 30:31], past_key_values=first.past_key_values).logits.numpy()]
        wanted.append(peer(ids[:, 31:], past_key_values=first.past_key_values).logits.numpy())
    model, to_numpy = load(folder)
    cache = model.make_cache(LENGTH, 2)
    model.forward(tokens()[:, :30], 0, cache)
    got = [
        to_numpy(model.forward(tokens()[:, a:b], a, cache, all_positions=True))
        for a, b in ((30, 31), (31, LENGTH))
    ]
    assert relative_error(np.concatenate(got, 1), np.concatenate(wanted, 1)) < 1e-4


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
    import torch
    from transformers import AutoModelForCausalLM

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
    got = backend.runtime.to_numpy(
        model.forward(tokens(), 0, model.make_cache(LENGTH, 2), all_positions=True)
    )
    bound = {"bfloat16": 4e-2, "float16": 6e-3}[dtype]
    assert relative_error(got, transformers_logits("llama2-grouped", dtype)) < bound


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("feature", ["llama2-grouped", "mistral-sliding", "yi"])
def test_the_last_position_alone_is_the_last_of_all(feature, compile, backend):
    """The last layer of a prompt computes one position, and still stores all keys and values."""
    model = backend.load(open_checkpoint(checkpoint(feature)), "float32", compile=compile)
    to_numpy = backend.runtime.to_numpy
    whole, last = model.make_cache(LENGTH, 2), model.make_cache(LENGTH, 2)
    for start, end in ((0, 13), (13, 14), (14, LENGTH)):
        wanted = to_numpy(model.forward(tokens()[:, start:end], start, whole, all_positions=True))[
            :, -1
        ]
        got = to_numpy(model.forward(tokens()[:, start:end], start, last))
        assert relative_error(got, wanted) < 1e-5
    for name, part in whole.state().items():
        assert relative_error(last.state()[name].astype(float), part.astype(float)) < 1e-5
