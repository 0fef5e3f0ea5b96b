"""BaseWeights: layers from a checkpoint's tensors; the backends' weights.py make the matrices."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np

from mlx_llama.core.errors import CheckpointError, OutOfMemoryError
from mlx_llama.core.files.adapters import stack
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.llama import Embedding, Linear, RMSNorm, SummedLinear
from mlx_llama.core.ops import Array, Matrix, Stack
from mlx_llama.core.system import progress

from .shards import Ranks, ShareEmbedding, Vocabulary, take_share

T = TypeVar("T")


class BaseWeights:
    """A checkpoint's tensors by name as layers; a tensor is read when first asked for.

    ranks: the processes that each take a share of the checkpoint, None for all of it here; config,
    tensors and adapters are the share's.
    """

    ops: ClassVar[ModuleType]
    runtime: ClassVar[ModuleType]
    vocabulary_type: ClassVar[type[Vocabulary]] = Vocabulary
    notices: tuple[str, ...] = ()  # about the dtype and kernels
    nbytes = 0  # that the weights take on the device
    _matrix: Callable[[Sequence[str]], Matrix]  # modules' matrices as one, rows on rows
    _vector: Callable[[Sequence[str]], Array]
    _shift: Callable[[Array, float], Array]  # a vector plus an offset, rounded once
    _ones: Callable[[int], Array]  # a vector of a width
    _float32: Callable[[np.ndarray], Array]  # on the device
    _stack: Callable[[Sequence[str]], Stack]
    _adapt: Callable[[Sequence[str]], Any]  # what adapters add to a product, or None

    def __init__(self, checkpoint: Checkpoint, device: Any = "cpu", ranks: Ranks | None = None):
        self.device, self.ranks = device, ranks
        self.share = take_share(checkpoint, ranks.rank, ranks.size) if ranks else None
        self.checkpoint = self.share.checkpoint if self.share else checkpoint
        self.config, self.tensors = self.checkpoint.config, self.checkpoint.tensors
        self.adapters = self.checkpoint.adapters

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Joins the logits of all shares; None for a head with the whole vocabulary."""
        if self.share is None:
            return None
        assert self.ranks is not None
        return self.vocabulary_type(self.ranks, self.share.vocabulary)

    def linear(self, names: Sequence[str]) -> Linear:
        """The modules' matrices as one, rows on rows, and their biases where they have any."""
        biases = [key for name in names if (key := f"{name}.bias") in self.tensors]
        with self._allocating():
            matrix, bias = self._matrix(names), self._vector(biases) if biases else None
            adapters = self._adapt(names)
        if self.share and names[0] in self.share.summed:
            return SummedLinear(self.ops, matrix, bias, adapters, ranks=self.ranks)
        return Linear(self.ops, matrix, bias, adapters)

    def norm(self, name: str | None) -> RMSNorm | None:
        """The norm of that name; None for None."""
        if name is None:
            return None
        with self._allocating():
            weight, offset = self._vector([f"{name}.weight"]), self.config.norm_offset
            weight = self._shift(weight, offset) if offset else weight
            return RMSNorm(self.ops, weight, self.config.rms_norm_eps)

    def norm_of_ones(self, width: int) -> RMSNorm:
        """A norm without weights."""
        with self._allocating():
            return RMSNorm(self.ops, self._ones(width), self.config.rms_norm_eps)

    def vector(self, name: str | None) -> Array | None:
        """The vector of that name; None for None."""
        if name is None:
            return None
        with self._allocating():
            return self._vector([name])

    def send(self, numbers: np.ndarray) -> Array:
        """float32 numbers on the device, not rounded."""
        with self._allocating():
            return self._float32(numbers)

    def float32(self, name: str) -> Array:
        """The vector of that name in float32, whatever the model's dtype."""
        return self.send(self.tensors[name].float32())

    def filter(self, name: str, size: int) -> Array:
        """The weights of a convolution of each of `size` channels: [size, positions]."""
        with self._allocating():
            return self._vector([f"{name}.weight"]).reshape(size, -1)

    def embedding(self, name: str) -> Embedding:
        """The embedding; a tied head shares its memory."""
        with self._allocating():
            weight = self._table(name)
        if self.share is None:
            return Embedding(self.ops, weight)
        assert self.ranks is not None
        span = self.share.vocabulary[self.ranks.rank]
        return ShareEmbedding(self.ops, weight, span, self.ranks)

    def stack(self, names: Sequence[str]) -> Stack:
        """The matrices of all experts. Raises CheckpointError if they have several formats."""
        with self._allocating():
            return self._stack(names)

    def stack_biases(self, names: Sequence[str]) -> Array:
        """The biases of all experts, [experts, N]."""
        with self._allocating():
            return self._vector([f"{name}.bias" for name in names]).reshape(len(names), -1)

    def numbers(self, names: Sequence[str]) -> tuple[float, ...]:
        """Tensors of a single number each."""
        return tuple(self.tensors[name].float32().item() for name in names)

    def _table(self, name: str) -> Matrix:
        """The matrix of an embedding."""
        return self._matrix((name,))

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        """Failed allocations, which frameworks report as RuntimeError, raise OutOfMemoryError."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self.runtime.is_out_of_memory(error):
                raise
            device = self.runtime.device_name(self.device)
            raise OutOfMemoryError.of(self.nbytes, None, device) from None


def check_memory(nbytes: int, free_memory: Callable[[], int | None], device: str) -> None:
    """Raise OutOfMemoryError if weights of `nbytes` exceed the memory that is known free."""
    free = free_memory()
    if free is not None and nbytes > free:
        gc.collect()  # a dropped model may wait for its collection
        free = free_memory()
    if free is not None and nbytes > free:
        raise OutOfMemoryError.of(nbytes, free, device)


def refuse_formats(
    names: Sequence[str], matrices: Sequence[T], can_stack: Callable[[T, T], bool]
) -> CheckpointError:
    """The error for matrices of a layer's experts that cannot all be stacked with the first."""
    odd = next(name for name, matrix in zip(names, matrices) if not can_stack(matrices[0], matrix))
    return CheckpointError(
        f"{odd}: differs in format from the same matrix of the layer's other experts, which are "
        "multiplied together; quantise all of them alike"
    )


def group_runs(items: Iterable[T], can_concatenate: Callable[[T, T], bool]) -> list[list[T]]:
    """Neighbours that can be concatenated with the first of their run, in order."""
    runs: list[list[T]] = []
    for item in items:
        if runs and can_concatenate(runs[-1][0], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


class BlockWeights(BaseWeights):
    """Weights that are copied to a device: tensors of one format are concatenated to a block."""

    # fields that are equal in low-bit weights of one block
    block_fields: ClassVar[tuple[str, ...]]
    stack_type: ClassVar[type]  # (count, block): low-bit matrices of all experts
    _pack: Callable[[Sequence[Any]], Matrix]  # a block of low-bit weights
    _dense: Callable[[Sequence[Any]], Array]  # one of others
    _pack_adapters: Callable[[Array, Array], Any]  # takes core.files.adapters.stack's arrays

    def __init__(self, checkpoint: Checkpoint, device: Any = "cpu", ranks: Ranks | None = None):
        super().__init__(checkpoint, device, ranks)
        # read so far, by the tensors' names
        self._blocks: dict[tuple[str, ...], list[Matrix]] = {}
        self._advance = progress.meter(self.checkpoint.nbytes)

    def can_concatenate(self, first: Tensor | AffineWeight, second: Tensor | AffineWeight) -> bool:
        """True if the rows of two weights can be concatenated to a block."""
        if not isinstance(first, AffineWeight) or not isinstance(second, AffineWeight):
            return isinstance(first, AffineWeight) == isinstance(second, AffineWeight)
        return all(getattr(first, name) == getattr(second, name) for name in self.block_fields)

    def _read(self, keys: Sequence[str]) -> list[Matrix]:
        """Concatenate the rows of tensors, in as few blocks as their formats allow."""
        blocks: list[Matrix] = []
        for run in group_runs((self.tensors[key] for key in keys), self.can_concatenate):
            for tensor in run:
                tensor.check_file()
            blocks.append(self._pack(run) if isinstance(run[0], AffineWeight) else self._dense(run))
            self._advance(sum(tensor.nbytes for tensor in run))
        return blocks

    def _adapt(self, names: Sequence[str]) -> Any:
        shapes = [self.tensors[f"{name}.weight"].shape for name in names]
        stacked = stack(self.adapters, names, [shape[0] for shape in shapes], shapes[0][1])
        return None if stacked is None else self._pack_adapters(stacked[0], stacked[1])

    def _vector(self, keys: Sequence[str]) -> Array:
        (vector,) = self._read(keys)
        return vector

    def _stack(self, names: Sequence[str]) -> Stack:
        keys = [f"{name}.weight" for name in names]
        blocks, tensors = self._read(keys), [self.tensors[key] for key in keys]
        if len(blocks) > 1:
            raise refuse_formats(keys, tensors, self.can_concatenate)
        if isinstance(tensors[0], AffineWeight):
            return self.stack_type(len(names), blocks[0])
        return blocks[0].reshape(len(names), -1, blocks[0].shape[-1])
