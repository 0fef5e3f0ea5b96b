"""The words of core/sample.py and core/ops.py in NumPy. The fast paths of a decoded token: a
greedy row is one argmax, and noise is computed for the candidates that filters left.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from mlx_llama.core import ops as plain, rng, sample
from mlx_llama.core.sample import Masks, Values

from .runtime import launch  # noqa: F401, a word


class SamplingBatch(sample.SamplingBatch):
    """Sampling in NumPy."""

    words = sys.modules[__name__]

    def __call__(
        self,
        logits: np.ndarray,
        positions: Sequence[int],
        recent: np.ndarray | None = None,
        masks: Masks | None = None,
        vocabulary: Any = None,
    ) -> np.ndarray:
        if masks is None and self.is_greedy:
            return choose(logits)
        return super().__call__(logits, positions, recent, masks, vocabulary)


def scope(device: str) -> AbstractContextManager[object]:
    return np.errstate(over="ignore", invalid="ignore")  # token -1 tells of them


def send(array: Any, device: str) -> Any:
    return array


send_all = send
where, zeros_like, concatenate = np.where, np.zeros_like, partial(np.concatenate, axis=1)
float32, int32 = (partial(np.asarray, dtype=dtype) for dtype in (np.float32, np.int32))
to_bits, from_bits = methodcaller("view", np.int32), methodcaller("view", np.float32)
largest = partial(np.maximum.reduce, axis=-1, keepdims=True)
smallest = partial(np.minimum.reduce, axis=-1, keepdims=True)
clip, tanh, expm1, exp = np.clip, np.tanh, np.expm1, np.exp
softplus = partial(np.logaddexp, np.float32(0))


def best(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return largest(x), x.argmax(axis=-1, keepdims=True)


def choose(x: np.ndarray) -> np.ndarray:
    tokens = []
    for scores in x:
        best = int(scores.argmax())  # NaN counts as the largest
        tokens.append((best if math.isfinite(scores.item(best)) else -1,))
    return np.array(tokens, np.int32)


def arange(count: int, like: np.ndarray) -> np.ndarray:
    return np.arange(count)


def sort(x: np.ndarray) -> np.ndarray:
    return np.sort(x, axis=-1)[:, ::-1]


def kth_largest(x: np.ndarray, k: np.ndarray, most: int) -> np.ndarray:
    places = [min(at, most) for at in k[:, 0].tolist()]
    least = [np.partition(row, -at)[-at] if at else -np.inf for row, at in zip(x, places)]
    return np.array(least, np.float32)[:, None]


def cumulative_share(ordered: np.ndarray, share: np.ndarray) -> np.ndarray:
    shares = np.exp(ordered - ordered[:, :1])
    shares /= shares.sum(axis=-1, keepdims=True)
    before = np.cumsum(shares, axis=-1) - shares
    return before < share.astype(np.float32)


def has_share(scores: np.ndarray, temperature: np.ndarray, least: np.ndarray) -> np.ndarray:
    shares = np.exp((scores - largest(scores)) * temperature)
    return shares >= least * shares.sum(axis=-1, keepdims=True)


def gather(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return x[np.arange(len(x))[:, None], ids]


take = gather
join = partial(np.concatenate, axis=1)


def scatter_add(x: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    added = x.copy()
    if ids.shape == (1, 1):  # most biases; ufunc.at takes five times as long
        added[0, ids[0, 0]] += values[0, 0]
        return added
    rows = np.arange(len(x))[:, None] * x.shape[1]
    np.add.at(added.reshape(-1), (rows + ids).reshape(-1), values.reshape(-1))
    return added


def unpack_bits(masks: np.ndarray, count: int) -> np.ndarray:
    bits = np.ascontiguousarray(masks).view(np.uint8)
    return np.unpackbits(bits, axis=1, bitorder="little", count=count).view(bool)


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - largest(x)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return shifted - np.log(total).astype(np.float32)


def likeliest(x: np.ndarray, count: int) -> np.ndarray:
    ids = np.empty((len(x), count), np.int32)
    for i, row in enumerate(x if count else ()):
        # ties of the last one included, and all if one is NaN
        likely = np.flatnonzero(~(row < np.partition(row, -count)[-count]))
        ids[i] = likely[np.argsort(-row[likely], kind="stable")][:count]
    return ids


def random24(values: Values, positions: np.ndarray, first: int, count: int) -> np.ndarray:
    key, tokens = (values["seed_low"], values["seed_high"]), np.arange(first, first + count)
    return (rng.threefry2x32(key, tokens.astype(np.uint32), positions) >> 8).astype(np.int32)


def add_noise(
    scores: np.ndarray, positions: np.ndarray, values: Values, first: int = 0
) -> np.ndarray:
    for i in values["is_random"][:, 0].nonzero()[0]:
        # Noise costs more than all else: compute it for the candidates that filters left.
        row, kept = scores[i], (scores[i] != -np.inf).nonzero()[0]
        tokens = (kept + first).astype(np.uint32)
        if len(kept) > len(row) // 2:
            kept, tokens = slice(None), np.arange(first, first + len(row), dtype=np.uint32)
        key = values["seed_low"][i], values["seed_high"][i]
        words = rng.threefry2x32(key, tokens, positions[i])
        row[kept] += rng.gumbel_table()[rng.table_index(words)]
    return scores


def cast_as(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return x


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def swish(x: np.ndarray | int, exponent: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-exponent))


sigmoid, gelu = partial(swish, 1), partial(plain.gelu, sys.modules[__name__])


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - largest(x))
    return powers / powers.sum(axis=-1, keepdims=True)


def top(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    places = np.argsort(-x, axis=-1, kind="stable")[:, :count]
    return take(x, places), places
