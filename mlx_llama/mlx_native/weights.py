"""Stored tensors as the layers' matrices on the device, packed at their own width."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.weights import BlockWeights, check_memory
from mlx_llama.core.dtypes import dtype_name
from mlx_llama.core.files.adapters import stacked_nbytes
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight

from . import facts, ops, quantized, runtime
from .kernels import delta
from .ops import DenseMatrix
from .quantized import LowBitMatrix, QuantizedStack
from .ranks import Ranks, Vocabulary

# On Linux MLX's CPU device crashes when memory is short, so check before anything is read.


class Weights(BlockWeights):
    """Layers of MLX arrays. One matrix at a time is in memory twice."""

    ops, runtime, vocabulary_type = ops, runtime, Vocabulary
    block_fields = ("__class__", "mode", "bits", "group_size", "two_level", "scale_dtype")
    stack_type = QuantizedStack

    def __init__(
        self, checkpoint: Checkpoint, dtype: mx.Dtype, device: mx.Device, ranks: Ranks | None = None
    ):
        """dtype: of activations and unpacked weights. Raises OutOfMemoryError, also later."""
        super().__init__(checkpoint, device, ranks)
        self.dtype = dtype
        low_bit = [tensor for tensor in self.tensors.values() if isinstance(tensor, AffineWeight)]
        self._faults = quantized.find_faults(low_bit, dtype, device)
        self.notices = tuple(
            f"{name} weights take more memory and time, since their kernels do not work here: "
            f"{fault}"
            for name, fault in self._faults.items()
        )
        self.notices += tuple(
            f"recurrent layers take more time, since their kernel does not work here: {fault}"
            for fault in delta.find_faults(self.config.recurrent, dtype, device)
        )
        name, on_gpu = dtype_name(dtype), quantized.lays_for_gpu(device)
        self.nbytes = sum(
            facts.tensor_nbytes(tensor, name, on_gpu, self._has_kernel(tensor))
            for tensor in self.tensors.values()
        )
        self.nbytes += stacked_nbytes(self.adapters, self.config, dtype.size)
        check_memory(self.nbytes, lambda: _free_memory(device), runtime.device_name(device))

    def _matrix(self, names: Sequence[str]) -> ops.Matrices:
        blocks = [
            DenseMatrix(block.T) if isinstance(block, mx.array) else block
            for block in self._blocks_of(tuple(names))
        ]
        mx.eval([block.columns for block in blocks if isinstance(block, DenseMatrix)])
        return blocks[0] if len(blocks) == 1 else tuple(blocks)

    def _table(self, name: str) -> ops.Matrix:
        (weight,) = self._blocks_of((name,), for_products=name == self.config.head_name)
        return weight

    _float32 = staticmethod(mx.array)

    def filter(self, name: str, size: int) -> ops.Filter:
        columns = super().filter(name, size).astype(mx.float32).T
        parts = tuple(mx.contiguous(column) for column in columns)
        mx.eval(parts)
        return parts

    def _pack_adapters(self, a: np.ndarray, b: np.ndarray) -> ops.Adapters:
        pair = tuple(mx.array(np.swapaxes(part, 1, 2)).astype(self.dtype) for part in (a, b))
        mx.eval(pair)
        return pair

    def _shift(self, vector: mx.array, offset: float) -> mx.array:
        shifted = (vector.astype(mx.float32) + offset).astype(vector.dtype)
        mx.eval(shifted)
        return shifted

    def _ones(self, width: int) -> mx.array:
        return mx.ones(width, self.dtype)

    def _blocks_of(
        self, names: tuple[str, ...], for_products: bool = True
    ) -> list[mx.array | LowBitMatrix]:
        """Concatenate the rows of the matrices, in as few blocks as the formats allow."""
        if names not in self._blocks:
            blocks = self._read([f"{name}.weight" for name in names])
            is_slow = self.device.type == mx.cpu and self.dtype == mx.float32
            if for_products and is_slow and len(blocks) == 1 and isinstance(blocks[0], mx.array):
                columns = mx.contiguous(blocks[0].T)  # products are twice as fast
                blocks = [columns.T]
                mx.eval(columns, blocks)
            self._blocks[names] = blocks
        return self._blocks[names]

    def _pack(self, run: Sequence[AffineWeight]) -> LowBitMatrix:
        return quantized.pack(run, self.dtype, self.device, self._has_kernel(run[0]))

    def _has_kernel(self, tensor: Tensor | AffineWeight) -> bool:
        return not isinstance(tensor, AffineWeight) or tensor.format not in self._faults

    def _dense(self, parts: Sequence[Tensor]) -> mx.array:
        kinds = {part.dtype for part in parts}
        bits = [part.bits if len(kinds) == 1 else part.float32() for part in parts]
        array = mx.array(bits[0] if len(bits) == 1 else np.concatenate(bits))
        if kinds == {"bfloat16"}:
            array = array.view(mx.bfloat16)
        array = array.astype(self.dtype)
        mx.eval(array)
        for part in parts:
            part.release()
        return array

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        """As in BaseWeights, on the model's device."""
        with super()._allocating(), mx.stream(self.device):
            yield


def _free_memory(device: mx.Device) -> int | None:
    """Bytes available to weights. Metal runs a model beyond its working set, slowly."""
    free = runtime.free_memory(device)
    if free is None or device.type == mx.cpu:
        return free
    return max(free, mx.device_info(device).get("memory_size", 0) - mx.get_active_memory())
