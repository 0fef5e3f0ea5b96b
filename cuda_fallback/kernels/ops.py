"""The vocabulary (core.ops) by Triton's kernels, for decoded tokens seen through a StateView: x is
[rows, 1, E].

Importing it needs the package triton. A row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlx_llama.core.models.parts import Attention, GatedDelta, ShortConv
from mlx_llama.core.ops import DeltaWeights, ExpertStacks

from .. import ops as plain
from ..ops import Adapters, Matrices
from . import decode
from .state import StateView

layer_inputs, gate_input = decode.layer_inputs, decode.gate_input
embed, add, scale, softcap = plain.embed, plain.add, plain.scale, plain.softcap
last_position, scale_heads, split_heads = plain.last_position, plain.scale_heads, plain.split_heads
add_rms_norm, gate, xielu = decode.add_rms_norm, decode.gate, decode.xielu


def gate_output(x: Tensor, score: Tensor) -> Tensor:
    by_kernel = x.shape == score.shape  # not a score for a whole token
    return (decode.gate_output if by_kernel else plain.gate_output)(x, score)


def linear(x: Tensor, weight: Matrices, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Tensor):
        return decode.multiply(x, weight, bias)
    if isinstance(weight, tuple):
        product = torch.cat([linear(x, block) for block in weight], dim=-1)
    else:
        product = weight.matmul(x)
    return product if bias is None else product + bias


def gated_linear(
    x: Tensor, weight: Matrices, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    if isinstance(weight, Tensor):
        return decode.multiply_gated(x, weight, bias, activation)
    return gate(linear(x, weight, bias), activation)


def experts(x: Tensor, scores: Tensor, stacks: ExpertStacks) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    router, scores = stacks.spec.router, scores.reshape(len(rows), -1)
    chosen, shares = plain.choose_experts(scores, router, *stacks[5:])
    rows, shares = plain.scale_inputs(rows, shares, router)
    return decode.experts(rows, chosen, shares, stacks).view(x.shape)


def adapt(product: Tensor, x: Tensor, adapters: Adapters, view: StateView) -> Tensor:
    a, b = adapters
    return decode.adapt(view.state, product, x, a, b)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_rms_norm(x, None, weight, eps)[1]


def norm_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor | None, spec: Attention
) -> Tensor:
    H, G, D = spec.heads, spec.new_heads, spec.head_dim
    if len(query_weight) == D:
        norms_values = spec.norms_values
        return decode.norm_heads(heads, query_weight, key_weight, H, G, D, spec.eps, norms_values)
    query, key, value = heads.split((H * D, G * D, G * D), dim=-1)
    query, key = rms_norm(query, query_weight, spec.eps), rms_norm(key, key_weight, spec.eps)
    return torch.cat([query, key, value], dim=-1)


def rope_and_store(heads: Tensor, view: StateView, spec: Attention) -> Tensor:
    return decode.store_rotated(
        view.state,
        view.key_places[spec.slot],
        heads,
        spec.heads,
        spec.new_heads,
        spec.head_dim,
        spec.rotates,
        view.bits,
        half=spec.angles.stop - spec.angles.start,
        offset=spec.angles.start,
        query_offset=spec.query_angles.start,
        stride=view.table_width,
    )


def attend(query: Tensor, view: StateView, spec: Attention, sinks: Tensor | None = None) -> Tensor:
    return decode.attend(
        view.state,
        view.key_places[spec.slot],
        query,
        spec.key_value_heads,
        spec.window,
        spec.scale,
        view.bits,
        spec.softcap,
        sinks,
    )


def short_conv(
    x: Tensor, view: StateView, spec: ShortConv, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return decode.short_conv(view.state, view.places[spec.slot], x, weight, bias)


def gated_delta(x: Tensor, view: StateView, spec: GatedDelta, weights: DeltaWeights) -> Tensor:
    return decode.gated_delta(view.state, view.places[spec.slot], x, spec, weights)
