"""Norms, rotations, gates and activations by Triton's kernels, of decoded tokens and of prompts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlx_llama.core.models.parts import LayerInputs, PerLayerInput

from . import packed
from .packed import gated

_BLOCK = 1024  # elements per program


@triton.jit
def _add_rms_norm(x, delta, weight, total, normed, eps, E: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < E
    value = tl.load(x + row * E + e, mask=inside, other=0).to(tl.float32)
    if delta is not None:
        value += tl.load(delta + row * E + e, mask=inside, other=0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * E + e, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(value * value, axis=0) / E + eps)
    by = tl.load(weight + e, mask=inside, other=0).to(tl.float32)
    tl.store(normed + row * E + e, (value * scale * by).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads(
    heads,
    query_weight,
    key_weight,
    out,
    eps,
    H,
    G,
    normed,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one of the first `normed` heads, one of values without weights; copy any other."""
    h = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64) * (H + 2 * G) * D + h * D
    d = tl.arange(0, BLOCK)
    inside = d < D
    value = tl.load(heads + at + d, mask=inside, other=0)
    if h < normed:
        weight = query_weight
        if key_weight is not None:
            if h >= H:
                weight = key_weight
        wide = value.to(tl.float32)
        scale = 1 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / D + eps)
        by = tl.load(weight + d, mask=inside & (h < H + G), other=1).to(tl.float32)
        value = (wide * scale * by).to(value.dtype)
    tl.store(out + at + d, value, mask=inside)


@triton.jit
def _rotate(
    x,
    cosines,
    sines,
    out,
    H,
    T,
    batch_stride,
    head_stride,
    row_stride,
    table_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    source = x + b.to(tl.int64) * batch_stride + h.to(tl.int64) * head_stride
    source = source + t.to(tl.int64) * row_stride + d
    target = out + ((b.to(tl.int64) * H + h) * T + t) * (2 * HALF) + d
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    angle = b * table_stride + t * HALF + d
    cosine = tl.load(cosines + angle, mask=inside, other=0)
    sine = tl.load(sines + angle, mask=inside, other=0)
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * F + f, mask=f < F, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=f < F, other=0).to(tl.float32)
    tl.store(out + row * F + f, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=f < F)


@triton.jit
def _gate_output(x, gate, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    by = 1 / (1 + tl.exp(-tl.load(gate + at, mask=at < N, other=0).to(tl.float32)))
    value = tl.load(x + at, mask=at < N, other=0).to(tl.float32) * by
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < N)


@triton.jit
def _layer_inputs(
    embedded, projected, weight, out, shrink, factor, eps, P: tl.constexpr, BLOCK: tl.constexpr
):
    p = tl.arange(0, BLOCK)
    inside = p < P
    at = tl.program_id(0).to(tl.int64) * P + p
    value = tl.load(projected + at, mask=inside, other=0).to(tl.float32) * shrink
    scale = 1 / tl.sqrt_rn(tl.sum(value * value, axis=0) / P + eps)
    by = tl.load(weight + p, mask=inside, other=0).to(tl.float32)
    other = tl.load(embedded + at, mask=inside, other=0).to(tl.float32) * factor
    value = (value * scale * by + other) * 0.7071067811865476
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["index"])
def _gate_input(
    gate, inputs, out, index, layers, P: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    score = tl.load(gate + row * P + p, mask=p < P, other=0).to(tl.float32)
    place = (row * layers + index) * P
    value = tl.load(inputs + place + p, mask=p < P, other=0).to(tl.float32)
    value = gated(score, value, ACTIVATION)
    tl.store(out + row * P + p, value.to(out.dtype.element_ty), mask=p < P)


@triton.jit
def _xielu(x, out, positive, negative, beta, eps, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < N, other=0).to(tl.float32)
    least = tl.where(value < eps, value, eps)
    # exp(x) - 1 by Taylor's series where the difference would cancel
    series = 1 / 24 + least * (1 / 120 + least * (1 / 720 + least * (1 / 5040)))
    series = least * (1 + least * (1 / 2 + least * (1 / 6 + least * series)))
    below = tl.where(least > -0.5, series, tl.exp(least) - 1) - value
    curve = tl.where(value > 0, positive * value * value, negative * below)
    tl.store(out + at, (curve + beta * value).to(out.dtype.element_ty), mask=at < N)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm times weight). x, delta: [..., E]; weight: [E]."""
    E, x, delta = x.shape[-1], x.contiguous(), None if delta is None else delta.contiguous()
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    rows, block = x.numel() // E, triton.next_power_of_2(E)
    warps = min(16, max(1, block // 512))
    packed.run(
        _add_rms_norm, (rows,), x, delta, weight, total, normed, eps, E, block, num_warps=warps
    )
    return total, normed


def norm_heads(
    heads: Tensor,
    query_weight: Tensor,
    key_weight: Tensor | None,
    H: int,
    G: int,
    D: int,
    eps: float,
    norms_values: bool = False,
) -> Tensor:
    """RMS norm of each head of queries and keys; norms_values: of values, too, without weights.
    heads: [..., (H + 2 G) D]; weights: [D], that of the keys None for a G of 0.
    """
    heads = heads.contiguous()
    out, block = torch.empty_like(heads), triton.next_power_of_2(D)
    grid, warps = (H + 2 * G, heads.numel() // heads.shape[-1]), max(1, block // 512)
    packed.run(
        _norm_heads,
        grid,
        heads,
        query_weight,
        key_weight,
        out,
        eps,
        H,
        G,
        H + G + G * norms_values,
        D,
        block,
        num_warps=warps,
    )
    return out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head by their position's angle. x: [B, H, T, D], the last
    axis contiguous; cosines, sines: float32 [T, D/2] or [B, T, D/2]; returns [B, H, T, D],
    contiguous."""
    B, H, T, D = x.shape
    half = D // 2
    out = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    packed.run(
        _rotate,
        (T, H, B),
        x,
        cosines.contiguous(),
        sines.contiguous(),
        out,
        H,
        T,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        T * half if cosines.numel() > T * half else 0,
        half,
        triton.next_power_of_2(half),
        num_warps=1,
    )
    return out


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, rounded once. gate_up: [..., 2 F], the gate first; activation: as in
    core.ops.gate; returns [..., F]."""
    gate_up = gate_up.contiguous()
    F = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], F), dtype=gate_up.dtype, device=gate_up.device)
    grid = (out.numel() // F, triton.cdiv(F, _BLOCK))
    packed.run(_gate, grid, gate_up, out, F, _BLOCK, activation)
    return out


def gate_output(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), rounded once, of one shape."""
    x, gate = x.contiguous(), gate.contiguous()
    out, grid = torch.empty_like(x), (triton.cdiv(x.numel(), _BLOCK),)
    packed.run(_gate_output, grid, x, gate, out, x.numel(), _BLOCK)
    return out


def layer_inputs(embedded: Tensor, projected: Tensor, weight: Tensor, spec: LayerInputs) -> Tensor:
    """As in core.ops, rounded once."""
    embedded, projected = embedded.contiguous(), projected.contiguous()
    out, P = torch.empty_like(projected), spec.size
    block, factors = triton.next_power_of_2(P), (spec.hidden**-0.5, P**0.5)
    arguments = embedded, projected, weight, out, *factors, spec.eps, P, block
    packed.run(_layer_inputs, (out.numel() // P,), *arguments, num_warps=max(1, block // 512))
    return out


def gate_input(gate: Tensor, inputs: Tensor, spec: PerLayerInput) -> Tensor:
    """As in core.ops, rounded once."""
    gate, inputs = gate.contiguous(), inputs[:, -gate.shape[1] :].contiguous()
    out, P = torch.empty_like(gate), spec.size
    block, layers = triton.next_power_of_2(P), inputs.shape[-1] // P
    arguments = gate, inputs, out, spec.index, layers, P, block, spec.activation
    packed.run(_gate_input, (out.numel() // P,), *arguments, num_warps=max(1, block // 512))
    return out


def xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """As ops.xielu, rounded once. x: any shape."""
    x = x.contiguous()
    out, grid = torch.empty_like(x), (triton.cdiv(x.numel(), _BLOCK),)
    packed.run(_xielu, grid, x, out, positive, negative, beta, eps, x.numel(), _BLOCK)
    return out
