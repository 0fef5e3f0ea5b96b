"""Weights on their way from a mapped file to the device's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight

from . import runtime

_BUFFER = 32 << 20  # bytes of a pinned buffer, of which one is filled while the other is sent


def check_memory(weights: Iterable[Tensor | AffineWeight], dtype: torch.dtype, device: torch.device) -> None:
    """Raises BackendError, before anything is made, when a GPU has less memory free than the weights take."""
    if device.type == "cpu":
        return  # there they stay mapped
    needed = sum(weight.nbytes if isinstance(weight, AffineWeight) else _count(weight.shape) * dtype.itemsize
                 for weight in weights)
    free = runtime.free_memory(device)
    if free is not None and needed > free:
        gc.collect()  # a model that was let go of, but not collected yet
        free = runtime.free_memory(device)
    if free is not None and needed > free:
        raise BackendError(f"the weights take {needed / 1e9:.2f} GB, and {runtime.device_name(device)} has {free / 1e9:.2f} GB "
                           "free: choose a smaller model, quantise this one (python -m mlx_llama.quantize), close other "
                           "programs, or choose --backend cpu")


class Upload:
    """Copies into tensors of the device, converting; to a GPU through two pinned buffers, so that the copy of one part
    runs while the next is read from the file."""

    def __init__(self, device: torch.device, nbytes: int = _BUFFER):
        self.on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target: contiguous, on the device; source: on the host, of the same shape and any dtype. The copy to a GPU may
        still run on return, but the source is read."""
        target, source = target.view(-1), source.reshape(-1)
        step = self._buffers[0].nbytes // target.itemsize
        for start in range(0, len(target), step):
            stop = min(start + step, len(target))
            turn, self._next = self._next, 1 - self._next
            if self._sent[turn]:
                self._sent[turn].synchronize()
            part = self._buffers[turn][:(stop - start) * target.itemsize].view(target.dtype)
            part.copy_(source[start:stop])
            target[start:stop].copy_(part, non_blocking=True)
            if self.on_gpu:
                self._sent[turn] = torch.cuda.Event()
                self._sent[turn].record(torch.cuda.current_stream(target.device))


def _count(shape: Iterable[int]) -> int:
    return int(torch.Size(shape).numel())
