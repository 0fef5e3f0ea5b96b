"""The two calls that reach the device's queue: launch and read."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.backends.interface import Array, Cache, Model, Sampler
from mlx_llama.core.backends.selection import Backend

from .completion import Completion


class Steps:
    """Launches and reads of one completion, counted in it."""

    def __init__(self, backend: Backend, completion: Completion):
        self.backend = backend
        self.completion = completion

    def prefill(self, model: Model, tokens: list[int], cache: Cache, chunk: int) -> None:
        """Append `tokens` to the cache, `chunk` per evaluation.

        A lazy device projects nothing to the vocabulary, an eager one a single row per chunk.
        """
        for start in range(0, len(tokens), chunk):
            model.forward(np.array([tokens[start:start + chunk]], np.int32), cache.length, cache)
            self.backend.launch(*cache.arrays())

    def launch(self, model: Model, tokens: Array, cache: Cache, sampler: Sampler) -> Array:
        """Launch a step over `tokens` [1, T]; returns the next token, int32 [1, 1] on the device."""
        return self._launch(model.step(tokens, cache.length, cache, sampler), cache)

    def launch_verification(self, model: Model, tokens: list[int], cache: Cache, sampler: Sampler) -> Array:
        """Launch a step over `tokens`; returns the next token after each of them, int32 [1, T] on the device."""
        return self._launch(model.verify(np.array([tokens], np.int32), cache.length, cache, sampler), cache)

    def read(self, token: Array) -> int:
        """Wait for `token`, int32 [1, 1]."""
        value = self.backend.read(token)
        self._count_read(token)
        return value

    def read_all(self, *tokens: Array) -> list[int]:
        """Wait once for all `tokens`, int32 [1, T] each, and concatenate them."""
        values = self.backend.read_all(*tokens)
        self._count_read(*tokens)
        return values

    def _launch(self, sampled: Array, cache: Cache) -> Array:
        # Launch cache.tokens too; unevaluated updates would grow the graph.
        self.backend.launch(sampled, cache.tokens)
        self.completion.launches += 1
        return sampled

    def _count_read(self, *tokens: Array) -> None:
        self.completion.waits += 1
        self.completion.read_bytes += sum(token.nbytes for token in tokens)
