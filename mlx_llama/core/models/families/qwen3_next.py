"""Qwen3-Next and Qwen3.5: the gated delta rule, and attention with a gated output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layer_types import Types, all_but_each
from mlx_llama.core.models.layers import FULL, attention, block, experts, mlp
from mlx_llama.core.models.parts import Attention, GatedDelta, Layer

from .family import OPTIONAL, Experts, Family, expert_fields, size, skip_next_layers

_DELTA = "linear_attention"
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_KEY_SIZE, _VALUE_SIZE = "linear_key_head_dim", "linear_value_head_dim"
_UNITS, _SHARED = "intermediate_size", "shared_expert_intermediate_size"
_INTERVAL, _RECURRENT = "full_attention_interval", "attention.recurrent_layers"


def complete_for(tiles: bool) -> Callable[[Reader, dict[str, Any]], dict[str, Any]]:
    """Make `complete`: the sizes of heads. tiles: as of Family."""

    def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
        more = skip_next_layers(read, values) if read.is_gguf else {}
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
            _VALUE_SIZE: value_size,
            "inner_size": heads * value_size,
            "tiled": read.is_gguf and tiles,
            _UNITS: units,
        }

    return complete


def types(read: Reader, values: dict[str, Any]) -> Types:
    """The kinds of a list, or attention in each so-manyth layer."""
    name, count = _RECURRENT if read.is_gguf else "layer_types", values["num_hidden_layers"]
    kinds = found = read.get(name, None)
    if kinds is None:
        every = read.integer(_INTERVAL, 4)
        kinds = [_DELTA if (i + 1) % every else FULL for i in range(count)]
    elif read.is_gguf and isinstance(kinds, list) and {*map(type, kinds)} == {bool}:
        # llama.cpp counts the layers of multi-token prediction, too
        kinds = [_DELTA if is_recurrent else FULL for is_recurrent in kinds[:count]]
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or not {*map(str, kinds)} <= {FULL, _DELTA}
    ):
        names = (False, True) if read.is_gguf else (FULL, _DELTA)
        read.fail(name, found, f"{count} times {names[0]!r} or {names[1]!r}")
    return {"sliding_window": None, "layer_types": tuple(kinds)}


def write(config: Any) -> dict[str, Any]:
    """The layers' kinds, and what mlx_lm needs."""
    fields = {name: x for name, x in write_gguf(config).items() if name == _INTERVAL}
    fields |= {"layer_types": list(config.layer_types)}
    if config.architecture not in _OUTER:
        return fields
    fields["model_type"] = _OUTER[config.architecture]
    if config.rope.type == "default":
        share = config.rotary_dim / config.head_dim
        rope = {"rope_type": "default", "rope_theta": config.rope.theta}
        fields["rope_parameters"] = rope | {"partial_rotary_factor": share}
    return fields


def write_gguf(config: Any) -> dict[str, Any]:
    is_delta = [kind == _DELTA for kind in config.layer_types]
    every = is_delta.index(False) + 1 if False in is_delta else 0
    if every and is_delta == all_but_each(every, len(is_delta)):
        return {_INTERVAL: every}
    return {_RECURRENT: is_delta}


def write_sections(config: Any) -> dict[str, Any]:
    """As write_gguf, and the shares of pairs that time, height and width turn in turn."""
    sections = [(config.rotary_dim // 2 + 2 - i) // 3 for i in range(3)]
    return write_gguf(config) | {"rope.dimension_sections": [*sections, 0]}


def layers(config: Any) -> Iterator[Layer]:
    for i, kind in enumerate(config.layer_types):
        gate = f"model.layers.{i}.self_attn.q_gate"
        mixer = _delta(config, i) if kind == _DELTA else attention(config, i, gate=gate)
        ffn = experts(config, i, config.own[_SHARED]) if config.num_experts else mlp(config, i)
        yield block(config, i, mixer, ffn)


def _delta(config: Any, i: int) -> GatedDelta:
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
    "query_key_norm": "head",
    "types": types,
    "layers": layers,
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
        fixed={"norm_topk_prob": True},  # in GGUF
        complete=complete_for(tiles=False),
        write_gguf=write_gguf,
        experts=_EXPERTS,
        renamed=_NAMES | _JOINT,
        scattered=scattered_by_key,
        **_SHARED_OF_ALL,
    ),
)
