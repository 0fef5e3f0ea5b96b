"""Qwen3.5 and Qwen3-Next: config.json as the hub has it, GGUF metadata as llama.cpp's converter
writes it, and what is refused.
"""

import copy
import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from making import refusal
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.models.parts import Attention, GatedDelta
from mlx_llama.core.models.rope import inverse_frequencies

FILE = Path(__file__).parents[3] / "data" / "configs.json"
MODELS = {
    name: raw
    for name, raw in json.loads(FILE.read_text(encoding="utf-8")).items()
    if "linear_num_key_heads" in raw.get("text_config", raw)
}
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
}
NEXT = MODELS["Qwen3-Next-80B-A3B-Instruct"]
SMALL, LARGE = MODELS["Qwen3.5-0.8B"], MODELS["Qwen3.5-27B"]
# billions of weights of the text part, without multi-token prediction
SIZES = {
    "Qwen3.5-0.8B": 0.752,
    "Qwen3.5-2B": 1.882,
    "Qwen3.5-4B": 4.206,
    "Qwen3.5-9B": 8.954,
    "Qwen3.5-27B": 26.896,
    "Qwen3.8-27B": 26.896,
    "Qwen3.5-35B-A3B": 34.661,
    "Ornith-1.0-35B": 34.661,
    "Qwen3-Next-80B-A3B-Instruct": 79.674,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_config_means_what_transformers_reads(name):
    raw = MODELS[name]
    ours, fields = LlamaConfig.from_dict(raw), copy.deepcopy(raw.get("text_config", raw))
    theirs = transformers.AutoConfig.for_model(**fields)
    for field in (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps max_position_embeddings tie_word_embeddings bos_token_id"
    ).split():
        assert getattr(ours, field) == getattr(theirs, field), field
    ends = theirs.eos_token_id or raw["eos_token_id"]
    assert ours.eos_token_ids == tuple(ends if isinstance(ends, list) else [ends])
    kinds = [isinstance(layer.mixer, Attention) for layer in ours.layers]
    assert kinds == [kind == "full_attention" for kind in theirs.layer_types]
    kind = theirs.rope_parameters["rope_type"]
    assert (ours.rope.theta, ours.rope.dim, ours.rope.type) == (1e7, 64, kind)
    if kind == "yarn":
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
        frequencies, ours_factor = inverse_frequencies(ours)
        np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
        assert ours_factor == pytest.approx(factor)
    mixer = ours.recurrent[0]
    assert isinstance(mixer, GatedDelta) and not mixer.tiled
    assert mixer.states == (
        (3, 2 * 16 * 128 + theirs.linear_num_value_heads * 128),
        (theirs.linear_num_value_heads, 128, 128),
    )
    assert ours.is_text_part == ("text_config" in raw)


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_of_transformers_class(name):
    """But for experts, which it stacks in memory."""
    raw = MODELS[name]
    ours = LlamaConfig.from_dict(raw)
    fields = copy.deepcopy(raw.get("text_config", raw)) | {"num_hidden_layers": 4}
    fields.pop("layer_types", None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**fields)
        )
    wanted = {
        key: tuple(value.shape)
        for key, value in model.state_dict().items()
        if ".experts." not in key and (key != "lm_head.weight" or not ours.tie_word_embeddings)
    }
    shapes = {
        key: shape
        for key, shape in ours.stored_shapes().items()
        if ".experts." not in key and not re.search(r"layers\.([4-9]|\d\d)\.", key)
    }
    assert shapes == wanted
    weights = sum(map(math.prod, ours.tensor_shapes().values()))
    size = next(size for start, size in SIZES.items() if name.startswith(start))
    assert weights / 1e9 == pytest.approx(size, abs=6e-4)


def test_a_list_of_layers_comes_before_their_interval():
    def attention(**fields):
        config = LlamaConfig.from_dict(NEXT | {"num_hidden_layers": 5} | fields)
        return [layer.index for layer in config.layers if layer.attention]

    assert attention() == [3]
    assert attention(full_attention_interval=2) == [1, 3]
    kinds = ["full_attention", *["linear_attention"] * 4]
    assert attention(full_attention_interval=2, layer_types=kinds) == [0]
    assert attention(full_attention_interval=6) == []


@pytest.mark.parametrize("rope", ["rope_parameters", "rope_scaling", "outer"])
def test_ropes_in_all_spellings(rope):
    text = dict(SMALL["text_config"])
    parameters = text.pop("rope_parameters")
    if rope == "outer":
        text |= {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor")}
    else:
        text[rope] = parameters
    assert LlamaConfig.from_dict(text).rope == LlamaConfig.from_dict(SMALL).rope


def metadata(family: str, config: LlamaConfig, **more) -> dict:
    """Tensors in the layout of llama.cpp's converter."""
    mixer = config.recurrent[0]
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rotary_dim,
        "ssm.conv_kernel": mixer.width,
        "ssm.state_size": mixer.key_size,
        "ssm.group_count": mixer.key_heads,
        "ssm.time_step_rank": mixer.value_heads,
        "ssm.inner_size": mixer.value_heads * mixer.value_size,
        "full_attention_interval": 4,
    }
    if family != "qwen3next":
        fields["rope.dimension_sections"] = [11, 11, 10, 0]
    if config.num_experts:
        fields |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.own["shared_expert_intermediate_size"],
        }
    fields = {f"{family}.{key}": value for key, value in (fields | more).items()}
    return {"general.architecture": family} | fields


@pytest.mark.parametrize(
    "name, family",
    [
        ("Qwen3.5-27B", "qwen35"),
        ("Qwen3.5-35B-A3B", "qwen35moe"),
        ("Qwen3-Next-80B-A3B-Instruct", "qwen3next"),
    ],
)
def test_a_converted_file_means_the_same_model(name, family):
    config = LlamaConfig.from_dict(MODELS[name])
    count = config.num_hidden_layers
    recurrent = [(i + 1) % 4 != 0 for i in range(count)]
    for more in (
        {},
        {"attention.recurrent_layers": recurrent},
        {
            "block_count": count + 1,
            "nextn_predict_layers": 1,
            "attention.recurrent_layers": [*recurrent, False],
        },
    ):
        raw = metadata(family, config, **more)
        again = LlamaConfig.from_gguf(raw, {}, {}, "bfloat16", "model.gguf")
        assert again.architecture == config.architecture
        assert again.rope == config.rope
        assert [mixer.tiled for mixer in again.recurrent] == [family != "qwen3next"] * (
            count * 3 // 4
        )
        if family == "qwen3next":
            assert again.layers == config.layers
        else:
            swapped = {key: order for key, order in again.recurrent[0].swaps().items()}
            back = config.recurrent[0].swaps()
            for key, orders in swapped.items():
                for there, here in zip(orders, back[key]):
                    assert (there is None) == (here is None)
                    assert there is None or (there[here] == range(len(here))).all()
        skipped = [x for x in again.notices if "multi-token prediction" in x]
        assert len(skipped) == ("nextn_predict_layers" in more)


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_tensors_that_are_no_modules_have_llama_cpps_names(name):
    names, theirs = FAMILIES[name].names, gguf.get_tensor_name_map(ARCHITECTURES[name], 3)
    block = "model.layers.2.linear_attn"
    for ours, stored in (
        (f"{block}.A_log", theirs.get_name(f"{block}.A_log")),
        (f"{block}.dt_bias", theirs.get_name(f"{block}.dt_proj.bias", (".bias",))),
    ):
        assert names.gguf(ours) == stored and names.hugging_face(stored) == ours
    assert names.hugging_face("blk.2.ssm_norm") is None


TEXT = SMALL["text_config"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24, expected a multiple of "),
        ({"layer_types": ["linear_attention"]}, "layer_types is .*, expected 24 times 'full_att"),
        ({"layer_types": ["mamba"] * 24}, "layer_types is .*, expected 24 times 'full_attention'"),
        (
            {"full_attention_interval": 0, "layer_types": None},
            "full_attention_interval is 0, expected a whole number",
        ),
        ({"attn_output_gate": False}, "attn_output_gate is False, expected true, since attention"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', expected .silu"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, expected a whole number fr"),
        ({"linear_key_head_dim": "a"}, "linear_key_head_dim is 'a', expected a whole number from"),
    ],
)
def test_a_bad_field_is_named(fields, message):
    found = refusal(LlamaConfig.from_dict, TEXT | fields, kind=ConfigError)
    assert re.search(message, found), found


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"ssm.inner_size": 100}, "ssm.inner_size is 100, expected 48 heads of 128, the size of"),
        ({"ssm.group_count": 5}, "ssm.time_step_rank is 48, expected a multiple of qwen35.ssm.gr"),
        ({"attention.recurrent_layers": [True]}, "recurrent_layers is .*, expected 64 times Fal"),
        ({"nextn_predict_layers": 64}, "nextn_predict_layers is 64, expected less than 64"),
    ],
)
def test_bad_metadata_is_named(fields, message):
    raw = metadata("qwen35", LlamaConfig.from_dict(LARGE)) | {
        f"qwen35.{name}": value for name, value in fields.items()
    }
    call = lambda: LlamaConfig.from_gguf(raw, {}, {}, "bfloat16", "m.gguf")  # noqa: E731
    found = refusal(call, kind=ConfigError)
    assert re.search(message, found), found


def test_a_mixture_without_experts_or_with_plain_layers_is_refused():
    for fields, message in (
        ({"num_experts": 0}, "num_experts is 0, expected a whole number from 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], expected \[\], since every layer"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1, since every layer"),
    ):
        assert re.search(message, refusal(LlamaConfig.from_dict, NEXT | fields, kind=ConfigError))
