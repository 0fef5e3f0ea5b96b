"""Recurrent states of a cache's rows: a block of float32 numbers each, which kernels address."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from mlx_llama.core.models.parts import Recurrent

from .pages import HUGE_PAGE, allocate

Places = tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]


def find_places(mixers: Sequence[Recurrent]) -> tuple[Places, int]:
    """By slot and state, its first number in a block and its shape; and a block's size."""
    places, size = [], 0
    for mixer in mixers:
        of_mixer = []
        for shape in mixer.states:
            of_mixer.append((size, shape))
            size += math.prod(shape)
        places.append(tuple(of_mixer))
    return tuple(places), size


class Block:
    """The states of one row. Not changed after the call that wrote them."""

    def __init__(self, places: Places, array: np.ndarray):
        self.places, self.array, self.address = places, array, array.ctypes.data

    def __getitem__(self, slot: int) -> tuple[np.ndarray, ...]:
        return tuple(
            self.array[start : start + math.prod(shape)].reshape(shape)
            for start, shape in self.places[slot]
        )


class Blocks:
    """Blocks of a cache's rows. The memory of up to `kept` that nobody holds is used again: fresh
    memory would cost a page fault for every 4 KB of a decoded token's states.
    """

    def __init__(self, mixers: Sequence[Recurrent]):
        self.places, self.size = find_places(mixers)
        self._kept, self._spare = 0, list[np.ndarray]()

    def keep(self, count: int) -> None:
        """Keep the memory of so many blocks at most."""
        self._kept = count
        del self._spare[count:]

    @property
    def spare_nbytes(self) -> int:
        """Bytes of memory that is kept for the next block."""
        return sum(memory.nbytes for memory in self._spare)

    def take(self) -> Block:
        """A new block, of undefined numbers."""
        nbytes = 4 * self.size
        memory = self._spare.pop() if self._spare else allocate(nbytes, huge=nbytes >= HUGE_PAGE)
        # Views of this array hold it and not `memory`, since its base is no array.
        array = np.frombuffer(memoryview(memory), np.float32)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return Block(self.places, array)

    def copy(self, parts: Iterable[np.ndarray]) -> Block:
        """A block of these states, in order."""
        block = self.take()
        np.concatenate([part.reshape(-1) for part in parts], out=block.array)
        return block

    def _give_back(self, memory: np.ndarray) -> None:
        if len(self._spare) < self._kept:
            self._spare.append(memory)
