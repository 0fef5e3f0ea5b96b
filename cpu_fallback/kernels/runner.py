"""Execution of a lowered forward on several threads: chunks of a prompt, decoded tokens, probes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig

from .. import cache, ops
from .lowering import Mark, Segment, Tokens, Trace, View
from .program import CONTEXT, Code
from .team import Team
from .workspace import CHUNK, HEAD_CHUNK, Workspace

Probes = dict[str, list[np.ndarray]]  # each probe's values, chunk by chunk


class Runner:
    """A lowered forward. Thread-safe: a lock serialises runs.

    forward(tokens, view, all_positions, probe): the model's `_compute`. It is traced three times: for a decoded token, for a
    prompt with logits of its last position, and for a prompt with logits of all positions.
    """

    def __init__(self, forward: Callable, config: LlamaConfig, code: Code, threads: int):
        self.config, self.code, self.team = config, code, Team(threads)
        self.workspace = Workspace(config, code.recipe.activations, threads)
        self.context = np.zeros(len(CONTEXT), np.int64)
        self._set("sync", self.workspace.sync.address)
        self._lock = threading.Lock()  # guards workspace and context
        self._vectors, self._embedding, self._embedding_factor = [], None, 1.0

        def lower(tokens: int, all_positions: bool) -> list[Segment]:
            trace = Trace(config, code, self.workspace, threads, decode=tokens == 1)
            probe = trace.probe if tokens == 1 or all_positions else None
            logits = forward(Tokens(trace), View(trace, tokens), all_positions, probe)
            self._vectors += trace.vectors
            self._embedding, self._embedding_factor = trace.embedding, trace.embedding_factor
            return trace.finish(logits, separate_head=all_positions)

        (self.decode,) = lower(1, False)
        self.prompt, self.last = lower(2, False)
        self.body, self.head = lower(2, True)

    def _set(self, name: str, value: int) -> None:
        self.context[CONTEXT[name]] = value

    def forward(self, tokens: np.ndarray, view: cache.View, all_positions: bool,
                probe: Callable | None = None) -> np.ndarray:
        """Logits float32 [B, V] of the last of `tokens` [B, T], with all_positions [B, T, V]. Stores keys and values in
        `view`. probe: as in model.forward. Raises ContextError for another model's cache, ValueError for arrays that the
        machine code cannot take."""
        c = self.config
        if view.config is not c and view.config != c:
            raise ContextError("the cache was made by another model: use this model's make_cache")
        # Reference the arrays: another thread that resets the cache meanwhile must not free their memory.
        (cosine, sine), position = view.tables, view.index_pos
        keys, values, addresses = view.keys, view.values, view.addresses
        batch, count = tokens.shape
        rooms = {array.shape[2] for array in (keys[0], values[0], keys[-1], values[-1])}
        if addresses.shape != (batch, c.num_hidden_layers, 2) or position + count > min(rooms):
            raise ValueError(f"{count} positions from {position} on do not fit a cache of {min(rooms)}, {addresses.shape}")
        for table in (cosine, sine):
            if table.shape != (count, c.head_dim // 2) or table.dtype != np.float32 or not table.flags.c_contiguous:
                raise ValueError(f"a rope table {table.dtype} {table.shape}, "
                                 f"not float32 {(count, c.head_dim // 2)} in C order")
        results = np.empty((batch, count, c.vocab_size) if all_positions else (batch, c.vocab_size), np.float32)
        probes: list[Probes] | None = [{} for _ in range(batch)] if probe else None
        with self._lock:
            self.team.settle()
            _, head_bytes, row_bytes, _ = keys[0].strides
            self._set("head_bytes", head_bytes)
            self._set("row_bytes", row_bytes)
            scores = self.workspace.reserve_scores(max(rooms))
            for name, value in zip(("scores", "scores_bytes", "scores_head_bytes"), scores):
                self._set(name, value)
            for begin in range(0, count, CHUNK):
                end = min(begin + CHUNK, count)
                rows = self.embed(tokens[:, begin:end])
                self._set("cosine", cosine[begin:].ctypes.data)
                self._set("sine", sine[begin:].ctypes.data)
                for b, sequence in enumerate(rows):
                    self._set("caches", addresses[b].ctypes.data)
                    out = results[b, begin:end] if all_positions else results[b:b + 1] if end == count else None
                    keep = (self, keys, values, addresses, cosine, sine)
                    self._run_chunk(sequence, position + begin, out, all_positions, probes and probes[b], keep)
        for name in probes[0] if probes else ():
            parts = [np.concatenate(found[name], axis=found[name][0].ndim - 2) for found in probes]
            probe(name, np.stack(parts))
        return results

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Look up the embedding: float32 [B, T, E]."""
        rows = ops.embed(tokens, self._embedding)
        if self._embedding_factor != 1:
            rows = ops.scale(rows, self._embedding_factor)
        if rows.shape != (*tokens.shape, self.config.hidden_size):
            raise ValueError(f"embeddings {rows.shape}, not {(*tokens.shape, self.config.hidden_size)}")
        return rows

    def _run_chunk(self, rows: np.ndarray, position: int, out: np.ndarray | None, all_positions: bool, probes: Probes | None,
               keep: tuple[object, ...]) -> None:
        """Run up to CHUNK tokens of one sequence. rows: their embeddings [T, E]; out: receives their logits, or None."""
        tokens, w, vocab = len(rows), self.workspace, self.config.vocab_size
        self._set("first_row", 0)
        w.hidden.array[:tokens, :rows.shape[1]] = rows
        w.hidden.array[:tokens, rows.shape[1]:] = 0  # an earlier run's infinity may have left NaN in the padding
        if tokens == 1 and out is not None:
            self._run(self.decode, 1, position, probes, keep)
            out[0] = w.logits.array[0, :vocab]
            return
        if not all_positions and probes is None:
            self._run(self.prompt, tokens, position, None, keep)
            if out is not None:
                for buffer in self.last.moves:
                    buffer.array[0] = buffer.array[tokens - 1]
                self._run(self.last, 1, position + tokens - 1, None, keep)
                out[0] = w.logits.array[0, :vocab]
            return
        self._run(self.body, tokens, position, probes, keep)
        for first in range(0, tokens, HEAD_CHUNK):
            size = min(HEAD_CHUNK, tokens - first)
            self._set("first_row", first)
            self._run(self.head, size, position, probes, keep)
            if all_positions:
                out[first:first + size] = w.logits.array[:size, :vocab]
            elif out is not None and first + size == tokens:
                out[0] = w.logits.array[size - 1, :vocab]

    def _run(self, segment: Segment, tokens: int, position: int, probes: Probes | None, keep: tuple[object, ...]) -> None:
        self._set("tokens", tokens)
        self._set("position", position)
        program = segment.program
        if probes is None:
            self.team.run(program, self.context, keep)
            return
        done = 0

        def advance(to: int) -> None:
            nonlocal done
            if to > done:
                self.team.run(program.part(done, to), self.context, keep)
                done = to

        for mark in segment.marks:
            values = self._read_mark(mark, tokens, advance)
            probes.setdefault(mark.name, []).append(values)
        advance(len(program))

    def _read_mark(self, mark: Mark, tokens: int, advance: Callable[[int], None]) -> np.ndarray:
        """Run to the end of a mark and read its values, without effect on later operations."""
        if mark.zeroed is None:
            advance(mark.last)
            return mark.read(tokens)
        advance(mark.first)
        stream = mark.zeroed.array[:tokens]
        before = stream.copy()
        stream[...] = 0
        advance(mark.last)
        added = mark.read(tokens)
        stream += before  # the same float32 sum as the operation would give
        return added
