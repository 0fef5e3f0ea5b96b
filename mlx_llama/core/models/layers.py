"""Builds a model's layers from its sizes, for the families' `layers`. All take a LlamaConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .parts import MLP, NORM_NAMES, NUMBERS_OF_XIELU, Attention, Experts, Layer, Window

FULL, SLIDING = "full_attention", "sliding_attention"  # in `layer_types`

Fields = Callable[[Any, int], dict[str, Any]]  # (LlamaConfig, layer) -> fields of a part


def no_fields(config: Any, i: int) -> dict[str, Any]:
    return {}


def decoder(
    attends: Fields = no_fields, routes: Fields = no_fields, adds: Fields = no_fields
) -> Callable[[Any], list[Layer]]:
    """Make `layers` of a family whose layers are alike but for these fields of Attention, arguments
    of `experts`, and fields of Layer.
    """

    def layers(config: Any) -> list[Layer]:
        make = experts if config.num_experts else mlp
        return [
            block(
                config,
                i,
                attention(config, i, **attends(config, i)),
                make(config, i, **routes(config, i)),
                **adds(config, i),
            )
            for i in range(config.num_hidden_layers)
        ]

    return layers


def block(config: Any, i: int, mixer: Any, ffn: Any, **more: Any) -> Layer:
    """A layer with the family's norms. more: other fields of Layer."""
    before, after = NORM_NAMES[config.family.norm_placement]
    name = f"model.layers.{i}."
    fields = dict(
        index=i,
        mixer=mixer,
        ffn=ffn,
        attention_norm=before and f"{name}{before[0]}" if mixer else None,
        ffn_norm=before and f"{name}{before[1]}" if ffn else None,
        post_attention_norm=after and f"{name}{after[0]}",
        post_ffn_norm=after and f"{name}{after[1]}",
    )
    return Layer(**fields | more)


def attention(config: Any, i: int, **more: Any) -> Attention:
    """Attention of the config's sizes. more: other fields of Attention."""
    name, slides = f"model.layers.{i}.self_attn.", config.layer_types[i] == SLIDING
    angles = config.tables[slides and config.local_rope is not None]
    norm = config.own.get("query_key_norm", config.family.query_key_norm)
    fields: dict[str, Any] = dict(
        index=i,
        slot=0,
        qkv=(f"{name}q_proj", f"{name}k_proj", f"{name}v_proj"),
        out=f"{name}o_proj",
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        eps=config.rms_norm_eps,
        window=Window(config.sliding_window) if slides and config.sliding_window else None,
        angles=angles,
        query_angles=angles,
        query_norm=f"{name}q_norm" if norm else None,
        key_norm=f"{name}k_norm" if norm else None,
        norms_rotated=norm == "rotated",
    )
    return Attention(**fields | more)


def mlp(config: Any, i: int, size: int | None = None, module: str = "") -> MLP:
    """The MLP of a module in the layer. size: hidden units."""
    is_gated = config.activation != "xielu"
    parts = ("gate_proj", "up_proj") if is_gated else ("up_proj",)
    numbers = () if is_gated else NUMBERS_OF_XIELU
    name = f"model.layers.{i}.{module or config.family.mlp}."
    return MLP(
        gate_up=tuple(f"{name}{part}" for part in parts),
        down=f"{name}down_proj",
        size=size or config.intermediate_size,
        activation=config.activation,
        xielu=tuple(f"{name}act_fn.{number}" for number in numbers),
    )


def experts(config: Any, i: int, shared_size: int = 0, **router: Any) -> Experts:
    """The family's experts. shared_size: of the expert for all tokens; router: fields of Router."""
    names = config.family.experts
    assert names is not None  # a family without experts has no `num_experts`
    module = config.family.expert_block
    name = f"model.layers.{i}.{module}"
    gate, up, down = (
        tuple(f"{name}experts.{n}.{part}" for n in range(config.num_experts))
        for part in (names.gate, names.up, names.down)
    )
    usual, stack = names.router, f"{name}{names.stack}."
    fields: dict[str, Any] = dict(
        module=name + usual.module,
        bias=usual.bias and name + usual.bias,
        used=config.num_experts_per_tok,
        normalises=config.own.get("norm_topk_prob", True),
    )
    return Experts(
        router=dataclasses.replace(usual, **fields | router),
        gate=gate,
        up=up,
        down=down,
        stacks=(f"{stack}gate_proj", f"{stack}up_proj", f"{stack}down_proj"),
        size=config.moe_intermediate_size,
        activation=config.activation,
        shared=mlp(config, i, shared_size, f"{module}{names.shared}") if names.shared else None,
        shared_gate=name + names.shared_gate if names.shared_gate else None,
        has_biases=config.mlp_bias,
    )
