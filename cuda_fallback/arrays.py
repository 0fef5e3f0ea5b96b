"""The words of core/sample.py and core/ops.py in torch, and the options of rows in packed words.

Every operation treats each row alone and in an order that no other row changes, so a row draws the
same bits alone and in any batch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from operator import methodcaller

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mlx_llama.core import rng, sample
from mlx_llama.core.sample import Values

from . import runtime

_FLOATS = {4: torch.float32, 8: torch.float64}
_UNIT = 1 << 40  # probability 1, as an integer to be summed


class SamplingBatch(sample.SamplingBatch):
    """Sampling of all rows together, on the device."""

    words = sys.modules[__name__]


scope, launch = nullcontext, runtime.launch
where, zeros_like, concatenate = torch.where, torch.zeros_like, partial(torch.cat, dim=1)
float32, int32, log_softmax = Tensor.float, Tensor.int, partial(torch.log_softmax, dim=-1)
to_bits, from_bits = methodcaller("view", torch.int32), methodcaller("view", torch.float32)
largest, smallest, best = (
    partial(function, dim=-1, keepdim=True) for function in (torch.amax, torch.amin, torch.max)
)
clip, tanh, expm1, cast_as = torch.clamp, torch.tanh, torch.expm1, Tensor.type_as
exp, softplus = torch.exp, torch.nn.functional.softplus
halves, gelu = methodcaller("chunk", 2, -1), partial(F.gelu, approximate="tanh")
sigmoid, softmax = torch.sigmoid, partial(torch.softmax, dim=-1)
top, join = torch.topk, partial(torch.cat, dim=1)


def take(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(-1, places)


def swish(x: Tensor, exponent: Tensor) -> Tensor:
    return F.silu(x) if exponent is x else x * torch.sigmoid(exponent)


def choose(x: Tensor) -> Tensor:
    largest, tokens = best(x)
    return torch.where(largest.abs() < torch.inf, int32(tokens), -1)


def send(array: np.ndarray, device: torch.device) -> Tensor:
    # torch has no arithmetic of unsigned integers
    return runtime.send(array.astype(np.int64) if array.dtype == np.uint32 else array, device)


def send_all(arrays: dict[str, np.ndarray], device: torch.device) -> Values:
    rows = max(map(len, arrays.values()), default=0)
    return unpack(arrays, runtime.send(pack(arrays, rows), device))


def arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def sort(x: Tensor) -> Tensor:
    return torch.sort(x, dim=-1, descending=True).values


def kth_largest(x: Tensor, k: Tensor, most: int) -> Tensor:
    least = torch.topk(x, most).values.gather(1, (k - 1).clamp(0, most - 1))
    return torch.where(k > 0, least, -torch.inf)


def cumulative_share(ordered: Tensor, share: Tensor) -> Tensor:
    # Summed as integers, in any order: a GPU's order of floats changes from run to run.
    shares = ((ordered.double() - ordered[:, :1]).exp() * _UNIT).long()
    sums = shares.cumsum(-1)
    return sums - shares < share * sums[:, -1:]


def has_share(scores: Tensor, temperature: Tensor, least: Tensor) -> Tensor:
    tempered = (scores - largest(scores)).double() * temperature
    shares = (tempered.exp() * _UNIT).long()  # see `cumulative_share`
    return shares >= least.double() * shares.sum(-1, keepdim=True)


def gather(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(1, ids.long().clamp(min=0))


def scatter_add(x: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    return x.scatter_add(1, ids.long(), values)


def unpack_bits(masks: Tensor, count: int) -> Tensor:
    ids = torch.arange(count, device=masks.device)
    return masks[:, ids >> 5] >> (ids & 31) & 1 > 0


def likeliest(x: Tensor, count: int) -> Tensor:
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :count].int()


def random24(values: Values, positions: Tensor, first: int, count: int) -> Tensor:
    start = to_signed(first)
    tokens = torch.arange(start, start + count, dtype=torch.int32, device=positions.device)
    low, high = values["seed_low"].int(), values["seed_high"].int()
    words = rng.threefry(low, high, tokens, positions.int(), _rotate, Tensor.expand_as)
    return (words >> 8) & 0xFFFFFF


def to_signed(word: int) -> int:
    """A 32-bit word as int32 holds it: torch's int32 wraps as unsigned arithmetic does."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _rotate(x: Tensor, count: int) -> Tensor:
    return (x << count) | ((x >> (32 - count)) & ((1 << count) - 1))


def add_noise(scores: Tensor, positions: Tensor, values: Values, first: int = 0) -> Tensor:
    k = random24(values, positions, first, scores.shape[1]).float() + 1
    places = (k.view(torch.int32) >> rng.TABLE_SHIFT) - rng.TABLE_OFFSET
    noise = gumbel_table(scores.device)[places.long()]
    return torch.where(values["is_random"] > 0, scores + noise, scores)


@functools.cache
def gumbel_table(device: torch.device) -> Tensor:
    """core.rng's table on a device."""
    with torch.inference_mode(False):
        return runtime.send(rng.gumbel_table(), device)


# Options in words of 64 bits: integers, float32 in the low half, and float64


def pack(arrays: Mapping[str, np.ndarray], width: int) -> np.ndarray:
    """Options of rows (core.sample.arrange), in order: int64 [n, width], row i in column i."""
    parts = [np.zeros((0, width), np.int64)]
    for array in arrays.values():
        parts.append(np.zeros((array.shape[1], width), np.int64))
        typed = parts[-1]
        if array.dtype.kind == "f":
            typed = typed.view(array.dtype)[:, :: 8 // array.dtype.itemsize]
        typed[:, : len(array)] = array.T
    return np.concatenate(parts)


def unpack(arrays: Mapping[str, np.ndarray], words: Tensor) -> dict[str, Tensor]:
    """Views [B, *] of packed words int64 [n, B], integers as int64. arrays: of any rows with the
    same features.
    """
    values, start = {}, 0
    for name, array in arrays.items():
        part = words[start : start + array.shape[1]]
        if array.dtype.kind == "f":
            part = part.view(_FLOATS[array.dtype.itemsize])[:, :: 8 // array.dtype.itemsize]
        values[name] = part.T
        start += array.shape[1]
    return values
