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
from making import make_checkpoint, refusal
from safetensors.numpy import load_file, save_file

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import ShortConv

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
