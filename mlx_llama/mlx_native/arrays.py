"""The words of core/sample.py and core/ops.py in MLX, lazily."""

from __future__ import annotations

import functools
import sys
from functools import partial
from operator import methodcaller

import mlx.core as mx
import numpy as np

from mlx_llama.core import ops as plain, rng, sample
from mlx_llama.core.sample import Values


class SamplingBatch(sample.SamplingBatch):
    """Sampling in the lazy graph."""

    words = sys.modules[__name__]


scope, launch = mx.stream, mx.async_eval
where, zeros_like, concatenate = mx.where, mx.zeros_like, partial(mx.concatenate, axis=1)
float32, int32 = (partial(mx.array.astype, dtype=dtype) for dtype in (mx.float32, mx.int32))
to_bits, from_bits = methodcaller("view", mx.int32), methodcaller("view", mx.float32)
largest, smallest = (partial(function, axis=-1, keepdims=True) for function in (mx.max, mx.min))
gather = take = partial(mx.take_along_axis, axis=1)
join = partial(mx.concatenate, axis=1)
exp = mx.exp
clip, tanh, expm1, halves = mx.clip, mx.tanh, mx.expm1, methodcaller("split", 2, axis=-1)
sigmoid, softmax = mx.sigmoid, partial(mx.softmax, axis=-1)


def best(x: mx.array) -> tuple[mx.array, mx.array]:
    return largest(x), mx.argmax(x, axis=-1, keepdims=True)


def choose(x: mx.array) -> mx.array:
    largest, tokens = best(x)
    return mx.where(abs(largest) < mx.inf, int32(tokens), -1)


def send(array: np.ndarray, device: mx.Device) -> mx.array:
    return mx.array(array)


def send_all(arrays: dict[str, np.ndarray], device: mx.Device) -> Values:
    return {name: mx.array(array) for name, array in arrays.items()}


def arange(count: int, like: mx.array) -> mx.array:
    return mx.arange(count)


def sort(x: mx.array) -> mx.array:
    return mx.sort(x, axis=-1)[:, ::-1]


def kth_largest(x: mx.array, k: mx.array, most: int) -> mx.array:
    ordered = mx.sort(mx.topk(x, most, axis=-1), axis=-1)
    return mx.where(k > 0, gather(ordered, most - mx.clip(k, 1, most)), -mx.inf)


def cumulative_share(ordered: mx.array, share: mx.array) -> mx.array:
    shares = mx.softmax(ordered, axis=-1)
    return mx.cumsum(shares, axis=-1) - shares < share


def has_share(scores: mx.array, temperature: mx.array, least: mx.array) -> mx.array:
    return mx.softmax(scores * temperature, axis=-1) >= least


def scatter_add(x: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    return x.at[mx.arange(len(x))[:, None], ids].add(values)


def unpack_bits(masks: mx.array, count: int) -> mx.array:
    ids = mx.arange(count)
    return (mx.take(masks, ids >> 5, axis=1) >> (ids & 31)) & 1 == 1


def log_softmax(x: mx.array) -> mx.array:
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def likeliest(x: mx.array, count: int) -> mx.array:
    return int32(mx.argsort(-x, axis=-1)[:, :count])


def random24(values: Values, positions: mx.array, first: int, count: int) -> mx.array:
    tokens = mx.arange(first, first + count, dtype=mx.uint32)
    low, high = values["seed_low"], values["seed_high"]
    words = rng.threefry(
        low, high, tokens, positions, _rotate, lambda x, like: mx.broadcast_to(x, like.shape)
    )
    return int32(words >> 8)


def _rotate(x: mx.array, count: int) -> mx.array:
    return (x << count) | (x >> (32 - count))


def add_noise(scores: mx.array, positions: mx.array, values: Values, first: int = 0) -> mx.array:
    k = float32(random24(values, positions, first, scores.shape[1])) + 1
    noise = _noise_table()[(to_bits(k) >> rng.TABLE_SHIFT) - rng.TABLE_OFFSET]
    return mx.where(values["is_random"] > 0, scores + noise, scores)


@functools.lru_cache(maxsize=1)
def _noise_table() -> mx.array:
    return mx.array(rng.gumbel_table())


def cast_as(x: mx.array, like: mx.array) -> mx.array:
    return x.astype(like.dtype)


def softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, 0)


def swish(x: mx.array, exponent: mx.array) -> mx.array:
    return x * mx.sigmoid(exponent)


gelu = partial(plain.gelu, sys.modules[__name__])


def top(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    places = mx.argpartition(-x, kth=count - 1, axis=-1)[..., :count]
    return take(x, places), places
