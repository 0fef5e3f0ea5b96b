"""Triton kernels over the packed codes of a QuantizedMatrix. Importing it requires triton.

`multiply` runs on tensor cores for 1 to 32 rows of x, bound by memory bandwidth. A thread loads
sixteen bytes of codes, which quantized.py lays out so that a shift and a mask make an operand of
two codes: exact integers, plus a constant, in the mantissas of 16-bit numbers. A group's products
are summed before they are scaled, so no weight is rounded:

    sum of w x  =  scale * (sum((code + base) x) - (base + offset) * sum(x))  +  bias * sum(x)        over a group

sum(x) is a product with a constant matrix. Floating-point codes (mxfp4, nvfp4, mxfp8) are moved
into the sign, exponent and mantissa of 16-bit numbers, which differ by a power of two: small ones
are subnormal, which tensor cores multiply exactly (https://peerj.com/articles/cs-330). A matrix of few rows is also split along K. The order of
sums depends on the matrix alone, and an instruction's columns are independent: a row of x is
bit-identical in every run, whatever else is in the batch.
"""  # noqa: E501

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.arrays import to_signed
from cuda_fallback.quantized import PLANES, SUPER_GROUP, QuantizedMatrix
from mlx_llama.core.ops import SWIGLU_ALPHA, SWIGLU_LIMIT

from .state import MAX_ROWS  # noqa: F401

# maximum number of a prompt's positions for `multiply`; dequantising is faster for more
MOST_ROWS = 32

# Rows of x per program: the columns of a tensor-core instruction; Triton before 3.5 takes two
_LEAST_TILE = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5) else 16
_MOST_TILE = 32
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# per program, 16 rows of w each; on capability 9.0, four would change the order of sums
WARPS = 2
# maximum number of programs where K is split: some 130 multiprocessors have room for 8 each
PROGRAMS = 1056
_UNITS = 16  # per iteration of `_dequantize`, four threads each
_COLUMNS = 4096  # per program of `_dequantize`: addresses cost as much as 20 weights
_BLOCK = 1024  # elements per program of `_finish`
_SWIGLU_ALPHA, _SWIGLU_LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)
_SUPER = tl.constexpr(SUPER_GROUP)


def _helper(function: Callable) -> Callable:
    """Compile a function that kernels call, but for the interpreter, where calls would be slow."""
    return function if IS_INTERPRETED.value else triton.jit(function)


@_helper
def _factor(values, i: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr):
    """Scales or biases float32 [rows]: number i after the pointers, EACH to a 32-bit word."""
    # Without `else`, Triton compiles what follows a `return` of a constant condition as well, and
    # shifts of a float16 are an error.
    if EACH == 1:
        return tl.load(values).to(tl.float32)
    else:
        word = tl.load(values + i // EACH)
        if KIND == "int8":
            return (word << (24 - 8 * (i % EACH)) >> 24).to(tl.float32)
        elif KIND == "uint8":
            return (word >> (8 * (i % EACH)) & 0xFF).to(tl.float32)
        elif KIND == "float16":
            half = (word >> (16 * (i % EACH))).to(tl.int16)
            return half.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            return ((word >> (16 * (i % EACH))) << 16).to(tl.float32, bitcast=True)


@_helper
def _take(values, i: tl.constexpr, COUNT: tl.constexpr):
    """values[:, i] of [R, COUNT, C], COUNT a power of two up to 8; no moves between threads."""
    for half in tl.static_range(3):
        if COUNT >> (half + 1):
            halves = tl.reshape(values, (values.shape[0], 2, COUNT >> (half + 1), values.shape[-1]))
            first, second = tl.split(tl.permute(halves, (0, 2, 3, 1)))
            if i // (COUNT >> (half + 1)) % 2:
                values = second
            else:
                values = first
    return tl.reshape(values, (values.shape[0], values.shape[-1]))


@_helper
def _operand(
    word,
    top,
    shift: tl.constexpr,
    above: tl.constexpr,
    magic,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Unpack 16 codes of each row, two digits of each half of four words: [R, 4] -> [R, 16].

    BITS of each digit, from bits `shift` and `shift` + LOW of the halves, go to bit PLACE of
    magic's halves, and HIGH bits of top, from bit `above`, above them.
    """
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001 << PLACE
    BY: tl.constexpr = shift - PLACE
    first = ((word >> BY if BY >= 0 else word << -BY) & MASK) | magic
    second = ((word >> BY + LOW if BY + LOW >= 0 else word << -BY - LOW) & MASK) | magic
    # not |, for which the compiler would need another instruction to join the planes
    if HIGH:
        ABOVE: tl.constexpr = ((1 << HIGH) - 1) * 0x10001 << PLACE + BITS
        UP: tl.constexpr = BITS + PLACE - above
        first ^= (top << UP if UP >= 0 else top >> -UP) & ABOVE
        second ^= (top << UP - HIGH if UP - HIGH >= 0 else top >> HIGH - UP) & ABOVE
    return _join(first, second, DTYPE)


@_helper
def _float_halves(word, shift: tl.constexpr, PLACE: tl.constexpr, LOW: tl.constexpr):
    """Move the floating-point codes from bit `shift` of the halves of words: magnitudes to bit
    PLACE, signs to the highest bit of each half.
    """
    BY: tl.constexpr = shift - PLACE
    UP: tl.constexpr = 16 - LOW - shift
    MASK: tl.constexpr = ((1 << LOW - 1) - 1) * 0x10001 << PLACE
    magnitude = (word >> BY if BY >= 0 else word << -BY) & MASK
    return magnitude | (word << UP) & -0x7FFF8000


@_helper
def _join(first, second, DTYPE: tl.constexpr):
    """Join the numbers (float32: integers) in the halves of words [R, 4] and [R, 4] to [R, 16]."""
    pairs = tl.join(first, second)
    if DTYPE == tl.float32:
        numbers = tl.join(pairs << 16 >> 16, pairs >> 16).to(tl.float32)
    else:
        numbers = _halves(pairs, DTYPE)
    return tl.reshape(numbers, (first.shape[0], 16))


@_helper
def _halves(words, DTYPE: tl.constexpr):
    """The two numbers in each word, on a new last axis."""
    if IS_INTERPRETED and DTYPE == tl.bfloat16:  # it would make zeros of subnormal numbers
        return tl.join(words << 16, words & -65536).to(tl.float32, bitcast=True)
    else:
        return tl.join(
            words.to(tl.int16).to(DTYPE, bitcast=True),
            (words >> 16).to(tl.int16).to(DTYPE, bitcast=True),
        )


@_helper
def _load_low(plane, block, lane, step, STEPS: tl.constexpr, WARPS: tl.constexpr):
    """Words of a step: [16 * WARPS rows, 4 units, 4]."""
    at = block.to(tl.int64) * (STEPS * 256) + step * 256 + lane % 32 * 4
    piece = tl.arange(0, 2)[:, None, None] * 128
    # evicted first, so that the rows of x stay cached
    at = plane + at[None, :, None] + piece + tl.arange(0, 4)[None, None, :]
    words = tl.load(at, eviction_policy="evict_first")
    words = tl.permute(tl.reshape(words, (2, WARPS, 8, 4, 2, 2)), (1, 5, 2, 0, 4, 3))
    return tl.reshape(words, (16 * WARPS, 4, 4))


@_helper
def _load_high(
    plane, block, lane, step, STEPS: tl.constexpr, WARPS: tl.constexpr, WORDS: tl.constexpr
):
    """Words of the high plane: [16 * WARPS rows, WORDS, 4]."""
    at = (block.to(tl.int64) * STEPS + step) * (64 * WORDS) + lane % 32 * (2 * WORDS)
    at = plane + at[:, None] + tl.arange(0, 2 * WORDS)[None, :]
    words = tl.load(at, eviction_policy="evict_first")
    words = tl.permute(tl.reshape(words, (WARPS, 8, 4, WORDS, 2)), (0, 4, 1, 3, 2))
    return tl.reshape(words, (16 * WARPS, WORDS, 4))


@_helper
def _load_x(x, sample, half, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of half a step of rows of x: [rows, COLUMNS]; 0 beyond K."""
    k = half * COLUMNS + tl.arange(0, COLUMNS)
    if K % (2 * COLUMNS):
        return tl.load(x + sample[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0)
    else:
        return tl.load(x + sample[:, None] * K + k[None, :])


@triton.jit(do_not_specialize=["M", "tiles"])
def _multiply(
    x,
    chosen,
    members,
    low,
    high,
    scales,
    biases,
    super_scales,
    super_biases,
    out,
    M,
    tiles,
    N,
    rows,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    EXPONENT: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    DIGITS: tl.constexpr,
    STEPS: tl.constexpr,
    SAMPLES: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    PART: tl.constexpr,
    PLACE: tl.constexpr,
    MAGIC: tl.constexpr,
    HIGHER: tl.constexpr,
    MINUS: tl.constexpr,
    FOLD: tl.constexpr,
    RAISE: tl.constexpr,
    FACTOR: tl.constexpr,
    EACH: tl.constexpr,
    SCALES: tl.constexpr,
    BIASES: tl.constexpr,
):
    """out[part, m, n] = x[m] @ w[n] over PART steps of each row. x: [M, K]; out: [parts, M, N].

    chosen: int64 [tiles], for x[m // SHARED] @ w[chosen[tile] * N + n], or None. Rows m of a tile:
    `members` int64 [tiles, TILE], -1 for none; or SAMPLES neighbours.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    # the interpreter would multiply bfloat16's raw bits
    NUMBER: tl.constexpr = tl.float32 if IS_INTERPRETED else DTYPE
    FLOAT: tl.constexpr = (
        tl.float16 if DTYPE == tl.float32 else DTYPE
    )  # floating-point codes as numbers
    COLUMNS: tl.constexpr = 8 * DIGITS  # in half a step
    TILES: tl.constexpr = COLUMNS // 16  # in half a step
    SPAN: tl.constexpr = GROUP // 16 if GROUP < COLUMNS else TILES  # tiles that share a scale
    GROUPS: tl.constexpr = K // GROUP
    # the high plane's, for each thread and row
    WORDS: tl.constexpr = DIGITS * HIGH // 8 if HIGH else 1
    tile = tl.program_id(0) % tiles  # neighbouring programs read the same rows of w
    column = tl.arange(0, TILE)
    part = tl.program_id(1)
    start, stop = part * PART, tl.minimum(part * PART + PART, STEPS)
    m = tile * SAMPLES + column
    if members is not None:
        m = tl.load(members + tile * TILE + column).to(tl.int32)
        stop = tl.where(
            tl.load(members + tile * TILE) < 0, start, stop
        )  # a tile without rows takes no steps
    sample = tl.maximum(tl.minimum(m, M - 1), 0) // SHARED  # columns without a row are not stored
    begin = tl.program_id(0) * 0
    if chosen is not None:
        begin = tl.load(chosen + tile).to(tl.int32) * N
    lane = tl.arange(0, 32 * WARPS)
    block = begin // 16 + tl.program_id(0) // tiles * WARPS
    row = block * 16 + tl.arange(0, 16 * WARPS)
    n = row - begin
    row = tl.minimum(row, rows - 1).to(tl.int64)
    block = tl.minimum(block + lane // 32, (rows - 1) // 16)
    # A zero that the compiler cannot fold: masks of registers take an instruction less.
    none = row.to(tl.int32)[:, None] >> 31
    magic = tl.broadcast_to(MAGIC | none, (16 * WARPS, 4))
    # Another zero: the compiler would copy one of an operand's equal registers for every product.
    zero = tl.broadcast_to(rows - row.to(tl.int32)[:, None] >> 31, (16 * WARPS, 4))
    minus = _join(MINUS | tl.broadcast_to(none, (16 * WARPS, 4)), MINUS | zero, DTYPE).to(NUMBER)
    total = tl.zeros((16 * WARPS, TILE), tl.float32)
    words = _load_low(low, block, lane, start, STEPS, WARPS)
    # Prefetch x: it goes through shared memory, and each product would stall on it. Other formats
    # have no registers left for this.
    AHEAD: tl.constexpr = LOW >= 4 and HIGH == 0
    # Large tiles in pairs: the compiler would keep each number of 16 bits in a register of its own.
    IS_HALF: tl.constexpr = RAISE == 1 and DTYPE != tl.float32
    PAIR: tl.constexpr = 2 if (AHEAD and TILE > 8) and IS_HALF else 1
    if PAIR == 2:
        x = x.to(tl.pointer_type(tl.int32))
    if AHEAD:
        first_half = _load_x(x, sample, 2 * start, K // PAIR, COLUMNS // PAIR)
        second_half = _load_x(x, sample, 2 * start + 1, K // PAIR, COLUMNS // PAIR)
        if RAISE != 1:  # floating-point codes are all read so
            first_half = first_half.to(NUMBER) * RAISE
            second_half = second_half.to(NUMBER) * RAISE
    # Pointers that advance take half the instructions of addresses computed from the step, and in
    # formats of one level more registers than there are.
    ADVANCES: tl.constexpr = EACH > 1 and super_scales is not None
    scales += row * (GROUPS // EACH)
    if biases is not None:
        biases += row * (GROUPS // EACH)
    if ADVANCES:
        scales += start * (2 * COLUMNS // GROUP // EACH)
        if biases is not None:
            biases += start * (2 * COLUMNS // GROUP // EACH)
    for step in range(start, stop):
        later = tl.minimum(step + 1, STEPS - 1)
        following = _load_low(low, block, lane, later, STEPS, WARPS)
        if AHEAD:
            next_first = _load_x(x, sample, 2 * later, K // PAIR, COLUMNS // PAIR)
            next_second = _load_x(x, sample, 2 * later + 1, K // PAIR, COLUMNS // PAIR)
        if HIGH:
            tops = _load_high(high, block, lane, step, STEPS, WARPS, WORDS)
        if super_scales is not None:
            scaled = tl.zeros((16 * WARPS, TILE), tl.float32)
            biased = tl.zeros((16 * WARPS, TILE), tl.float32)
        for p in tl.static_range(2):
            if not AHEAD:
                value = _load_x(x, sample, 2 * step + p, K, COLUMNS)
            elif p == 0:
                value = first_half
            else:
                value = second_half
            if PAIR == 2:
                value = _halves(value, DTYPE)
            value = tl.reshape(value.to(NUMBER), (TILE, TILES, 16))
            for first in tl.static_range(0, TILES, SPAN):
                plain = tl.zeros((16 * WARPS, TILE), tl.float32)
                if not EXPONENT:
                    for i in tl.static_range(first, first + SPAN):
                        by = tl.trans(_take(value, i, TILES))
                        plain = tl.dot(minus, by, plain, input_precision="ieee")
                product = plain
                for i in tl.static_range(first, first + SPAN):
                    word = _take(words, 2 * p + i // (TILES // 2), 4)
                    top = word
                    if HIGH:
                        top = _take(tops, (2 * p + i // (TILES // 2)) * WORDS // 4, WORDS)
                    by = tl.trans(_take(value, i, TILES))
                    if EXPONENT:
                        code = _join(
                            _float_halves(word, i % (TILES // 2) * 2 * LOW, PLACE, LOW),
                            _float_halves(word, i % (TILES // 2) * 2 * LOW + LOW, PLACE, LOW),
                            FLOAT,
                        )
                    elif HIGHER:
                        code = _operand(
                            word, top, i % (TILES // 2) * 2 * LOW, 0, magic, DTYPE, 4, PLACE, LOW, 0
                        )
                        product = tl.dot(code.to(NUMBER), by, product, input_precision="ieee")
                        code = _operand(
                            word,
                            top,
                            i % (TILES // 2) * 2 * LOW + 4,
                            0,
                            HIGHER | none,
                            DTYPE,
                            4,
                            PLACE,
                            LOW,
                            0,
                        )
                    else:
                        code = _operand(
                            word,
                            top,
                            i % (TILES // 2) * 2 * LOW,
                            (p * TILES + i) * 2 * HIGH % 16,
                            magic,
                            DTYPE,
                            LOW,
                            PLACE,
                            LOW,
                            HIGH,
                        )
                    product = tl.dot(code.to(NUMBER), by, product, input_precision="ieee")
                at = 0
                if EACH == 1:
                    at = tl.minimum(((2 * step + p) * COLUMNS + first * 16) // GROUP, GROUPS - 1)
                elif not ADVANCES:
                    at = step * (2 * COLUMNS // GROUP // EACH)
                scale = _factor(scales + at, (p * COLUMNS + first * 16) // GROUP, EACH, SCALES)
                if super_scales is not None:
                    scaled += scale[:, None] * product
                else:
                    total += scale[:, None] * product
                if biases is not None:
                    bias = _factor(biases + at, (p * COLUMNS + first * 16) // GROUP, EACH, BIASES)
                    if super_scales is not None:
                        biased += bias[:, None] * plain
                    else:
                        total += (bias * FOLD)[:, None] * plain
        if super_scales is not None:
            above = row * (K // _SUPER) + step * (2 * COLUMNS) // _SUPER
            total += tl.load(super_scales + above).to(tl.float32)[:, None] * scaled
            if biases is not None:
                total += (tl.load(super_biases + above).to(tl.float32) * FOLD)[:, None] * biased
        words = following
        if AHEAD:
            if RAISE != 1:  # late, when they have arrived
                next_first = next_first.to(NUMBER) * RAISE
                next_second = next_second.to(NUMBER) * RAISE
            first_half, second_half = next_first, next_second
        if ADVANCES:
            scales += 2 * COLUMNS // GROUP // EACH
            if biases is not None:
                biases += 2 * COLUMNS // GROUP // EACH
    if FACTOR != 1:
        total *= FACTOR
    target = out + (part * M + m)[None, :] * N + n[:, None]
    inside = ((column < SAMPLES) & (m >= 0) & (m < M))[None, :] & ((n >= 0) & (n < N))[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, as core.ops.gate."""
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate)) * up
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, _SWIGLU_LIMIT)
        up = tl.minimum(tl.maximum(up, -_SWIGLU_LIMIT), _SWIGLU_LIMIT)
        return gate / (1 + tl.exp(gate * -_SWIGLU_ALPHA)) * (up + 1)
    else:  # gelu by tanh: tanh(z / 2) = 2 sigmoid(z) - 1
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1 + tl.exp(-inner)) * up


@triton.jit(do_not_specialize=["M"])
def _finish(sums, bias, out, M, N, COUNT, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out[m, n] = sums[:, m, n].sum() + bias[n], in order; ACTIVATION: times that of N + n."""
    GATED: tl.constexpr = ACTIVATION != ""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = N * 2 if GATED else N
    total = tl.zeros((BLOCK,), tl.float32)
    other = tl.zeros((BLOCK,), tl.float32)
    for part in range(COUNT):
        total += tl.load(sums + (part * M + m) * wide + n, mask=n < N, other=0)
        if GATED:
            other += tl.load(sums + (part * M + m) * wide + N + n, mask=n < N, other=0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
        if GATED:
            other += tl.load(bias + N + n, mask=n < N, other=0).to(tl.float32)
    if GATED:
        total = gated(total, other, ACTIVATION)
    tl.store(out + m * N + n, total.to(out.dtype.element_ty), mask=n < N)


@_helper
def _place(word, shift: tl.constexpr, place: tl.constexpr, BITS: tl.constexpr):
    """Move BITS of both halves of words from `shift` to `place`."""
    BY: tl.constexpr = shift - place
    return (word >> BY if BY >= 0 else word << -BY) & ((1 << BITS) - 1) * 0x10001 << place


@_helper
def _widen(code, half: tl.constexpr, scale, bias, SHIFT: tl.constexpr, OFFSET: tl.constexpr):
    """Dequantise the codes from bit SHIFT on of a half of words; scale: divided by 2**SHIFT. The
    float 2**23 + i has the bits i.
    """
    number = (code >> 16 * half & 0xFFFF | 0x4B000000).to(tl.float32, bitcast=True)
    value = (number - (8388608 + (OFFSET << SHIFT))) * scale
    return value if bias is None else value + bias


@_helper
def _widen_float(code, half: tl.constexpr, scale, FACTOR: tl.constexpr):
    """Dequantise the float16 numbers in a half of words, each times FACTOR and its scale."""
    number = (code >> 16 * half).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number * FACTOR * scale


@triton.jit
def _dequantize(
    rows,
    low,
    high,
    scales,
    biases,
    super_scales,
    super_biases,
    out,
    start,
    K: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    EXPONENT: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    DIGITS: tl.constexpr,
    STEPS: tl.constexpr,
    PASSES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """out[i] = w[rows[i]], or w[start + i] without `rows`; PASSES times UNITS units per program.
    out: [n, K].

    A thread's addresses differ by constants, which need no instructions.
    """
    SPAN: tl.constexpr = 4 * DIGITS  # columns of a unit
    # place of floating-point codes' magnitudes in float16, and the ratio to its numbers
    FLOAT: tl.constexpr = 11 - LOW + EXPONENT
    FACTOR: tl.constexpr = 1 << 16 - (1 << EXPONENT - 1) if EXPONENT else 1
    # place of the second of two digits, which saves a shift and leaves room for high digits
    PLACE: tl.constexpr = LOW % 8
    IS_RAGGED: tl.constexpr = K % (PASSES * UNITS * SPAN) != 0  # else masks are constants
    EACH: tl.constexpr = LOW // HIGH if HIGH else 4  # units to a word of the high plane
    WORDS: tl.constexpr = 4 // EACH
    i = tl.program_id(0).to(tl.int64)
    if rows is None:
        row = start + i
    else:
        row = tl.load(rows + i).to(tl.int64)
    unit = tl.program_id(1) * (UNITS * PASSES) + tl.arange(0, UNITS)[:, None]
    t = tl.arange(0, 4)[None, :]
    column = unit * SPAN + 4 * t
    low_row = row // 16 * (STEPS * 256) + row % 8 * 16 + row % 16 // 8
    low += low_row + unit // 2 * 128 + t * 4 + unit % 2 * 2
    group = row * (K // GROUP) + column // GROUP
    above = row * (K // _SUPER) + column // _SUPER
    if HIGH:
        high += row // 16 * (STEPS * 64 * WORDS) + row % 8 * (8 * WORDS) + row % 16 // 8
        high += unit // 4 * (64 * WORDS) + t * (2 * WORDS) + unit % 4 // EACH * 2
    out += i * K + column[:, :, None] + tl.arange(0, 4)[None, None, :]
    for p in tl.static_range(PASSES):
        inside = column + p * (UNITS * SPAN) < K if IS_RAGGED else column == column
        word = tl.load(low + p * (UNITS * 64), mask=inside, other=0)
        if HIGH:
            top = tl.load(high + p * (UNITS * 16 * WORDS), mask=inside, other=0)
            top = top >> unit % EACH * (DIGITS // 2 * HIGH)
        if super_scales is not None:
            at = above + p * (UNITS * SPAN) // _SUPER
            super_scale = tl.load(super_scales + at, mask=inside, other=0).to(tl.float32)
            if biases is not None:
                super_bias = tl.load(super_biases + at, mask=inside, other=0).to(tl.float32)
        for s in tl.static_range(DIGITS // 4):
            if IS_RAGGED:
                inside = column + p * (UNITS * SPAN) + 16 * s < K
            if 16 * s % GROUP == 0:
                at = group + (p * (UNITS * SPAN) + 16 * s) // GROUP
                scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
                bias = None
                if super_scales is not None:
                    scale *= super_scale
                if biases is not None:
                    bias = tl.load(biases + at, mask=inside, other=0).to(tl.float32)
                    if super_scales is not None:
                        bias *= super_bias
            if EXPONENT:
                pair = _float_halves(word, 2 * s * LOW, FLOAT, LOW)
                following = _float_halves(word, 2 * s * LOW + LOW, FLOAT, LOW)
                n0 = _widen_float(pair, 0, scale, FACTOR)
                n2 = _widen_float(following, 0, scale, FACTOR)
                n1 = _widen_float(pair, 1, scale, FACTOR)
                n3 = _widen_float(following, 1, scale, FACTOR)
            else:
                pair = _place(word, 2 * s * LOW, 0, LOW)
                following = _place(word, 2 * s * LOW + LOW, PLACE, LOW)
                if HIGH:
                    pair |= _place(top, 2 * s * HIGH, LOW, HIGH)
                    following |= _place(top, 2 * s * HIGH + HIGH, PLACE + LOW, HIGH)
                lower = scale * (1 / (1 << PLACE))
                n0 = _widen(pair, 0, scale, bias, 0, OFFSET)
                n2 = _widen(following, 0, lower, bias, PLACE, OFFSET)
                n1 = _widen(pair, 1, scale, bias, 0, OFFSET)
                n3 = _widen(following, 1, lower, bias, PLACE, OFFSET)
            values = tl.join(tl.join(n0, n2), tl.join(n1, n3))
            values = tl.reshape(values, (UNITS, 4, 4)).to(out.dtype.element_ty)
            tl.store(out + p * (UNITS * SPAN) + 16 * s, values, mask=inside[:, :, None])


def run(
    kernel: triton.JITFunction, grid: tuple[int, ...], *arguments: object, **options: object
) -> None:
    """Launch a kernel."""
    kernel[grid](*arguments, **options)


def try_out(device: torch.device) -> None:
    """Compile and launch a small `multiply`. Raises Triton's errors."""
    low = torch.zeros((16, 16), dtype=torch.int32, device=device)
    scales = torch.zeros((1, 1), dtype=torch.float16, device=device)
    matrix = QuantizedMatrix((1, 16), 4, 16, 8, low, None, scales, None, None, None, torch.float16)
    multiply(matrix, torch.zeros((1, 16), dtype=torch.float16, device=device))


def multiply(matrix: QuantizedMatrix, x: Tensor) -> Tensor:
    """x @ w.T from the packed codes, summed in float32. x: [M, K]; returns [M, N] in x's dtype."""
    return _launch(matrix, x, None, None, len(x), matrix.shape[0])


def multiply_chosen(
    matrix: QuantizedMatrix, x: Tensor, chosen: Tensor, count: int, groups: Groups | None = None
) -> Tensor:
    """Multiply each row with some of the `count` matrices [N, K] that `matrix` concatenates.

    chosen: int64 [T, used]; x: [T, K], each row for all of its matrices, or [T used, K]; groups:
    group_rows(chosen), to read a matrix once for several rows. Returns [T used, N] in x's dtype.
    """
    return _launch(matrix, x, chosen.contiguous(), groups, chosen.numel(), matrix.shape[0] // count)


class Groups(NamedTuple):
    """Products in tiles that share a matrix."""

    chosen: Tensor  # matrix of each tile, int64 [tiles]
    members: Tensor  # products of each tile, int64 [tiles, TILE], -1: none


def group_rows(chosen: Tensor, count: int) -> Groups:
    """Group products by matrix, without waiting. chosen: int64 [T, used], of `count` matrices."""
    flat, width = chosen.reshape(-1), _MOST_TILE
    order = torch.argsort(flat, stable=True)
    sizes = torch.zeros(count, dtype=torch.int64, device=flat.device)
    sizes.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (sizes + width - 1) // width
    ends = tiles.cumsum(0)
    # some are empty
    tile = torch.arange(len(flat) // width + min(len(flat), count), device=flat.device)
    matrix = torch.searchsorted(ends, tile, right=True).clamp(max=count - 1)
    column = torch.arange(width, device=flat.device)
    place = ((tile - (ends - tiles)[matrix]) * width)[:, None] + column
    rows = order[((sizes.cumsum(0) - sizes)[matrix][:, None] + place).clamp(max=len(flat) - 1)]
    return Groups(matrix, torch.where(place < sizes[matrix][:, None], rows, -1))


def tile(M: int) -> int:
    """Rows of x per program, for M rows in all."""
    # NumPy's order of sums depends on the width of a product, unlike that of tensor cores
    if IS_INTERPRETED.value:
        return _MOST_TILE
    return max(_LEAST_TILE, min(_MOST_TILE, triton.next_power_of_2(M)))


def _launch(
    matrix: QuantizedMatrix, x: Tensor, chosen: Tensor | None, groups: Groups | None, M: int, N: int
) -> Tensor:
    (rows, K), steps = matrix.shape, matrix.low.shape[1] // 16
    width, members = tile(M) if chosen is None else _LEAST_TILE, None
    if matrix.bits < 4:
        width = min(width, 16)  # a step has 256 columns: more rows of x would not fit in registers
    samples = width if chosen is None else 1
    tiles = triton.cdiv(M, samples)
    if groups:
        chosen, members = groups
        width = samples = min(members.shape[1], 16 if matrix.bits < 4 else _MOST_TILE)
        chosen = chosen.repeat_interleave(members.shape[1] // width)
        members, tiles = members.view(-1, width), len(chosen)
    # an expert's rows begin anywhere in a block
    blocks = triton.cdiv(N if chosen is None else N + 15, 16 * WARPS)
    # a prompt has enough programs
    part = steps if groups else triton.cdiv(steps, max(1, PROGRAMS // blocks))
    parts = triton.cdiv(steps, part)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    sums = out if parts == 1 else torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    each, scales, biases = _scalings(matrix, steps)
    constants = dict(K=K, SHARED=M // len(x), **_constants(matrix))
    constants |= dict(SAMPLES=samples, TILE=width, WARPS=WARPS, PART=part, EACH=each)
    constants |= dict(SCALES=_name(matrix.scales), BIASES=_name(matrix.biases))
    constants |= number_constants(x.dtype, matrix.bits, matrix.offset, matrix.exponent)
    constants |= dict(num_warps=WARPS, num_stages=1, enable_fp_fusion=True)
    grid = tiles * blocks, parts
    run(
        _multiply,
        grid,
        x.contiguous(),
        chosen,
        members,
        matrix.low,
        matrix.high,
        scales,
        biases,
        matrix.super_scales,
        matrix.super_biases,
        sums,
        M,
        tiles,
        N,
        rows,
        **constants,
    )
    if parts > 1:
        add_parts(sums, out)
    return out


def add_parts(sums: Tensor, out: Tensor, bias: Tensor | None = None, activation: str = "") -> None:
    """out = sums.sum(0) + bias, in order; with an activation: of its first half, times the second.
    sums: float32 [parts, M, N], or [parts, M, 2 N].
    """
    (parts, M, _), N = sums.shape, out.shape[-1]
    grid = (M, triton.cdiv(N, _BLOCK))
    run(_finish, grid, sums, bias, out, M, N, parts, activation, _BLOCK)


def _scalings(matrix: QuantizedMatrix, steps: int) -> tuple[int, Tensor, Tensor | None]:
    """(scales per word, both as int32) if steps have whole words, else (1, as stored)."""
    groups, each = matrix.scales.shape[1], 4 // matrix.scales.itemsize
    if (
        each == 1  # float32
        or groups % each
        or steps * (512 // PLANES[matrix.bits][0]) != groups * matrix.group_size
        or groups // steps < each
    ):
        return 1, matrix.scales, matrix.biases
    biases = None if matrix.biases is None else matrix.biases.view(torch.int32)
    return each, matrix.scales.view(torch.int32), biases


@functools.cache
def number_constants(
    dtype: torch.dtype, bits: int, offset: int, exponent: int
) -> dict[str, object]:
    """Constants of `_multiply` for codes of `bits` bits as numbers of `dtype`.

    A half of MAGIC has the bits of BASE, and BASE + code is made by setting the bits from PLACE on:
    the last 6 bits of the mantissa of 64 are worth 1 to 32. 8 bits exceed bfloat16's mantissa, so
    two numbers hold four bits each, the second 1024 + 16 * code. float32 takes integers. MINUS:
    -(BASE + offset), twice. FOLD: turns -(BASE + offset) * sum(x) into sum(x).

    Codes with `exponent` bits of exponent are moved to bit PLACE, and a sum is multiplied by
    FACTOR, since exponents have another bias. RAISE: factor of x, without which bfloat16's
    products would be subnormal float32 numbers.
    """
    constants: dict[str, object] = dict(PLACE=0, MAGIC=0, HIGHER=0, MINUS=0, FOLD=1, RAISE=1)
    if exponent:
        mantissa, bias, raised = (7, 127, 64) if dtype == torch.bfloat16 else (10, 15, 0)
        factor = 2.0 ** (bias + 1 - (1 << exponent - 1) - raised)
        place = mantissa + 1 - bits + exponent
        return constants | dict(PLACE=place, RAISE=2.0**raised, FACTOR=factor)
    place, first, second = {
        torch.float16: (4, 64, 0) if bits < 8 else (0, 1024, 0),
        torch.bfloat16: (1, 64, 0) if bits < 8 else (1, 64, 1024),
        torch.float32: (0, 1 << bits, 0),
    }[dtype]

    def twice(number: int) -> int:
        # NumPy, since a captured step must not make host tensors. All are exact in bfloat16.
        half = number & 0xFFFF
        if dtype == torch.float16:
            half = int(np.float16(number).view(np.uint16))
        elif dtype == torch.bfloat16:
            half = int(np.float32(number).view(np.uint32)) >> 16
        return to_signed(half * 0x10001)

    base = first + second
    constants |= dict(PLACE=place, MAGIC=twice(first), HIGHER=twice(second) if second else 0)
    return constants | dict(MINUS=twice(-base - offset), FOLD=-1 / (base + offset), FACTOR=1)


def _name(part: Tensor | None) -> str:
    return "" if part is None else str(part.dtype).removeprefix("torch.")


def dequantize(matrix: QuantizedMatrix, which: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n, K] in `dtype`, rounded as torch's operations do. which: a slice, or indices [n]."""
    rows, start = (None, which.start) if isinstance(which, slice) else (which.contiguous(), 0)
    n, K = which.stop - which.start if rows is None else len(rows), matrix.shape[1]
    out = torch.empty((n, K), dtype=dtype, device=matrix.low.device)
    units = triton.cdiv(K * PLANES[matrix.bits][0], 128)
    passes = triton.cdiv(min(units, _COLUMNS * PLANES[matrix.bits][0] // 128), _UNITS)
    run(
        _dequantize,
        (n, triton.cdiv(units, _UNITS * passes)),
        rows,
        matrix.low,
        matrix.high,
        matrix.scales,
        matrix.biases,
        matrix.super_scales,
        matrix.super_biases,
        out,
        start,
        K=K,
        **_constants(matrix),
        PASSES=passes,
        UNITS=_UNITS,
        num_warps=_UNITS // 8,
        enable_fp_fusion=False,
    )
    return out


def _constants(matrix: QuantizedMatrix) -> dict[str, int]:
    low, high = PLANES[matrix.bits]
    return dict(
        LOW=low,
        HIGH=high,
        EXPONENT=matrix.exponent,
        GROUP=matrix.group_size,
        OFFSET=matrix.offset,
        DIGITS=32 // low,
        STEPS=matrix.low.shape[1] // 16,
    )
