"""Matrices: of floating-point numbers, and packed low-bit ones with one level of scales or, on a
GPU, with two.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from typing_extensions import Self

from mlx_llama.core.dtypes import dtype_name
from mlx_llama.core.files.quantized import IQ4_VALUES, AffineWeight, MLXWeight, Rows, pack_stream
from mlx_llama.core.models.quantization import FLOAT_MODES, Packing

from . import facts
from .kernels import two_level
from .kernels.two_level import SUPER_GROUP, Layout, Parts

HALF_GROUP = 16  # MLX's kernels have groups of 32, 64 and 128; groups of 16 take two products
_SLAB = 1 << 20  # weights that a thread repacks at a time
_BLOCK = 1 << 26  # weights dequantised at a time


def lays_for_gpu(device: mx.Device) -> bool:
    """True if matrices are packed for a GPU. Tests force it on the CPU."""
    return device.type == mx.gpu


def pack(
    weights: Sequence[AffineWeight], dtype: mx.Dtype, device: mx.Device, has_kernel: bool = True
) -> QuantizedMatrix | TwoLevelMatrix:
    """Concatenate rows of one format; releases their pages. has_kernel: False for a fault of
    `find_faults`.
    """
    keeps_levels = facts.keeps_levels(weights[0], lays_for_gpu(device), has_kernel)
    kind = TwoLevelMatrix if keeps_levels else QuantizedMatrix
    matrix = kind.pack(weights, dtype, device)
    for weight in weights:
        weight.release()
    return matrix


def find_faults(
    weights: Iterable[AffineWeight], dtype: mx.Dtype, device: mx.Device
) -> dict[str, str]:
    """Try the kernels of each format with two levels of scales; returns faults by format."""
    if device.type != mx.gpu:
        return {}
    layouts = {weight.format: _layout(weight) for weight in weights if weight.two_level}
    with mx.stream(device):
        faults = {name: two_level.find_fault(layout, dtype) for name, layout in layouts.items()}
    return {name: fault for name, fault in faults.items() if fault}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A low-bit matrix [N, K]: w = scale * code + bias over groups of columns; floating-point codes
    have no biases.
    """

    packing: Packing
    packed: mx.array  # uint32 [N, K * bits / 32], each row a stream of codes, low bits first
    # (scales, biases), [N, K / group_size] each, in the dtype of products. Affine groups of 16 have
    # two pairs over groups of 32: of the even and of the odd groups of 16. Floating-point codes:
    # (scales,), uint8.
    scalings: tuple[tuple[mx.array, ...], ...]
    even: mx.array | None  # bool [K], True in columns of even groups of 16; None with a single pair
    product: mx.Dtype  # x in products
    dtype: mx.Dtype  # `rows` returns it

    @classmethod
    def pack(cls, weights: Sequence[AffineWeight], dtype: mx.Dtype, device: mx.Device) -> Self:
        """Concatenate the rows of `weights`. dtype: of the activations."""
        first = weights[0]
        if first.mode != "affine":
            arrays = [weight.mlx_rows(0, weight.shape[0]) for weight in weights]
            packed, scales = (mx.array(_join(parts)) for parts in zip(*arrays))
            product = _product_dtype(first, dtype, device, 0.0)
            bits, group_size = FLOAT_MODES[first.mode]
            packing = Packing(bits, group_size, first.mode)
            mx.eval(packed, scales)
            return cls(packing, packed, ((scales,),), None, product, dtype)
        if isinstance(first, MLXWeight):
            stored = [(weight.packed, weight.scales, weight.biases) for weight in weights]
            packed, scales, biases = map(_join, zip(*stored))
            largest = 0.0  # they fit the file's width
        else:
            packed, scales, biases = _repack(weights)
            largest = max(np.abs(scales).max(), np.abs(biases).max())
        product = _product_dtype(first, dtype, device, largest)
        if product == mx.float16 and first.has_biases and first.two_level:
            # Biases make up for rounded scales at the middle code: the errors do not add up.
            biases += (scales - scales.astype(np.float16)) * np.float32((2**first.bits - 1) / 2)
        pairs, even = [(scales, biases)], None
        if first.group_size == HALF_GROUP:
            pairs = [(scales[:, i::2], biases[:, i::2]) for i in (0, 1)]
            even = mx.arange(first.shape[1]) // HALF_GROUP % 2 == 0

        def scaling(values: np.ndarray) -> mx.array:
            array = mx.array(np.ascontiguousarray(values))
            return (array.view(mx.bfloat16) if array.dtype == mx.uint16 else array).astype(product)

        packing = Packing(first.bits, max(first.group_size, 2 * HALF_GROUP))
        scalings = tuple((scaling(s), scaling(b)) for s, b in pairs)
        matrix = cls(packing, mx.array(packed), scalings, even, product, dtype)
        mx.eval(matrix.packed, matrix.scalings, even)
        return matrix

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 32 // self.packing.bits

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + sum(part.nbytes for pair in self.scalings for part in pair)

    def matmul(self, x: mx.array) -> mx.array:
        """x @ w.T. x: [..., K]; returns [..., N] in x's dtype."""
        products = [
            mx.quantized_matmul(part, self.packed, *scaling, **self.packing._asdict())
            for part, scaling in zip(self.split(x), self.scalings)
        ]
        return functools.reduce(operator.add, products).astype(x.dtype)

    def split(self, x: mx.array) -> tuple[mx.array, ...]:
        """x for each pair of scalings: groups of 16 take a product of even and of odd groups."""
        wide = x.astype(self.product)
        if self.even is None:
            return (wide,)
        return mx.where(self.even, wide, 0), mx.where(self.even, 0, wide)

    def rows(self, tokens: mx.array) -> mx.array:
        """Dequantise rows by index, in float32. tokens: int32 [B, T]; returns [B, T, K]."""
        packed, options = self.packed[tokens], {**self.packing._asdict(), "dtype": mx.float32}
        pairs = [tuple(part[tokens] for part in pair) for pair in self.scalings]
        if self.packing.mode == "affine":
            pairs = [tuple(part.astype(mx.float32) for part in pair) for pair in pairs]
        rows = [mx.dequantize(packed, *pair, **options) for pair in pairs]
        chosen = rows[0] if self.even is None else mx.where(self.even, rows[0], rows[1])
        return chosen.astype(self.dtype)


@dataclass(frozen=True)
class QuantizedStack:
    """`count` low-bit matrices [N, K], with concatenated rows."""

    count: int
    matrix: QuantizedMatrix

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def matmul(self, x: mx.array, chosen: mx.array, is_sorted: bool) -> mx.array:
        """x @ w.T with the matrices of numbers `chosen`. x: [..., M, K]; chosen: uint32, broadcast
        with the axes before M; is_sorted: they are in ascending order. Returns [..., M, N] in x's
        dtype."""
        whole, products = self.matrix, []
        options = dict(transpose=True, sorted_indices=is_sorted, **whole.packing._asdict())
        for part, scaling in zip(whole.split(x), whole.scalings):
            stacks = [
                array.reshape(self.count, -1, array.shape[-1]) for array in (whole.packed, *scaling)
            ]
            products.append(mx.gather_qmm(part, *stacks, rhs_indices=chosen, **options))
        return functools.reduce(operator.add, products).astype(x.dtype)


@dataclass(frozen=True)
class TwoLevelMatrix:
    """A low-bit matrix [N, K] as its file stores it, with unrounded scales."""

    layout: Layout
    parts: Parts
    product: mx.Dtype  # the dequantised matrix in products with many rows
    dtype: mx.Dtype  # `rows` returns it
    # multiply few rows by a kernel, which reads each code once and sums in float32; else dequantise
    has_kernel: bool

    @classmethod
    def pack(cls, weights: Sequence[AffineWeight], dtype: mx.Dtype, device: mx.Device) -> Self:
        """Concatenate the rows of `weights`. dtype: of the activations."""
        first, layout, has_kernel = weights[0], _layout(weights[0]), device.type == mx.gpu
        N, K = sum(weight.shape[0] for weight in weights), first.shape[1]
        packed = np.empty((N, K * layout.bits // 32), np.uint32)
        subs = np.empty((N, K // layout.group_size), layout.sub_kind)
        supers = np.empty((N, K // SUPER_GROUP, 2 if layout.sub_bits else 1), np.float16)

        def fill(rows: Rows, at: slice) -> float:
            codes = rows.codes
            if layout.has_table:
                codes = np.searchsorted(IQ4_VALUES, codes).astype(np.uint8)
            packed[at] = pack_stream(codes, layout.bits)
            subs[at] = rows.sub_scales
            supers[at, :, 0] = rows.super_scales
            if layout.sub_bits:
                subs[at] |= rows.sub_biases.astype(layout.sub_kind) << layout.sub_bits
                supers[at, :, 1] = rows.super_biases
            biases = 0 if rows.biases is None else np.abs(rows.biases).max()
            return np.abs(rows.scales).max() * 2**first.bits + biases

        largest = float(np.max(_map_slabs(weights, fill)))
        # On its CPU device MLX sums 16-bit products in 16 bits.
        product = _product_dtype(first, dtype, device, largest) if has_kernel else mx.float32
        parts = Parts(mx.array(packed), mx.array(subs), mx.array(supers))
        mx.eval(parts)
        return cls(layout, parts, product, dtype, has_kernel)

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts.packed.shape[0], self.parts.packed.shape[1] * 32 // self.layout.bits

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def matmul(self, x: mx.array) -> mx.array:
        N, K = self.shape
        if x.ndim != 2:
            return self.matmul(x.reshape(-1, K)).reshape((*x.shape[:-1], N))
        if self.has_kernel and x.shape[0] <= two_level.MAX_ROWS:
            return two_level.multiply(self.layout, self.parts, x)
        dequantise = two_level.dequantise if self.has_kernel else two_level.dequantise_plainly
        wide, step, blocks = x.astype(self.product), max(1, _BLOCK // K), []
        for start in range(0, N, step):
            block = self.parts
            if step < N:
                block = Parts._make(part[start : start + step] for part in block)
            blocks.append(wide @ dequantise(self.layout, block, self.product).T)
        return (blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=-1)).astype(x.dtype)

    def rows(self, tokens: mx.array) -> mx.array:
        parts = Parts._make(part[tokens.reshape(-1)] for part in self.parts)
        rows = two_level.dequantise_plainly(self.layout, parts, self.dtype)
        return rows.reshape((*tokens.shape, self.shape[1]))


LowBitMatrix = QuantizedMatrix | TwoLevelMatrix


def _layout(weight: AffineWeight) -> Layout:
    name, has_table = weight.format, weight.format in facts.INDEX_BITS
    bits, sub_bits = facts.INDEX_BITS.get(name, weight.bits), facts.SUB_BITS.get(name, 0)
    return Layout(bits, weight.group_size, weight.offset, sub_bits, has_table)


def _product_dtype(
    weight: AffineWeight, dtype: mx.Dtype, device: mx.Device, largest: float
) -> mx.Dtype:
    """The dtype of operands: as planned, or float32 if float16 would overflow. largest: magnitude.

    Small numbers are safe: products of float16 numbers and integers are multiples of 2**-24.
    """
    planned = facts.product_dtype(weight, dtype_name(dtype), lays_for_gpu(device))
    product = getattr(mx, planned)
    return product if product != mx.float16 or largest <= np.finfo(np.float16).max else mx.float32


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate rows. A single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _repack(weights: Sequence[AffineWeight]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Repack: codes uint32 [N, K * bits / 32], scales and biases float32 [N, K / group_size]."""
    first, K = weights[0], weights[0].shape[1]
    N = sum(weight.shape[0] for weight in weights)
    packed = np.empty((N, K * first.bits // 32), np.uint32)
    scales, biases = np.empty((2, N, K // first.group_size), np.float32)

    def fill(rows: Rows, at: slice) -> None:
        packed[at] = pack_stream(rows.codes, first.bits)
        scales[at] = rows.scales
        if rows.biases is None:
            np.multiply(rows.scales, np.float32(-rows.offset), out=biases[at])
        else:
            biases[at] = rows.biases

    _map_slabs(weights, fill)
    return packed, scales, biases


def _map_slabs(
    weights: Sequence[AffineWeight], fill: Callable[[Rows, slice], float | None]
) -> list[float | None]:
    """Call fill(unpacked rows, their slice of the whole matrix) on threads; returns results."""
    step = max(1, _SLAB // weights[0].shape[1])
    firsts = np.cumsum([0] + [weight.shape[0] for weight in weights])
    slabs = [
        (weight, start, at + start)
        for weight, at in zip(weights, firsts)
        for start in range(0, weight.shape[0], step)
    ]

    def run(slab: tuple[AffineWeight, int, int]) -> float | None:
        weight, start, at = slab
        stop = min(start + step, weight.shape[0])
        return fill(weight.rows(start, stop), slice(at, at + stop - start))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run, slabs))
