"""config.json of the families as the hub has them, judged by transformers; and their features that
are refused, by name.
"""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from making import config_fields, refusal, shared_arithmetic
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig, RopeConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.models.fields import Reader
from mlx_llama.core.models.parts import Router, Window

FACTORS = {
    "short_factor": np.linspace(1, 2, 48).tolist(),
    "long_factor": np.linspace(1, 60, 48).tolist(),
}
FILE = Path(__file__).parents[3] / "data" / "configs.json"
# those with recurrent states are in test_qwen3_next.py
MODELS = {
    name: raw
    for name, raw in json.loads(FILE.read_text(encoding="utf-8")).items()
    if "linear_num_key_heads" not in raw.get("text_config", raw)
}
SMOLLM3, GRANITE, GRANITE4 = (
    MODELS[name] for name in ("SmolLM3-3B", "granite-3.3-2b-instruct", "granite-4.0-micro")
)
GEMMA2, GEMMA3, LLAMA4 = (
    MODELS[name] for name in ("gemma-2-2b-it", "gemma-3-1b-it", "Llama 4 Scout")
)
MIXTRAL, QWEN3_MOE, GPT_OSS = (
    MODELS[name] for name in ("Mixtral 8x7B", "Qwen3 30B-A3B", "gpt-oss 20B")
)
QWEN2_MOE, OLMOE, GRANITE_MOE, GLM = (
    MODELS[name]
    for name in (
        "Qwen1.5-MoE-A2.7B",
        "OLMoE-1B-7B-0924",
        "granite-3.1-1b-a400m-instruct",
        "GLM-4.5",
    )
)
HUNYUAN, APERTUS = MODELS["Hunyuan-7B-Instruct"], MODELS["Apertus-8B-Instruct-2509"]
QWEN2, QWEN3 = (config_fields(architectures=[f"Qwen{n}ForCausalLM"]) for n in (2, 3))
PHI4 = MODELS["Phi-4-mini-instruct"]
PHI4["rope_scaling"] |= FACTORS
MODELS["gemma-3-1b-it, scaled as gemma-3-4b-it"] = GEMMA3 | {
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}
}
GEMMA4_EXPERTS = MODELS["gemma-4-26B-A4B-it"]
MODELS["Llama 4 Maverick"] = LLAMA4 | {
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
    "moe_layers": list(range(1, 48, 2)),
    "use_qk_norm": False,
    "rope_scaling": None,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_config_means_what_transformers_reads(name):
    raw = MODELS[name]
    ours = LlamaConfig.from_dict(raw)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(raw))  # which it changes
    if is_part := "text_config" in raw:  # of a model of images and text
        theirs = theirs.get_text_config()
    if theirs.model_type.startswith("gemma4"):
        theirs.allow_global_per_layer_attribute_access = True
    is_llama4, is_lfm2 = theirs.model_type == "llama4_text", theirs.model_type.startswith("lfm2")
    units = theirs.intermediate_size_mlp if is_llama4 else theirs.intermediate_size
    # which LFM2's layers may adjust; test_lfm2.py
    assert ours.intermediate_size == units or theirs.model_type == "lfm2"
    for field in (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings tie_word_embeddings bos_token_id"
    ).split():
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.rms_norm_eps == (theirs.norm_eps if is_lfm2 else theirs.rms_norm_eps)
    assert is_part or ours.architecture == theirs.architectures[0]
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    if theirs.model_type in ("llama", "mistral"):
        assert ours.attention_bias == getattr(theirs, "attention_bias", False)
        assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
        assert ours.dtype == str(theirs.dtype).removeprefix("torch.")
    ends = theirs.eos_token_id
    assert ours.eos_token_ids == tuple(ends if isinstance(ends, list) else [ends])
    kinds = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"]
        * theirs.num_hidden_layers
    )
    windows = {
        "sliding_attention": lambda: Window(theirs.sliding_window),
        "chunked_attention": lambda: Window(theirs.attention_chunk_size, is_chunk=True),
    }
    assert [layer.attention is None for layer in ours.layers] == [k == "conv" for k in kinds]
    assert [layer.attention.window for layer in ours.layers if layer.attention] == [
        windows[kind]() if kind in windows else None for kind in kinds if kind != "conv"
    ]
    # only layers with a window rotate
    is_hybrid = theirs.model_type == "exaone4" and theirs.sliding_window
    rotated = [kind == "sliding_attention" for kind in kinds]
    if not is_hybrid:
        rotated = list(map(bool, getattr(theirs, "no_rope_layers", [1] * len(kinds))))
    assert [is_rotated(ours, layer.attention) for layer in ours.layers] == rotated
    if (parameters := theirs.rope_parameters).get("rope_type") == "longrope":
        for length in (4096, 4097):
            wanted, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", length)
            frequencies, ours_factor = rope.inverse_frequencies(ours, length)
            np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
            assert ours_factor == pytest.approx(factor)
    elif "full_attention" in parameters:
        assert [
            (table.rope.type, table.rope.theta, table.rope.factor) for table in ours.angles
        ] == [
            (theirs["rope_type"], theirs["rope_theta"], theirs.get("factor"))
            for theirs in (parameters["full_attention"], parameters["sliding_attention"])
        ]
        assert {(mixer.window is not None, mixer.angles.start) for mixer in mixers(ours)} == {
            (True, ours.tables[0].stop),
            (False, 0),
        }
    elif "alpha" in parameters:
        wanted, _ = HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters(theirs)
        frequencies, _ = rope.inverse_frequencies(ours)
        np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
    else:
        assert ours.rope.type == parameters["rope_type"]
        assert ours.rope.theta == parameters["rope_theta"]
        for field in "factor low_freq_factor high_freq_factor".split():
            assert getattr(ours.rope, field) == parameters.get(field), field
        if parameters["rope_type"] == "yarn":
            wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
            frequencies, ours_factor = rope.inverse_frequencies(ours)
            np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
            assert ours_factor == pytest.approx(factor)
    width = ours.own.get("global_head_dim", ours.head_dim)
    assert ours.rotary_dim == int(width * parameters.get("partial_rotary_factor", 1))


def is_rotated(config, mixer):
    """False for no rotation, and for one by angles of 0."""
    turns = mixer is None or config.angles[config.tables.index(mixer.angles)].turns
    return mixer is None or (mixer.rotates and turns)


def mixers(config):
    return [layer.mixer for layer in config.layers]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("gemma-4")])
def test_layers_of_gemma_4_are_those_of_transformers(name):
    ours = LlamaConfig.from_dict(MODELS[name])
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(MODELS[name])).get_text_config()
    for i, (layer, sharing) in enumerate(zip(ours.layers, theirs.kv_sharing_modes, strict=True)):
        mixer, wanted = layer.mixer, theirs.per_layer_config[i]
        assert mixer.head_dim == wanted.head_dim
        assert mixer.key_value_heads == wanted.num_key_value_heads
        assert (mixer.keys_of is not None) == (sharing == "reuse")
        if sharing == "reuse":
            source = theirs.layer_types[mixer.keys_of]
            assert source == theirs.layer_types[i]
            assert theirs.kv_sharing_modes[mixer.keys_of] == "store"
        is_wide = sharing == "reuse" and theirs.use_double_wide_mlp
        assert layer.mlp.size == theirs.intermediate_size * (1 + is_wide)
        keys_twice = theirs.attention_k_eq_v and theirs.layer_types[i] == "full_attention"
        assert (mixer.qkv[-1] == mixer.qkv[-2]) == keys_twice if len(mixer.qkv) > 1 else True
    inputs = getattr(theirs, "hidden_size_per_layer_input", 0)
    assert (ours.inputs.size if ours.inputs else 0) == inputs
    wanted, _ = ROPE_INIT_FUNCTIONS["proportional"](theirs, "cpu", layer_type="full_attention")
    frequencies, _ = rope.inverse_frequencies(ours)
    np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
    # effective parameters and all, by the model cards
    billions = {"E2B": 5.1, "E4B": 8.0, "26B": 25.2, "31B": 30.7, "12B": 12}[name.split("-")[2]]
    total = sum(math.prod(shape) for shape in ours.tensor_shapes().values()) / 1e9
    assert total == pytest.approx(billions, rel=0.1)


GEMMA4_TEXT = MODELS["gemma-4-E2B-it"]["text_config"]


@pytest.mark.parametrize(
    "fields, message",
    [
        (GEMMA4_TEXT | {"enable_moe_block": True}, "num_experts is None, expected a number, since"),
        (
            GEMMA4_TEXT | {"enable_moe_block": True, "num_experts": 4},
            "top_k_experts is None, expected a number, since enable_moe_block is true",
        ),
        (GEMMA4_TEXT | {"num_kv_shared_layers": 32}, "num_kv_shared_layers is 32, expected fewer"),
        (GEMMA4_TEXT | {"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35, expected fewer"),
        (GEMMA4_TEXT | {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9, exp"),
        (GEMMA4_TEXT | {"global_head_dim": 511}, "global_head_dim, num_global.* is .511, 1."),
        (GEMMA4_TEXT | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is"),
        (
            GEMMA4_TEXT | {"per_layer_config": {"4": {"head_dim": 512}, "9": {"head_dim": 256}}},
            "per_layer_config is .*, expected the same head_dim",
        ),
    ],
)
def test_a_bad_field_of_gemma_4_is_named(fields, message):
    assert re.search(message, refusal(LlamaConfig.from_dict, fields, kind=ConfigError))


def test_factors_of_the_families():
    granite, gemma = LlamaConfig.from_dict(GRANITE), LlamaConfig.from_dict(GEMMA2)
    assert (granite.embedding_multiplier, granite.logits_multiplier) == (12, 1 / 8)
    assert {mixer.scale for mixer in mixers(granite)} == {0.015625}
    assert {layer.residual_multiplier for layer in granite.layers} == {0.22}
    assert (gemma.embedding_multiplier, gemma.norm_offset, gemma.logits_softcap) == (48, 1, 30)
    assert {(mixer.scale, mixer.softcap) for mixer in mixers(gemma)} == {(1 / 16, 50)}
    assert {layer.mlp.activation for layer in gemma.layers} == {"gelu_tanh"}
    # query_pre_attn_scalar of gemma-2-9b, gemma-2-27b and gemma-3-27b on the hub; their GGUF files
    # do not name it
    names = ("hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers")
    for name, sizes, scalar in (
        ("Gemma2", (3584, 16, 256, 42), 256),
        ("Gemma2", (4608, 32, 128, 46), 144),
        ("Gemma3", (5376, 32, 128, 62), 168),
    ):
        read = Reader({}, "model.gguf", is_gguf=True)
        factors = FAMILIES[f"{name}ForCausalLM"].complete(read, dict(zip(names, sizes)))
        assert factors["attention_multiplier"] == scalar**-0.5


def test_experts_of_the_families():
    mixtral, qwen = LlamaConfig.from_dict(MIXTRAL), LlamaConfig.from_dict(QWEN3_MOE)
    few, other = mixtral.layers[31].experts, qwen.layers[47].experts
    assert (few.count, few.router.used, few.router.normalises, mixtral.mlp_size) == (
        8,
        2,
        True,
        14336,
    )
    assert (other.count, other.router.used, other.router.normalises, qwen.mlp_size) == (
        128,
        8,
        True,
        768,
    )
    scout, maverick = (MODELS[f"Llama 4 {name}"] for name in ("Scout", "Maverick"))
    layers = LlamaConfig.from_dict(maverick).layers
    assert [layer.experts is None for layer in layers] == [True, False] * 24
    experts = layers[1].experts
    assert (experts.count, experts.router.used) == (128, 1)
    assert (experts.router.scoring, experts.router.scales_input) == ("sigmoid", True)
    for fields, weights in ((scout, 107_769_861_120), (maverick, 400_711_848_960)):
        shapes = LlamaConfig.from_dict(fields).tensor_shapes()
        assert sum(math.prod(shape) for shape in shapes.values()) == weights
    # the model card's 46.7 B
    assert sum(math.prod(shape) for shape in mixtral.tensor_shapes().values()) == 46_702_792_704
    assert sum(math.prod(shape) for shape in qwen.tensor_shapes().values()) == 30_532_122_624
    gpt_oss = LlamaConfig.from_dict(GPT_OSS)
    # 20.91 B by the model card
    assert sum(math.prod(shape) for shape in gpt_oss.tensor_shapes().values()) == 20_914_757_184
    plain = LlamaConfig.from_dict(QWEN3_MOE | {"norm_topk_prob": False})
    assert not plain.layers[0].experts.router.normalises


@pytest.mark.parametrize(
    "name, weights",
    [
        ("Qwen1.5-MoE-A2.7B", 14_315_784_192),
        ("Qwen2-57B-A14B", 57_408_658_944),
        ("OLMoE-1B-7B-0924", 6_919_161_856),
        ("granite-3.1-1b-a400m-instruct", 1_334_628_352),
        ("GLM-4.5-Air", 106_852_251_264),
    ],
)
def test_weights_of_models_with_experts(name, weights):
    """As the hub counts them; of GLM-4.5-Air without the layer of multi-token prediction."""
    shapes = LlamaConfig.from_dict(MODELS[name]).tensor_shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == weights


def test_routers_of_the_families():
    glm = LlamaConfig.from_dict(GLM | {"n_shared_experts": 2, "n_group": 4, "topk_group": 3})
    assert [layer.experts is None for layer in glm.layers] == [True] * 3 + [False] * 89
    experts = glm.layers[3].experts
    gate = "model.layers.3.mlp.gate"
    numbers = dict(scale=2.5, groups=4, used_groups=3, normalises=True)
    bias = f"{gate}.e_score_correction_bias"
    assert experts.router == Router(gate, 8, scoring="sigmoid", bias=bias, **numbers)
    assert (experts.shared.size, experts.size, glm.layers[0].ffn.size) == (3072, 1536, 12288)
    assert (experts.shared_gate, glm.layers[0].mixer.norms_rotated) == (None, False)
    assert glm.layers[0].mixer.query_norm
    assert glm.notices == ("config.json: 1 layer of multi-token prediction left out",)
    qwen = LlamaConfig.from_dict(QWEN2_MOE).layers[0].experts
    assert (qwen.size, qwen.shared.size) == (1408, 5632)
    assert qwen.shared_gate == "model.layers.0.mlp.shared_expert_gate"
    plain = {"used": 8, "normalises": False}
    router = LlamaConfig.from_dict(OLMOE).layers[15].experts.router
    assert router == Router("model.layers.15.mlp.gate", **plain)
    router = LlamaConfig.from_dict(GRANITE_MOE).layers[0].experts.router
    name = "model.layers.0.block_sparse_moe.router.layer"
    assert router == Router(name, **plain | {"normalises": True})


def test_the_text_part_of_gemma_3_4b_takes_the_defaults_that_its_config_leaves_out():
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    config = LlamaConfig.from_dict(raw)
    assert config.vocab_size == 262208 and config.num_attention_heads == 8
    assert config.num_key_value_heads == 4 and config.head_dim == 256
    assert [(table.rope.type, table.rope.theta, table.rope.factor) for table in config.angles] == [
        ("linear", 1e6, 8),
        ("default", 1e4, None),
    ]
    assert (config.eos_token_ids, config.dtype, config.is_text_part) == ((1, 106), "bfloat16", True)


# Beside sizes, what conversion/NAME.py of llama.cpp writes for models above
def llama4(step, experts):
    fields = {"expert_used_count": 1, "expert_feed_forward_length": 8192, "rope.freq_base": 5e5}
    return fields | {"interleave_moe_layer_step": step, "expert_count": experts}


def windows(layers):
    """Of every four layers, the first three see 4096 tokens."""
    pattern = [True, True, True, False] * (layers // 4)
    return {"attention.sliding_window": 4096, "attention.sliding_window_pattern": pattern}


def experts_of(count, used, size=None):
    fields = {"expert_count": count, "expert_used_count": used, "rope.freq_base": 1e6}
    return fields | ({"expert_feed_forward_length": size} if size else {})


CONVERTED = {
    "Llama 4 Scout": ("llama4", llama4(1, 16)),
    "Llama 4 Maverick": ("llama4", llama4(2, 128)),
    "Olmo-3-7B-Instruct": (
        "olmo2",
        windows(32)
        | {
            "rope.freq_base": 500000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 8192,
            "rope.scaling.yarn_attn_factor": 1.2079441541679836,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
    ),
    "EXAONE-4.0-1.2B": ("exaone4", {"rope.freq_base": 1e6}),
    "Hunyuan-7B-Instruct": (
        "hunyuan-dense",
        {
            "context_length": 262144,
            "rope.freq_base": 11158839.925,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 262144,
        },
    ),
    "EXAONE-4.0-32B": ("exaone4", windows(64) | {"rope.freq_base": 1e6}),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2moe",
        experts_of(60, 4, 1408) | {"expert_shared_feed_forward_length": 5632},
    ),
    "OLMoE-1B-7B-0924": ("olmoe", experts_of(64, 8) | {"rope.freq_base": 10000.0}),
    "granite-3.1-1b-a400m-instruct": (
        "granitemoe",
        experts_of(32, 8)
        | {
            "rope.freq_base": 5e6,
            "attention.scale": 0.015625,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "logit_scale": 6.0,
        },
    ),
    "GLM-4.5-Air": (
        "glm4moe",
        experts_of(128, 8, 1408)
        | {
            "block_count": 47,
            "nextn_predict_layers": 1,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "rope.dimension_count": 64,
        },
    ),
}


def test_a_converted_granite_4_is_a_granite_3():
    config = LlamaConfig.from_dict(GRANITE4)
    fields = {
        "context_length": 131072,
        "embedding_length": 2560,
        "block_count": 40,
        "feed_forward_length": 8192,
        "expert_shared_feed_forward_length": 8192,
        "attention.head_count": 40,
        "attention.head_count_kv": [8] * 40,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 100352,
        "attention.scale": 0.015625,
        "embedding_scale": 12.0,
        "logit_scale": 10.0,
        "residual_scale": 0.22,
        "rope.freq_base": 1e7,
        "rope.scaling.finetuned": True,
        "ssm.inner_size": 5120,
    }
    for rotates in (True, False):
        metadata = {f"granite.{key}": value for key, value in fields.items()}
        metadata |= {"general.architecture": "granite", "granite.rope.scaling.finetuned": rotates}
        again = LlamaConfig.from_gguf(metadata, {}, {}, "bfloat16", "model.gguf")
        assert again.layers == tuple(
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rotates=rotates))
            for layer in config.layers
        )
        assert shared_arithmetic(again) == shared_arithmetic(config)
        assert (again.embedding_multiplier, again.logits_multiplier) == (12, 0.1)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_means_the_same_model(name):
    config, (family, fields) = LlamaConfig.from_dict(MODELS[name]), CONVERTED[name]
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    } | fields
    metadata = {"general.architecture": family} | {
        f"{family}.{key}": value for key, value in fields.items()
    }
    # The converter writes a llama3 rope as a tensor of divisors.
    plain = RopeConfig(theta=config.rope.theta, dim=config.rope.dim)
    plain = dataclasses.replace(config, rope=plain)
    ratios = rope.inverse_frequencies(plain)[0] / rope.inverse_frequencies(config)[0]
    divisors = {"": tuple(ratios)} if config.rope.type == "llama3" else {}
    again = LlamaConfig.from_gguf(metadata, {}, divisors, "bfloat16", "model.gguf")
    assert (again.architecture, again.layers) == (config.architecture, config.layers)
    assert shared_arithmetic(again) == shared_arithmetic(config)
    for table in range(len(config.angles)):
        for frequencies, wanted in zip(
            rope.inverse_frequencies(again, table=table),
            rope.inverse_frequencies(config, table=table),
        ):
            np.testing.assert_allclose(frequencies, wanted, rtol=1e-6)


EXAONE, SEED, ERNIE = (
    MODELS[name] for name in ("EXAONE-4.0-32B", "Seed-OSS-36B-Instruct", "ERNIE-4.5-0.3B-PT")
)
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
LONGROPE = {"type": "longrope", "short_factor": FACTORS["short_factor"]}
CHUNKED = ["chunked_attention"]
# (a model, its field, a value that the family refuses, what the message expects)
BAD_VALUES = [
    (SMOLLM3, "no_rope_layers", [1, 0], "a list of 36 numbers"),
    (SMOLLM3 | {"no_rope_layers": None}, "no_rope_layer_interval", 0, ""),
    (EXAONE, "sliding_window_pattern", "LLLX", "a whole number"),
    (QWEN2, "mlp_bias", True, "false, since Qwen2ForCausalLM"),
    (QWEN2 | {"use_sliding_window": True, "sliding_window": 7}, "max_window_layers", -1, ""),
    (GRANITE, "logits_scaling", 0, "a number above 0"),
    (GRANITE, "partial_rotary_factor", 0.5, "1"),
    (GRANITE, "hidden_act", "xielu", "one of"),
    (PHI4, "partial_rotary_factor", 0.01, ""),
    (GEMMA2, "hidden_activation", "gelu", "one of"),
    (GEMMA2, "sliding_window", None, "a whole number from 1"),
    (GEMMA2, "use_bidirectional_attention", True, "false"),
    (GEMMA3, "sliding_window_pattern", 0, ""),
    (MIXTRAL, "num_experts_per_tok", 9, "at most num_local_experts (8)"),
    (MIXTRAL, "num_local_experts", 0, "a whole number from 1 to 4096"),
    (LLAMA4, "moe_layers", [0, 1, 3], "the numbers of every layer, every other"),
    (QWEN3_MOE, "mlp_only_layers", [0, 1], "[], since every layer is a mixture"),
    (QWEN3_MOE, "decoder_sparse_step", 2, "1"),
    (QWEN3_MOE, "norm_topk_prob", "yes", "true or false"),
    (QWEN3_MOE, "moe_intermediate_size", None, ""),
    (QWEN2_MOE, "qkv_bias", False, "true, since all files"),
    (QWEN2_MOE, "mlp_only_layers", [0], "[], since every layer is a mixture"),
    (OLMOE, "clip_qkv", 8.0, "null, since queries, keys and values are not clipped"),
    (GRANITE_MOE, "num_experts_per_tok", 33, "at most num_local_experts (32)"),
    (GLM, "n_group", 3, "a divisor of 160 experts, with at least 2 in a group"),
    (GLM, "n_group", 160, "a divisor of 160 experts"),
    (GLM, "topk_group", 2, "at most 1 groups"),
    (GLM | {"n_group": 80}, "topk_group", 3, "at most 80 groups, with at least 8 experts"),
    (GLM, "num_nextn_predict_layers", -1, "a whole number from 0"),
    (GLM, "num_experts_per_tok", 161, "at most n_routed_experts (160)"),
    (GPT_OSS, "swiglu_limit", 9.0, "7.0, since the constants"),
    (GPT_OSS, "hidden_act", "gelu", '"silu", since the gate'),
    (SEED, "attention_out_bias", True, "false"),
    (ERNIE, "use_bias", True, "false"),
    (GRANITE4, "num_local_experts", 62, "0, since experts beside the shared one"),
    (HUNYUAN, "use_qk_norm", False, ""),
    (APERTUS, "rope_scaling", None, ""),
    (APERTUS, "hidden_act", "silu", ""),
]
REFUSED = [
    *(
        (model | {name: value}, re.escape(f"{name} is {value!r}, expected {expected}"))
        for model, name, value, expected in BAD_VALUES
    ),
    (PHI4 | {"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "short_factor is .*48 numbers"),
    (PHI4 | {"rope_scaling": LONGROPE}, "long_factor is missing"),
    (GEMMA2 | {"layer_types": CHUNKED * 26}, r"layer_types\[0\] is 'chunked_attention'"),
    (QWEN3 | {"layer_types": ["sliding_attention"] * 2}, r"layer_types\[0\] is 'sliding_"),
    (GPT_OSS | {"layer_types": CHUNKED * 24}, r"layer_types\[0\] is 'chunked_attention'"),
    (
        GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "chunked": {}}},
        "rope_parameters.chunked",
    ),
    *(
        (model | YARN, f"rope_type is 'yarn', expected another type, since {name}ForCausalLM norms")
        for model, name in ((LLAMA4, "Llama4"), (HUNYUAN, "HunYuanDenseV1"))
    ),
    (
        GRANITE4 | {"layer_types": [*["mamba"] * 39, "attention"]},
        r"layer_types\[0\] is 'mamba', expected 'attention', since this package lacks state spaces",
    ),
    (GRANITE4 | {"layer_types": None}, "layer_types.0. is 'mamba'"),
    ({"model_type": "gemma3", "text_config": {"model_type": "bert"}}, "text_config.model_type is"),
    ({"architectures": ["BambaForCausalLM"], "model_type": "bamba"}, "BambaForCausalLM"),
]
ABSENT = {  # transformers' models by what they need
    "AltUp and laurel": ["gemma3n"],
    "a gate of each head": ["lfm3"],
    "latent attention": ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_linear"],
    "state spaces": ["mamba", "mamba2", "bamba", "falcon_h1", "jamba", "nemotron_h", "zamba2"],
    "RWKV's mixing": ["rwkv"],
    "a tower for images": ["llava", "mllama", "qwen2_vl", "qwen3_vl_moe", "idefics3", "internvl"],
}


@pytest.mark.parametrize("fields, message", REFUSED)
def test_a_bad_or_unsupported_field_is_named(fields, message):
    assert re.search(message, refusal(LlamaConfig.from_dict, fields, kind=ConfigError))


@pytest.mark.parametrize("kind, needed", [(x, need) for need in ABSENT for x in ABSENT[need]])
def test_a_model_that_does_not_run_says_what_is_missing_and_what_runs(kind, needed):
    raw = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string())
    message = refusal(LlamaConfig.from_dict, raw, kind=ConfigError)
    assert re.search(f"it needs {needed}.*, which this package lacks: load ", message)


@pytest.mark.parametrize(
    "name, field, needed",
    [  # llama.cpp's src/llama-arch.cpp
        ("gemma3n", "altup.num_inputs", "AltUp and laurel"),
        ("deepseek2", "attention.kv_lora_rank", "latent attention"),
        ("jamba", "ssm.state_size", "state spaces"),
        ("mamba", "ssm.state_size", "state spaces"),
        ("rwkv7", "wkv.head_size", "RWKV's mixing"),
        ("qwen2vl", "rope.dimension_sections", "a tower for images"),
    ],
)
def test_a_gguf_file_of_a_model_that_does_not_run_says_what_is_missing(name, field, needed):
    metadata = {"general.architecture": name, f"{name}.{field}": 16}
    call = lambda: LlamaConfig.from_gguf(metadata, {}, {}, "float16", "model.gguf")  # noqa: E731
    message = refusal(call, kind=ConfigError)
    assert re.search(f"general.architecture is '{name}': it needs {needed}.*: load ", message)
