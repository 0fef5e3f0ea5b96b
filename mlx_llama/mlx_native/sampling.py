"""Logits to token, lazily: penalties, temperature, filters, Gumbel noise, argmax."""

from __future__ import annotations

import math

import mlx.core as mx

from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import GenerationOptions


def gumbel(seed: int | mx.array, position: int | mx.array, table: mx.array, indices: mx.array) -> mx.array:
    """core.rng.gumbel, bit for bit. table: its gumbel_table on the device; indices: uint32 arange [V]; float32 [V].

    seed and position: numbers, or uint32 [2] (the words of core.rng.split_seed) and uint32 [] on the device.
    """
    if isinstance(seed, int):
        seed = mx.array(rng.split_seed(seed), mx.uint32)
    if isinstance(position, int):
        position = mx.array(position & 0xFFFFFFFF, mx.uint32)
    low, high = seed[0], seed[1]
    keys = (low, high, low ^ high ^ mx.array(rng.PARITY, mx.uint32))
    x0 = indices + low
    x1 = mx.broadcast_to(position + high, indices.shape)
    for group in range(5):
        for rotation in rng.ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + (group + 1))
    k = (x0 >> 8).astype(mx.float32) + 1
    return table[(k.view(mx.int32) >> rng.TABLE_SHIFT) - rng.TABLE_OFFSET]


class Sampler:
    """Draws one token per call. It has no state: the recent tokens are an argument.

    The order is transformers': bias and penalties, temperature, top-k, top-p, min-p; then argmax of the logits plus
    core.rng's noise, which draws from their softmax. Everything in float32.
    """

    def __init__(self, options: GenerationOptions, device: mx.Device = mx.Device(mx.cpu)):
        self.options = o = options
        self.device = device
        penalised = o.repetition_penalty != 1 or o.presence_penalty or o.frequency_penalty
        self.window = o.repetition_context_size if penalised else 0
        self.bias_ids = mx.array(list(o.logit_bias), mx.int32) if o.logit_bias else None
        self.bias = mx.array(list(o.logit_bias.values()), mx.float32) if o.logit_bias else None
        self._table = mx.array(rng.gumbel_table()) if o.temperature > 0 else None

    def __call__(self, logits: mx.array, position: int, recent: mx.array | None = None) -> mx.array:
        """logits: [1, V]; position: of the token to be sampled; recent: int32 [1, window], -1 where there is none.

        Returns the token, int32 [1, 1].
        """
        with mx.stream(self.device):
            return self.draw(logits, position, recent, self.options.seed)

    def draw(self, logits: mx.array, position: int | mx.array, recent: mx.array | None, seed: int | mx.array) -> mx.array:
        """Draw on every path, traced or not. seed and position: as in `gumbel`; the rest and the result: as in `__call__`."""
        scores = self.processed(logits[0].astype(mx.float32), recent)
        if self.options.temperature > 0:
            indices = mx.arange(len(scores), dtype=mx.uint32)
            scores = scores + gumbel(seed, position, self._table, indices)
        return mx.argmax(scores).astype(mx.int32).reshape(1, 1)

    def processed(self, scores: mx.array, recent: mx.array | None = None) -> mx.array:
        """Scores [V] after bias, penalties, temperature and filters; -inf where filtered out."""
        o = self.options
        if self.bias is not None:
            scores = scores.at[self.bias_ids].add(self.bias)
        if self.window:
            scores = self._penalise(scores, recent[0])
        if o.temperature == 0:
            return scores
        scores = scores / o.temperature
        if 0 < o.top_k < len(scores):
            scores = mx.where(scores < mx.topk(scores, o.top_k).min(), -math.inf, scores)
        if o.top_p < 1:
            ordered = mx.sort(scores)[::-1]
            shares = mx.softmax(ordered)
            before = mx.cumsum(shares) - shares  # probability of all likelier tokens: 0 for the first, which stays
            smallest = mx.where(before < o.top_p, ordered, math.inf).min()
            scores = mx.where(scores < smallest, -math.inf, scores)
        if o.min_p > 0:
            scores = mx.where(scores < scores.max() + math.log(o.min_p), -math.inf, scores)
        return scores

    def _penalise(self, scores: mx.array, recent: mx.array) -> mx.array:
        o = self.options
        counts = mx.zeros(len(scores) + 1).at[recent + 1].add(1.0)[1:]  # -1 falls out
        repeated = mx.where(scores > 0, scores / o.repetition_penalty, scores * o.repetition_penalty)
        scores = mx.where(counts > 0, repeated - o.presence_penalty, scores)
        return scores - counts * o.frequency_penalty
