"""Logits to token: penalties, temperature, filters, Gumbel noise, argmax; on the device, without waiting."""

from __future__ import annotations

import math

import torch

from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import GenerationOptions

from . import kernels, runtime


def _signed(word: int) -> int:
    """A 32-bit word as int32 holds it; torch's int32 wraps like unsigned arithmetic, only shifts must be masked."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def gumbel(seed: int, position: int, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """core.rng.gumbel, bit for bit. table: its gumbel_table on the device; indices: int32 arange [V]; float32 [V]."""
    low, high = rng.split_seed(seed)
    keys = (low, high, low ^ high ^ rng.PARITY)
    x0 = indices + _signed(low)
    x1 = torch.full_like(indices, _signed(position + high))
    for group in range(5):
        for rotation in rng.ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | ((x1 >> (32 - rotation)) & ((1 << rotation) - 1))
            x1 = x1 ^ x0
        x0 = x0 + _signed(keys[(group + 1) % 3])
        x1 = x1 + _signed(keys[(group + 2) % 3] + group + 1)
    k = ((x0 >> 8) & 0xFFFFFF).float() + 1
    return table[((k.view(torch.int32) >> rng.TABLE_SHIFT) - rng.TABLE_OFFSET).long()]


class Sampler:
    """Draws one token per call, from the call's arguments alone.

    The order is transformers': bias and penalties, temperature, top-k, top-p, min-p; then argmax of the logits plus
    core.rng's noise, which draws from their softmax. Everything in float32.
    """

    def __init__(self, options: GenerationOptions, device: torch.device = torch.device("cpu")):
        self.options = o = options
        self.device = device
        penalised = o.repetition_penalty != 1 or o.presence_penalty or o.frequency_penalty
        self.window = o.repetition_context_size if penalised else 0
        self.bias_ids = runtime._sent(torch.tensor(list(o.logit_bias), dtype=torch.long), device)
        self.bias = runtime._sent(torch.tensor(list(o.logit_bias.values()), dtype=torch.float32), device)
        self._table = runtime._sent(rng.gumbel_table(), device) if o.temperature > 0 else None
        self._indices: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, position: int, recent: torch.Tensor | None = None) -> torch.Tensor:
        """logits: [1, V]; position: of the token to be sampled; recent: int32 [1, window], -1 where there is none.

        Returns the token, int32 [1, 1].
        """
        return self.draw(logits, position, recent, self.options.seed)

    def draw(self, logits: torch.Tensor, position: int | torch.Tensor, recent: torch.Tensor | None,
             seed: int | torch.Tensor) -> torch.Tensor:
        """Draw with another seed. position, seed: on the host, or a StateView's, on the device. Returns int32 [1, 1]."""
        scores = self.processed(logits[0].float(), recent)
        if self.options.temperature > 0:
            scores = self._add_noise(scores, position, seed)
        return torch.argmax(scores).int().reshape(1, 1)

    def processed(self, scores: torch.Tensor, recent: torch.Tensor | None = None) -> torch.Tensor:
        """Scores [V] after bias, penalties, temperature and filters; -inf where filtered out."""
        o = self.options
        if len(self.bias):
            scores = scores.index_add(0, self.bias_ids, self.bias)
        if self.window:
            scores = self._penalised(scores, recent[0])
        if o.temperature == 0:
            return scores
        scores = scores / o.temperature
        if 0 < o.top_k < len(scores):
            scores = scores.masked_fill(scores < torch.topk(scores, o.top_k).values[-1], -math.inf)
        if o.top_p < 1:
            ordered = torch.sort(scores, descending=True).values
            # Summed as integers: a GPU adds floats in an order that changes from run to run.
            shares = (torch.softmax(ordered.double(), dim=-1) * 2**40).long()
            before = torch.cumsum(shares, dim=-1) - shares  # of all likelier tokens; 0 for the first, which stays
            smallest = torch.where(before < o.top_p * 2**40, ordered, math.inf).min()
            scores = scores.masked_fill(scores < smallest, -math.inf)
        if o.min_p > 0:
            scores = scores.masked_fill(scores < scores.max() + math.log(o.min_p), -math.inf)
        return scores

    def _add_noise(self, scores: torch.Tensor, position: int | torch.Tensor, seed: int | torch.Tensor) -> torch.Tensor:
        if isinstance(position, torch.Tensor):
            return kernels.find_kernels(scores.device).decode.add_noise(scores, self._table, position, seed)
        if self._indices is None:
            self._indices = torch.arange(len(scores), dtype=torch.int32, device=self.device)
        return scores + gumbel(seed, position, self._table, self._indices)

    def _penalised(self, scores: torch.Tensor, recent: torch.Tensor) -> torch.Tensor:
        o = self.options
        counts = torch.zeros(len(scores) + 1, dtype=torch.int32, device=self.device)
        ones = torch.ones(len(recent), dtype=torch.int32, device=self.device)
        counts = counts.index_add(0, (recent + 1).long(), ones)[1:]  # -1 falls out
        repeated = torch.where(scores > 0, scores / o.repetition_penalty, scores * o.repetition_penalty)
        scores = torch.where(counts > 0, repeated - o.presence_penalty, scores)
        return scores - counts * o.frequency_penalty
