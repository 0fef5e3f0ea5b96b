"""Stored tensors as the layers' matrices: fused, packed and uploaded to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mlx_llama.core.backends.weights import BlockWeights, check_memory
from mlx_llama.core.dtypes import dtype_name
from mlx_llama.core.files.adapters import stacked_nbytes
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight

from . import facts, kernels, ops, runtime
from .quantized import QuantizedMatrix, QuantizedStack
from .ranks import Ranks

_BUFFER = 32 << 20  # bytes of a pinned buffer; one is filled while the other is sent


class Weights(BlockWeights):
    """Layers of torch's tensors.

    dtype: of activations and of weights that are not packed; the argument is a dtype's name or
    "auto" for the stored one. Raises OutOfMemoryError before anything is read where a GPU has less
    memory free than the weights take; so does each reading that runs out of memory.
    """

    ops, runtime = ops, runtime
    block_fields = tuple("bits group_size offset has_biases two_level scale_dtype table".split())
    stack_type = QuantizedStack

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: torch.device, ranks: Ranks | None = None
    ):
        super().__init__(checkpoint, device, ranks)
        checkpoint = self.checkpoint
        preferred = facts.preferred_dtype(self.tensors.values(), checkpoint.dtype)
        self.dtype = runtime.pick_dtype(dtype, preferred, device, checkpoint.config.exceeds_float16)
        on_gpu, name = device.type != "cpu", runtime.device_name(device)
        chosen = dtype_name(self.dtype)
        self.nbytes = facts.weights_nbytes(self.tensors.values(), chosen, on_gpu)
        self.nbytes += stacked_nbytes(self.adapters, self.config, self.dtype.itemsize)
        if on_gpu:  # on the CPU weights stay mapped
            check_memory(self.nbytes, lambda: runtime.free_memory(device), name)
        if dtype == "auto" and chosen != preferred:
            self.notices = (f"{name} has no {preferred}: computing in {chosen}",)
        # made when it is needed
        self._upload: Callable[[torch.Tensor, torch.Tensor], object] | None = None

    def _matrix(self, names: Sequence[str]) -> ops.Matrices:
        blocks = self._read([f"{name}.weight" for name in names])
        return blocks[0] if len(blocks) == 1 else tuple(blocks)

    def _shift(self, vector: torch.Tensor, offset: float) -> torch.Tensor:
        return (vector.float() + offset).to(vector.dtype)

    def _ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def _float32(self, numbers: np.ndarray) -> torch.Tensor:
        return runtime.send(numbers, self.device)

    def _pack_adapters(self, a: np.ndarray, b: np.ndarray) -> ops.Adapters:
        return tuple(torch.from_numpy(part).to(self.device, self.dtype) for part in (a, b))

    def _read(self, keys: Sequence[str]) -> list[ops.Matrix]:
        """As in BlockWeights; a tied head shares the embedding's memory."""
        if (keys := tuple(keys)) not in self._blocks:
            self._blocks[keys] = super()._read(keys)
        return self._blocks[keys]

    def _pack(self, run: Sequence[AffineWeight]) -> QuantizedMatrix:
        packed = kernels.find_kernels(self.device).packed
        return QuantizedMatrix.pack(run, self.dtype, self.device, packed)

    def _dense(self, run: Sequence[Tensor]) -> torch.Tensor:
        on_cpu = self.device.type == "cpu"
        if on_cpu and len(run) == 1 and run[0].dtype == dtype_name(self.dtype):
            return _mapped(run[0])
        if self._upload is None:
            self._upload = torch.Tensor.copy_ if on_cpu else Upload(self.device)
        rows = [stored.shape[0] for stored in run]
        block = torch.empty((sum(rows), *run[0].shape[1:]), dtype=self.dtype, device=self.device)
        for target, stored in zip(block.split(rows), run):
            self._upload(target, _mapped(stored))
            stored.release()
        return block


class Upload:
    """Copies into tensors of the device, converting; to a GPU through two pinned buffers, so that
    one part is copied while the next is read from the file."""

    def __init__(self, device: torch.device, nbytes: int = _BUFFER):
        self.on_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu) for _ in range(2)
        ]
        self.send: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target: contiguous, on the device; source: on the host, of the same shape and any dtype.
        The copy to a GPU may still run on return, but the source is read."""
        target, source = target.view(-1), source.reshape(-1)
        step = self._buffers[0].nbytes // target.itemsize
        for start in range(0, len(target), step):
            stop = min(start + step, len(target))
            turn, self._next = self._next, 1 - self._next
            if self.send[turn]:
                self.send[turn].synchronize()
            part = self._buffers[turn][: (stop - start) * target.itemsize].view(target.dtype)
            part.copy_(source[start:stop])
            target[start:stop].copy_(part, non_blocking=True)
            if self.on_gpu:
                self.send[turn] = torch.cuda.Event()
                self.send[turn].record(torch.cuda.current_stream(target.device))


def _mapped(stored: Tensor) -> torch.Tensor:
    """As it lies in the file; copied only from an unaligned one."""
    with warnings.catch_warnings():
        # weights are read only
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        bits = torch.from_numpy(np.require(stored.bits, requirements="A"))
    return bits.view(torch.bfloat16) if stored.dtype == "bfloat16" else bits
