"""Logits to tokens, lazily: penalties, temperature, filters, Gumbel noise, argmax."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_llama.core.generation.options import GenerationOptions

from .kernels.draw import OptionArrays, draw, gumbel, process

__all__ = ["SamplingBatch", "gumbel"]


class SamplingBatch(OptionArrays):
    """Draws one token per row. It has no state: the recent tokens are an argument.

    The order is transformers': bias and penalties, temperature, top-k, top-p, min-p; then argmax of the logits plus
    core.rng's noise, which draws from their softmax. Everything in float32.
    """

    def __init__(self, options: Sequence[GenerationOptions], device: mx.Device = mx.Device(mx.cpu)):
        super().__init__(options)
        self.device = device

    def __call__(self, logits: mx.array, positions: Sequence[int], recent: mx.array | None = None) -> mx.array:
        """logits: [B, V]; positions: of the tokens to be sampled, by row; recent: int32 [B, window or more], -1 where there
        is none.

        Returns the tokens, int32 [B, 1].
        """
        with mx.stream(self.device):
            return draw(self.kind, logits, mx.array([p & 0xFFFFFFFF for p in positions], mx.uint32), recent,
                        self.arrange(range(len(self.options))))

    def processed(self, logits: mx.array, recent: mx.array | None = None) -> mx.array:
        """Scores float32 [B, V] after bias, penalties, temperature and filters; -inf where filtered out."""
        return process(self.kind, logits, recent, self.arrange(range(len(self.options))))
