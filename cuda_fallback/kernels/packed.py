"""Triton kernels over the packed codes of a QuantizedMatrix. Importing it requires the package triton.

`multiply` is bound by memory bandwidth. A word of the weights is loaded once, sixteen bytes to a thread, and unpacked in
registers. A program computes ROWS rows of the matrix, which share its loads of x, over UNITS words at a time. Codes are
multiplied without their scale, which is applied once per word, since a word lies within a group:

    sum over a word of w x  =  scale * sum(code x)  +  (bias - scale * offset) * sum(x)

A matrix of few rows is split along K as well. A program multiplies SAMPLES rows of x with the codes that it has unpacked.
Sums are added in an order that depends on the matrix alone: a row of x has the same bits in every run and in every company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuda_fallback.quantized import PLANES, SUPER_GROUP, QuantizedMatrix

from .state import MAX_ROWS  # noqa: F401

MOST_ROWS = 16  # positions of a prompt for `multiply`; for more, a dense product with dequantised blocks is faster

_SAMPLES = 4  # most rows of x that a program of `multiply` takes
_ROWS, _UNITS = 4, 128  # of one warp of `multiply`: 32 lanes with 16 bytes of each row
_WARPS = 4  # of one program, side by side along K
_PROGRAMS = 512  # split along K if there are fewer blocks of rows: large GPUs have some 130 multiprocessors
_COLUMNS = 1024  # of one program of `dequantize`


@triton.jit
def _scaling(values, supers, row, group, inside, GROUPS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr):
    """Scales or biases of `group`s of `row`s, float32: [rows, 1] and [1, n] -> [rows, n]."""
    found = tl.load(values + row * GROUPS + group, mask=inside, other=0).to(tl.float32)
    if supers is not None:
        above = tl.load(supers + row * (GROUPS * GROUP // SUPER) + group * GROUP // SUPER, mask=inside, other=0)
        found *= above.to(tl.float32)
    return found


@triton.jit
def _multiply(x, chosen, low, high, scales, biases, super_scales, super_biases, out, M, N, K: tl.constexpr,
              SHARED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
              SUPER: tl.constexpr, DIGITS: tl.constexpr, CHUNK: tl.constexpr, SAMPLES: tl.constexpr, ROWS: tl.constexpr,
              UNITS: tl.constexpr, PART: tl.constexpr):
    """out[part, m, n] = x[m] @ w[n] over PART words of each row. x: [M, K]; out: [parts, M, N].

    chosen: int64 [M], for x[m // SHARED] @ w[chosen[m] * N + n], with SAMPLES of 1; or None.
    """
    WORDS: tl.constexpr = K // DIGITS  # of a row
    tiles = tl.cdiv(M, SAMPLES)  # neighbouring programs read the same rows of w
    m = (tl.program_id(0) % tiles * SAMPLES + tl.arange(0, SAMPLES))[:, None]
    n = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS))[None, :]
    part = tl.program_id(1)
    sample = tl.minimum(m, M - 1)[:, :, None]
    row = tl.minimum(n, N - 1).to(tl.int64)[:, :, None]
    if chosen is not None:
        row += tl.load(chosen + sample) * N
    sample = sample // SHARED
    total = tl.zeros((SAMPLES, ROWS, UNITS), tl.float32)
    for start in range(part * PART, tl.minimum(part * PART + PART, WORDS), UNITS):
        unit = (start + tl.arange(0, UNITS))[None, None, :]
        # The hint gives all loads the same layout over threads; otherwise codes move between threads.
        near = tl.max_contiguous(start + tl.arange(0, UNITS), CHUNK)[None, None, :]
        inside = unit < WORDS
        words = tl.load(low + row * WORDS + near, mask=inside, other=0)
        if HIGH:
            tops = tl.load(high + row * WORDS + near, mask=inside, other=0).to(tl.int32)
        first = unit // CHUNK * (CHUNK * DIGITS) + unit % CHUNK  # column of a word's digit 0
        product = tl.zeros((SAMPLES, ROWS, UNITS), tl.float32)
        plain = tl.zeros((SAMPLES, 1, UNITS), tl.float32)
        for p in tl.static_range(DIGITS):
            code = (words >> (p * LOW)) & ((1 << LOW) - 1)
            if HIGH:
                code |= ((tops >> (p * HIGH)) & ((1 << HIGH) - 1)) << LOW
            value = tl.load(x + sample * K + first + p * CHUNK, mask=inside, other=0).to(tl.float32)
            product += code.to(tl.float32) * value
            plain += value
        group = first // GROUP
        scale = _scaling(scales, super_scales, row, group, inside, K // GROUP, GROUP, SUPER)
        bias = -OFFSET * scale
        if biases is not None:
            bias += _scaling(biases, super_biases, row, group, inside, K // GROUP, GROUP, SUPER)
        total += scale * product + bias * plain
    target = out + (part * M + m) * N + n
    tl.store(target, tl.sum(total, axis=2).to(out.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def _add_parts(parts, out, COUNT, SIZE, BLOCK: tl.constexpr):
    """out[i] = the sum of parts[:, i], in order. parts: float32 [COUNT, SIZE]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(COUNT):
        total += tl.load(parts + part * SIZE + i, mask=i < SIZE, other=0)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def _dequantize(rows, low, high, scales, biases, super_scales, super_biases, out, start, K: tl.constexpr,
                LOW: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, SUPER: tl.constexpr,
                DIGITS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """out[i] = row rows[i] of w, or start + i without `rows`; COLUMNS columns of one row. out: [n, K]."""
    WORDS: tl.constexpr = K // DIGITS
    i = tl.program_id(0).to(tl.int64)
    if rows is None:
        row = start + i
    else:
        row = tl.load(rows + i).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < K
    unit = column // (CHUNK * DIGITS) * CHUNK + column % CHUNK
    digit = column // CHUNK % DIGITS
    code = (tl.load(low + row * WORDS + unit, mask=inside, other=0) >> (digit * LOW)) & ((1 << LOW) - 1)
    if HIGH:
        tops = tl.load(high + row * WORDS + unit, mask=inside, other=0).to(tl.int32)
        code |= ((tops >> (digit * HIGH)) & ((1 << HIGH) - 1)) << LOW
    group = column // GROUP
    value = (code - OFFSET).to(tl.float32)
    value *= _scaling(scales, super_scales, row, group, inside, K // GROUP, GROUP, SUPER)
    if biases is not None:
        value += _scaling(biases, super_biases, row, group, inside, K // GROUP, GROUP, SUPER)
    tl.store(out + i * K + column, value.to(out.dtype.element_ty), mask=inside)


def run(kernel: triton.JITFunction, grid: tuple[int, ...], *arguments: object, **given: object) -> None:
    """Launch a kernel."""
    kernel[grid](*arguments, **given)


def try_out(device: torch.device) -> None:
    """Compile and launch a small `multiply`. Raises Triton's errors."""
    low = torch.zeros((1, 2), dtype=torch.int32, device=device)
    scales = torch.zeros((1, 1), dtype=torch.float16, device=device)
    matrix = QuantizedMatrix((1, 16), 4, 16, 8, 8, 2, low, None, scales, None, None, None, torch.float16)
    multiply(matrix, torch.zeros((1, 16), dtype=torch.float16, device=device))


def multiply(matrix: QuantizedMatrix, x: torch.Tensor) -> torch.Tensor:
    """x @ w.T from the packed codes, products and sums in float32. x: [M, K]; returns [M, N] in x's dtype."""
    return _launch(matrix, x, None, len(x), matrix.shape[0])


def multiply_chosen(matrix: QuantizedMatrix, x: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Products of each row with some of a stack's `count` matrices [N, K], which are rows on rows in `matrix`.

    chosen: int64 [T, used]; x: [T, K], each row for all of its matrices, or [T used, K]. Returns [T used, N] in x's dtype.
    """
    return _launch(matrix, x, chosen.contiguous(), chosen.numel(), matrix.shape[0] // count)


def _launch(matrix: QuantizedMatrix, x: torch.Tensor, chosen: torch.Tensor | None, M: int, N: int) -> torch.Tensor:
    K, shared = matrix.shape[1], M // len(x)
    words = K // matrix.digits
    warps = _WARPS
    while warps > 1 and words < _UNITS * warps:
        warps //= 2
    units = min(_UNITS * warps, triton.next_power_of_2(words))
    blocks, steps = triton.cdiv(N, _ROWS), triton.cdiv(words, units)
    part = triton.cdiv(steps, triton.cdiv(_PROGRAMS, blocks)) * units
    parts = triton.cdiv(words, part)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    sums = out if parts == 1 else torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    samples = min(_SAMPLES, triton.next_power_of_2(M)) if chosen is None else 1
    rows = _ROWS if samples == 1 else _ROWS // 2  # the sums of a program's rows of x are as many registers
    run(_multiply, (triton.cdiv(M, samples) * triton.cdiv(N, rows), parts), x.contiguous(), chosen, *_parts(matrix), sums,
        M, N, K, shared, *_constants(matrix), SAMPLES=samples, ROWS=rows, UNITS=units, PART=part, num_warps=warps,
        enable_fp_fusion=True)
    if parts > 1:
        run(_add_parts, (triton.cdiv(M * N, _COLUMNS),), sums, out, parts, M * N, _COLUMNS, num_warps=4)
    return out


def dequantize(matrix: QuantizedMatrix, which: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as [n, K] in `dtype`, rounded as by torch's own operations. which: a slice of them, or int indices [n]."""
    rows, start = (None, which.start) if isinstance(which, slice) else (which.contiguous(), 0)
    n, K = which.stop - which.start if rows is None else len(rows), matrix.shape[1]
    out = torch.empty((n, K), dtype=dtype, device=matrix.low.device)
    columns = min(_COLUMNS, triton.next_power_of_2(K))
    run(_dequantize, (n, triton.cdiv(K, columns)), rows, *_parts(matrix), out, start, K, *_constants(matrix),
        COLUMNS=columns, enable_fp_fusion=False)
    return out


def _parts(matrix: QuantizedMatrix) -> tuple[torch.Tensor | None, ...]:
    return matrix.low, matrix.high, matrix.scales, matrix.biases, matrix.super_scales, matrix.super_biases


def _constants(matrix: QuantizedMatrix) -> tuple[int, ...]:
    """Constants of a kernel: LOW, HIGH, GROUP, OFFSET, SUPER, DIGITS, CHUNK."""
    return *PLANES[matrix.bits], matrix.group_size, matrix.offset, SUPER_GROUP, matrix.digits, matrix.chunk
