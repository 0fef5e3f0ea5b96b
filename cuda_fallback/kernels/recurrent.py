"""Layers with a recurrent state by Triton's kernels, of decoded tokens and of prompts.

x is [R, T, ..]: T positions of each of R rows of a state (state.py), or one position of each row,
where neighbouring rows may be tokens of one sequence. A sequence's states are read from one slot of
its storage and written to the other. Sums are float32, in an order that depends on the sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlx_llama.core.models.parts import GatedDelta
from mlx_llama.core.ops import DeltaWeights

from . import packed
from .addresses import AFTER, BEFORE, POSITION, SLOT, STATES, address, field
from .storage import ALIGNED

_ALIGNED = tl.constexpr(ALIGNED)
_CHANNELS = 256  # per program of `_short_conv`
# columns of a state per program of `_delta`: one warp keeps 8 columns of 128 numbers in registers
_COLUMNS = tl.constexpr(8)
_BY_CALL = ["T", "place", "total"]  # not specialised, or prompts might differ from decoded tokens


@triton.jit
def _slots(state, row, like, place, total):
    """Pointers to a part of a row's states before and after the call. place, total: in units of
    _ALIGNED numbers.
    """
    begin, slot = address(state, STATES, row, like), field(state, SLOT, row)
    before = begin + (slot * total + place) * _ALIGNED
    return before, begin + ((1 - slot) * total + place) * _ALIGNED


@triton.jit
def _has_states(state, row):
    """Whether a sequence has states before the call: those of its first position are zeros."""
    return field(state, POSITION, row) > field(state, BEFORE, row)


@triton.jit
def _load_input(x, line, c, inside, C: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """Inputs of channels' convolution in a line of x; GATED: products of two of its parts."""
    at = x + line.to(tl.int64) * WIDTH + c
    value = tl.load(at, mask=inside, other=0)
    if GATED:
        other = tl.load(at + 2 * C, mask=inside, other=0)
        value = (value.to(tl.float32) * other.to(tl.float32)).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def _convolve(
    state,
    x,
    weight,
    like,
    T,
    place,
    total,
    c,
    inside,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    W: tl.constexpr,
):
    """Convolve channels c at a position, and keep the inputs after a sequence's last position."""
    line = tl.program_id(0)
    row = line // T
    before = field(state, BEFORE, row).to(tl.int32) + line % T  # positions in x before this one
    is_last = field(state, AFTER, row) + T - 1 == line % T
    kept = is_last & (field(state, STATES, row) != 0)
    old, new = _slots(state, row, like, place, total)
    has_states = _has_states(state, row)
    mixed = tl.zeros(c.shape, tl.float32)
    for i in tl.static_range(W):
        if before + i >= W - 1:
            value = _load_input(x, line - (W - 1) + i, c, inside, C, WIDTH, GATED)
        else:
            value = tl.load(old + (before + i) * C + c, mask=inside & has_states, other=0)
        mixed += value * tl.load(weight + c * W + i, mask=inside, other=0).to(tl.float32)
        if i > 0:
            tl.store(new + (i - 1) * C + c, value, mask=inside & kept)
    return mixed


@triton.jit(do_not_specialize=_BY_CALL)
def _short_conv(
    state,
    x,
    weight,
    bias,
    like,
    out,
    T,
    place,
    total,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    mixed = _convolve(state, x, weight, like, T, place, total, c, inside, C, 3 * C, True, W)
    if bias is not None:
        mixed += tl.load(bias + c, mask=inside, other=0).to(tl.float32)
    after = tl.load(x + line * 3 * C + C + c, mask=inside, other=0)
    mixed = mixed.to(after.dtype).to(tl.float32) * after.to(tl.float32)
    tl.store(out + line * C + c, mixed.to(after.dtype), mask=inside)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where exp(x) is much less than 1."""
    small = tl.exp(-tl.abs(x))
    sum_ = 1 + small
    rounded = sum_ - 1
    return tl.maximum(x, 0) + tl.where(
        rounded > 0, tl.log(sum_) * (small / tl.where(rounded > 0, rounded, 1)), small
    )


@triton.jit(do_not_specialize=_BY_CALL)
def _prepare_delta(
    state,
    x,
    weight,
    rate,
    bias,
    mixed,
    T,
    place,
    total,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A head's queries, keys or values after the convolution; a value head's decay and strength.

    _COLUMNS copies of the latter: the compiler would move single numbers to uniform registers,
    which waits for them. mixed: float32 [lines, C + 2 HEADS _COLUMNS].
    """
    C: tl.constexpr = 2 * GROUPS * KEY + HEADS * VALUE
    WIDTH: tl.constexpr = C + HEADS * VALUE + 2 * HEADS
    line, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, v = tl.arange(0, BLOCK), h - 2 * GROUPS
    start = tl.where(v < 0, h * KEY, 2 * GROUPS * KEY + v * VALUE)
    inside, c = d < tl.where(v < 0, KEY, VALUE), start + d
    value = _convolve(state, x, weight, mixed, T, place, total, c, inside, C, WIDTH, False, W)
    value = value / (1 + tl.exp(-value))
    target = mixed + line * (C + 2 * HEADS * _COLUMNS)
    if v < 0:
        value = value / tl.sqrt_rn(tl.sum(value * value, axis=0) + 1e-6)
        value = value * tl.where(h < GROUPS, KEY**-0.5, 1.0)
    else:
        numbers = x + line * WIDTH + C + HEADS * VALUE + v
        strength = tl.load(numbers).to(tl.float32)
        time = _softplus(tl.load(numbers + HEADS).to(tl.float32) + tl.load(bias + v))
        decay = tl.exp(tl.load(rate + v) * time)
        strength = 1 / (1 + tl.exp(-strength))
        copies = target + C + v * _COLUMNS + tl.arange(0, _COLUMNS)
        tl.store(copies, tl.zeros((_COLUMNS,), tl.float32) + decay)
        tl.store(copies + HEADS * _COLUMNS, tl.zeros((_COLUMNS,), tl.float32) + strength)
    tl.store(target + c, value, mask=inside)


@triton.jit
def _load_line(
    numbers,
    h,
    k,
    v,
    is_key,
    is_value,
    there,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """A position's query, key, values v, decay and strength of value head h."""
    head = numbers + h // SHARED % GROUPS * KEY + k
    query = tl.load(head, mask=is_key & there, other=0)
    key = tl.load(head + GROUPS * KEY, mask=is_key & there, other=0)
    head = numbers + 2 * GROUPS * KEY + h * VALUE
    value = tl.load(head + v, mask=is_value & there, other=0)
    head = numbers + 2 * GROUPS * KEY + HEADS * VALUE + h * _COLUMNS + tl.arange(0, _COLUMNS)
    decay = tl.load(head, mask=there, other=0)
    return query, key, value, decay, tl.load(head + HEADS * _COLUMNS, mask=there, other=0)


@triton.jit(do_not_specialize=_BY_CALL)
def _delta(
    state,
    mixed,
    out,
    T,
    place,
    total,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The recurrence of some columns of a value head's matrix, over a sequence's positions."""
    h, row = tl.program_id(1), tl.program_id(2)
    if field(state, BEFORE, row) == 0:
        C: tl.constexpr = 2 * GROUPS * KEY + HEADS * VALUE
        count = field(state, AFTER, row).to(tl.int32) + T
        old, new = _slots(state, row, mixed, place, total)
        k, v = tl.arange(0, BLOCK), tl.program_id(0) * _COLUMNS + tl.arange(0, _COLUMNS)
        is_key, is_value = k < KEY, v < VALUE
        inside = is_key[:, None] & is_value[None, :]
        at = (h * KEY + k[:, None]) * VALUE + v[None, :]
        matrix = tl.load(old + at, mask=inside & _has_states(state, row), other=0)
        line = row.to(tl.int64) * T
        numbers = mixed + line * (C + 2 * HEADS * _COLUMNS)
        product = out + (line * HEADS + h) * VALUE + v
        query, key, value, decay, strength = _load_line(
            numbers, h, k, v, is_key, is_value, count > 0, GROUPS, HEADS, KEY, VALUE, SHARED
        )
        for i in range(count):
            # of the next position, which arrive meanwhile
            numbers += C + 2 * HEADS * _COLUMNS
            there = i + 1 < count
            next_query, next_key, next_value, next_decay, next_strength = _load_line(
                numbers, h, k, v, is_key, is_value, there, GROUPS, HEADS, KEY, VALUE, SHARED
            )
            matrix *= decay[None, :]
            delta = (value - tl.sum(matrix * key[:, None], axis=0)) * strength
            # of the matrix before the update, so that all sums run together
            asked = tl.sum(matrix * query[:, None], axis=0) + tl.sum(query * key) * delta
            matrix += key[:, None] * delta[None, :]
            tl.store(product, asked, mask=is_value)
            product += HEADS * VALUE
            query, key, value = next_query, next_key, next_value
            decay, strength = next_decay, next_strength
        tl.store(new + at, matrix, mask=inside & (field(state, STATES, row) != 0))


@triton.jit
def _norm_gated(
    mixed, x, weight, out, eps, HEADS, WIDTH, FIRST, D: tl.constexpr, BLOCK: tl.constexpr
):
    """The norm of a head, times silu of the gate at FIRST of a line of x."""
    line, h, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, at = d < D, (line * HEADS + h) * D + d
    value = tl.load(mixed + at, mask=inside, other=0)
    scale = 1 / tl.sqrt_rn(tl.sum(value * value, axis=0) / D + eps)
    by = tl.load(weight + d, mask=inside, other=0).to(tl.float32)
    gate = tl.load(x + line * WIDTH + FIRST + h * D + d, mask=inside, other=0)
    value = packed.gated(gate.to(tl.float32), value * scale * by, "silu")
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def short_conv(
    state: Tensor, place: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """As core.ops.short_conv. place: of the row's states, from storage.state_places."""
    (rows, T, _), (C, W), x = x.shape, weight.shape, x.contiguous()
    start, total = (number // ALIGNED for number in place)
    out = torch.empty((rows, T, C), dtype=x.dtype, device=x.device)
    like = torch.empty(0, dtype=torch.float32, device=x.device)
    block = min(_CHANNELS, triton.next_power_of_2(C))
    packed.run(
        _short_conv,
        (rows * T, triton.cdiv(C, block)),
        state,
        x,
        weight,
        bias,
        like,
        out,
        T,
        start,
        total,
        C,
        W,
        block,
        num_warps=max(1, block // 128),
    )
    return out


def gated_delta(
    state: Tensor, place: Sequence[int], x: Tensor, spec: GatedDelta, weights: DeltaWeights
) -> Tensor:
    """As core.ops.gated_delta. place: as in `short_conv`."""
    (rows, T, width), x = x.shape, x.contiguous()
    sizes = spec.key_heads, spec.value_heads, spec.key_size, spec.value_size
    groups, heads, key, value = sizes
    history, matrices, total = (number // ALIGNED for number in place)
    mixed, out = (
        torch.empty((rows, T, numbers), dtype=torch.float32, device=x.device)
        for numbers in (spec.channels + 2 * heads * _COLUMNS.value, heads * value)
    )
    block = triton.next_power_of_2(max(key, value))
    packed.run(
        _prepare_delta,
        (rows * T, 2 * groups + heads),
        state,
        x,
        weights.conv,
        weights.rate,
        weights.bias,
        mixed,
        T,
        history,
        total,
        *sizes,
        spec.width,
        block,
        num_warps=max(1, block // 128),
    )
    packed.run(
        _delta,
        (triton.cdiv(value, _COLUMNS.value), heads, rows),
        state,
        mixed,
        out,
        T,
        matrices,
        total,
        *sizes,
        1 if spec.tiled else heads // groups,  # neighbours with one key head
        triton.next_power_of_2(key),
        num_warps=1,
    )
    gated = torch.empty(out.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(value)
    packed.run(
        _norm_gated,
        (rows * T, heads),
        out,
        x,
        weights.norm,
        gated,
        spec.eps,
        heads,
        width,
        spec.channels,
        value,
        block,
        num_warps=max(1, block // 128),
    )
    return gated
