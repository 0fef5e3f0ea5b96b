"""The layers of core.llama, built from a checkpoint's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlx_llama.core.llama import (
    MLP,
    Attention,
    Block,
    Decoder,
    Experts,
    GatedDelta,
    LayerInputs,
    PerLayerInput,
    RMSNorm,
    ShortConv,
    Unnormed,
)
from mlx_llama.core.models import parts
from mlx_llama.core.ops import DeltaWeights, ExpertStacks, Ops

from .weights import BaseWeights


def build_decoder(ops: Ops, weights: BaseWeights) -> Decoder:
    """The whole model of `weights`."""
    config = weights.config
    embedding = weights.embedding("model.embed_tokens")
    blocks = tuple(build_block(ops, layer, weights) for layer in config.layers)
    norm = weights.norm(config.final_norm)
    assert norm is not None
    head, inputs = weights.linear([config.head_name]), None
    if spec := config.inputs:
        table, projection = weights.embedding(spec.embedding), weights.linear([spec.projection])
        part_norm = weights.norm(spec.norm)
        assert part_norm is not None
        inputs = LayerInputs(ops, spec, table, projection, part_norm)
    return Decoder(ops, config, embedding, blocks, norm, head, inputs)


def build_block(ops: Ops, layer: parts.Layer, weights: BaseWeights) -> Block:
    """The layer as `layer` describes it."""
    mlp = build_mlp(ops, layer.mlp, weights) if layer.mlp else None
    experts = build_experts(ops, layer.experts, mlp, weights) if layer.experts else None
    scalars = weights.numbers([layer.scalar]) if layer.scalar else (1.0,)
    return Block(
        ops,
        layer,
        attention_norm=weights.norm(layer.attention_norm) or Unnormed(ops),
        mixer=build_mixer(ops, layer.mixer, weights) if layer.mixer else None,
        ffn_norm=weights.norm(layer.ffn_norm) or Unnormed(ops),
        mlp=experts or mlp,
        post_attention_norm=weights.norm(layer.post_attention_norm),
        post_ffn_norm=weights.norm(layer.post_ffn_norm),
        input=build_input(ops, layer.input, weights) if layer.input else None,
        scalar=scalars[0],
    )


def build_input(ops: Ops, spec: parts.PerLayerInput, weights: BaseWeights) -> PerLayerInput:
    norm = weights.norm(spec.norm)
    assert norm is not None
    gate, projection = weights.linear([spec.gate]), weights.linear([spec.projection])
    return PerLayerInput(ops, spec, gate, projection, norm)


def build_mlp(ops: Ops, mlp: parts.MLP, weights: BaseWeights) -> MLP:
    numbers = _constrain(weights.numbers(mlp.xielu)) if mlp.xielu else ()
    gate_up, down = weights.linear(mlp.gate_up), weights.linear([mlp.down])
    return MLP(ops, gate_up, down, mlp.activation, numbers)


def build_experts(
    ops: Ops, experts: parts.Experts, shared: MLP | None, weights: BaseWeights
) -> Experts:
    modules = experts.gate, experts.up, experts.down
    gate, up, down = map(weights.stack, modules)
    stacks = ExpertStacks(gate, up, down, experts)
    if experts.has_biases:
        stacks = stacks._replace(biases=tuple(map(weights.stack_biases, modules)))
    if experts.router.bias:
        stacks = stacks._replace(router_bias=weights.float32(experts.router.bias))
    if experts.router.expert_scale:
        stacks = stacks._replace(expert_scale=weights.float32(experts.router.expert_scale))
    gate_of_shared = weights.linear([experts.shared_gate]) if experts.shared_gate else None
    router = weights.linear([experts.router.module])
    norms = tuple(filter(None, map(weights.norm, experts.norms)))
    if (scale := weights.vector(experts.router.norm)) is not None:
        scale = scale * weights.config.hidden_size**-0.5
        norms = RMSNorm(ops, scale, weights.config.rms_norm_eps), *norms
    return Experts(ops, router, stacks, shared, gate_of_shared, norms)


def build_mixer(
    ops: Ops, spec: parts.Mixer, weights: BaseWeights
) -> Attention | ShortConv | GatedDelta:
    if isinstance(spec, parts.Attention):
        return build_attention(ops, spec, weights)
    if isinstance(spec, parts.GatedDelta):
        return build_delta(ops, spec, weights)
    return ShortConv(
        ops,
        spec,
        into=weights.linear([spec.into]),
        weight=weights.filter(spec.conv, spec.size),
        bias=weights.vector(f"{spec.conv}.bias" if spec.has_bias else None),
        out=weights.linear([spec.out]),
    )


def build_delta(ops: Ops, spec: parts.GatedDelta, weights: BaseWeights) -> GatedDelta:
    rate, bias = (weights.tensors[name].float32() for name in (spec.decay, spec.decay_bias))
    numbers = DeltaWeights(
        conv=weights.filter(spec.conv, spec.channels),
        rate=weights.send(-np.exp(rate)),
        bias=weights.send(bias),
        norm=weights.vector(f"{spec.norm}.weight"),
    )
    return GatedDelta(ops, spec, weights.linear(spec.into), weights.linear([spec.out]), numbers)


def build_attention(ops: Ops, spec: parts.Attention, weights: BaseWeights) -> Attention:
    query_norm, key_norm = (
        weights.norm_of_ones(spec.head_dim) if spec.norms_heads else weights.norm(name)
        for name in (spec.query_norm, spec.key_norm)
    )
    query_scale = None
    if spec.norms_rotated:
        # A rotation keeps a head's RMS, but not the places of the norm's weights. Scores need only
        # their products, which the rotated queries take; keys are stored without.
        assert query_norm is not None and key_norm is not None
        query_scale = query_norm.weight * key_norm.weight
        query_norm = key_norm = replace(query_norm, weight=query_norm.weight * 0 + 1)
    return Attention(
        ops,
        spec,
        qkv=weights.linear(spec.qkv),
        out=weights.linear([spec.out]),
        query_norm=query_norm,
        key_norm=key_norm,
        query_scale=query_scale,
        sinks=weights.vector(spec.sinks),
        gate=weights.linear([spec.gate]) if spec.gate else None,
    )


def _constrain(numbers: Sequence[float]) -> tuple[float, ...]:
    """xIELU's numbers as `Ops.xielu` takes them, of the trained ones."""

    def softplus(x: float) -> float:
        return max(x, 0.0) + math.log1p(math.exp(-abs(x)))

    alpha_p, alpha_n, beta, eps = numbers
    return softplus(alpha_p), beta + softplus(alpha_n), beta, eps
