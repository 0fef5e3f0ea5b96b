"""Random numbers that every backend reproduces bit for bit.

A counter-based generator has no state: the noise of a candidate token is a function of the seed,
the position of the sampled token and the candidate's vocabulary index. Sampling is then
`argmax(logits + noise)` with Gumbel noise, which draws from softmax(logits) (Gumbel 1954; Maddison,
Tarlow and Minka 2014, "A* sampling").

Generator: Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3"), key = the 64-bit seed's low and high word, counter = (vocabulary
index, position); only the first output word is used. `threefry` below is the definition, over any
arrays of 32-bit words.

The device computes no logarithm: logarithms differ in the last bit between libraries, and one bit
can change a token. Instead k + 1, with k the word's upper 24 bits, is converted to float32
(exactly). Its exponent and leading 11 bits of mantissa index a table that was computed once in
float64. The table is finest in the upper tail of the noise, which decides the argmax: 1/2048 of an
octave of its probability, down to 2**-24.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
CHANCE = 0xFFFFFFFF  # beyond all vocabularies: the counter of other decisions
TABLE_SHIFT = 12  # a float32 has 23 bits of mantissa; the upper 11 are kept
TABLE_OFFSET = 127 << (23 - TABLE_SHIFT)  # the index of 1.0


def split_seed(seed: int) -> tuple[int, int]:
    """The two 32-bit words (low, high) of a seed in [0, 2**64): the generator's key."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def threefry(
    low: Any, high: Any, counter0: Any, counter1: Any, rotate: Callable, spread: Callable
) -> Any:
    """Threefry-2x32-20 over arrays of 32-bit words that wrap: the first output word.

    low, high: of the key, and counter1: all [..., 1]; counter0: [N]. rotate(x, count): x with its
    bits rotated left, and may overwrite x; spread(x, like): x of another array's shape, writable if
    `rotate` writes to it.
    """
    keys = (low, high, low ^ high ^ PARITY)
    x0 = counter0 + low
    x1 = spread(counter1 + high, x0)
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 += x1
            x1 = rotate(x1, rotation)
            x1 ^= x0
        x0 += keys[(group + 1) % 3]
        x1 += keys[(group + 2) % 3] + (group + 1)
    return x0


def threefry2x32(
    key: Sequence[int | np.ndarray], counter0: np.ndarray, counter1: int | np.ndarray
) -> np.ndarray:
    """`threefry` in NumPy, uint32 [N]. key: two words; counter0: uint32 [N]. Words are numbers, or
    uint32 [..., 1].
    """
    key0, key1, counter1 = (
        word if isinstance(word, np.ndarray) else np.array([word & 0xFFFFFFFF], np.uint32)
        for word in (*key, counter1)
    )
    high = np.empty(np.broadcast(counter0, key0, counter1).shape, np.uint32)

    def rotate(x: np.ndarray, count: int) -> np.ndarray:
        np.right_shift(x, 32 - count, out=high)
        x <<= count
        x |= high
        return x

    return threefry(key0, key1, counter0, counter1, rotate, lambda x, like: x + np.zeros_like(like))


def table_index(words: np.ndarray) -> np.ndarray:
    """Index into `gumbel_table` for each 32-bit word. words: uint32 [N]; returns int32 [N]."""
    k = (words >> np.uint32(8)).astype(np.float32) + np.float32(1)
    return (k.view(np.int32) >> TABLE_SHIFT) - TABLE_OFFSET


@functools.lru_cache(maxsize=1)
def gumbel_table() -> np.ndarray:
    """Gumbel noise by bucket, float32 [49153], descending: -log(-log(1 - v)) at its middle v."""
    edges = (np.arange(24 * 2048 + 2, dtype=np.int32) + TABLE_OFFSET) << TABLE_SHIFT
    # Bucket i contains the integers k with edges[i] <= k + 1 < edges[i + 1]: one or none in small
    # buckets.
    first = np.ceil(edges.view(np.float32).astype(np.float64)) - 1
    last = np.minimum(np.maximum(first[1:] - 1, first[:-1]), 2.0**24 - 1)
    v = ((first[:-1] + last) / 2 + 0.5) * 2.0**-24
    table = -np.log(-np.log1p(-v))
    table.flags.writeable = False
    return table.astype(np.float32)


def gumbel(seed: int, position: int, count: int) -> np.ndarray:
    """Noise of the candidates 0 .. count - 1 for a position's token: float32 [count]."""
    words = threefry2x32(split_seed(seed), np.arange(count, dtype=np.uint32), position)
    return gumbel_table()[table_index(words)]
