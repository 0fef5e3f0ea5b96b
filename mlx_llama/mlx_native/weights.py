"""Stored tensors as the layers' matrices, copied to the device: at the activations' width, or packed at their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.weights import check_memory, group_runs
from mlx_llama.core.errors import OutOfMemoryError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.system import progress

from . import facts, runtime
from .dense import DenseMatrix
from .layers import Embedding, Linear, RMSNorm
from .quantized import QuantizedMatrix, can_concatenate

# Texts of MLX's RuntimeErrors on GPUs (mlx/backend/{metal,cuda}/allocator.cpp). On Linux its CPU device crashes instead, so
# memory is checked before anything is read.
_ALLOCATION = ("malloc]", "unable to allocate", "attempting to allocate", "out of memory")


class Weights:
    """A checkpoint's tensors by name, each as the layer that holds it. Every tensor is read when it is asked for.

    dtype: of activations and of unpacked weights. One matrix or block at a time is in memory twice. Raises
    OutOfMemoryError, before anything is read or while it is read.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, device: mx.Device):
        self.config, self.tensors = checkpoint.config, checkpoint.tensors
        self.dtype, self.device = dtype, device
        self.nbytes = facts.weights_nbytes(self.tensors.values(), runtime.dtype_name(dtype), device.type == mx.gpu)
        self._blocks: dict[tuple[str, ...], list[mx.array | QuantizedMatrix]] = {}  # read so far, by names
        check_memory(self.nbytes, lambda: _free_memory(device), runtime.device_name(device))
        self._advance = progress.meter(checkpoint.nbytes)

    def linear(self, *names: str) -> Linear:
        """The modules' matrices as one, rows on rows, and their biases where they have any."""
        biases = [key for name in names if (key := f"{name}.bias") in self.tensors]
        with self._allocating():
            blocks = [DenseMatrix(block.T) if isinstance(block, mx.array) else block
                      for block in self._matrix(*names, for_products=True)]
            mx.eval([block.columns for block in blocks if isinstance(block, DenseMatrix)])
            return Linear(blocks[0] if len(blocks) == 1 else tuple(blocks), self._vector(*biases) if biases else None)

    def norm(self, name: str | None) -> RMSNorm | None:
        """The norm of that name; None for None."""
        with self._allocating():
            return name and RMSNorm(self._vector(f"{name}.weight"), self.config.rms_norm_eps)

    def embedding(self, name: str) -> Embedding:
        """The embedding; a tied head shares its memory."""
        with self._allocating():
            (weight,) = self._matrix(name, for_products=name == self.config.head_name)
            return Embedding(weight)

    def _matrix(self, *names: str, for_products: bool) -> list[mx.array | QuantizedMatrix]:
        """The matrices, rows on rows, in as few blocks as the formats allow."""
        if names not in self._blocks:
            blocks = self._read(*(f"{name}.weight" for name in names))
            if for_products and len(blocks) == 1 and isinstance(blocks[0], mx.array):
                blocks = [self._lay_for_products(blocks[0])]
            self._blocks[names] = blocks
        return self._blocks[names]

    def _vector(self, *keys: str) -> mx.array:
        (vector,) = self._read(*keys)
        return vector

    def _read(self, *keys: str) -> list[mx.array | QuantizedMatrix]:
        blocks = []
        for run in group_runs(map(self.tensors.__getitem__, keys), can_concatenate):
            is_low_bit = isinstance(run[0], AffineWeight)
            blocks.append(QuantizedMatrix.pack(run, self.dtype, self.device) if is_low_bit else self._copy(run))
            self._advance(sum(tensor.nbytes for tensor in run))
        return blocks

    def _copy(self, parts: Sequence[Tensor]) -> mx.array:
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

    def _lay_for_products(self, weight: mx.array) -> mx.array:
        """The same matrix, column after column in memory on the CPU at float32, where products are then twice as fast."""
        if self.device.type != mx.cpu or self.dtype != mx.float32:
            return weight
        columns = mx.contiguous(weight.T)
        weight = columns.T
        mx.eval(columns, weight)
        return weight

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        """On the model's device; failed allocations, which MLX reports as RuntimeError, raise OutOfMemoryError."""
        try:
            with mx.stream(self.device):
                yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not any(text in str(error).lower() for text in _ALLOCATION):
                raise
            raise OutOfMemoryError.of(self.nbytes, None, runtime.device_name(self.device)) from None


def _free_memory(device: mx.Device) -> int | None:
    """Bytes that weights may take; None: unknown.

    Metal's recommended working set is no limit: a model beyond it runs, slowly. Its limit is the machine's memory.
    """
    free = runtime.free_memory(device)
    if free is None or device.type == mx.cpu:
        return free
    return max(free, mx.device_info(device).get("memory_size", 0) - mx.get_active_memory())
