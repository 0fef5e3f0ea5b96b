"""Logits to tokens, lazily: penalties, temperature, filters, Gumbel noise, argmax."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.interface import Masks

from .kernels.draw import OptionArrays, gumbel, pack, process, sample

__all__ = ["SamplingBatch", "gumbel"]


class SamplingBatch(OptionArrays):
    """Samples in the lazy graph."""

    def __call__(
        self,
        logits: mx.array,
        positions: Sequence[int],
        recent: mx.array | None = None,
        masks: Masks | None = None,
    ) -> mx.array:
        with mx.stream(self.device):
            if masks is not None:
                mx.async_eval(logits)  # the device works while the host computes the masks
            words = None if masks is None else mx.array(masks())
            return sample(
                self.kind,
                logits,
                mx.array([p & 0xFFFFFFFF for p in positions], mx.uint32),
                recent,
                self.arrange(range(len(self.options))),
                words,
            )

    def rate(self, logits: mx.array, tokens: np.ndarray, count: int) -> mx.array:
        with mx.stream(self.device):
            return pack(mx.array(tokens), logits, count)

    def processed(self, scores: mx.array, recent: mx.array | None = None) -> mx.array:
        """Scores float32 [B, V] after bias, penalties, temperature and filters, which give -inf."""
        return process(self.kind, scores, recent, self.arrange(range(len(self.options))))
