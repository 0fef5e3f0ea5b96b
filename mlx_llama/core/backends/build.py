"""The layers of core.llama, built from a checkpoint's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mlx_llama.core.llama import MLP, Attention, Block, Decoder, Experts, Unnormed
from mlx_llama.core.models.spec import LayerSpec
from mlx_llama.core.ops import ExpertStacks, Ops

from .weights import BaseWeights


def build_decoder(ops: Ops, weights: BaseWeights) -> Decoder:
    """The whole model of `weights`."""
    config = weights.config
    embedding = weights.embedding("model.embed_tokens")
    blocks = tuple(build_block(ops, spec, weights) for spec in config.layers)
    norm = weights.norm("model.norm")
    assert norm is not None
    return Decoder(ops, config, embedding, blocks, norm, weights.linear([config.head_name]))


def build_block(ops: Ops, spec: LayerSpec, weights: BaseWeights) -> Block:
    """The layer that `spec` describes."""
    attention = build_attention(ops, spec, weights) if spec.qkv else None

    def build_mlp(gate_up: Sequence[str], down: str, xielu: tuple[float, ...] = ()) -> MLP:
        return MLP(ops, weights.linear(gate_up), weights.linear([down]), spec.activation, xielu)

    mlp: MLP | Experts | None = None
    if experts := spec.experts:
        parts = experts.gate, experts.up, experts.down
        gate, up, down = map(weights.stack, parts)
        stacks = ExpertStacks(gate, up, down, experts, spec.activation)
        router, shared = weights.linear([experts.router]), None
        if experts.shared:
            shared = build_mlp(experts.shared[:2], experts.shared[2])
        if experts.has_biases:
            stacks = stacks._replace(biases=tuple(map(weights.stack_biases, parts)))
        mlp = Experts(ops, router, stacks, shared)
    elif spec.down:
        numbers = _constrain(weights.numbers(spec.xielu)) if spec.xielu else ()
        mlp = build_mlp(spec.gate_up, spec.down, numbers)
    return Block(
        ops,
        spec,
        attention_norm=weights.norm(spec.attention_norm) or Unnormed(ops),
        attention=attention,
        ffn_norm=weights.norm(spec.ffn_norm) or Unnormed(ops),
        mlp=mlp,
        post_attention_norm=weights.norm(spec.post_attention_norm),
        post_ffn_norm=weights.norm(spec.post_ffn_norm),
    )


def build_attention(ops: Ops, spec: LayerSpec, weights: BaseWeights) -> Attention:
    query_norm, key_norm = (
        weights.norm_of_ones(spec.head_dim) if spec.norms_heads else weights.norm(name)
        for name in (spec.query_norm, spec.key_norm)
    )
    query_scale = None
    if spec.config.query_key_norm == "rotated":
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
    )


def _constrain(numbers: Sequence[float]) -> tuple[float, ...]:
    """xIELU's numbers as `Ops.xielu` takes them, of the trained ones."""

    def softplus(x: float) -> float:
        return max(x, 0.0) + math.log1p(math.exp(-abs(x)))

    alpha_p, alpha_n, beta, eps = numbers
    return softplus(alpha_p), beta + softplus(alpha_n), beta, eps
