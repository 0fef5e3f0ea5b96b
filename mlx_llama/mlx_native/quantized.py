"""QuantizedMatrix: a packed low-bit matrix for mx.quantized_matmul."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight, MLXWeight, pack_stream

from . import facts, runtime

HALF_GROUP = 16  # MLX's kernels have groups of 32, 64 and 128; groups of 16 take two products
_SLAB = 1 << 20  # weights that a thread repacks at a time


@dataclass(frozen=True)
class QuantizedMatrix:
    """One low-bit matrix [N, K]: w = scale * code + bias over groups of `group_size` columns.

    packed: uint32 [N, K * bits / 32], each row one stream of codes, low bits first.
    scalings: pairs of (scales, biases), [N, K / group_size] each, in the dtype of products. One pair; or two for groups of
    16, over groups of 32: of the even groups of 16, and of the odd.
    even: bool [K], True in columns of even groups of 16; None with one pair.
    dtype: of the result of `rows`.
    """

    bits: int
    group_size: int
    packed: mx.array
    scalings: tuple[tuple[mx.array, mx.array], ...]
    even: mx.array | None
    dtype: mx.Dtype

    @classmethod
    def pack(cls, weights: Sequence[AffineWeight], dtype: mx.Dtype, device: mx.Device) -> QuantizedMatrix:
        """Concatenate the rows of `weights`, which `can_concatenate`; releases their pages. dtype: of the activations."""
        first = weights[0]
        is_mlx = isinstance(first, MLXWeight)
        packed, scales, biases = _concatenate(weights) if is_mlx else _repack(weights)
        # bias = -offset * scale is exact, since offsets are powers of two, but may overflow float16.
        fits = is_mlx or dtype != mx.float16 or np.abs(biases).max(initial=0) <= np.finfo(np.float16).max
        on_gpu = device.type == mx.gpu
        product = getattr(mx, facts.product_dtype(first, runtime.dtype_name(dtype), on_gpu)) if fits else mx.float32
        pairs, even = [(scales, biases)], None
        if first.group_size == HALF_GROUP:
            pairs = [tuple(np.ascontiguousarray(part[:, i::2]) for part in (scales, biases)) for i in (0, 1)]
            even = mx.arange(first.shape[1]) // HALF_GROUP % 2 == 0

        def scaling(values: np.ndarray) -> mx.array:
            array = mx.array(values)
            return (array.view(mx.bfloat16) if array.dtype == mx.uint16 else array).astype(product)

        matrix = cls(first.bits, max(first.group_size, 2 * HALF_GROUP), mx.array(packed),
                     tuple((scaling(s), scaling(b)) for s, b in pairs), even, dtype)
        mx.eval(matrix.packed, matrix.scalings, even)
        for weight in weights:
            weight.release()
        return matrix

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.packed.shape[0], self.packed.shape[1] * 32 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases."""
        return self.packed.nbytes + sum(part.nbytes for pair in self.scalings for part in pair)

    def matmul(self, x: mx.array) -> mx.array:
        """x @ w.T. x: [..., K]; returns [..., N] in x's dtype."""
        wide = x.astype(self.scalings[0][0].dtype)
        if self.even is None:
            return self._product(wide, 0).astype(x.dtype)
        # Zeros in x make groups of 16 exact: one product for the even groups, with their scales, and one for the odd.
        halves = mx.where(self.even, wide, 0), mx.where(self.even, 0, wide)
        return (self._product(halves[0], 0) + self._product(halves[1], 1)).astype(x.dtype)

    def rows(self, tokens: mx.array) -> mx.array:
        """Rows by index, dequantised in float32. tokens: int32 [B, T]; returns [B, T, K] in `dtype`."""
        packed = self.packed[tokens]
        pairs = [tuple(part[tokens].astype(mx.float32) for part in pair) for pair in self.scalings]
        rows = [mx.dequantize(packed, *pair, group_size=self.group_size, bits=self.bits) for pair in pairs]
        return (rows[0] if self.even is None else mx.where(self.even, *rows)).astype(self.dtype)

    def _product(self, x: mx.array, i: int) -> mx.array:
        return mx.quantized_matmul(x, self.packed, *self.scalings[i], group_size=self.group_size, bits=self.bits)


def can_concatenate(first: Tensor | AffineWeight, second: Tensor | AffineWeight) -> bool:
    """True if the rows of two weights can be concatenated to one array or one QuantizedMatrix."""
    if not isinstance(first, AffineWeight) or not isinstance(second, AffineWeight):
        return isinstance(first, AffineWeight) == isinstance(second, AffineWeight)
    if type(first) is not type(second):
        return False
    fields = ("bits", "group_size", "two_level", "scale_dtype")
    return all(getattr(first, name) == getattr(second, name) for name in fields)


def _concatenate(weights: Sequence[MLXWeight]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate stored codes, scales and biases. A single matrix is not copied."""
    parts = [(weight.packed, weight.scales, weight.biases) for weight in weights]
    return parts[0] if len(parts) == 1 else tuple(np.concatenate(arrays) for arrays in zip(*parts))


def _repack(weights: Sequence[AffineWeight]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Repack for MLX: codes uint32 [N, K * bits / 32], scales and biases float32 [N, K / group_size]."""
    first, K = weights[0], weights[0].shape[1]
    N = sum(weight.shape[0] for weight in weights)
    packed = np.empty((N, K * first.bits // 32), np.uint32)
    scales, biases = np.empty((2, N, K // first.group_size), np.float32)

    step, slabs = max(1, _SLAB // K), []  # (weight, first row, last row + 1, first row of the result)
    for weight, at in zip(weights, np.cumsum([0] + [weight.shape[0] for weight in weights])):
        starts = range(0, weight.shape[0], step)
        slabs += [(weight, start, min(start + step, weight.shape[0]), at + start) for start in starts]

    def fill(weight: AffineWeight, start: int, stop: int, at: int) -> None:
        rows, own = weight.rows(start, stop), slice(at, at + stop - start)
        packed[own] = pack_stream(rows.codes, first.bits)
        scales[own] = rows.scales
        if rows.biases is None:
            np.multiply(rows.scales, np.float32(-rows.offset), out=biases[own])
        else:
            biases[own] = rows.biases

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda slab: fill(*slab), slabs))
    return packed, scales, biases
