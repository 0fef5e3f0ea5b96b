"""LFM2 and LFM2.5: short convolutions with gates, and attention in some layers."""

from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.parts import ShortConv

from .family import OPTIONAL, Family, size

_ATTENTION, _CONV = "full_attention", "conv"
_UNITS, _TIED = "intermediate_size", "tie_word_embeddings"


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """The layers' kinds, and the width of MLPs, which config.json may have before adjustment."""
    count = values["num_hidden_layers"]
    if read.is_gguf:
        groups = read.get("attention.head_count_kv")
        groups = groups if isinstance(groups, list) else [groups] * count
        return {"attention_layers": tuple(i for i in range(count) if groups[i])}
    kinds, chosen = read.get("layer_types", None), read.get("full_attn_idxs", None)
    if kinds is None:
        kinds = [_ATTENTION if chosen is None or i in chosen else _CONV for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or {*kinds} - {_ATTENTION, _CONV}:
        read.fail("layer_types", kinds, f"{count} times {_ATTENTION!r} or {_CONV!r}")
    units = values["intermediate_size"]
    if read.boolean("block_auto_adjust_ff_dim", True):
        units = int(2 * units / 3)
        if (factor := read.number("block_ffn_dim_multiplier", None)) is not None:
            multiple = read.integer("block_multiple_of", 256)
            units = -(-int(factor * units) // multiple) * multiple
    attention = tuple(i for i in range(count) if kinds[i] == _ATTENTION)
    return {"attention_layers": attention, "intermediate_size": units}


def write(config: Any) -> dict[str, Any]:
    kinds = [_ATTENTION if layer.attention else _CONV for layer in config.layers]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


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


FAMILIES = (
    Family(
        "Lfm2ForCausalLM",
        "lfm2",
        "lfm2",
        fields=(
            size(
                "num_key_value_heads", "attention.head_count_kv", 14, skips_zeros=True, **OPTIONAL
            ),
            size("conv_width", "shortconv.l_cache", 8, "conv_L_cache", default=3),
            Field("conv_bias", "conv_bias", kind=bool, default=False),
            Field(
                "rms_norm_eps",
                "norm_eps",
                "attention.layer_norm_rms_epsilon",
                float,
                0,
                1,
                default=1e-5,
            ),
            size(
                "intermediate_size",
                "feed_forward_length",
                22,
                "block_ff_dim",
                alias="intermediate_size",
            ),
            Field(
                "tie_word_embeddings",
                "tie_embedding",
                kind=bool,
                default=True,
                alias="tie_word_embeddings",
            ),
        ),
        defaults={
            "max_position_embeddings": 128000,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed={"query_key_norm": "head"},
        complete=complete,
        write=write,
        mixer=mixer,
        norm=("model.embedding_norm", "token_embd_norm"),
        fused={
            "operator_norm": ("input_layernorm",),
            "ffn_norm": ("post_attention_layernorm",),
            "self_attn.out_proj": ("self_attn.o_proj",),
            "self_attn.q_layernorm": ("self_attn.q_norm",),
            "self_attn.k_layernorm": ("self_attn.k_norm",),
            "feed_forward.w1": ("mlp.gate_proj",),
            "feed_forward.w3": ("mlp.up_proj",),
            "feed_forward.w2": ("mlp.down_proj",),
        },
        renamed={
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
        },
        theta=1e6,
    ),
)
