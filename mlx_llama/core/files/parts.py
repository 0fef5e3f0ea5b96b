"""Rows or columns of stored tensors as tensors, without reading them."""

from __future__ import annotations

import copy
import math

import numpy as np

from .quantized import AffineWeight, GGUFWeight, MLXWeight
from .tensor import CopiedTensor, Tensor


def column_unit(weight: Tensor | AffineWeight) -> int:
    """Columns that must stay together: 1, or a block of a low-bit format."""
    if isinstance(weight, GGUFWeight):
        return weight.layout.block_size
    return math.lcm(weight.group_size, 32) if isinstance(weight, AffineWeight) else 1


def take_rows(weight: Tensor | AffineWeight, start: int, stop: int) -> Tensor | AffineWeight:
    """Rows start .. stop - 1 of a matrix, or numbers of a vector."""
    shape = (stop - start, *weight.shape[1:])
    first, last, order = start, stop, weight.order
    # neighbouring rows lie anywhere between the first and the last in the file
    if order is not None:
        order = order[start:stop]
        first, last = int(order.min()), int(order.max()) + 1
        order = order - first
    pages = tuple(weight.pages_of(first, last))
    if isinstance(weight, CopiedTensor):
        return CopiedTensor(
            Tensor(weight.name, weight.dtype, shape, weight.stored[first:last], pages), order
        )
    if isinstance(weight, Tensor):
        return Tensor(weight.name, weight.dtype, shape, weight.bits[start:stop], pages)
    part = copy.copy(weight)
    part.shape, part.pages = (stop - start, part.shape[1]), pages
    if isinstance(part, GGUFWeight):
        part.blocks, part.order = part.blocks[first:last], order
        part.nbytes = part.blocks.nbytes
        return part
    assert isinstance(part, MLXWeight)
    return _take_mlx(part, slice(start, stop), slice(None))


def take_columns(weight: Tensor | AffineWeight, start: int, stop: int) -> Tensor | AffineWeight:
    """Columns start .. stop - 1 of a matrix, multiples of its `column_unit`."""
    shape = (weight.shape[0], stop - start)
    if isinstance(weight, CopiedTensor):
        return CopiedTensor(
            Tensor(weight.name, weight.dtype, shape, weight.stored[:, start:stop], weight.pages),
            weight.order,
        )
    if isinstance(weight, Tensor):
        return Tensor(weight.name, weight.dtype, shape, weight.bits[:, start:stop], weight.pages)
    part = copy.copy(weight)
    part.shape = shape
    if isinstance(part, GGUFWeight):
        size, nbytes = part.layout.block_size, part.layout.nbytes
        part.blocks = part.blocks[:, start // size * nbytes : stop // size * nbytes]
        part.nbytes = part.blocks.nbytes
        return part
    assert isinstance(part, MLXWeight)
    return _take_mlx(part, slice(None), slice(start, stop))


def _take_mlx(part: MLXWeight, rows: slice, columns: slice) -> MLXWeight:
    def narrow(array: np.ndarray, per_column: float) -> np.ndarray:
        if columns.start is None:
            return array[rows]
        return array[rows, int(columns.start * per_column) : int(columns.stop * per_column)]

    part.packed = narrow(part.packed, part.bits / 32)
    part.scales, part.biases = (
        narrow(part.scales, 1 / part.group_size),
        narrow(part.biases, 1 / part.group_size),
    )
    part.nbytes = part.packed.nbytes + part.scales.nbytes + part.biases.nbytes
    return part
