"""QuantizedMatrix: a packed low-bit matrix, for torch's operations or Triton's kernels (packed.py).

A code of `bits` bits is split into digits in one or two planes, whose widths divide a byte: 2, 4
and 8 bits are one digit, 3 is 2 + 1, 5 is 4 + 1, 6 is 4 + 2. For torch's operations a plane is
bytes [N, K / P] of P digits: column p * K / P + c is digit p, from the low end, of byte c, so that
operations are few and long.

For the kernels a plane is 32-bit words in the order in which a warp's threads multiply them on
tensor cores:

    block      16 rows; threads 4 g to 4 g + 3 have rows g and 8 + g
    unit       4 P columns, P = 32 / width of the low plane; thread 4 g + t has columns 16 s + 4 t to 16 s + 4 t + 3
    word       a thread's columns of a row and unit: digits 2 s and 2 s + 1 of its lower half are columns 16 s + 4 t and
               16 s + 4 t + 2, those of its upper half the columns after these, so that a shift and
               a mask unpack two neighbours
    16 bytes   a thread's words of two units, of rows g and 8 + g each; a warp's 512 bytes are contiguous
    step       four units; K is padded to whole steps, N to whole blocks. A word of the high plane has the digits of as many
               units as fit, and a thread's words of a step are contiguous.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mlx_llama.core.files.quantized import FP4_VALUES, FP8_NUMBERS, AffineWeight

from . import runtime

# bits: widths of low and high digit
PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
SUPER_GROUP = 256  # weights that share a super scale

_SLAB = 1 << 20  # weights that a thread packs at a time
# Weights that torch's operations dequantise at a time, in some 17 launches: 0.3 GB on a GPU
_BLOCK = {"cpu": 1 << 19, "cuda": 1 << 24}
# codes of E2M1 by the integers of `Rows`
_FP4_CODES = np.zeros(29, np.uint8)
_FP4_CODES[FP4_VALUES[::-1]] = np.arange(16)[::-1]
_SCRATCH = 32 << 20  # bytes that a kernel dequantises at a time


@dataclass(frozen=True)
class QuantizedMatrix:
    """A low-bit matrix [N, K]: w = scale * (code - offset) + bias by `group_size` columns, or
    scale times the number of a floating-point code.

    With two levels a group's scale is super_scales * scales, and its bias super_biases * biases.
    """

    shape: tuple[int, int]  # (N, K)
    bits: int
    group_size: int
    offset: int
    # low plane: uint8 [N, K / P] for torch's operations, int32 [blocks * 16, steps * 16] for
    # kernels
    low: Tensor
    # high plane: uint8 [N, K / P], or int32 [blocks * 16, steps * 4 * words of a step]
    high: Tensor | None
    # [N, K / group_size], float32, float16 or bfloat16 as in the file; two levels: int8
    scales: Tensor
    biases: Tensor | None  # the same, two levels: uint8; None for zero
    super_scales: Tensor | None  # float16 [N, K / 256]; None for one level
    super_biases: Tensor | None
    dtype: torch.dtype  # `rows` returns it
    kernels: ModuleType | None = None  # packed.py; None for torch's operations
    # exponent bits of floating-point codes (E2M1: 2, E4M3: 4), which have no offset; 0: integers
    exponent: int = 0

    @classmethod
    def pack(
        cls,
        weights: Sequence[AffineWeight],
        dtype: torch.dtype,
        device: torch.device,
        kernels: ModuleType | None = None,
    ) -> QuantizedMatrix:
        """Concatenate the rows of `weights`, of one format, on `device`; releases their pages.

        kernels: packed.py, None for the layout of torch's operations.
        """
        first, K = weights[0], weights[0].shape[1]
        N = sum(weight.shape[0] for weight in weights)
        exponent = 2 if first.table == "fp4" else 4 if first.mode == "mxfp8" else 0
        bits, offset = (4, 0) if first.table == "fp4" else (first.bits, first.offset)
        widths = PLANES[bits]

        def empty(columns: int, kind: torch.dtype) -> Tensor:
            return torch.empty((N, columns), dtype=kind, device=device)

        def plane(width: int) -> Tensor | None:
            if not width:
                return None
            if not kernels:
                return empty(K * width // 8, torch.uint8)
            columns = -(-K * widths[0] // 512) * 16 * width // widths[0]
            return torch.zeros((-(-N // 16) * 16, columns), dtype=torch.int32, device=device)

        groups, has_biases = K // first.group_size, first.has_biases
        if first.two_level:
            kinds = [(groups, torch.int8), (groups, torch.uint8)]
            kinds += 2 * [(K // SUPER_GROUP, torch.float16)]
        else:
            kinds = 2 * [(groups, getattr(torch, first.scale_dtype))]
        # scales and biases in turn
        scalings = [
            None if i % 2 and not has_biases else empty(columns, kind)
            for i, (columns, kind) in enumerate(kinds)
        ]
        scalings += [None] * (4 - len(scalings))
        low, high = map(plane, widths)
        scales, biases, super_scales, super_biases = scalings
        matrix = cls(
            (N, K),
            bits,
            first.group_size,
            offset,
            low,
            high,
            scales,
            biases,
            super_scales,
            super_biases,
            dtype,
            kernels,
            exponent,
        )
        at, step = 0, max(1, _SLAB // K)
        # Few threads, since each allocates a slab of codes on the device.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for weight in weights:
                fill = partial(matrix._fill, weight, at, step)
                list(pool.map(fill, range(0, weight.shape[0], step)))
                weight.release()
                at += weight.shape[0]
        return matrix

    def _fill(self, weight: AffineWeight, at: int, step: int, start: int) -> None:
        """Pack `step` rows of `weight` from `start` on. at: this matrix's row for row 0."""
        stop = min(start + step, weight.shape[0])
        rows, target = weight.rows(start, stop), slice(at + start, at + stop)
        is_fp4 = weight.table == "fp4"
        codes = runtime.send(_FP4_CODES[rows.codes] if is_fp4 else rows.codes, self.low.device)
        shift = 0
        for plane, width in zip((self.low, self.high), PLANES[self.bits]):
            if width:
                digits = (codes >> shift) & ((1 << width) - 1)
                if self.kernels:
                    _pack_words(digits, width, PLANES[self.bits][0], plane, at + start)
                else:
                    plane[target] = _pack_bytes(digits, width)
            shift += width
        if weight.two_level:
            stored = (rows.sub_scales, rows.sub_biases, rows.super_scales, rows.super_biases)
        else:
            # Integers are twice the numbers of E2M1.
            stored = (rows.scales * 2 if is_fp4 else rows.scales, rows.biases, None, None)
        for part, values in zip(self._scalings, stored):
            if part is not None:
                part[target] = runtime.send(np.ascontiguousarray(values), part.device)

    @property
    def nbytes(self) -> int:
        parts = self.low, self.high, *self._scalings
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def _scalings(self) -> tuple[Tensor | None, ...]:
        return self.scales, self.biases, self.super_scales, self.super_biases

    def matmul(self, x: Tensor) -> Tensor:
        """x @ w.T, accumulated in float32. x: [B, T, K] or [T, K]; returns [..., N] in x's dtype.

        A kernel multiplies the packed codes with a few positions of a prompt and with the rows of a
        step. For more, and without kernels, blocks of rows of w are dequantised in turn: to x's
        dtype on a GPU, to float32 on the CPU.
        """
        N, K = self.shape
        flat = x.reshape(-1, K)
        if self.kernels:
            is_step = x.ndim == 3 and x.shape[1] == 1
            if len(flat) <= (self.kernels.MAX_ROWS if is_step else self.kernels.MOST_ROWS):
                return self.kernels.multiply(self, flat).reshape((*x.shape[:-1], N))
        flat = flat.to(x.dtype if x.is_cuda else torch.float32)
        out = torch.empty((len(flat), N), dtype=flat.dtype, device=x.device)
        step = max(1, (_SCRATCH // flat.itemsize if self.kernels else _BLOCK[x.device.type]) // K)
        for start in range(0, N, step):
            block = self.dequantize(slice(start, min(start + step, N)), flat.dtype)
            torch.mm(flat, block.T, out=out[:, start : start + step])
        return out.to(x.dtype).reshape((*x.shape[:-1], N))

    def rows(self, tokens: Tensor) -> Tensor:
        """Dequantise rows by index. tokens: int32 or int64; returns [*tokens.shape, K]."""
        rows = self.dequantize(tokens.reshape(-1), self.dtype)
        return rows.reshape((*tokens.shape, self.shape[1]))

    def dequantize(self, which: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Rows as [n, K] in `dtype`, computed in float32. which: a slice, or int indices [n]."""
        if self.kernels:
            return self.kernels.dequantize(self, which, dtype)

        def pick(part: Tensor) -> Tensor:
            return part[which] if isinstance(which, slice) else part.index_select(0, which)

        def scaling(part: Tensor, above: Tensor | None) -> Tensor:
            part = pick(part).float()
            if above is not None:
                part = part.view(len(part), -1, SUPER_GROUP // self.group_size)
                part = part * pick(above).float()[:, :, None]
            return part.view(len(part), -1, 1)

        low, high = PLANES[self.bits]
        codes = _unpack_bytes(pick(self.low), low)
        if self.high is not None:
            codes |= _unpack_bytes(pick(self.high), high) << low
        values = codes.view(len(codes), -1, self.group_size)
        if self.exponent:
            values = _numbers(self.exponent, codes.device)[values.int()]
        else:
            values = values.float()
        if self.offset:
            values -= self.offset
        values *= scaling(self.scales, self.super_scales)
        if self.biases is not None:
            values += scaling(self.biases, self.super_biases)
        return values.view(codes.shape).to(dtype)


@dataclass(frozen=True)
class QuantizedStack:
    """`count` low-bit matrices [N, K], concatenated along N."""

    count: int
    matrix: QuantizedMatrix

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, K = self.matrix.shape
        return self.count, rows // self.count, K

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def dequantize(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """Matrices by number, int64 [n], as [n, N, K]."""
        _, N, K = self.shape
        rows = chosen[:, None] * N + torch.arange(N, device=chosen.device)
        return self.matrix.dequantize(rows.view(-1), dtype).view(-1, N, K)


@cache
def _numbers(exponent: int, device: torch.device) -> Tensor:
    """Numbers of all floating-point codes, float32."""
    numbers = FP8_NUMBERS if exponent == 4 else (FP4_VALUES - 16) / np.float32(2)
    return torch.from_numpy(numbers).to(device)


def _pack_bytes(digits: Tensor, width: int) -> Tensor:
    """Pack digits uint8 [n, K] as bytes [n, K width / 8]."""
    parts = digits.chunk(8 // width, dim=1)
    packed = parts[0].clone()
    for p in range(1, len(parts)):
        packed |= parts[p] << (p * width)
    return packed


def _unpack_bytes(packed: Tensor, width: int) -> Tensor:
    """Unpack bytes [n, columns] to digits uint8 [n, columns 8 / width]."""
    digits = [(packed >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return torch.cat(digits, dim=1)


def _pack_words(digits: Tensor, width: int, low: int, plane: Tensor, start: int) -> None:
    """Pack digits uint8 [n, K] into rows from `start` on. low: width of the low plane's digits."""
    n, K = digits.shape
    steps, units = plane.shape[1] * low // (16 * width), low // width  # units to a word
    digits = F.pad(digits, (0, steps * 512 // low - K))
    digits = digits.view(n, steps, 4 // units, units, 8 // low, 4, 2, 2)
    words = torch.zeros((n, steps, 4 // units, 4), dtype=torch.int32, device=plane.device)
    for u in range(units):
        for s in range(8 // low):
            for h in range(2):
                shift = (16 // low * u + 2 * s + h) * width
                words |= digits[:, :, :, u, s, :, h, 0].int() << shift
                words |= digits[:, :, :, u, s, :, h, 1].int() << (16 + shift)
    rows = torch.arange(start, start + n, device=plane.device)
    if width == low:  # [block, step, piece, g, t, unit of the piece, row above 8 or not]
        target = plane.view(-1, steps, 2, 8, 4, 2, 2).permute(0, 6, 3, 1, 2, 5, 4)
    else:
        target = plane.view(-1, steps, 8, 4, 4 // units, 2).permute(0, 5, 2, 1, 4, 3)
    target[rows // 16, rows % 16 // 8, rows % 8] = words.view((n, *target.shape[3:]))
