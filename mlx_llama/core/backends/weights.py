"""Rules that every backend's weights.py follows: fitting weights into memory, and fusing neighbours."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import TypeVar

from mlx_llama.core.errors import CheckpointError, OutOfMemoryError

T = TypeVar("T")


def check_memory(nbytes: int, free_memory: Callable[[], int | None], device: str) -> None:
    """Raises OutOfMemoryError if weights of `nbytes` exceed the free memory of `device`; None: unknown, so no error."""
    free = free_memory()
    if free is not None and nbytes > free:
        gc.collect()  # a dropped model may wait for its collection
        free = free_memory()
    if free is not None and nbytes > free:
        raise OutOfMemoryError.of(nbytes, free, device)


def refuse_formats(name: str) -> CheckpointError:
    """The error for a tensor whose format is not that of the other experts in its layer."""
    return CheckpointError(f"{name}: has another format than the same matrix of the layer's other experts, which are "
                           "multiplied together; quantise all of them alike")


def group_runs(items: Iterable[T], can_concatenate: Callable[[T, T], bool]) -> list[list[T]]:
    """Neighbours that can be concatenated with the first of their run, in order."""
    runs: list[list[T]] = []
    for item in items:
        if runs and can_concatenate(runs[-1][0], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
