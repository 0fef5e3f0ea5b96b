"""LFM2's config in all spellings, judged by transformers, and its tensors as the files of others
have them.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from making import config_fields, make_checkpoint, refusal, stored_tensors
from safetensors.numpy import load_file, save_file

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import ShortConv
from mlx_llama.quantize.gguf_export import write_gguf

LFM2 = dict(
    architectures=["Lfm2ForCausalLM"],
    model_type="lfm2",
    vocab_size=384,
    hidden_size=48,
    block_ff_dim=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
KINDS = ["conv", "full_attention", "conv", "full_attention"]


@pytest.mark.parametrize(
    "fields",
    [
        dict(layer_types=KINDS),
        dict(full_attn_idxs=[0, 2]),
        dict(),
        dict(layer_types=KINDS, full_attn_idxs=[0]),
        dict(intermediate_size=80, block_ff_dim=None),
        dict(block_multiple_of=7),
        dict(block_ffn_dim_multiplier=1.3, block_multiple_of=16),
        dict(block_ff_dim=97),
        dict(block_auto_adjust_ff_dim=False),
        dict(tie_embedding=False),
        dict(tie_word_embeddings=False),
        dict(conv_L_cache=4, conv_bias=True),
        dict(norm_eps=1e-3, rope_theta=5e5),
    ],
    ids=str,
)
def test_spellings_mean_what_transformers_reads(fields):
    raw = {name: value for name, value in (LFM2 | fields).items() if value is not None}
    ours = LlamaConfig.from_dict(raw)
    theirs = transformers.Lfm2ForCausalLM(transformers.AutoConfig.for_model(**raw))
    shapes = {name: tuple(value.shape) for name, value in theirs.named_parameters()}
    assert ours.stored_shapes() == shapes
    assert ours.rms_norm_eps == theirs.config.norm_eps
    assert ours.rope.theta == theirs.config.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(layer_types=KINDS[1:]), "layer_types is .*, expected 4 times 'full_attention'"),
        (dict(layer_types=["mamba", *KINDS[1:]]), "'mamba'.*, expected 4 times 'full_attention'"),
        (dict(layer_types="conv"), "layer_types is 'conv', expected 4 times"),
        (dict(full_attn_idxs=[]), "'full_attention', which one has at least, or 'conv'"),
        (dict(full_attn_idxs=3), "full_attn_idxs is 3, expected numbers of layers from 0 to 3"),
        (dict(full_attn_idxs=[4]), r"full_attn_idxs is \[4\], expected numbers of layers"),
        (dict(full_attn_idxs=["1"]), r"full_attn_idxs is \['1'\], expected numbers of layers"),
        (dict(conv_L_cache=0), "conv_L_cache is 0, expected a whole number from 2 to 256"),
        (dict(conv_L_cache=1), "conv_L_cache is 1, expected a whole number from 2"),
        (dict(block_multiple_of=0), "block_multiple_of is 0, expected a whole number from 1"),
        (dict(block_ffn_dim_multiplier=-1), "block_ffn_dim_multiplier is -1, expected a number"),
        (dict(block_ff_dim=1), "block_ff_dim is 1, expected a whole number from 2"),
    ],
)
def test_a_bad_field_is_named(fields, message):
    raw = LFM2 | dict(block_ffn_dim_multiplier=1.0) | fields
    assert re.search(message, refusal(LlamaConfig.from_dict, raw, kind=ConfigError))


def test_layers_keep_two_kinds_of_states():
    config = LlamaConfig.from_dict(LFM2 | dict(layer_types=KINDS, conv_L_cache=4))
    assert [layer.mixer.slot for layer in config.layers] == [0, 0, 1, 1]
    assert [mixer.index for mixer in config.attentions] == [1, 3]
    assert {mixer.states for mixer in config.recurrent} == {((3, 48),)}
    assert all(isinstance(mixer, ShortConv) for mixer in config.recurrent)


LAYOUTS = (48, 1, 3), (48, 3, 1), (48, 3)  # transformers', mlx_lm's, llama.cpp's


def make(folder, *shape):
    """A checkpoint whose convolutions are stored in this shape."""
    folder = make_checkpoint(folder, tokenizer=False, **LFM2 | dict(layer_types=KINDS))
    path = folder / "model.safetensors"
    stored = {
        name: x.reshape(shape) if ".conv.conv." in name else x
        for name, x in load_file(path).items()
    }
    save_file(stored, path)
    return folder


def test_a_convolution_has_the_same_numbers_in_each_layout(tmp_path):
    first, *others = (open_checkpoint(make(tmp_path / str(s), *s)).tensors for s in LAYOUTS)
    for name, tensor in first.items():
        for other in others:
            np.testing.assert_array_equal(other[name].bits, tensor.bits)
    words = ["model.layers.0.conv.conv.weight has shape [3, 48]", "calls for [48, 1, 3]"]
    refusal(open_checkpoint, make(tmp_path / "turned", 3, 48), words=words)


# as the models' cards have them
PARAMETERS = {
    "LFM2-350M": 354_483_968,
    "LFM2-700M": 742_489_344,
    "LFM2-1.2B": 1_170_340_608,
    "LFM2-2.6B": 2_569_272_320,
    "LFM2.5-1.2B-Instruct": 1_170_340_608,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_parameters_of_their_cards(name):
    file = Path(__file__).parents[3] / "data" / "configs.json"
    config = LlamaConfig.from_dict(json.loads(file.read_text(encoding="utf-8"))[name])
    assert sum(map(math.prod, config.tensor_shapes().values())) == PARAMETERS[name]


MOE = dict(architectures=["Lfm2MoeForCausalLM"], model_type="lfm2_moe", moe_intermediate_size=32)
MOE |= dict(num_experts=3, num_experts_per_tok=2, layer_types=KINDS)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(conv_bias=True), "conv_bias is True, where a GGUF file means False to llama.cpp"),
        (MOE | dict(use_expert_bias=False), "use_expert_bias is False, where a GGUF file means"),
        (MOE | dict(routed_scaling_factor=2.0), "routed_scaling_factor is 2.0, where a GGUF"),
        (MOE | dict(norm_topk_prob=False), "norm_topk_prob is False, where a GGUF file means"),
    ],
)
def test_a_gguf_file_cannot_express(fields, message, tmp_path):
    fields = LFM2 | dict(layer_types=KINDS) | fields
    folder = make_checkpoint(
        tmp_path / "m", tensors=stored_tensors(config_fields(**fields)), **fields
    )
    said = refusal(write_gguf, open_checkpoint(folder), tmp_path / "m.gguf", kind=ConfigError)
    assert re.search(message, said) and "write the MLX form" in said
