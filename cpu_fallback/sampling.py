"""Logits to tokens: penalties, temperature, filters, Gumbel noise, argmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.logprobs import pack
from mlx_llama.core.generation import rng
from mlx_llama.core.generation.sampling import BatchOptions, Kind, RowNumbers, rates_sampled
from mlx_llama.core.options import GenerationOptions

Bias = tuple[np.ndarray, np.ndarray]


class SamplingBatch(BatchOptions):
    """Samples in NumPy, row by row."""

    def __init__(self, options: Sequence[GenerationOptions], device: str = "cpu"):
        super().__init__(options, device)
        self._is_plain = self.kind == Kind()  # greedy: the largest logit
        self._biases = [_make_bias(o) for o in self.options]

    def __call__(
        self,
        logits: np.ndarray,
        positions: Sequence[int],
        recent: np.ndarray | None = None,
        masks: Masks | None = None,
    ) -> np.ndarray:
        if masks is None and self._is_plain:
            return np.array([[_choose(scores)] for scores in logits], np.int32)
        scores, dry = (logits, [None] * len(logits)) if masks is None else _mask(logits, masks())
        seen = self._seen(recent)
        rows = zip(scores, self.options, self._biases, seen, dry, positions, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):  # -1 tells of them
            draws = [_draw(*row) for row in rows]
            tokens = np.array([[token] for token, _ in draws], np.int32)
            if self.logprobs is None:
                return tokens
            if self.kind.rates_sampled:
                drawn = zip(draws, self.options, logits)
                rows = [_rated(*draw, o) if rates_sampled(o) else row for draw, o, row in drawn]
                logits = np.stack(rows)
            return pack(tokens, logits, self.logprobs)

    def processed(self, scores: np.ndarray, recent: np.ndarray | None = None) -> np.ndarray:
        """Scores float32 [B, V] after bias, penalties, temperature and filters, which give -inf."""
        rows = zip(scores, self.options, self._biases, self._seen(recent), strict=True)
        return np.stack([_process(*row, None) for row in rows])

    def rate(self, logits: np.ndarray, tokens: np.ndarray, count: int) -> np.ndarray:
        return pack(tokens, logits, count)

    def _seen(self, recent: np.ndarray | None) -> list[np.ndarray | None]:
        """By row, the recent tokens of its own window; None if it penalises none."""
        return [
            recent[row, recent.shape[1] - window :] if window else None
            for row, window in enumerate(self.windows)
        ]


def _mask(logits: np.ndarray, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray | Sequence[None]]:
    """Logits float32 [B, V], -inf where forbidden, and DRY's penalties by row. masks: see Masks."""
    vocabulary = logits.shape[1]
    words, penalties = np.split(masks, [-(-vocabulary // 32)], axis=1)
    bits = np.ascontiguousarray(words).view(np.uint8)
    allowed = np.unpackbits(bits, axis=1, bitorder="little", count=vocabulary)
    masked = np.where(allowed, logits, np.float32(-np.inf))
    return masked, penalties.view(np.float32) if penalties.size else [None] * len(logits)


def _make_bias(o: GenerationOptions) -> Bias | None:
    """(token ids int64, biases float32), None without any."""
    if not o.logit_bias:
        return None
    ids = np.array(list(o.logit_bias), np.int64)
    return ids, np.array(list(o.logit_bias.values()), np.float32)


def _draw(
    logits: np.ndarray,
    options: GenerationOptions,
    bias: Bias | None,
    recent: np.ndarray | None,
    dry: np.ndarray | None,
    position: int,
) -> tuple[int, np.ndarray]:
    """Sample one row: its token, and the scores float32 [V] that it was drawn from. logits: float32
    [V]; recent: its own window, int32, or None.
    """
    scores = _process(logits, options, bias, recent, dry)
    if options.temperature == 0:
        return _choose(scores), scores
    chance = RowNumbers.of(options).xtc_chance
    if chance and rng.draw_chance(options.seed, position) < chance:
        scores = _exclude_top(scores, options)
    # Noise costs more than all else: compute it for the candidates that filters left.
    kept = np.flatnonzero(scores != -np.inf)
    if len(kept) > len(scores) // 2 or not len(kept):
        return _choose(scores + rng.gumbel(options.seed, position, len(scores))), scores
    words = rng.threefry2x32(rng.split_seed(options.seed), kept.astype(np.uint32), position)
    best = _choose(scores[kept] + rng.gumbel_table()[rng.table_index(words)])
    return -1 if best < 0 else int(kept[best]), scores


def _rated(token: int, scores: np.ndarray, options: GenerationOptions) -> np.ndarray:
    """Scores float32 [V] whose softmax has the probabilities of a draw: a greedy one is certain."""
    if options.temperature > 0:
        return scores
    return np.where(np.arange(len(scores)) == token, np.float32(0), np.float32(-np.inf))


def _choose(scores: np.ndarray) -> int:
    """The index of the largest score; -1 if it is not finite. NaN counts as the largest."""
    best = int(scores.argmax())
    return best if math.isfinite(scores.item(best)) else -1


def _process(
    scores: np.ndarray,
    o: GenerationOptions,
    bias: Bias | None,
    recent: np.ndarray | None,
    dry: np.ndarray | None,
) -> np.ndarray:
    """A copy of scores float32 [V] after bias, penalties, temperature and filters."""
    if bias is not None:
        scores = scores.copy()
        scores[bias[0]] += bias[1]
    if recent is not None:
        scores = _penalise(scores, o, recent)
    if dry is not None:
        scores = scores - dry
    if o.temperature == 0:
        return scores
    scores = scores / np.float32(o.temperature)
    if 0 < o.top_k < len(scores):
        scores[scores < np.partition(scores, -o.top_k)[-o.top_k]] = -np.inf
    if o.top_p < 1:
        ordered = np.sort(scores)[::-1]
        shares = np.exp(ordered - ordered[0])
        shares /= shares.sum()
        before = np.cumsum(shares) - shares  # probability of all likelier tokens; 0 keeps the first
        nucleus = ordered[before < np.float32(o.top_p)]
        if len(nucleus):  # none where NaN or infinity is among the scores
            scores[scores < nucleus[-1]] = -np.inf
    if o.min_p > 0:
        scores[scores < scores.max() + np.float32(np.log(o.min_p))] = -np.inf
    return scores


def _exclude_top(scores: np.ndarray, o: GenerationOptions) -> np.ndarray:
    """XTC: -inf for all likely tokens but the least likely of them."""
    shares = np.exp((scores - scores.max()) * np.float32(o.temperature))
    likely = (shares >= np.float32(o.xtc_threshold) * shares.sum()) & (scores > -np.inf)
    if likely.any():
        scores = np.where(likely & (scores > scores[likely].min()), -np.inf, scores)
    return scores.astype(np.float32)


def _penalise(scores: np.ndarray, o: GenerationOptions, recent: np.ndarray) -> np.ndarray:
    # drop the padding
    counts = np.bincount(recent + 1, minlength=len(scores) + 1)[1:].astype(np.float32)
    penalty = np.float32(o.repetition_penalty)
    repeated = np.where(scores > 0, scores / penalty, scores * penalty)
    scores = np.where(counts > 0, repeated - np.float32(o.presence_penalty), scores)
    return scores - counts * np.float32(o.frequency_penalty)
