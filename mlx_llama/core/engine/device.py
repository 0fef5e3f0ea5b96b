"""Launches and reads on the device, counted in the completions that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_llama.core.backends.interface import Array, Cache, Masks, Model, SamplingBatch
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.generation.completion import Writer


@dataclass(eq=False)
class Device:
    """Launches and reads of a model (the served model or a draft model) on its cache."""

    backend: Backend
    model: Model
    cache: Cache

    def prefill(self, tokens: Sequence[int], row: int) -> None:
        """Launch a chunk of a row's prompt. A lazy device projects nothing to the vocabulary."""
        ids = np.array([tokens], np.int32)
        self.model.forward(ids, self.cache.lengths[row], self.cache, rows=[row])
        self.backend.launch(*self.cache.arrays())

    def step(
        self,
        tokens: Array,
        rows: Sequence[int],
        sampling: SamplingBatch,
        writers: Sequence[Writer],
        masks: Masks | None = None,
    ) -> Array:
        """Launch a step over `tokens` [B, T], which continue the rows; see Model.step."""
        lengths = self.cache.lengths
        starts = [lengths[row] for row in rows] if len(rows) > 1 else lengths[rows[0]]
        masked = {"masks": masks} if masks else {}
        sampled = self.model.step(tokens, starts, self.cache, sampling, rows=rows, **masked)
        return self._launch(sampled, writers)

    def read(self, tokens: Array, writers: Sequence[Writer]) -> list[int]:
        """Wait for `tokens`, row by row: int32 [B, C] of as many writers, or [1, T] of one."""
        backend = self.backend
        values = [backend.read(tokens)] if tokens.shape == (1, 1) else backend.read_all(tokens)
        nbytes = tokens.nbytes // len(writers)
        for writer in writers:
            writer.count_read(nbytes)
        return values

    def read_all(self, tokens: Sequence[Array], writer: Writer) -> list[int]:
        """Wait once for all `tokens`, int32 [1, T] each, and concatenate them."""
        writer.count_read(sum(array.nbytes for array in tokens))
        return self.backend.read_all(*tokens)

    def _launch(self, sampled: Array, writers: Sequence[Writer]) -> Array:
        self.backend.launch(sampled)
        for writer in writers:
            writer.completion.launches += 1
        return sampled
