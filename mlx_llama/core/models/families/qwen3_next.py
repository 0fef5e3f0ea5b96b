"""Qwen3-Next and Qwen3.5: the gated delta rule, and attention with a gated output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.parts import Attention, GatedDelta

from .family import OPTIONAL, Experts, Family, expert_fields, size, skip_next_layers

_ATTENTION, _DELTA = "full_attention", "linear_attention"
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_KEY_SIZE, _VALUE_SIZE = "linear_key_head_dim", "linear_value_head_dim"
_UNITS, _SHARED = "intermediate_size", "shared_expert_intermediate_size"
_INTERVAL, _RECURRENT = "full_attention_interval", "attention.recurrent_layers"


def complete_for(tiles: bool) -> Callable[[Reader, dict[str, Any]], dict[str, Any]]:
    """Make `complete`: the layers' kinds and the sizes of heads. tiles: as of Family."""

    def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
        more = skip_next_layers(read, values) if read.is_gguf else {}
        count = more.get("num_hidden_layers", values["num_hidden_layers"])
        keys, heads = values[_KEY_HEADS], values[_VALUE_HEADS]
        if heads % keys:
            names = ("ssm.time_step_rank", "ssm.group_count")
            names = names if read.is_gguf else (_VALUE_HEADS, _KEY_HEADS)
            read.fail(names[0], heads, f"a multiple of {read.prefix}{names[1]} ({keys})")
        if read.is_gguf and values["inner_size"] != heads * values[_KEY_SIZE]:
            expected = f"{heads} heads of {values[_KEY_SIZE]}, the size of a key"
            read.fail("ssm.inner_size", values["inner_size"], expected)
        value_size = values.get(_VALUE_SIZE, values[_KEY_SIZE])
        units = values.get(_UNITS) or values["moe_intermediate_size"]
        return more | {
            "attention_layers": _read_layers(read, count),
            _VALUE_SIZE: value_size,
            "inner_size": heads * value_size,
            "tiled": read.is_gguf and tiles,
            _UNITS: units,
        }

    return complete


def _read_layers(read: Reader, count: int) -> tuple[int, ...]:
    """The layers of attention: the others of a list, or each so-manyth."""
    name = _RECURRENT if read.is_gguf else "layer_types"
    kinds = read.get(name, None)
    if kinds is None:
        every = read.integer(_INTERVAL, 4)
        return tuple(i for i in range(count) if (i + 1) % every == 0)
    allowed = {True, False} if read.is_gguf else {_ATTENTION, _DELTA}
    # llama.cpp counts the layers of multi-token prediction, too
    fits = isinstance(kinds, list) and (
        len(kinds) == count or (read.is_gguf and len(kinds) > count)
    )
    if not fits or not {*map(str, kinds)} <= {*map(str, allowed)}:
        read.fail(name, kinds, f"{count} times {' or '.join(map(repr, sorted(allowed)))}")
        return ()
    return tuple(i for i in range(count) if kinds[i] in (False, _ATTENTION))


def write(config: Any) -> dict[str, Any]:
    """The layers' kinds, and what mlx_lm needs."""
    kinds = [_ATTENTION if layer.attention else _DELTA for layer in config.layers]
    fields = {name: x for name, x in write_gguf(config).items() if name == _INTERVAL}
    fields |= {"layer_types": kinds}
    if config.architecture not in _OUTER:
        return fields
    fields["model_type"] = _OUTER[config.architecture]
    if config.rope.type == "default":
        share = config.rotary_dim / config.head_dim
        rope = {"rope_type": "default", "rope_theta": config.rope.theta}
        fields["rope_parameters"] = rope | {"partial_rotary_factor": share}
    return fields


def write_gguf(config: Any) -> dict[str, Any]:
    attention = [bool(layer.attention) for layer in config.layers]
    every, count = (attention.index(True) + 1 if True in attention else 0), len(attention)
    if every and attention == [(i + 1) % every == 0 for i in range(count)]:
        return {_INTERVAL: every}
    return {_RECURRENT: [not kind for kind in attention]}


def write_sections(config: Any) -> dict[str, Any]:
    """As write_gguf, and the shares of pairs that time, height and width turn in turn."""
    sections = [(config.rotary_dim // 2 + 2 - i) // 3 for i in range(3)]
    return write_gguf(config) | {"rope.dimension_sections": [*sections, 0]}


def mixer(config: Any, i: int) -> GatedDelta | None:
    if i in config.own["attention_layers"]:
        return None
    name, own = f"model.layers.{i}.linear_attn.", config.own
    qkv, gate, strength, decay = (f"{name}in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    return GatedDelta(
        index=i,
        slot=0,
        into=(qkv, gate, strength, decay),
        conv=f"{name}conv1d",
        decay=f"{name}A_log",
        decay_bias=f"{name}dt_bias",
        norm=f"{name}norm",
        out=f"{name}out_proj",
        key_heads=own[_KEY_HEADS],
        value_heads=own[_VALUE_HEADS],
        key_size=own[_KEY_SIZE],
        value_size=own[_VALUE_SIZE],
        hidden=config.hidden_size,
        width=own["linear_conv_kernel_dim"],
        eps=config.rms_norm_eps,
        tiled=own["tiled"],
    )


def scattered(mixer: Any) -> dict[str, tuple[str, Any]]:
    """Query and gate of attention, whose rows lie in one matrix head by head."""
    if not isinstance(mixer, Attention):
        return {}
    query, stored = mixer.qkv[0], mixer.qkv[0]
    rows = np.arange(2 * mixer.heads * mixer.head_dim).reshape(mixer.heads, 2, -1)
    return {
        module: (stored, rows[:, i].reshape(-1))
        for i, module in enumerate((query, mixer.gate or ""))
    }


def scattered_by_key(mixer: Any) -> dict[str, tuple[str, Any]]:
    """As `scattered`, and the inputs of the delta rule in two matrices, key head by key head."""
    if not isinstance(mixer, GatedDelta):
        return scattered(mixer)
    heads, shared = mixer.key_heads, mixer.value_heads // mixer.key_heads
    values, qkv, result = shared * mixer.value_size, [], {}
    stored = mixer.into[0].removesuffix("qkv")
    for whole, sizes, modules in (
        (
            "qkvz",
            (mixer.key_size, mixer.key_size, values, values),
            (*mixer.into[:1] * 3, mixer.into[1]),
        ),
        ("ba", (shared, shared), mixer.into[2:]),
    ):
        rows, first = np.arange(heads * sum(sizes)).reshape(heads, -1), 0
        for size_, module in zip(sizes, modules):
            part = rows[:, first : first + size_].reshape(-1)
            first += size_
            if module == mixer.into[0]:
                qkv.append(part)
                part = np.concatenate(qkv)
            result[module] = stored + whole, part
    return result


_DELTA_FIELDS = (
    size(_KEY_HEADS, "ssm.group_count", 12, default=16, placeholder=1),
    size(_VALUE_HEADS, "ssm.time_step_rank", 12, default=32, placeholder=1),
    size(_KEY_SIZE, "ssm.state_size", 12, default=128),
    size(_VALUE_SIZE, "", 12, default=128),
    Field("inner_size", gguf="ssm.inner_size", high=1 << 22),
    size("linear_conv_kernel_dim", "ssm.conv_kernel", 6, default=4),
    Field(
        "num_nextn_predict_layers",
        gguf="nextn_predict_layers",
        low=0,
        high=256,
        gguf_default=0,
        encode=lambda count: 0,  # our files lack them
        placeholder=0,
    ),
)
_SILU = {"hidden_act": ("silu", "the convolution of the delta rule has it, too")}
_GATED = {"attn_output_gate": (True, "attention has a gate of its output here")}
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_APART = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_JOINT = {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
# {architecture: model_type for which mlx_lm has it}
_OUTER = {"Qwen3_5ForCausalLM": "qwen3_5", "Qwen3_5MoeForCausalLM": "qwen3_5_moe"}
_EVERY_LAYER = "every layer is a mixture of experts here"
_EXPERTS = Experts(shared="shared_expert", shared_gate="shared_expert_gate")
_SHARED_OF_ALL: dict[str, Any] = {
    "attention_biases": (None, None),
    "norm_offset": 1.0,
    "fixed": {"query_key_norm": "head"},
    "mixer": mixer,
    "gate": "self_attn.q_gate",
    "partial_rotation": True,
    "write": write,
}
_QWEN35: dict[str, Any] = _SHARED_OF_ALL | {
    "complete": complete_for(tiles=True),
    "write_gguf": write_sections,
    "renamed": _NAMES | _APART,
    "scattered": scattered,
    "tiles": True,
    "has_sections": True,
    "neutral": _SILU | _GATED,
}

FAMILIES = (
    Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        "qwen35",
        wrapper=("Qwen3_5ForConditionalGeneration", _OUTER["Qwen3_5ForCausalLM"]),
        fields=_DELTA_FIELDS,
        defaults=_DEFAULTS | {"num_key_value_heads": 4},
        **_QWEN35,
    ),
    # Qwen3.5 with a mixture of experts in each layer, and a gated shared expert.
    Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        "qwen35moe",
        wrapper=("Qwen3_5MoeForConditionalGeneration", _OUTER["Qwen3_5MoeForCausalLM"]),
        fields=(
            *_DELTA_FIELDS,
            *expert_fields("num_experts", 256, 8, "moe_intermediate_size"),
            size(_SHARED, "expert_shared_feed_forward_length", 22, default=512),
            size(_UNITS, "feed_forward_length", 22, **OPTIONAL),
        ),
        defaults=_DEFAULTS | {"num_key_value_heads": 2, "moe_intermediate_size": 512},
        experts=_EXPERTS,
        **_QWEN35,
    ),
    # Qwen3-Next: the same with other matrices of the delta rule.
    Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        "qwen3next",
        fields=(
            *_DELTA_FIELDS,
            *expert_fields("num_experts", 512, 10, "moe_intermediate_size"),
            size(_SHARED, "expert_shared_feed_forward_length", 22, default=512),
            Field("norm_topk_prob", "norm_topk_prob", kind=bool, default=True),
        ),
        defaults=_DEFAULTS | {"num_key_value_heads": 2, "moe_intermediate_size": 512},
        neutral=_SILU
        | {"mlp_only_layers": ([], _EVERY_LAYER), "decoder_sparse_step": (1, _EVERY_LAYER)},
        complete=complete_for(tiles=False),
        write_gguf=write_gguf,
        experts=_EXPERTS,
        renamed=_NAMES | _JOINT,
        scattered=scattered_by_key,
        **_SHARED_OF_ALL,
    ),
)
