"""Helpers of both writers. Tensors are streamed in slabs of rows, so peak memory is the new form of
the largest tensor.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.files.tensor import Tensor, encode
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.models.parts import GatedDelta
from mlx_llama.core.system import machine

_SLAB = 1 << 18  # weights at a time: a few float32 arrays of this size fit a core's cache


@dataclass(frozen=True)
class Written:
    path: Path
    nbytes: int  # size of the tensors
    weights: int  # their number
    notices: tuple[str, ...]  # lines for the user

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.weights


def convert_slabs(
    tensor: Tensor | AffineWeight,
    convert: Callable[[int, np.ndarray], None],
    advance: Callable[[int], None],
    order: np.ndarray | None = None,
    dtype: str = "float32",
) -> None:
    """Call `convert` for all rows, slab by slab, on all cores, with the first row and float32
    [n, ...] rounded to `dtype`. advance: of core.system.progress, called with bytes of the source.
    order: int [N], the source's row for each row. Raises CheckpointError: a value that is not
    finite at `dtype`; a truncated file.
    """
    rows = tensor.shape[0] if tensor.shape else 1
    array = np.atleast_1d(tensor.array) if isinstance(tensor, Tensor) else None
    step = max(1, _SLAB // math.prod(tensor.shape[1:]))

    def run(start: int) -> None:
        stop = min(start + step, rows)
        ids = None if order is None else order[start:stop]
        tensor.check_file()
        if array is not None:
            values = array[slice(start, stop) if ids is None else ids].astype(np.float32)
        else:
            assert isinstance(tensor, AffineWeight)
            values = tensor.rows(start, stop).float32() if ids is None else tensor.take(ids)
        if dtype != "float32" and not (isinstance(tensor, Tensor) and tensor.dtype == dtype):
            values = encode(values, dtype).astype(np.float32)
        if not np.isfinite(values).all():
            remedy = "" if dtype == "float32" else ", or take its float32 or bfloat16 version"
            raise CheckpointError(
                f"tensor {tensor.name} holds a value that is not finite at {dtype}, in rows "
                f"{start} to {stop - 1}: it cannot be quantised; fetch the model again{remedy}"
            )
        convert(start, values)
        advance(tensor.nbytes * stop // rows - tensor.nbytes * start // rows)

    for _ in _pool(os.getpid()).map(run, range(0, rows, step)):
        pass


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of a process: a forked one lacks its parent's."""
    # With buffers of several groups, NumPy copies a vector that multiplies each row.
    return ThreadPoolExecutor(machine.physical_cores(), "quantize", np.setbufsize, (1024,))


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to write: its matrices, if it is a stack of experts'."""

    parts: tuple[Tensor | AffineWeight, ...]
    is_stack: bool

    @property
    def tensor(self) -> Tensor | AffineWeight:
        """The tensor, or the first of the stack."""
        return self.parts[0]

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stack for that of each tensor."""
        return (len(self.parts), *shape) if self.is_stack else shape

    def release(self) -> None:
        for part in self.parts:
            part.release()


def stack_experts(checkpoint: Checkpoint) -> dict[str, tuple[Tensor | AffineWeight, ...]]:
    """Tensors by name, experts' matrices under the name of their stack, others alone."""
    stored, config = checkpoint.stored or checkpoint.tensors, checkpoint.config
    if FAMILIES[config.architecture].splits:
        stored = checkpoint.tensors
    stacks = {
        f"{stack}.{kind}": tuple(stored[f"{name}.{kind}"] for name in names)
        for stack, names in config.stacks().items()
        for kind in ("weight", "bias")
        if f"{names[0]}.{kind}" in stored
    }
    in_stacks = {tensor.name for parts in stacks.values() for tensor in parts}
    return {name: (tensor,) for name, tensor in stored.items() if name not in in_stacks} | stacks


def swap_heads(
    config: LlamaConfig, tiled: bool
) -> dict[str, tuple[np.ndarray | None, np.ndarray | None]]:
    """{tensor of the delta rule: (its rows, its columns), None for all as they are} where value
    heads are in another order than `tiled`, as of parts.GatedDelta.
    """
    mixers = (mixer for mixer in config.recurrent if isinstance(mixer, GatedDelta))
    others = (mixer for mixer in mixers if mixer.tiled != tiled)
    return {name: order for mixer in others for name, order in mixer.swaps().items()}


def notice_requantised(checkpoint: Checkpoint, kept: Collection[str] = ()) -> list[str]:
    """Notice that the source is quantised already, if so. kept: matrices that keep their codes."""
    formats = {
        tensor.description
        for name, parts in stack_experts(checkpoint).items()
        for tensor in (parts if name not in kept else ())
        if isinstance(tensor, AffineWeight)
    }
    if not formats:
        return []
    return [
        f"{checkpoint.name} is quantised already ({', '.join(sorted(formats))}): each such matrix "
        "was dequantised and quantised again, which adds an error; start from the 16-bit model if "
        "there is one"
    ]


def notice_unquantised(
    names: list[str], checkpoint: Checkpoint, dtype: str, blocks: str
) -> list[str]:
    """Notice that matrices keep `dtype` because `blocks` do not divide their rows."""
    matrices = f"{len(names)} matrices (such as {names[0]}) are"
    if len(names) == 1:
        matrices = f"1 matrix ({names[0]}) is"
    tensors = stack_experts(checkpoint)
    lengths = ", ".join(sorted({str(tensors[name][0].shape[1]) for name in names}))
    return [f"{matrices} kept at {dtype}: {blocks} do not divide rows of {lengths}"]


def count_weights(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
