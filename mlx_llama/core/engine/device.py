"""Launches and reads on the device, counted in the completions that they serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_llama.core.backends.interface import Array, Cache, Masks, Model, SamplingBatch
from mlx_llama.core.backends.logprobs import TokenLogprobs, unpack
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

    def rate(
        self, tokens: Sequence[int], row: int, sampling: SamplingBatch, count: int
    ) -> list[TokenLogprobs | None]:
        """Compute a chunk of a row's prompt and wait for the log-probabilities of tokens[1:].

        The last token is not computed. count: likeliest tokens to report.
        """
        cache, runtime = self.cache, self.backend.runtime
        ids, start = np.array([tokens[:-1]], np.int32), cache.lengths[row]
        logits = self.model.forward(ids, start, cache, rows=[row], all_positions=True)[0]
        packed = sampling.rate(logits, np.array([tokens[1:]], np.int32).T, count)
        self.backend.launch(packed, *cache.arrays())
        return [unpack(columns, count) for columns in runtime.to_numpy(packed).tolist()]

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
        return self._launch(
            self.model.step(tokens, starts, self.cache, sampling, rows=rows, **masked), writers
        )

    def step_processed(
        self,
        tokens: Array,
        row: int,
        sampling: SamplingBatch,
        writer: Writer,
        process: Callable[[np.ndarray], np.ndarray],
        masks: Masks | None = None,
    ) -> Array:
        """As `step` for one row, with logits float32 [1, V] that `process` changes on the host."""
        cache = self.cache
        logits = self.backend.runtime.to_numpy(
            self.model.forward(tokens, cache.lengths[row], cache, rows=[row])
        )
        writer.count_read(logits.nbytes)
        sampled = self.model.sample(process(logits), cache, sampling, rows=[row], masks=masks)
        self.backend.launch(*cache.arrays())
        return self._launch(sampled, [writer])

    def verify(
        self, tokens: Sequence[int], row: int, sampling: SamplingBatch, writer: Writer
    ) -> Array:
        """Launch a step over `tokens`; returns the token after each, int32 [1, T] on the device."""
        sampled = self.model.verify(
            np.array([tokens], np.int32), self.cache.lengths[row], self.cache, sampling, rows=[row]
        )
        return self._launch(sampled, [writer])

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
