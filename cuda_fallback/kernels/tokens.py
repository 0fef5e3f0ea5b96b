"""The tokens of a step by Triton's kernels: recent ones, noise, and the next in the caches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlx_llama.core import rng
from mlx_llama.core.sample import Values

from ..arrays import gumbel_table
from . import packed
from .addresses import NEXT, POSITION, SLOT, STRIDE, TOKEN, TOKENS, address, field

# the first fields of core.sample
_SEED_LOW, _SEED_HIGH, _IS_RANDOM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_PARITY = tl.constexpr(rng.PARITY)
_SHIFT, _OFFSET = tl.constexpr(rng.TABLE_SHIFT), tl.constexpr(rng.TABLE_OFFSET)
_BLOCK = 1024  # scores per program of `_add_noise`


@triton.jit
def _recent(state, like, out, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    at = field(state, NEXT, row) - WINDOW + i
    there = (at >= 0) & (i < WINDOW) & (field(state, TOKENS, row) != 0)
    token = tl.load(address(state, TOKENS, row, like) + at, mask=there, other=-1)
    tl.store(out + row * WINDOW + i, token, mask=i < WINDOW)


@triton.jit
def _four_rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0 += x1
    x1 = ((x1 << A) | (x1 >> (32 - A))) ^ x0
    x0 += x1
    x1 = ((x1 << B) | (x1 >> (32 - B))) ^ x0
    x0 += x1
    x1 = ((x1 << C) | (x1 >> (32 - C))) ^ x0
    x0 += x1
    return x0, ((x1 << D) | (x1 >> (32 - D))) ^ x0


@triton.jit
def _add_noise(position, words, scores, table, out, V, first, BLOCK: tl.constexpr):
    """Add core.rng's noise (threefry2x32) of a row's position; none to a row that is not random."""
    row = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = field(words, _SEED_LOW, row).to(tl.uint32)
    high = field(words, _SEED_HIGH, row).to(tl.uint32)
    third = low ^ high ^ _PARITY
    x0 = (i + first).to(tl.uint32) + low
    x1 = tl.zeros((BLOCK,), tl.uint32) + (tl.load(position + row).to(tl.uint32) + high)
    for group in tl.static_range(5):
        if group % 2 == 0:
            x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
        else:
            x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
        if group % 3 == 0:
            x0 += high
            x1 += third + (group + 1)
        elif group % 3 == 1:
            x0 += third
            x1 += low + (group + 1)
        else:
            x0 += low
            x1 += high + (group + 1)
    k = (x0 >> 8).to(tl.float32) + 1
    index = (k.to(tl.int32, bitcast=True) >> _SHIFT) - _OFFSET
    place = row.to(tl.int64) * V + i
    score = tl.load(scores + place, mask=i < V, other=0)
    noisy = tl.where(field(words, _IS_RANDOM, row) != 0, score + tl.load(table + index), score)
    tl.store(out + place, noisy, mask=i < V)


@triton.jit
def _note(state, like):
    row = tl.program_id(0)
    there = field(state, TOKENS, row) != 0
    token = field(state, TOKEN, row).to(like.dtype.element_ty)
    tl.store(address(state, TOKENS, row, like) + field(state, POSITION, row), token, mask=there)


@triton.jit
def _advance(state, tokens, like):
    row = tl.program_id(0)
    there = field(state, TOKENS, row) != 0  # a padding row does not move
    position, following = field(state, NEXT, row), tl.load(tokens + row)
    tl.store(address(state, TOKENS, row, like) + position, following, mask=there)
    # -1 tells the host of logits that are not finite; the next step runs before it is read, and
    # needs a valid id.
    tl.store(state + TOKEN * STRIDE + row, tl.maximum(following, 0).to(tl.int64), mask=there)
    tl.store(state + NEXT * STRIDE + row, position + 1, mask=there)
    tl.store(state + POSITION * STRIDE + row, position, mask=there)
    tl.store(state + SLOT * STRIDE + row, 1 - field(state, SLOT, row), mask=there)


def recent(state: Tensor, B: int, window: int) -> Tensor:
    """Last `window` tokens of B rows up to their positions: int32 [B, window], -1 in front."""
    out = torch.empty((B, window), dtype=torch.int32, device=state.device)
    packed.run(_recent, (B,), state, out, out, window, triton.next_power_of_2(window))
    return out


def add_noise(scores: Tensor, positions: Tensor, values: Values, first: int = 0) -> Tensor:
    """As core.sample.Words.add_noise. positions: int64 [B, 1]; values: views of packed words, int64
    [fields, MAX_ROWS].
    """
    table, words = gumbel_table(scores.device), values["seed_low"]  # the first field's
    (B, V), out = scores.shape, torch.empty_like(scores)
    grid = (triton.cdiv(V, _BLOCK), B)
    packed.run(_add_noise, grid, positions, words, scores, table, out, V, first, _BLOCK)
    return out


def note(state: Tensor, B: int) -> None:
    """Store the tokens of B rows in their caches."""
    like = torch.empty(0, dtype=torch.int32, device=state.device)
    packed.run(_note, (B,), state, like, num_warps=1)


def advance(state: Tensor, tokens: Tensor) -> None:
    """Make `tokens`, int32 [B, 1], the rows' next ones, and store them in the caches."""
    packed.run(_advance, (len(tokens),), state, tokens, tokens, num_warps=1)
