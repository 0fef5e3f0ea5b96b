"""Execution of a lowered forward on several threads: chunks of a prompt, decoded tokens of rows, probes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from mlx_llama.core.backends.positions import GROWTH
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig

from .. import cache, ops
from ..pages import PAGE
from .lowering import Mark, Segment, Tokens, Trace, View
from .program import CONTEXT, Code
from .team import Team
from .workspace import CHUNK, HEAD_CHUNK, Workspace, pad

Probes = dict[str, list[np.ndarray]]  # each probe's values, chunk by chunk


class Runner:
    """A lowered forward. Thread-safe: a lock serialises runs.

    forward(tokens, view, all_positions, probe): the model's `_compute`. It is traced three times: for a decoded token, for a
    prompt with logits of its last position, and for a prompt with logits of all positions.
    """

    def __init__(self, forward: Callable, config: LlamaConfig, code: Code, threads: int):
        self.config, self.code, self.team = config, code, Team(threads)
        self.workspace = Workspace(config, code.recipe.activations, threads, code.recipe.cache_bits)
        self.context = np.zeros(len(CONTEXT), np.int64)
        self._set("sync", self.workspace.sync.address)
        self._set("places", self.workspace.places.address)
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
        `view`. Single tokens of several rows run together, prompts one after another. probe: as in model.forward. Raises
        ContextError for another model's cache, ValueError for arrays that the machine code cannot take."""
        self._check(tokens, view)
        # Reference the arrays: another thread that resets the cache meanwhile must not free their memory.
        keep = (self, view.pages, view.page_tables, view.tables)
        batch, count = tokens.shape
        results = np.empty((batch, count, self.config.vocab_size), np.float32) if all_positions else np.empty(
            (batch, self.config.vocab_size), np.float32)
        runs: list[Probes] = []
        with self._lock:
            self.team.settle()
            scores = self.workspace.reserve_scores(pad(max(span.end for span in view.spans), GROWTH))
            for name, value in zip(("scores", "scores_bytes", "scores_head_bytes"), scores):
                self._set(name, value)
            if count == 1 and batch > 1:
                runs.append({})
                logits = results.reshape(batch, -1)
                for begin in range(0, batch, CHUNK):
                    rows = range(begin, min(begin + CHUNK, batch))
                    self._place(view, [(row, 0) for row in rows])
                    self._run_chunk(self.embed(tokens[begin:rows.stop, 0]), logits[begin:rows.stop], True,
                                    runs[0] if probe else None, keep)
            else:
                for b in range(batch):
                    runs.append({})
                    for begin in range(0, count, CHUNK):
                        end = min(begin + CHUNK, count)
                        self._place(view, [(b, token) for token in range(begin, end)])
                        out = results[b, begin:end] if all_positions else results[b:b + 1] if end == count else None
                        self._run_chunk(self.embed(tokens[b, begin:end]), out, all_positions, runs[b] if probe else None, keep)
        for name in runs[0] if probe else ():
            parts = [np.concatenate(found[name], axis=found[name][0].ndim - 2) for found in runs]  # [.., tokens, width]
            probe(name, np.stack(parts) if len(parts) == batch else np.moveaxis(parts[0], -2, 0)[..., None, :])
        return results

    def _check(self, tokens: np.ndarray, view: cache.View) -> None:
        """Refuse a view that the machine code cannot take: see forward."""
        c = self.config
        if view.config is not c and view.config != c or view.layout != self.workspace.pages:
            raise ContextError("the cache was made by another model: use this model's make_cache")
        batch, count = tokens.shape
        if not batch == len(view.spans) == len(view.pages) == len(view.page_tables):
            raise ValueError(f"{batch} sequences do not fit a view of {len(view.spans)} rows")
        for span, pages, (table, _) in zip(view.spans, view.pages, view.page_tables):
            room = PAGE * min(len(pages), len(table))
            if span.count != count or span.end > room:
                raise ValueError(f"{count} positions from {span.start} on do not fit {room} positions of pages")
        for table in view.tables:
            if table.shape != (batch, count, c.head_dim // 2) or table.dtype != np.float32 or not table.flags.c_contiguous:
                raise ValueError(f"a rope table {table.dtype} {table.shape}, "
                                 f"not float32 {(batch, count, c.head_dim // 2)} in C order")

    def _place(self, view: cache.View, tokens: list[tuple[int, int]]) -> None:
        """Tell the machine code where the cache has each of `tokens`, (sequence, number in it)."""
        cosine, sine = (table.ctypes.data for table in view.tables)
        _, count, width = view.tables[0].shape
        places = self.workspace.places.array
        if len(tokens) == 1:
            ((b, t),) = tokens
            at = 4 * width * (b * count + t)
            places[0] = view.spans[b].start + t, view.page_tables[b][1], cosine + at, sine + at
            return
        places[:len(tokens)] = [
            (view.spans[b].start + t, view.page_tables[b][1], cosine + 4 * width * (b * count + t),
             sine + 4 * width * (b * count + t)) for b, t in tokens]

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Look up the embedding: float32 [T, E]."""
        rows = ops.embed(tokens, self._embedding)
        if self._embedding_factor != 1:
            rows = ops.scale(rows, self._embedding_factor)
        if rows.shape != (*tokens.shape, self.config.hidden_size):
            raise ValueError(f"embeddings {rows.shape}, not {(*tokens.shape, self.config.hidden_size)}")
        return rows

    def _run_chunk(self, rows: np.ndarray, out: np.ndarray | None, all_positions: bool, probes: Probes | None,
                   keep: tuple[object, ...]) -> None:
        """Run up to CHUNK tokens, whose places are set. rows: their embeddings [T, E]; out: receives their logits, or None."""
        tokens, w, vocab = len(rows), self.workspace, self.config.vocab_size
        self._set("first_row", 0)
        w.hidden.array[:tokens, :rows.shape[1]] = rows
        w.hidden.array[:tokens, rows.shape[1]:] = 0  # an earlier run's infinity may have left NaN in the padding
        if tokens == 1 and out is not None:
            self._run(self.decode, 1, probes, keep)
            out[0] = w.logits.array[0, :vocab]
            return
        if not all_positions and probes is None:
            self._run(self.prompt, tokens, None, keep)
            if out is not None:
                for buffer in (*self.last.moves, w.places):
                    buffer.array[0] = buffer.array[tokens - 1]
                self._run(self.last, 1, None, keep)
                out[0] = w.logits.array[0, :vocab]
            return
        self._run(self.body, tokens, probes, keep)
        for first in range(0, tokens, HEAD_CHUNK):
            size = min(HEAD_CHUNK, tokens - first)
            self._set("first_row", first)
            self._run(self.head, size, probes, keep)
            if all_positions:
                out[first:first + size] = w.logits.array[:size, :vocab]
            elif out is not None and first + size == tokens:
                out[0] = w.logits.array[size - 1, :vocab]

    def _run(self, segment: Segment, tokens: int, probes: Probes | None, keep: tuple[object, ...]) -> None:
        self._set("tokens", tokens)
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
