"""LFM2, LFM2.5 and LFM2-MoE: short convolutions with gates, and attention in some layers."""

from collections.abc import Iterator
from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layer_types import Types
from mlx_llama.core.models.layers import FULL, attention, block, experts, mlp
from mlx_llama.core.models.parts import Layer, Mixer, Router, ShortConv

from .family import EPS, OPTIONAL, Experts, Family, expert_fields, size

_CONV = "conv"
_TIED, _UNITS = "tie_word_embeddings", "intermediate_size"
_SIGMOID = 2  # llama.cpp's number for it


def types(read: Reader, values: dict[str, Any]) -> Types:
    count = values["num_hidden_layers"]
    if read.is_gguf:
        groups = read.get("attention.head_count_kv")
        groups = groups if isinstance(groups, list) else [groups] * count
        if len(groups) != count or not any(groups):
            expected = f"a number for each of {count} layers, above 0 in one at least"
            read.fail("attention.head_count_kv", groups, expected)
        kinds = [FULL if heads else _CONV for heads in groups]
    elif (kinds := read.get("layer_types", None)) is None:
        chosen = read.get("full_attn_idxs", None)
        chosen = list(range(count)) if chosen is None else chosen
        if not isinstance(chosen, list) or any(i not in range(count) for i in chosen):
            read.fail("full_attn_idxs", chosen, f"numbers of layers from 0 to {count - 1}")
        kinds = [FULL if i in chosen else _CONV for i in range(count)]
    known = isinstance(kinds, list) and all(kind in (FULL, _CONV) for kind in kinds)
    if not known or len(kinds) != count or FULL not in kinds:
        expected = f"{count} times {FULL!r}, which one has at least, or {_CONV!r}"
        read.fail("layer_types", kinds, expected)
    return {"sliding_window": None, "layer_types": tuple(kinds)}


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """The width of MLPs, which config.json may have before an adjustment."""
    units = values[_UNITS]
    if not read.is_gguf and read.boolean("block_auto_adjust_ff_dim", True):
        factor = read.number("block_ffn_dim_multiplier", None) or 1.0
        multiple = read.integer("block_multiple_of", 256)
        units = -(-int(factor * int(2 * units / 3)) // multiple) * multiple
    return {_UNITS: units}


def layers(config: Any) -> Iterator[Layer]:
    own = config.own
    for i, kind in enumerate(config.layer_types):
        name = f"model.layers.{i}.conv."
        mixer: Mixer = attention(config, i)
        if kind == _CONV:
            mixer = ShortConv(
                index=i,
                slot=0,
                into=f"{name}in_proj",
                conv=f"{name}conv",
                out=f"{name}out_proj",
                size=config.hidden_size,
                width=own["conv_width"],
                has_bias=own["conv_bias"],
            )
        ffn: Any = mlp(config, i)
        if i >= own["first_k_dense_replace"]:
            bias: dict[str, Any] = {} if own["use_expert_bias"] else {"bias": None}
            ffn = experts(config, i, scale=own["routed_scaling_factor"], **bias)
        yield block(config, i, mixer, ffn)


def write_experts(config: Any) -> dict[str, Any]:
    return {"layer_types": list(config.layer_types)}


def write(config: Any) -> dict[str, Any]:
    # mlx-lm requires those that are not used, too
    unused = {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    adjusted = {"block_dim": config.hidden_size, "block_auto_adjust_ff_dim": False}
    return write_experts(config) | adjusted | unused


_KEY_VALUE_HEADS = "num_key_value_heads", "attention.head_count_kv", 14
_FIELDS = (
    size(*_KEY_VALUE_HEADS, skips_zeros=True, **OPTIONAL),
    size("conv_width", "shortconv.l_cache", 8, "conv_L_cache", low=2, default=3),
    Field("conv_bias", "conv_bias", kind=bool, default=False),
    Field(EPS, "norm_eps", "attention.layer_norm_rms_epsilon", float, 0, 1, default=1e-5),
    Field(_TIED, "tie_embedding", kind=bool, default=True, alias=_TIED),
)
_IN_GGUF = {"conv_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
_COMMON: dict[str, Any] = {
    "defaults": {
        "max_position_embeddings": 128000,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "query_key_norm": "head",
    "types": types,
    "layers": layers,
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
        fixed=_IN_GGUF | {"first_k_dense_replace": 1 << 12},  # none has experts
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
        fixed=_IN_GGUF | {"use_expert_bias": True, "expert_gating_func": _SIGMOID},
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
