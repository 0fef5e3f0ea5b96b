"""Logits to tokens: biases, penalties, temperature, filters, Gumbel noise, argmax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.generation.sampling import BatchOptions
from mlx_llama.core.options import GenerationOptions

from . import runtime
from .kernels import draw
from .kernels.draw import Values, gumbel

__all__ = ["SamplingBatch", "gumbel"]


class SamplingBatch(BatchOptions):
    """Samples on the device, all rows together."""

    def __init__(
        self, options: Sequence[GenerationOptions], device: torch.device = torch.device("cpu")
    ):
        super().__init__(options, device)
        self._values: Values | None = None
        self._ids: tuple[int, int] | None = None  # of the last call's tokens, first and last + 1
        self._indices: Tensor | None = None  # the same, one by one

    def __call__(
        self,
        logits: Tensor,
        positions: Sequence[int],
        recent: Tensor | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        allowed, dry = logits.float(), None
        if masks is not None:
            allowed, dry = draw.mask(allowed, runtime.send(masks(), self.device))
        scores, noisy = self.score(allowed, positions, recent, dry=dry)
        tokens = draw.choose(noisy)
        if self.logprobs is None:
            return tokens
        logits = draw.rated(self.kind, self._on_device(), logits, scores, tokens)
        return draw.pack_logprobs(tokens, logits, self.logprobs)

    def rate(self, logits: Tensor, tokens: np.ndarray, count: int) -> Tensor:
        return draw.pack_logprobs(runtime.send(tokens, self.device), logits, count)

    def score(
        self,
        logits: Tensor,
        positions: Sequence[int],
        recent: Tensor | None,
        first: int = 0,
        dry: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`processed` logits [B, V] of the tokens from `first` on, without and with noise (none
        where a row is not random). dry: of DRY.
        """
        scores = draw.process(self.kind, self._on_device(), logits, recent, dry)
        if not self.kind.is_random:
            return scores, scores
        ids = first, first + scores.shape[1]
        if self._ids != ids:
            indices = torch.arange(*ids, dtype=torch.int32, device=self.device)
            self._ids, self._indices = ids, indices
        positions = np.array([draw.to_signed(int(position)) for position in positions], np.int32)
        sent = runtime.send(positions, self.device)[:, None]
        values = self._on_device()
        if self.kind.has_xtc:
            scores = draw.exclude_top(values, scores, sent)
        seeds = tuple(values.integer(field).int() for field in (draw.SEED_LOW, draw.SEED_HIGH))
        noise = gumbel(seeds, sent, draw.gumbel_table(self.device), self._indices)
        return scores, torch.where(values.integer(draw.IS_RANDOM) > 0, scores + noise, scores)

    def processed(self, scores: Tensor, recent: Tensor | None = None) -> Tensor:
        """Scores [B, V] after biases, penalties, temperature and filters, which give -inf."""
        return draw.process(self.kind, self._on_device(), scores, recent)

    def _on_device(self) -> Values:
        if self._values is None:
            words = np.zeros((draw.count_words(self.kind), len(self.options)), np.int64)
            draw.pack(self.options, self.kind, words)
            self._values = Values(runtime.send(words, self.device))
        return self._values
