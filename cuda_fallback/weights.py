"""Stored tensors as the layers' matrices: fused, packed and uploaded to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mlx_llama.core.backends.shards import take_share
from mlx_llama.core.backends.weights import check_memory, group_runs, refuse_formats
from mlx_llama.core.errors import OutOfMemoryError
from mlx_llama.core.files.adapters import stack, stacked_nbytes
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.llama import Embedding, Linear, RMSNorm, SummedLinear
from mlx_llama.core.system import progress

from . import facts, kernels, ops, runtime
from .quantized import QuantizedMatrix, QuantizedStack, can_concatenate
from .ranks import Ranks, ShareEmbedding, Vocabulary

_BUFFER = 32 << 20  # bytes of a pinned buffer; one is filled while the other is sent


class Weights:
    """A checkpoint's tensors by name, each as the layer that holds it. A tensor is read once, when it is first asked for.

    dtype: of activations and of weights that are not packed; the argument is a dtype's name or "auto" for the stored one.
    nbytes: that the weights take on the device. notices: about the dtype. Raises OutOfMemoryError before anything is
    read where a GPU has less memory free than the weights take; so does each reading that runs out of memory. ranks: the
    processes that each take a share of the checkpoint, None for all of it here; config and tensors are the share's.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: torch.device, ranks: Ranks | None = None):
        self.ranks = ranks
        self.share = take_share(checkpoint, ranks.rank, ranks.size) if ranks else None
        checkpoint = self.share.checkpoint if self.share else checkpoint
        self.config, self.tensors, self.device = checkpoint.config, checkpoint.tensors, device
        self.adapters = checkpoint.adapters
        preferred = facts.preferred_dtype(self.tensors.values(), checkpoint.dtype)
        self.dtype = runtime.pick_dtype(dtype, preferred, device, self.config.exceeds_float16)
        self.nbytes = facts.weights_nbytes(self.tensors.values(), runtime.dtype_name(self.dtype), device.type != "cpu")
        self.nbytes += stacked_nbytes(self.adapters, self.config, self.dtype.itemsize)
        if device.type != "cpu":  # where weights stay mapped
            check_memory(self.nbytes, lambda: runtime.free_memory(device), runtime.device_name(device))
        self.notices: tuple[str, ...] = ()
        if dtype == "auto" and (chosen := runtime.dtype_name(self.dtype)) != preferred:
            self.notices = (f"{runtime.device_name(device)} has no {preferred}: computing in {chosen}",)
        self._read: dict[tuple[str, ...], ops.Matrix | tuple[ops.Matrix, ...]] = {}  # by names
        self._advance = progress.meter(checkpoint.nbytes)
        self._upload: Callable[[torch.Tensor, torch.Tensor], object] | None = None  # made when it is needed

    @property
    def vocabulary(self) -> Vocabulary | None:
        """How the logits of all shares become one answer; None for a head with the whole vocabulary."""
        return Vocabulary(self.ranks, self.share.vocabulary) if self.share else None

    def linear(self, *names: str) -> Linear:
        """The modules' matrices as one, rows on rows, and their biases where they have any."""
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self.tensors]
        linear = (ops, self._matrix(*(f"{name}.weight" for name in names)), self._matrix(*biases) if biases else None,
                  self._adapt(names))
        return SummedLinear(*linear, ranks=self.ranks) if self.share and names[0] in self.share.summed else Linear(*linear)

    def _adapt(self, names: Sequence[str]) -> ops.Adapters | None:
        """Additions of the adapters to the modules' product; None: nothing."""
        shapes = [self.tensors[f"{name}.weight"].shape for name in names]
        stacked = stack(self.adapters, names, [shape[0] for shape in shapes], shapes[0][1])
        if stacked is None:
            return None
        try:
            return tuple(torch.from_numpy(part).to(self.device, self.dtype) for part in stacked)
        except RuntimeError as error:
            if not runtime.is_out_of_memory(error):
                raise
            raise OutOfMemoryError.of(self.nbytes, None, runtime.device_name(self.device)) from None

    def stack(self, names: Sequence[str]) -> ops.Stack:
        """The matrices of all experts, by number. Raises CheckpointError if they have several formats."""
        keys = [f"{name}.weight" for name in names]
        whole = self._matrix(*keys)
        if isinstance(whole, tuple):
            first = self.tensors[keys[0]]
            raise refuse_formats(next(key for key in keys if not can_concatenate(first, self.tensors[key])))
        return (whole.view(len(names), -1, whole.shape[-1]) if isinstance(whole, torch.Tensor)
                else QuantizedStack(len(names), whole))

    def norm(self, name: str | None) -> RMSNorm | None:
        """The norm of that name; None for None."""
        if name is None:
            return None
        weight, offset = self._matrix(f"{name}.weight"), self.config.norm_offset
        return RMSNorm(ops, (weight.float() + offset).to(weight.dtype) if offset else weight, self.config.rms_norm_eps)

    def embedding(self, name: str) -> Embedding:
        """The embedding; shares its matrix with a tied head."""
        weight = self._matrix(f"{name}.weight")
        if self.share:
            return ShareEmbedding(ops, weight, self.share.vocabulary[self.ranks.rank], self.ranks)
        return Embedding(ops, weight)

    def _matrix(self, *names: str) -> ops.Matrix | tuple[ops.Matrix, ...]:
        """Tensors rows on rows, in as few blocks as their formats allow; of one block, the block."""
        if names not in self._read:
            try:
                blocks = [self._block(run) for run in group_runs((self.tensors[name] for name in names), can_concatenate)]
            except (MemoryError, RuntimeError) as error:
                if not runtime.is_out_of_memory(error):
                    raise
                raise OutOfMemoryError.of(self.nbytes, None, runtime.device_name(self.device)) from None
            self._read[names] = blocks[0] if len(blocks) == 1 else tuple(blocks)
        return self._read[names]

    def _block(self, run: Sequence[Tensor | AffineWeight]) -> ops.Matrix:
        for weight in run:
            weight.check_file()
        if isinstance(run[0], AffineWeight):
            block = QuantizedMatrix.pack(run, self.dtype, self.device, kernels.find_kernels(self.device).packed)
        else:
            block = self._dense(run)
        self._advance(sum(weight.nbytes for weight in run))
        return block

    def _dense(self, run: Sequence[Tensor]) -> torch.Tensor:
        if len(run) == 1 and self.device.type == "cpu" and run[0].dtype == runtime.dtype_name(self.dtype):
            return _mapped(run[0])
        if self._upload is None:
            self._upload = torch.Tensor.copy_ if self.device.type == "cpu" else Upload(self.device)
        rows = [stored.shape[0] for stored in run]
        block = torch.empty((sum(rows), *run[0].shape[1:]), dtype=self.dtype, device=self.device)
        for target, stored in zip(block.split(rows), run):
            self._upload(target, _mapped(stored))
            stored.release()
        return block


class Upload:
    """Copies into tensors of the device, converting; to a GPU through two pinned buffers, so that one part is copied
    while the next is read from the file."""

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


def _mapped(stored: Tensor) -> torch.Tensor:
    """As it lies in the file; copied only from an unaligned one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # weights are read only
        bits = torch.from_numpy(np.require(stored.bits, requirements="A"))
    return bits.view(torch.bfloat16) if stored.dtype == "bfloat16" else bits
