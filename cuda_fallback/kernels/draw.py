"""Arithmetic of sampling, with the options of each row read from the device's memory.

Every operation treats each row alone and in an order that no other row changes, so a row draws the
same bits alone and in any batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mlx_llama.core.generation import rng
from mlx_llama.core.generation.sampling import Kind, RowNumbers
from mlx_llama.core.options import GenerationOptions

from .. import runtime

# Options of a row as the device reads them: 64-bit words, integers, float32 and top-p in float64.
SEED_LOW, SEED_HIGH, IS_RANDOM, TOP_K, WINDOW, XTC_CHANCE, RATES_SAMPLED = range(7)
TEMPERATURE, MIN_P, REPETITION, PRESENCE, FREQUENCY, XTC_THRESHOLD, TOP_P, BIASES = range(7, 15)
_UNIT = 1 << 40  # of probabilities that are summed as integers


def to_signed(word: int) -> int:
    """A 32-bit word as int32 holds it: torch's int32 wraps as unsigned arithmetic does."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def gumbel(
    seed: int | tuple[Tensor, Tensor], position: int | Tensor, table: Tensor, indices: Tensor
) -> Tensor:
    """core.rng.gumbel, bit for bit. table: its gumbel_table on the device; indices: int32 [V].

    seed, position: ints, or words low and high and positions, int32 [B, 1]; float32 [V] or [B, V].
    """
    if isinstance(seed, int):
        low, high = (torch.full_like(indices[:1], to_signed(word)) for word in rng.split_seed(seed))
        position = torch.full_like(indices[:1], to_signed(position))
    else:
        low, high = seed
    k = ((_threefry(low, high, position, indices) >> 8) & 0xFFFFFF).float() + 1
    return table[((k.view(torch.int32) >> rng.TABLE_SHIFT) - rng.TABLE_OFFSET).long()]


def _threefry(low: Tensor, high: Tensor, position: Tensor, indices: Tensor) -> Tensor:
    """core.rng.threefry2x32. low, high: words of the seed; the others as of `gumbel`."""
    keys = (low, high, low ^ high ^ to_signed(rng.PARITY))
    x0 = indices + low
    x1 = torch.zeros_like(indices) + (position + high)
    for group in range(5):
        for rotation in rng.ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | ((x1 >> (32 - rotation)) & ((1 << rotation) - 1))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + (group + 1))
    return x0


@functools.cache
def gumbel_table(device: torch.device) -> Tensor:
    """core.rng's table on a device."""
    with torch.inference_mode(False):
        return runtime.send(rng.gumbel_table(), device)


def count_words(kind: Kind) -> int:
    """Words that `pack` fills for a row."""
    return BIASES + 2 * kind.biases


@dataclass(frozen=True)
class Values:
    """A batch's options on the device, by row: views of packed words, [B, 1], biases [B, n]."""

    words: Tensor  # int64 [count_words, B]

    def integer(self, field: int) -> Tensor:
        return self.words[field, :, None]

    def number(self, field: int) -> Tensor:
        return self.words[field].view(torch.float32)[::2, None]  # the low words

    def double(self, field: int) -> Tensor:
        return self.words[field].view(torch.float64)[:, None]

    def biases(self, count: int) -> tuple[Tensor, Tensor]:
        """Token ids int64 and values float32, [B, count] each."""
        ids, values = self.words[BIASES : BIASES + 2 * count].split(count)
        return ids.T, values.view(torch.float32)[:, ::2].T


def pack(options: Sequence[GenerationOptions], kind: Kind, words: np.ndarray) -> None:
    """Write the options of row i to words[:, i]. words: int64 zeros [count_words, B or more]."""
    numbers, doubles = words.view(np.float32)[:, ::2], words.view(np.float64)
    for i, o in enumerate(options):
        row = RowNumbers.of(o)
        words[SEED_LOW : TOP_K + 1, i] = *row.seed, row.is_random, row.top_k
        words[WINDOW : RATES_SAMPLED + 1, i] = row.window, row.xtc_chance, row.rates_sampled
        penalties = row.repetition_penalty, row.presence_penalty, row.frequency_penalty
        numbers[TEMPERATURE:TOP_P, i] = row.temperature, row.min_p, *penalties, row.xtc_threshold
        doubles[TOP_P, i] = row.top_p
        if o.logit_bias:
            words[BIASES : BIASES + len(o.logit_bias), i] = list(o.logit_bias)
            start = BIASES + kind.biases
            numbers[start : start + len(o.logit_bias), i] = list(o.logit_bias.values())


def mask(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [B, V], -inf where forbidden, and DRY's penalties. masks: see Masks."""
    words, dry = masks.tensor_split([-(-logits.shape[1] // 32)], dim=1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = words[:, ids >> 5] >> (ids & 31) & 1
    masked = torch.where(bits > 0, logits, float("-inf"))
    return masked, dry.view(torch.float32) if dry.shape[1] else None


def process(
    kind: Kind, values: Values, scores: Tensor, recent: Tensor | None, dry: Tensor | None = None
) -> Tensor:
    """Scores float32 [B, V] after biases, penalties, temperature and filters; recent: int32 [B,
    W]; dry: penalties float32 [B, V].
    """
    if kind.biases:
        # No token has two biases; the ids that pad a row add zero.
        scores = scores.scatter_add(1, *values.biases(kind.biases))
    if kind.window:
        scores = _penalise(values, scores, recent)
    if dry is not None:
        scores = scores - dry
    if not kind.is_random:
        return scores
    scores = scores / values.number(TEMPERATURE)
    if kind.top_k:
        largest = torch.topk(scores, min(kind.top_k, scores.shape[1])).values
        asked = values.integer(TOP_K)
        least = largest.gather(1, (asked - 1).clamp(0, largest.shape[1] - 1))
        scores = scores.masked_fill((scores < least) & (asked > 0), -math.inf)
    if kind.has_top_p:
        ordered = torch.sort(scores, dim=-1, descending=True).values
        # Summed as integers, in any order: a GPU's order of floats changes from run to run.
        shares = ((ordered.double() - ordered[:, :1]).exp() * _UNIT).long()
        sums = shares.cumsum(-1)
        before = sums - shares  # of all likelier tokens; 0 for the first, which stays
        is_kept = before < values.double(TOP_P) * sums[:, -1:]
        least = torch.where(is_kept, ordered, math.inf).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < least, -math.inf)
    if kind.has_min_p:
        least = scores.amax(-1, keepdim=True) + values.number(MIN_P)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def exclude_top(values: Values, scores: Tensor, positions: Tensor) -> Tensor:
    """XTC: -inf for all likely tokens but the least likely of them, by the draw of a position.
    positions: int32 [B, 1].
    """
    # summed as integers, see `process`
    tempered = (scores - scores.amax(-1, keepdim=True)).double()
    shares = ((tempered * values.number(TEMPERATURE)).exp() * _UNIT).long()
    least_share = values.number(XTC_THRESHOLD).double() * shares.sum(-1, keepdim=True)
    likely = (shares >= least_share) & (scores > -math.inf)
    least = torch.where(likely, scores, math.inf).amin(-1, keepdim=True)
    low, high = (values.integer(field).int() for field in (SEED_LOW, SEED_HIGH))
    index = torch.full_like(positions, to_signed(rng.CHANCE))
    draws = (_threefry(low, high, positions, index) >> 8) & 0xFFFFFF
    is_on = draws < values.integer(XTC_CHANCE)
    return scores.masked_fill(likely & (scores > least) & is_on, -math.inf)


def rated(kind: Kind, values: Values, logits: Tensor, scores: Tensor, tokens: Tensor) -> Tensor:
    """Logits [B, V] whose log-probabilities are reported. scores: from whose softmax rows with a
    temperature drew `tokens`, int32 [B, 1].
    """
    if not kind.rates_sampled:
        return logits
    certain = torch.full_like(scores, -math.inf).scatter(1, tokens.long().clamp(min=0), 0.0)
    final = torch.where(values.integer(IS_RANDOM) > 0, scores, certain)
    return torch.where(values.integer(RATES_SAMPLED) > 0, final, logits.float())


def choose(scores: Tensor) -> Tensor:
    """The index of each row's largest score, int32 [B, 1]; -1 if any is NaN or it is infinite."""
    best, tokens = scores.max(dim=-1, keepdim=True)
    return torch.where(best.abs() < math.inf, tokens.int(), -1)


def pack_logprobs(tokens: Tensor, logits: Tensor, count: int) -> Tensor:
    """core.backends.logprobs.pack. tokens: int32 [B, 1]; returns int32 [B, 2 + 2 count]."""
    values = torch.log_softmax(logits.float(), dim=-1)
    top, ids = torch.sort(values, dim=-1, descending=True, stable=True)
    chosen, top = values.gather(1, tokens.long().clamp(min=0)), top[:, :count].contiguous()
    return torch.cat(
        [tokens, chosen.view(torch.int32), ids[:, :count].int(), top.view(torch.int32)], dim=1
    )


def _penalise(values: Values, scores: Tensor, recent: Tensor) -> Tensor:
    width = recent.shape[1]
    age = torch.arange(width, 0, -1, device=scores.device)
    seen = torch.where(age <= values.integer(WINDOW), recent + 1, 0).long()  # 0 falls out
    size = len(scores), scores.shape[1] + 1
    counts = torch.zeros(size, dtype=torch.int32, device=scores.device)
    counts = counts.scatter_add(1, seen, torch.ones_like(recent))[:, 1:]
    penalty = values.number(REPETITION)
    repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(counts > 0, repeated - values.number(PRESENCE), scores)
    return scores - counts * values.number(FREQUENCY)
