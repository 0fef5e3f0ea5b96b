"""LlamaConfig.layers: what a config resolves to, layer by layer. The arithmetic is
tests/backends/test_layer_spec.py's.
"""

import dataclasses

import pytest
from making import config_fields

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.spec import Window


def layers(**fields):
    return LlamaConfig.from_dict(config_fields(num_hidden_layers=4, **fields)).layers


def test_a_llamas_layer():
    spec = layers()[3]
    assert spec.index == 3 and spec.heads == 4 and spec.key_value_heads == 2 and spec.head_dim == 16
    assert spec.eps == 1e-5
    assert spec.qkv == tuple(f"model.layers.3.self_attn.{letter}_proj" for letter in "qkv")
    assert spec.attention_norm == "model.layers.3.input_layernorm"
    assert spec.ffn_norm == "model.layers.3.post_attention_layernorm"
    assert (
        spec.query_norm
        is spec.key_norm
        is spec.post_attention_norm
        is spec.post_ffn_norm
        is spec.window
        is None
    )
    assert spec.scale == 16**-0.5 and spec.rotates and spec.residual_multiplier == 1
    assert spec.activation == "silu"


def test_windows_of_the_last_layers_alone():
    qwen = dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=7)
    assert [spec.window for spec in layers(**qwen, max_window_layers=3)] == [
        None,
        None,
        None,
        Window(7),
    ]
    assert [spec.window for spec in layers(**qwen, max_window_layers=9)] == [None] * 4
    none = LlamaConfig.from_dict(config_fields(num_hidden_layers=4, **qwen, max_window_layers=4))
    assert none.sliding_window is none.sliding_layers is None
    assert [spec.window for spec in layers(**qwen, max_window_layers=0)] == [Window(7)] * 4
    assert [spec.window for spec in layers(**(qwen | dict(use_sliding_window=False)))] == [None] * 4
    assert [
        spec.window for spec in layers(architectures=["MistralForCausalLM"], sliding_window=5)
    ] == [Window(5)] * 4


def test_transformers_has_the_same_windows():
    import transformers

    theirs = transformers.Qwen2Config(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=7, max_window_layers=1
    )
    ours = layers(
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        layer_types=theirs.layer_types,
    )
    assert [spec.window is not None for spec in ours] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]


@pytest.mark.parametrize("placement, norms", [("before", 2), ("after", 2), ("both", 4)])
def test_every_norm_of_a_placement_is_a_tensor(placement, norms):
    config = dataclasses.replace(LlamaConfig.from_dict(config_fields()), norm_placement=placement)
    spec, shapes = config.layers[0], config.tensor_shapes()
    names = [spec.attention_norm, spec.ffn_norm, spec.post_attention_norm, spec.post_ffn_norm]
    assert len(set(filter(None, names))) == norms
    assert all(shapes[f"{name}.weight"] == (64,) for name in filter(None, names))
