"""LFM2, LFM2.5 and LFM2-MoE: short convolutions with gates, and attention in some layers."""

from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.parts import Router, ShortConv

from .family import EPS, OPTIONAL, Experts, Family, expert_fields, size

_ATTENTION, _CONV = "full_attention", "conv"
_TIED, _UNITS = "tie_word_embeddings", "intermediate_size"
_SIGMOID = 2  # llama.cpp's number for it


def read_layers(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """The layers with attention, and whether the others' products have biases."""
    count = values["num_hidden_layers"]
    if read.is_gguf:
        groups = read.get("attention.head_count_kv")
        groups = groups if isinstance(groups, list) else [groups] * count
        if len(groups) != count or not any(groups):
            expected = f"a number for each of {count} layers, above 0 in one at least"
            read.fail("attention.head_count_kv", groups, expected)
        attention = tuple(i for i in range(count) if groups[i])
        return {"attention_layers": attention, "conv_bias": False}
    kinds, chosen = read.get("layer_types", None), read.get("full_attn_idxs", None)
    if kinds is None:
        chosen = list(range(count)) if chosen is None else chosen
        if not isinstance(chosen, list) or any(i not in range(count) for i in chosen):
            read.fail("full_attn_idxs", chosen, f"numbers of layers from 0 to {count - 1}")
        kinds = [_ATTENTION if i in chosen else _CONV for i in range(count)]
    known = isinstance(kinds, list) and all(kind in (_ATTENTION, _CONV) for kind in kinds)
    if not known or len(kinds) != count or _ATTENTION not in kinds:
        expected = f"{count} times {_ATTENTION!r}, which one has at least, or {_CONV!r}"
        read.fail("layer_types", kinds, expected)
    return {"attention_layers": tuple(i for i in range(count) if kinds[i] == _ATTENTION)}


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """The width of MLPs too, which config.json may have before an adjustment."""
    layers, units = read_layers(read, values), values[_UNITS]
    if not read.is_gguf and read.boolean("block_auto_adjust_ff_dim", True):
        factor = read.number("block_ffn_dim_multiplier", None) or 1.0
        multiple = read.integer("block_multiple_of", 256)
        units = -(-int(factor * int(2 * units / 3)) // multiple) * multiple
    return layers | {_UNITS: units}


def complete_experts(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    bias = {"use_expert_bias": True} if read.is_gguf else {}
    return read_layers(read, values) | bias | {"expert_gating_func": _SIGMOID}


def write_experts(config: Any) -> dict[str, Any]:
    kinds = [_ATTENTION if layer.attention else _CONV for layer in config.layers]
    return {"layer_types": kinds}


def write(config: Any) -> dict[str, Any]:
    # mlx-lm requires those that are not used, too
    unused = {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    adjusted = {"block_dim": config.hidden_size, "block_auto_adjust_ff_dim": False}
    return write_experts(config) | adjusted | unused


def mixer(config: Any, i: int) -> ShortConv | None:
    if i in config.own["attention_layers"]:
        return None
    name = f"model.layers.{i}.conv."
    return ShortConv(
        index=i,
        slot=0,
        into=f"{name}in_proj",
        conv=f"{name}conv",
        out=f"{name}out_proj",
        size=config.hidden_size,
        width=config.own["conv_width"],
        has_bias=config.own["conv_bias"],
    )


_KEY_VALUE_HEADS = "num_key_value_heads", "attention.head_count_kv", 14
_FIELDS = (
    size(*_KEY_VALUE_HEADS, skips_zeros=True, **OPTIONAL),
    size("conv_width", "shortconv.l_cache", 8, "conv_L_cache", low=2, default=3),
    Field("conv_bias", "conv_bias", kind=bool, default=False),
    Field(EPS, "norm_eps", "attention.layer_norm_rms_epsilon", float, 0, 1, default=1e-5),
    Field(_TIED, "tie_embedding", kind=bool, default=True, alias=_TIED),
)
_COMMON: dict[str, Any] = {
    "defaults": {
        "max_position_embeddings": 128000,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "fixed": {"query_key_norm": "head"},
    "mixer": mixer,
    "norm": ("model.embedding_norm", "token_embd_norm"),
    "renamed": {
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    "theta": 1e6,
}
_NAMES = {
    "operator_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
    "self_attn.out_proj": ("self_attn.o_proj",),
    "self_attn.q_layernorm": ("self_attn.q_norm",),
    "self_attn.k_layernorm": ("self_attn.k_norm",),
}
_MLP = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

FAMILIES = (
    Family(
        "Lfm2ForCausalLM",
        "lfm2",
        "lfm2",
        wrapper=("Lfm2VlForConditionalGeneration", "lfm2_vl"),
        fields=(
            *_FIELDS,
            size(_UNITS, "feed_forward_length", 22, "block_ff_dim", low=2, alias=_UNITS),
        ),
        complete=complete,
        write=write,
        fused=_NAMES | {f"feed_forward.{a}": (f"mlp.{b}",) for a, b in _MLP.items()},
        **_COMMON,
    ),
    Family(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        "lfm2moe",
        fields=(
            *_FIELDS,
            *expert_fields("num_experts", 32, 4, "moe_intermediate_size"),
            size(
                "first_k_dense_replace",
                "leading_dense_block_count",
                12,
                "num_dense_layers",
                low=0,
                default=2,
                gguf_default=0,
            ),
            Field("norm_topk_prob", "norm_topk_prob", kind=bool, default=True),
            Field("use_expert_bias", "use_expert_bias", kind=bool, default=True),
            Field(
                "routed_scaling_factor",
                "routed_scaling_factor",
                kind=float,
                low=0,
                high=1e12,
                default=1.0,
            ),
            Field("expert_gating_func", gguf="expert_gating_func", low=_SIGMOID, high=_SIGMOID),
        ),
        complete=complete_experts,
        write=write_experts,
        mlp="feed_forward",
        experts=Experts(
            gate="w1",
            up="w3",
            down="w2",
            router=Router("gate", scoring="sigmoid", bias="expert_bias"),
            fused=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
            # mlx_lm's names of leading layers' MLPs stand for those of other files
            aliases={
                f"feed_forward.{a}.weight": f"feed_forward.{b}.weight" for a, b in _MLP.items()
            },
        ),
        fused=_NAMES,
        **_COMMON | {"defaults": _COMMON["defaults"] | {"moe_intermediate_size": 1792}},
    ),
)
