"""Arithmetic of sampling, with the options of each row read from the device's memory.

Every operation treats each row alone and in an order that no other row changes, so a row draws the same bits alone and in
any batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mlx_llama.core.backends.logprobs import count_logprobs
from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import GenerationOptions

from .. import runtime

# Options of a row as the device reads them: 64-bit words. top-p is a float64, the others are float32 or integers.
(SEED_LOW, SEED_HIGH, IS_RANDOM, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, WINDOW,
 BIASES) = range(12)
_UNIT = 1 << 40  # of probabilities that are summed as integers


def to_signed(word: int) -> int:
    """A 32-bit word as int32 holds it; torch's int32 wraps like unsigned arithmetic, only shifts must be masked."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def gumbel(seed: int | tuple[torch.Tensor, torch.Tensor], position: int | torch.Tensor, table: torch.Tensor,
           indices: torch.Tensor) -> torch.Tensor:
    """core.rng.gumbel, bit for bit. table: its gumbel_table on the device; indices: int32 arange [V].

    seed, position: ints, or words low and high and positions by row, int32 [B, 1]. Returns float32 [V] or [B, V].
    """
    if isinstance(seed, int):
        low, high = (torch.full_like(indices[:1], to_signed(word)) for word in rng.split_seed(seed))
        position = torch.full_like(indices[:1], to_signed(position))
    else:
        low, high = seed
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
    k = ((x0 >> 8) & 0xFFFFFF).float() + 1
    return table[((k.view(torch.int32) >> rng.TABLE_SHIFT) - rng.TABLE_OFFSET).long()]


@functools.cache
def gumbel_table(device: torch.device) -> torch.Tensor:
    """core.rng's table on a device."""
    with torch.inference_mode(False):
        return runtime._sent(rng.gumbel_table(), device)


class Kind(NamedTuple):
    """Features that any row of a batch uses; sizes are powers of two that hold every row's. Key of captured steps.

    is_random: any row has a temperature. top_k: the largest of any row, 0: none. window: recent tokens, 0: none. biases: of
    any row, 0: none. logprobs: likeliest tokens to report, None: no log-probabilities. has_masks: of grammars.
    """

    is_random: bool = False
    top_k: int = 0
    has_top_p: bool = False
    has_min_p: bool = False
    window: int = 0
    biases: int = 0
    logprobs: int | None = None
    has_masks: bool = False

    @property
    def words(self) -> int:
        """Words that `SamplingBatch.pack` fills for a row."""
        return BIASES + 2 * self.biases


@dataclass(frozen=True)
class Values:
    """A batch's options on the device, by row: views of packed words, [B, 1], biases [B, n]."""

    words: torch.Tensor  # int64 [Kind.words, B]

    def integer(self, field: int) -> torch.Tensor:
        return self.words[field, :, None]

    def number(self, field: int) -> torch.Tensor:
        return self.words[field].view(torch.float32)[::2, None]  # the low words

    def double(self, field: int) -> torch.Tensor:
        return self.words[field].view(torch.float64)[:, None]

    def biases(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 and values float32, [B, count] each."""
        ids, values = self.words[BIASES:BIASES + count], self.words[BIASES + count:BIASES + 2 * count]
        return ids.T, values.view(torch.float32)[:, ::2].T


def recent_window(o: GenerationOptions) -> int:
    """Recent tokens that a row's penalties look at."""
    penalised = o.repetition_penalty != 1 or o.presence_penalty or o.frequency_penalty
    return o.repetition_context_size if penalised else 0


def kind_of(options: Sequence[GenerationOptions]) -> Kind:
    """Features of a batch of rows with these options."""
    drawn = [o for o in options if o.temperature > 0]
    return Kind(
        bool(drawn), _power_of_two(max((o.top_k for o in drawn), default=0)), any(o.top_p < 1 for o in drawn),
        any(o.min_p > 0 for o in drawn), _power_of_two(max(map(recent_window, options), default=0)),
        _power_of_two(max((len(o.logit_bias) for o in options), default=0)), count_logprobs(options))


def pack(options: Sequence[GenerationOptions], kind: Kind, words: np.ndarray) -> None:
    """Write the options of row i to the words [:, i]. words: int64 zeros [kind.words, B or more]."""
    numbers, doubles = words.view(np.float32)[:, ::2], words.view(np.float64)
    for i, o in enumerate(options):
        words[SEED_LOW:SEED_HIGH + 1, i] = rng.split_seed(o.seed or 0)
        is_random = o.temperature > 0
        words[IS_RANDOM, i] = is_random
        numbers[TEMPERATURE, i] = o.temperature if is_random else 1
        words[TOP_K, i] = o.top_k if is_random else 0
        doubles[TOP_P, i] = o.top_p if is_random and o.top_p < 1 else 2  # more than all
        numbers[MIN_P, i] = math.log(o.min_p) if is_random and o.min_p > 0 else -math.inf
        numbers[REPETITION:FREQUENCY + 1, i] = o.repetition_penalty, o.presence_penalty, o.frequency_penalty
        words[WINDOW, i] = recent_window(o)
        if o.logit_bias:
            words[BIASES:BIASES + len(o.logit_bias), i] = list(o.logit_bias)
            start = BIASES + kind.biases
            numbers[start:start + len(o.logit_bias), i] = list(o.logit_bias.values())


def mask(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Logits float32 [B, V], -inf where a grammar forbids a token. words: int32 [B, ceil(V / 32)], a bit per token."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = words[:, ids >> 5] >> (ids & 31) & 1
    return torch.where(bits > 0, logits, float("-inf"))


def process(kind: Kind, values: Values, scores: torch.Tensor, recent: torch.Tensor | None) -> torch.Tensor:
    """Scores float32 [B, V] after biases, penalties, temperature and filters; recent: int32 [B, W]."""
    if kind.biases:
        # No token has two biases; the ids that pad a row add zero.
        scores = scores.scatter_add(1, *values.biases(kind.biases))
    if kind.window:
        scores = _penalise(values, scores, recent)
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
        # Summed as integers, whose order does not matter: a GPU adds floats in one that changes from run to run.
        shares = ((ordered.double() - ordered[:, :1]).exp() * _UNIT).long()
        sums = shares.cumsum(-1)
        before = sums - shares  # of all likelier tokens; 0 for the first, which stays
        least = torch.where(before < values.double(TOP_P) * sums[:, -1:], ordered, math.inf).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < least, -math.inf)
    if kind.has_min_p:
        least = scores.amax(-1, keepdim=True) + values.number(MIN_P)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def choose(scores: torch.Tensor) -> torch.Tensor:
    """The index of the largest score of each row, int32 [B, 1]; -1 if it is not finite. NaN counts as the largest."""
    best, tokens = scores.max(dim=-1, keepdim=True)
    return torch.where(best.abs() < math.inf, tokens.int(), -1)


def pack_logprobs(tokens: torch.Tensor, logits: torch.Tensor, count: int) -> torch.Tensor:
    """core.backends.logprobs.pack: tokens int32 [B, 1] with log-probabilities, int32 [B, 2 + 2 count]."""
    values = torch.log_softmax(logits.float(), dim=-1)
    top, ids = torch.sort(values, dim=-1, descending=True, stable=True)
    chosen, top = values.gather(1, tokens.long().clamp(min=0)), top[:, :count].contiguous()
    return torch.cat([tokens, chosen.view(torch.int32), ids[:, :count].int(), top.view(torch.int32)], dim=1)


def _penalise(values: Values, scores: torch.Tensor, recent: torch.Tensor) -> torch.Tensor:
    width = recent.shape[1]
    age = torch.arange(width, 0, -1, device=scores.device)
    seen = torch.where(age <= values.integer(WINDOW), recent + 1, 0).long()  # 0 falls out
    counts = torch.zeros((len(scores), scores.shape[1] + 1), dtype=torch.int32, device=scores.device)
    counts = counts.scatter_add(1, seen, torch.ones_like(recent))[:, 1:]
    penalty = values.number(REPETITION)
    repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(counts > 0, repeated - values.number(PRESENCE), scores)
    return scores - counts * values.number(FREQUENCY)


def _power_of_two(count: int) -> int:
    """The least power of two that is not below `count`; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
