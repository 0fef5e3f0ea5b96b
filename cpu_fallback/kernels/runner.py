"""Execution of a lowered forward: chunks of a prompt, decoded tokens of rows, probes."""

from __future__ import annotations

import itertools
import math
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mlx_llama.core.backends.positions import GROWTH
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig

from .. import cache, ops
from ..pages import PAGE
from .layouts import ROWS
from .lowering import Mark, Segment, Symbol, Trace, View
from .panels import Plan, weight_layout
from .program import Code
from .recipe import expert_tiles
from .records import CONTEXT, PLACE
from .team import Team
from .workspace import CHUNK, HEAD_CHUNK, Buffer, Workspace, pad

# multiplications and additions between two checks for interrupts, about 0.1 s on few cores
PART_WORK = 1e10
_FIRST_ROW, _TOKENS = CONTEXT["first_row"], CONTEXT["tokens"]
_PLACE = struct.Struct(f"{len(PLACE)}q")
KEPT = 16  # sets of adapters whose programs are kept

Probes = dict[str, list[np.ndarray]]  # values by probe and chunk


class Programs(NamedTuple):
    """A forward lowered three times."""

    decode: Segment  # for a decoded token
    prompt: Segment  # for a prompt, ...
    last: Segment  # ... and logits of its last position
    body: Segment  # for a prompt, ...
    head: Segment  # ... and logits of all positions
    vectors: list[Buffer]  # norms and biases that the programs point to


@dataclass
class Table:
    """An embedding in the file, whose rows are written to a buffer before a program runs."""

    weight: ops.Matrix  # [V, N]
    buffer: Buffer
    rows: np.ndarray  # its columns for N numbers
    factor: float  # on the rows
    numbers: np.ndarray | None = None  # the weight, if NumPy converts it to float32
    dequantise: Callable | None = None  # filling.embed of its format; None for NumPy's
    place: tuple[int, int, int] = (0, 0, 0)  # blocks and bytes of a row, address


def _make_table(code: Code, weight: ops.Matrix, buffer: Buffer, factor: float) -> Table:
    table = Table(weight, buffer, buffer.array[:, : weight.shape[1]], factor)
    if isinstance(weight, np.ndarray):
        is_bfloat16 = weight.dtype == np.uint16
        table.numbers = weight.view(ml_dtypes.bfloat16) if is_bfloat16 else weight
        return table
    plan = Plan(weight, weight_layout(weight))
    table.dequantise = code.embed.get((plan.layout, plan.source))
    if table.dequantise:
        blocks = weight.blocks
        if weight.order is not None or blocks.strides[1] != 1:
            raise ValueError(
                f"{weight.name}: machine code cannot look up reordered rows, or rows with "
                f"strides {blocks.strides}"
            )
        table.place = plan.blocks, blocks.strides[0], blocks.ctypes.data
    return table


class Runner:
    """A lowered forward. A lock serialises runs. A forked process starts new threads."""

    width = CHUNK  # prompt tokens per run

    def __init__(
        self, forward: Callable, config: LlamaConfig, code: Code, threads: int, rank: int = 0
    ):
        """forward(tokens, view, all_positions): the decoder over the words of ops.py. It is lowered
        for rows without adapters and each set of adapters in a call. rank: as in Workspace.
        """
        self.config, self.code, self.threads, self.team = config, code, threads, Team(code, threads)
        bits, expert_rows = code.recipe.cache_bits, expert_tiles(code.recipe.target)[-1]
        layouts = code.recipe.activations
        self.workspace = Workspace(config, layouts, threads, bits, expert_rows, rank)
        self.context = np.zeros(len(CONTEXT), np.int64)
        self._words = memoryview(self.context)  # sets a word in half of NumPy's time
        self._place_words = memoryview(self.workspace.places.array).cast("B")
        r = self.workspace.recurrence
        self._states = r.states.array if r else None
        if r:
            self._set("states", r.states.address)
        self._logits = self.workspace.logits.array[:1, : config.vocab_size]
        w = self.workspace
        paddings = [buffer.array[:, config.hidden_size :] for buffer in (w.hidden, w.delta)]
        self._paddings = [padding for padding in paddings if padding.size]
        # positions that scores are reserved for; the last cache's layouts
        self._scored, self._layouts = 0, None
        self._set("sync", self.workspace.sync.address)
        self._set("places", self.workspace.places.address)
        self._lock = threading.Lock()  # guards workspace and context
        self._process = os.getpid()
        self.tables: list[Table] = []  # of the stream, and of the layers' inputs
        self._table_rows = np.zeros(ROWS, np.int64)
        used = config.num_experts_per_tok / config.num_experts if config.num_experts else 1
        self._work = 2 * sum(
            math.prod(shape) * (used if ".experts." in name else 1)
            for name, shape in config.tensor_shapes().items()
            if ".layers." in name
        )

        self._forward = forward
        # by numbers of adapters, last used last
        self._adapted: OrderedDict[tuple[int, ...], Programs] = OrderedDict()
        self._base = self._lower(())
        self.decode, self.prompt, self.last, self.body, self.head, _ = self._base

    def _lower(self, adapters: tuple[int, ...]) -> Programs:
        """Lower the programs for rows with any of these adapters or none."""
        vectors: list[Buffer] = []

        def lower(tokens: int, all_positions: bool) -> list[Segment]:
            trace = Trace(self.config, self.code, self.workspace, self.threads, decode=tokens == 1)
            view = View(trace, tokens, adapters, is_probed=tokens == 1 or all_positions)
            logits = self._forward(Symbol(trace), view, all_positions)
            vectors.extend(trace.vectors)
            if not self.tables:
                w, factors = self.workspace, (trace.embedding_factor, 1.0)
                for parts in zip(trace.embeddings, (w.hidden, w.inputs), factors):
                    self.tables.append(_make_table(self.code, *parts))
            return trace.finish(logits, separate_head=all_positions)

        (decode,), (prompt, last) = lower(1, False), lower(2, False)
        body, head = lower(2, True)
        return Programs(decode, prompt, last, body, head, vectors)

    def _find_programs(self, numbers: Iterable[int]) -> Programs:
        """The programs for rows with these adapters, 0 for none. Lowered at their first use."""
        if not any(numbers):
            return self._base
        adapters = tuple(sorted({number for number in numbers if number}))
        if adapters not in self._adapted:
            self._adapted[adapters] = self._lower(adapters)
            if len(self._adapted) > KEPT:
                self._adapted.popitem(last=False)
        self._adapted.move_to_end(adapters)
        return self._adapted[adapters]

    def _set(self, name: str, value: int) -> None:
        self._words[CONTEXT[name]] = value

    def forward(
        self, tokens: np.ndarray, view: cache.View, all_positions: bool, probe: Any = None
    ) -> np.ndarray:
        """Logits float32 [B, V] of the last of `tokens` [B, T], with all_positions [B, T, V].
        Stores keys and values in `view`.

        Single tokens of several rows run together, prompts one after another. probe: as in
        model.forward. Raises ContextError for another model's cache, ValueError for unfit arrays.
        """
        self._check(tokens, view)
        batch, count = tokens.shape
        if self._process != os.getpid():
            self._start_over()
        if batch == count == 1 and not all_positions and not probe:
            with self._lock:
                return self._decode(tokens[0], view)
        vocab, together = self.config.vocab_size, count == 1  # rows of single tokens
        shape = (batch, count, vocab) if all_positions else (batch, vocab)
        results, runs = np.empty(shape, np.float32), []
        with self._lock:
            self._reserve_scores(max(span.end for span in view.spans))
            for b in range(1 if together else batch):
                places, ids = [(b, t) for t in range(count)], tokens[b]
                if together:
                    places, ids = [(row, 0) for row in range(batch)], tokens[:, 0]
                programs = self._find_programs(
                    view.adapters if together else view.adapters[b : b + 1]
                )
                probes: Probes | None = {} if probe else None
                runs.append(probes)
                for begin in range(0, len(ids), CHUNK):
                    end = min(begin + CHUNK, len(ids))
                    if together:
                        out = results.reshape(batch, vocab)[begin:end]
                    elif all_positions:
                        out = results[b, begin:end]
                    else:
                        out = results[b : b + 1] if end == count else None
                    self._place(view, places[begin:end])
                    self._run_chunk(
                        programs, ids[begin:end], out, together or all_positions, probes
                    )
        for name in runs[0] if probe else ():
            parts = [np.concatenate(run[name], axis=-2) for run in runs]  # [.., tokens, width]
            if len(parts) == batch:
                probe(name, np.stack(parts))
            else:
                probe(name, np.moveaxis(parts[0], -2, 0)[..., None, :])
        return results

    def _decode(self, token: np.ndarray, view: cache.View) -> np.ndarray:
        """Logits float32 [1, V] after a token, int32 [1], alone."""
        start, adapter = view.spans[0].start, view.adapters[0]
        (_, pages), (cosine, sine) = view.page_tables[0], view.find_tables()
        if not self._scored - GROWTH <= start < self._scored:
            self._reserve_scores(start + 1)
        _PLACE.pack_into(self._place_words, 0, start, pages, cosine, sine, adapter)
        if self._states is not None:
            before, after = view.blocks[0]
            self._states[0] = before, after.address
        self._start_chunk(token)
        self._words[_TOKENS] = 1
        programs = self._find_programs(view.adapters) if adapter else self._base
        self.team.run(programs.decode.program, self.context)
        return self._logits.copy()

    def _reserve_scores(self, positions: int) -> None:
        """Tell the machine code where a call over so many positions of a row has scores."""
        if not self._scored - GROWTH < positions <= self._scored:
            positions = pad(positions, GROWTH)
            scores = self.workspace.reserve_scores(positions)
            for name, value in zip(("scores", "scores_bytes", "scores_head_bytes"), scores):
                self._set(name, value)
            self._scored = positions

    def _start_over(self) -> None:
        """Renew the team, the lock and an unfinished barrier in a forked process."""
        self._process, self._lock = os.getpid(), threading.Lock()
        self.team = Team(self.code, self.threads)
        self.workspace.sync.array.fill(0)

    def _check(self, tokens: np.ndarray, view: cache.View) -> None:
        """Raise for a view that the machine code cannot take: see forward."""
        c = self.config
        if (view.config is not c and view.config != c) or (
            view.layouts is not self._layouts and view.layouts != self.workspace.pages
        ):
            raise ContextError("the cache was made by another model: use this model's make_cache")
        self._layouts = view.layouts
        batch, count = tokens.shape
        if not batch == len(view.spans) == len(view.pages) == len(view.page_tables):
            raise ValueError(f"{batch} sequences do not fit a view of {len(view.spans)} rows")
        for span, pages, (table, _) in zip(view.spans, view.pages, view.page_tables):
            positions = PAGE * min(len(table), *map(len, pages))
            if span.count != count or span.end > positions:
                raise ValueError(
                    f"{count} positions from {span.start} on do not fit {positions} positions "
                    "of pages"
                )
        if batch == count == 1:
            return  # find_tables answers
        width = c.table_width
        for table in view.tables:
            is_float32 = table.dtype == np.float32 and table.flags.c_contiguous
            if table.shape != (batch, count, width) or not is_float32:
                raise ValueError(
                    f"a rope table {table.dtype} {table.shape}, "
                    f"not float32 {(batch, count, width)} in C order"
                )

    def _place(self, view: cache.View, tokens: list[tuple[int, int]]) -> None:
        """Tell the machine code where the cache has each of `tokens`, (sequence, index in it)."""
        cosine, sine = (table.ctypes.data for table in view.tables)
        _, count, width = view.tables[0].shape
        places = []
        for b, t in tokens:
            pages, at = view.page_tables[b][1], 4 * width * (b * count + t)
            position = view.spans[b].start + t
            places.append((position, pages, cosine + at, sine + at, view.adapters[b]))
        self.workspace.places.array[: len(tokens)] = places
        if self._states is not None:
            blocks = [(before, after.address) for before, after in view.blocks]
            self._states[: len(tokens)] = [(blocks[b][t > 0], blocks[b][1]) for b, t in tokens]

    def embed(self, tokens: np.ndarray) -> None:
        """Write the embeddings of up to CHUNK tokens, int32 [T], to the tables' buffers."""
        for table in self.tables:
            if table.numbers is not None and len(tokens) == 1:
                table.rows[0] = table.numbers[tokens[0]]
            elif table.dequantise is None:
                table.rows[: len(tokens)] = ops.embed(tokens[None], table.weight)[0]
            elif len(tokens) == 1:
                self._embed_rows(table, int(tokens[0]), 1, 0)
            else:
                for first in range(0, len(tokens), ROWS):
                    part = tokens[first : first + ROWS]
                    ids = np.resize(part, ROWS).astype(np.int64)
                    self._embed_rows(table, ids, len(part), first)
            if table.factor != 1:
                table.rows[: len(tokens)] *= np.float32(table.factor)

    def _embed_rows(self, table: Table, tokens: np.ndarray | int, count: int, first: int) -> None:
        """Write `count` embeddings from row `first` of the buffer on. tokens: [16] or one id."""
        blocks, row_bytes, start = table.place
        self._table_rows[:] = start + row_bytes * tokens
        out = table.buffer.address + first * table.buffer.row_bytes
        addresses = self._table_rows.ctypes.data
        table.dequantise(addresses, count, blocks, out, table.buffer.row_bytes)

    def _start_chunk(self, ids: np.ndarray) -> None:
        """Embed up to CHUNK tokens, int32 [T]."""
        self._words[_FIRST_ROW] = 0
        self.embed(ids)
        for padding in self._paddings:  # an earlier run's infinity may have left NaN there
            padding[: len(ids)] = 0

    def _run_chunk(
        self,
        programs: Programs,
        ids: np.ndarray,
        out: np.ndarray | None,
        all_positions: bool,
        probes: Probes | None,
    ) -> None:
        """Run up to CHUNK tokens, int32 [T], whose places are set. out: for logits, or None."""
        tokens, w, vocab = len(ids), self.workspace, self.config.vocab_size
        self._start_chunk(ids)
        if tokens == 1 and out is not None:
            self._run(programs.decode, 1, probes)
            out[0] = w.logits.array[0, :vocab]
            return
        if not all_positions and probes is None:
            # An interrupt waits for the end of a run: run a prompt in parts.
            parts = math.ceil(tokens * self._work / PART_WORK)
            self._run(programs.prompt, tokens, None, parts)
            if out is not None:
                for buffer in (*programs.last.moves, w.places):
                    buffer.array[0] = buffer.array[tokens - 1]
                self._run(programs.last, 1, None)
                out[0] = w.logits.array[0, :vocab]
            return
        self._run(programs.body, tokens, probes)
        for first in range(0, tokens, HEAD_CHUNK):
            size = min(HEAD_CHUNK, tokens - first)
            self._set("first_row", first)
            self._run(programs.head, size, probes)
            if all_positions:
                out[first : first + size] = w.logits.array[:size, :vocab]
            elif out is not None and first + size == tokens:
                out[0] = w.logits.array[size - 1, :vocab]

    def _run(self, segment: Segment, tokens: int, probes: Probes | None, parts: int = 1) -> None:
        self._words[_TOKENS] = tokens
        program = segment.program
        if probes is None:
            if parts <= 1:
                self.team.run(program, self.context)
                return
            parts = max(1, min(len(program), parts))
            bounds = [len(program) * part // parts for part in range(parts + 1)]
            for first, last in itertools.pairwise(bounds):
                self.team.run(program, self.context, first, last)
            return
        done = 0

        def advance(to: int) -> None:
            nonlocal done
            if to > done:
                self.team.run(program, self.context, done, to)
                done = to

        for mark in segment.marks:
            values = self._read_mark(mark, tokens, advance)
            probes.setdefault(mark.name, []).append(values)
        advance(len(program))

    def _read_mark(self, mark: Mark, tokens: int, advance: Callable[[int], None]) -> np.ndarray:
        """Run to a mark's last operation and read its values; later operations do not change."""
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
