"""Logits to token: penalties, temperature, filters, Gumbel noise, argmax."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import GenerationOptions


class Sampler:
    """Samples one token per call. Stateless: the caller passes the recent tokens.

    Order of transformers: bias and penalties, temperature, top-k, top-p, min-p; then argmax of logits plus Gumbel noise
    (core.generation.rng), a sample of their softmax. All in float32.
    """

    def __init__(self, options: GenerationOptions, device: str = "cpu"):
        self.options = o = options
        penalised = o.repetition_penalty != 1 or o.presence_penalty or o.frequency_penalty
        self.window = o.repetition_context_size if penalised else 0
        self.bias_ids = np.array(list(o.logit_bias), np.int64)
        self.bias = np.array(list(o.logit_bias.values()), np.float32)

    def __call__(self, logits: np.ndarray, position: int, recent: np.ndarray | None = None) -> np.ndarray:
        """Sample a token, int32 [1, 1].

        logits: float32 [1, V]; position: of the new token; recent: int32 [1, window], padded with -1 in front.
        """
        return self.draw(logits, position, recent, self.options.seed)

    def draw(self, logits: np.ndarray, position: int, recent: np.ndarray | None, seed: int) -> np.ndarray:
        """Sample with another seed; otherwise as a call."""
        scores = self.processed(logits[0].astype(np.float32), recent)
        if self.options.temperature > 0:
            scores += rng.gumbel(seed, position, len(scores))
        return np.array([[np.argmax(scores)]], np.int32)

    def processed(self, scores: np.ndarray, recent: np.ndarray | None = None) -> np.ndarray:
        """Scores float32 [V] after bias, penalties, temperature and filters; -inf where filtered out."""
        o = self.options
        if len(self.bias):
            scores = scores.copy()
            scores[self.bias_ids] += self.bias
        if self.window:
            scores = self._penalise(scores, recent[0])
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
            scores[scores < ordered[before < np.float32(o.top_p)][-1]] = -np.inf
        if o.min_p > 0:
            scores[scores < scores.max() + np.float32(np.log(o.min_p))] = -np.inf
        return scores

    def _penalise(self, scores: np.ndarray, recent: np.ndarray) -> np.ndarray:
        o = self.options
        counts = np.bincount(recent + 1, minlength=len(scores) + 1)[1:].astype(np.float32)  # drop the padding
        penalty = np.float32(o.repetition_penalty)
        repeated = np.where(scores > 0, scores / penalty, scores * penalty)
        scores = np.where(counts > 0, repeated - np.float32(o.presence_penalty), scores)
        return scores - counts * np.float32(o.frequency_penalty)
