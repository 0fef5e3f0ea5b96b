"""The only loop: many requests, one step for all of them.

A tick admits a request, launches one chunk of a prompt and one step for all rows, and reads the step's tokens at once. A
device that works by itself receives step n+1 before step n is read, as long as the rows stay the same; the surplus
step of a row that ended is trimmed. A row that needs its last token on the host, to draft from it, has steps of its own.

Ticks run inline, in the thread that waits for a token, or on a thread of the scheduler (`start`).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_llama.core.backends.interface import Array, Cache, Model, SamplingBatch
from mlx_llama.core.backends.load_options import MAX_ROWS
from mlx_llama.core.backends.logprobs import TokenLogprobs, unpack
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.errors import ContextError, SessionError
from mlx_llama.core.models import rope
from mlx_llama.core.text.tokenizer import Tokenizer

from .budget import default_budget
from .chunks import Chunks
from .device import Device
from .engine import Engine
from .home import Home
from .request import NO_ROW, Handle, Request, Sequence
from .rows import Rows
from .slots import Slots
from .speculate import ModelDrafts

KEPT_ROWS = 8  # finished rows that stay as prefixes
SHARED_CHUNK = 512  # most prompt tokens per tick while others run
PORTION = 256  # positions of an answer that admission counts in advance
WAKE_SECONDS = 0.5  # a consumer looks again after this time


@dataclass
class Step:
    """A launched step. sampled: int32 [B, 1] on the device, or [B, C] with log-probabilities; with drafts [1, T], the next
    token after each position."""

    sequences: list[Sequence]
    sampled: Array
    drafts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> Array:
        """The sampled tokens without log-probabilities, int32 [B, 1] on the device, as the next step's input."""
        return self.sampled if self.sampled.shape[1] == 1 else self.sampled[:, :1]


class Clock:
    """Seconds during which ticks ran. Time that consumers spend on a token does not count."""

    def __init__(self) -> None:
        self._idle = 0.0
        self._stopped = time.perf_counter()

    def start(self) -> None:
        self._idle += time.perf_counter() - self._stopped

    def stop(self) -> None:
        self._stopped = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._idle


class Scheduler:
    """Serves requests on one model.

    context: positions of a request, prompt and answer together. draft: a smaller model that guesses tokens. cache_memory:
    bytes of all keys and values; None: what is free when the first request comes, less a tenth, at least 256 MB.
    max_rows: requests in one step. kept_rows: finished ones that stay as prefixes of later prompts. home: the thread that
    makes all calls of the backend, None for the threads that tick.
    """

    def __init__(self, backend: Backend, model: Model, tokenizer: Tokenizer | None, eos: frozenset[int], context: int, *,
                 draft: Model | None = None, cache_memory: int | None = None, max_rows: int = MAX_ROWS,
                 kept_rows: int = KEPT_ROWS, home: Home | None = None):
        self.engine = Engine(backend, model, tokenizer, eos, context, draft)
        self.backend, self.model, self.context = backend, model, context
        self.cache_memory, self.max_rows, self.kept_rows = cache_memory, max_rows, kept_rows
        self.call = home.call if home else _call_here
        self._start_over()

    def _start_over(self) -> None:
        """Begin without rows and requests."""
        self._process = os.getpid()
        self.device = Device(self.backend)
        self.slots = Slots(self.max_rows)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: Sequence | None = None
        self.running: list[Sequence] = []  # in the order of admission
        self.steps: list[Step] = []  # launched and not read, in the order of launching
        self._rows: Rows | None = None
        self._arrived: deque[Sequence] = deque()  # submitted by any thread, seen by the next tick
        self._last: Step | None = None  # its tokens on the device are the input of the same rows' next step
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None
        self._drafters: dict[int, ModelDrafts] = {}  # by row
        self._numbers = itertools.count()
        self._clock = Clock()
        self._chunks = Chunks(SHARED_CHUNK)
        self._prompt_tokens = 0  # of this tick
        self._ticking = threading.Lock()
        self._ticker: int | None = None  # the thread that ticks
        self._setup = threading.Lock()
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self.set_asides = 0  # requests whose row was freed while memory was short, to be computed again
        self._is_short = False  # memory is, until the youngest request is set aside: no step runs ahead

    def _check_process(self) -> None:
        """Start over in a forked process, which lacks the threads of the first. Raises BackendError where it cannot compute."""
        if self._process != os.getpid():
            self.backend.check_process()
            for sequence in self._alive():
                sequence.row = NO_ROW  # requests go on in the first process alone
            self._start_over()

    def _hold(self) -> threading.Lock:
        """The lock of a tick."""
        self._check_process()
        return self._ticking

    # Storage, made for the first request

    @property
    def rows(self) -> Rows:
        return self._rows or self.call(self._make_rows)

    def _make_rows(self) -> Rows:
        with self._setup:
            if self._rows is None:
                draft, count = self.engine.draft, self.max_rows + self.kept_rows
                budget = self.cache_memory if self.cache_memory is not None else self._measure_budget()
                cache = self.model.make_cache(self.context, count)
                # Beyond its trained positions a draft model guesses badly, and dynamic rope would forbid trimming.
                drafts = draft.make_cache(min(self.context, draft.config.max_position_embeddings), count) if draft else None
                self._rows = Rows(self.model.config, cache, drafts, budget, self.kept_rows, self.backend.runtime.is_out_of_memory)
            return self._rows

    @property
    def cache(self) -> Cache:
        return self.rows.cache

    @property
    def budget(self) -> int | None:
        """Bytes that keys and values may take; None: unknown, so unlimited."""
        return self.rows.budget

    def _measure_budget(self) -> int | None:
        free = self.backend.runtime.free_memory(self.backend.device)
        return None if free is None else default_budget(free)

    # Requests

    def submit(self, request: Request) -> Handle:
        """Check a request and queue it. Raises ContextError and OptionsError. Any thread may call it."""
        return self.prepare(request).begin()

    def prepare(self, request: Request) -> Handle:
        """As `submit`, but the handle queues the request at its first use."""
        self._check_process()
        self.engine.check(request)
        self._check_memory(len(request.prompt))
        return Handle(self.engine.begin(request), self)

    def _check_memory(self, length: int) -> None:
        rows = self.rows
        needed = rows.nbytes_for(length + 1)
        if rows.budget is not None and needed > rows.budget:
            raise ContextError(f"keys and values of the prompt's {length} tokens take {needed / 1e6:.1f} MB, and the cache may "
                               f"take {rows.budget / 1e6:.1f} MB: shorten the prompt, raise `cache_memory`, or close other "
                               "programs")

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a request that `prepare` has checked."""
        self._check_process()
        sequence.number = next(self._numbers)
        sequence.writer.submitted = time.perf_counter()
        if sequence.limit == 0:
            sequence.writer.end("length")
            sequence.is_over = True
            return
        self._arrived.append(sequence)
        with self._work:
            self._work.notify_all()

    # Who ticks

    def start(self) -> None:
        """Tick on a thread of the scheduler's own from now on."""
        if self._thread is None:
            self._is_closing = False
            self._thread = threading.Thread(target=self._run, name="mlx_llama scheduler", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread, end all requests as interrupted and free the rows."""
        if self._process != os.getpid():
            return
        with self._work:
            self._is_closing = True
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._ticking:
            self.call(self._clear)

    def _clear(self) -> None:
        for sequence in [*self._arrived, *self.waiting, *self._alive()]:
            sequence.is_cancelled = True
            sequence.writer.interrupt()
        self._sweep()
        self.steps, self._last, self._batch = [], None, None
        if self._rows is not None:
            for row in list(self._rows.kept):
                self._rows.drop(row)

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._is_closing or self._has_work())
            if self._is_closing:
                return
            self.tick()

    def _has_work(self) -> bool:
        return bool(self._arrived or self.waiting or self.prefilling or self.running)

    def advance(self, sequence: Sequence, has_news: Callable[[], bool]) -> None:
        """Wait for news of a request: run a tick, or await one where another thread ticks."""
        if self._ticker == threading.get_ident():
            raise SessionError("a callback cannot wait for an answer: it runs inside the loop that computes it")
        self._check_process()
        if self._thread is not None:
            sequence.news.clear()
            sequence.is_awaited = True
            if not has_news():
                sequence.news.wait(WAKE_SECONDS)
            sequence.is_awaited = False
            return
        with self._hold():
            if not has_news() and not self.call(self._tick_held) and not has_news():
                self._fail(sequence, SessionError("this request was lost: submit it again"))

    def sweep(self) -> None:
        """End cancelled requests now, or in the tick that runs."""
        if self._ticker != threading.get_ident() and self._ticking.acquire(blocking=False):
            try:
                self.call(self._sweep)
            finally:
                self._ticking.release()

    def tick(self) -> bool:
        """Admit, prefill, step, read. False: there was nothing to do."""
        with self._hold():
            return self.call(self._tick_held)

    def _tick_held(self) -> bool:
        self._clock.start()
        self._ticker = threading.get_ident()
        try:
            return self._tick()
        except Exception as error:  # a defect of the loop: it must not end the loop
            for sequence in self._alive():
                self._fail(sequence, error)
            self._recover()
            return True
        except BaseException:  # Ctrl-C: the consumer cancels its request
            self._recover()
            raise
        finally:
            self._ticker = None
            self._clock.stop()

    # A tick

    def _tick(self) -> bool:
        self._sweep()
        self._admit()
        if not self.running and not self.prefilling:
            self.steps = []
            return bool(self.waiting)
        started, self._prompt_tokens, is_stepping = time.perf_counter(), 0, bool(self.running)
        self._prefill()
        self._launch()
        steps, self.steps = self.steps, []
        if self.backend.runs_ahead:
            groups = self._group(self.running)
            for step in steps:
                self._run_ahead(step, groups)
        for step in steps:
            if not self._read(step):
                break  # the other steps were forgotten with it
        self._chunks.note(time.perf_counter() - started, self._prompt_tokens, is_stepping)
        if self.backend.runs_ahead:
            self._launch(may_wait=False)  # the device works while consumers look at the tokens
        return True

    def _sweep(self) -> None:
        """Queue the requests that arrived; end those that were cancelled."""
        while self._arrived:
            if not self.waiting or self.waiting[-1] is not self._arrived[0]:
                self.waiting.append(self._arrived[0])
            self._arrived.popleft()
        if any(sequence.is_cancelled for sequence in self.waiting):
            for sequence in [sequence for sequence in self.waiting if sequence.is_cancelled]:
                self._end(sequence)
        for sequence in self._alive():
            if sequence.is_cancelled or sequence.writer.is_finished:  # finished before an interrupt
                self._end(sequence)

    def _alive(self) -> list[Sequence]:
        return [*self.running, *([self.prefilling] if self.prefilling else [])]

    def _admit(self) -> None:
        """Give the next request a row, if there is one and memory for its prompt and a first portion."""
        if self.prefilling or not self.waiting or len(self.running) >= self.max_rows:
            return
        sequence = self.waiting[0]
        try:
            self._enter(sequence)
        except Exception as error:
            self._fail(sequence, error)
            self._repair()

    def _enter(self, sequence: Sequence) -> None:
        """Admit a request, refuse it, or leave it waiting. Raises what its calls of the backend raise."""
        rows, length = self.rows, len(sequence.text)
        reuses = sequence.request.reuses
        claimed = rows.claim(sequence.text, length + min(PORTION, sequence.left), reuses, sequence.adapter)
        if claimed is None and not self.running:
            claimed = rows.claim(sequence.text, length, reuses, sequence.adapter)
        if claimed is None:
            if not self.running:
                self._refuse(sequence)
            return
        sequence.row, reused = claimed
        sequence.slot = self.slots.enter(sequence.text, {other.slot for other in self.running})
        sequence.writer.start(self._clock.now(), min(reused, sequence.prompt_length))
        sequence.sampling = sequence.sampling or self.backend.sampling_batch([sequence.options])
        if sequence.speculation.kind == "model" and sequence.speculation.is_on:
            try:
                self._begin_drafts(sequence)
            except Exception as error:
                self._end_drafts(sequence, error)
        if self._may_not_share(length):
            sequence.writer.add_notices(["no prefix is reused: this model's dynamic rope rotates keys of a text beyond "
                                         f"{self.model.config.max_position_embeddings} tokens by angles of its length"])
        self.prefilling = sequence
        self.waiting.popleft()

    def _refuse(self, sequence: Sequence) -> None:
        """End a request that does not fit although nothing else runs."""
        self.waiting.popleft()
        length, rows = len(sequence.text), self.rows
        if length > sequence.prompt_length:  # it ran before
            sequence.writer.end("context", _describe_shortage(rows.nbytes_for(length), length))
            self._end(sequence)
            return
        try:
            self.cache.check_memory({rows.free[-1]: length})
            self._check_memory(length)
            raise ContextError("memory has no room for the prompt's keys and values: shorten the prompt, or close other programs")
        except ContextError as error:
            self._fail(sequence, error)

    def _may_not_share(self, length: int) -> bool:
        config = self.model.config
        return rope.length_dependent(config) and length > config.max_position_embeddings

    def _begin_drafts(self, sequence: Sequence) -> None:
        row, draft, cache = sequence.row, self.engine.draft, self.rows.drafts
        assert draft and cache
        if row not in self._drafters:
            self._drafters[row] = ModelDrafts(draft, cache, row)
        self._drafters[row].begin(sequence.text, sequence.sampling, sequence.options.prefill_step_size)
        sequence.speculation.drafter = self._drafters[row]

    def _prefill(self) -> None:
        """Launch a chunk of the admitted prompt; with the last one, the step of its first token."""
        sequence = self.prefilling
        if sequence is None:
            return
        try:
            start, row = self.cache.lengths[sequence.row], sequence.row
            rest = sequence.text[start:start + self._choose_chunk(sequence, start)]
            self._prompt_tokens = len(rest)
            drafter = sequence.speculation.drafter
            if isinstance(drafter, ModelDrafts):
                drafter.prefill(start + len(rest), self.device)
            if start + len(rest) < len(sequence.text):
                self.device.prefill(self.model, rest, self.cache, row)
                sequence.processed = min(start + len(rest), sequence.prompt_length)
                sequence.writer.tell_prefill(self._clock.now())
                sequence.tell()
                return
            # Sample in the last chunk's step, which saves one pass over the weights.
            step = self._step([sequence], np.array([rest], np.int32))
        except Exception as error:
            if self._find_memory(error):
                self._rewind(sequence)
            else:
                self._fail(sequence, error)
            return
        sequence.processed = sequence.prompt_length
        self.steps.append(step)
        self.running.append(sequence)
        self.prefilling = None

    def _choose_chunk(self, sequence: Sequence, start: int) -> int:
        """Prompt tokens in the next chunk."""
        if self._may_not_share(len(sequence.text)):
            # Each chunk would be rotated for another length; an answer that is resumed was decoded token by token.
            return sequence.prompt_length if start < sequence.prompt_length else 1
        chunk = min(sequence.options.prefill_step_size, self.model.prefill_width)
        if not self.running:
            return chunk
        return min(chunk, self._chunks.choose() if self.model.is_batch_invariant else SHARED_CHUNK)

    def _group(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Sequences that share a step. Where others could run ahead, one that drafts is alone, and those with a grammar are
        apart: they wait for their tokens, and the host computes their masks while the device works for the others. One that
        waits for its logits is alone and comes last."""
        waiting = [[sequence] for sequence in sequences if sequence.needs_logits]
        if waiting:
            sequences = [sequence for sequence in sequences if not sequence.needs_logits]
        if not self.backend.runs_ahead:
            return [sequences, *waiting] if sequences else waiting
        together: list[Sequence] = []
        constrained: list[Sequence] = []
        groups: list[list[Sequence]] = []
        for sequence in sequences:
            if sequence.speculation.is_drafting:
                groups.append([sequence])
            else:
                (together if sequence.constraint is None else constrained).append(sequence)
        return [group for group in (together, *groups, constrained, *waiting) if group]

    # Launching

    def _launch(self, may_wait: bool = True) -> None:
        """Launch a step for every running sequence that has none. may_wait: also for those that wait for their logits."""
        self._is_short = False
        busy = {id(sequence) for step in self.steps for sequence in step.sequences}
        idle = [sequence for sequence in self.running if id(sequence) not in busy and (may_wait or not sequence.needs_logits)]
        if not idle:
            return
        for group in self._group(idle):
            group = [sequence for sequence in group if sequence.row != NO_ROW]  # set aside for one before
            alone = [sequence for sequence in group if self._launch_drafts(sequence) or self._launch_stretch(sequence)]
            group = [sequence for sequence in group if sequence not in alone] if alone else group
            group = self._make_room(group, 1)
            if group:
                self._launch_step(group)

    def _launch_drafts(self, sequence: Sequence) -> bool:
        """Launch the verification of drafts; False if there are none."""
        speculation = sequence.speculation
        if not speculation.is_drafting:
            return False
        try:
            drafts = speculation.draft(sequence.left - 1, self.device)
            if not drafts or not self.rows.reserve({sequence.row: len(sequence.text) + len(drafts)}):
                return False
            sampled = self.device.verify(self.model, [sequence.text[-1], *drafts], self.cache, sequence.row,
                                         sequence.sampling, sequence.writer)
        except Exception as error:
            self._end_drafts(sequence, error)
            self._rewind(sequence)
            return sequence.is_over
        self.steps.append(Step([sequence], sampled, drafts))
        return True

    def _end_drafts(self, sequence: Sequence, error: Exception) -> None:
        """Go on without drafts, which do not change the text."""
        sequence.speculation.end(f"speculation was switched off: {error}")

    def _launch_stretch(self, sequence: Sequence) -> bool:
        """Launch one step over the tokens that a grammar forced; False if there are none."""
        if sequence.constraint is None or self.cache.lengths[sequence.row] == len(sequence.text) - 1:
            return False
        tokens = sequence.text[self.cache.lengths[sequence.row]:]
        if not self._make_room([sequence], min(len(tokens), SHARED_CHUNK)):
            return True
        try:
            if len(tokens) > SHARED_CHUNK:  # the next tick goes on
                self.device.prefill(self.model, tokens[:SHARED_CHUNK], self.cache, sequence.row)
            else:
                self.steps.append(self._step([sequence], np.array([tokens], np.int32)))
        except Exception as error:
            self._fail(sequence, error)
        return True

    def _launch_step(self, sequences: list[Sequence]) -> None:
        """Launch the next token of sequences whose tokens are known."""
        last = self._last
        if last and last.sequences == sequences and not last.drafts:
            tokens = last.tokens
        else:
            tokens = np.array([[sequence.text[-1]] for sequence in sequences], np.int32)
        try:
            self.steps.append(self._step(sequences, tokens))
        except Exception as error:
            self._retry(sequences, error)

    def _step(self, sequences: list[Sequence], tokens: Array) -> Step:
        rows = [sequence.row for sequence in sequences]
        writers = [sequence.writer for sequence in sequences]
        masks = (lambda: self._compute_masks(sequences)) if any(sequence.constraint for sequence in sequences) else None
        first = sequences[0]
        if first.needs_logits:  # it is alone
            return Step(sequences, self.device.step_processed(self.model, tokens, self.cache, first.row, first.sampling,
                                                              first.writer, first.process, masks))
        return Step(sequences, self.device.step(self.model, tokens, self.cache, rows, self._sampling(sequences), writers, masks))

    def _compute_masks(self, sequences: list[Sequence]) -> np.ndarray:
        """Allowed tokens of each sequence, int32 [B, ceil(V / 32)]. Raises OptionsError for a grammar that grew too complex."""
        masks = np.full((len(sequences), -(-self.model.config.vocab_size // 32)), -1, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence.constraint:
                masks[row] = sequence.constraint.mask()
        return masks

    def _sampling(self, sequences: list[Sequence]) -> SamplingBatch:
        if len(sequences) == 1:
            return sequences[0].sampling
        if self._batch is None or self._batch[0] != sequences:
            self._batch = sequences, self.backend.sampling_batch([sequence.options for sequence in sequences])
        return self._batch[1]

    def _run_ahead(self, step: Step, groups: list[list[Sequence]]) -> None:
        """Launch the step after `step`, which is not read yet, unless its tokens may change the rows or be drafted from."""
        # A launched step cannot be cancelled, so do not run ahead of a possible draft.
        if self._is_short or step.drafts or step.sequences not in groups or any(
                sequence.left == 1 or sequence.is_cancelled or sequence.constraint or sequence.needs_logits
                or sequence.speculation.may_draft_next()
                for sequence in step.sequences):
            return
        before = [self.cache.lengths[sequence.row] for sequence in step.sequences]
        try:
            if self.rows.reserve({sequence.row: length + 1 for sequence, length in zip(step.sequences, before)}):
                self.steps.append(self._step(step.sequences, step.tokens))
        except Exception:  # launch it again once the tokens are read
            for sequence, length in zip(step.sequences, before):
                self._trim(sequence, length)

    # Memory

    def _make_room(self, sequences: list[Sequence], count: int) -> list[Sequence]:
        """Those of `sequences` that can grow by `count` positions. Sets the youngest request aside while memory is short."""
        while sequences := self._grow(sequences, count):
            ends = [self.cache.lengths[sequence.row] + count for sequence in sequences]
            if all(self.cache.allocated[sequence.row] >= end for sequence, end in zip(sequences, ends)):
                return sequences
            youngest = max(self._alive(), key=lambda sequence: sequence.number)
            if any(youngest in step.sequences for step in self.steps):
                self._is_short = True  # read it first
                return []
            if len(self._alive()) == 1:
                length = len(youngest.text)
                youngest.writer.end("context", _describe_shortage(self.rows.nbytes_for(length), length))
                self._end(youngest)
            else:
                self._set_aside(youngest)
            sequences = [sequence for sequence in sequences if sequence is not youngest]
        return []

    def _grow(self, sequences: list[Sequence], count: int) -> list[Sequence]:
        """Reserve `count` more positions, where memory has room for them; returns those whose growth does not fail."""
        try:
            self.rows.reserve({sequence.row: self.cache.lengths[sequence.row] + count for sequence in sequences})
            return sequences
        except Exception as error:
            if len(sequences) == 1:
                self._fail(sequences[0], error)
                return []
        return [grown for sequence in sequences for grown in self._grow([sequence], count)]

    def _find_memory(self, error: Exception) -> bool:
        """Free memory after an error of a step; False if it is another error, or there is nothing to free."""
        if not self.backend.runtime.is_out_of_memory(error):
            return False
        if self.rows.kept:
            for row in list(self.rows.kept):
                self.rows.drop(row)
            return True
        launched = [sequence for step in self.steps for sequence in step.sequences]
        idle = [sequence for sequence in self._alive() if sequence not in launched]
        if not idle or len(self._alive()) < 2:
            return False
        self._set_aside(max(idle, key=lambda sequence: sequence.number))
        return True

    def _set_aside(self, sequence: Sequence) -> None:
        """Free a row; the request goes to the front of the queue and is computed again later, to the same tokens."""
        self.set_asides += 1
        self.waiting.appendleft(sequence)
        if sequence is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(sequence)
        self._leave(sequence, self.rows.release)
        self._leave_row(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        sequence.row = NO_ROW
        if sequence.speculation.kind == "model":
            sequence.speculation.drafter = None  # it belongs to the row

    # Reading

    def _read(self, step: Step) -> bool:
        """Read a step and take its tokens. False: it failed, and all launched steps are forgotten."""
        try:
            sampled = self.device.read(step.sampled, [sequence.writer for sequence in step.sequences])
        except Exception as error:
            self._forget_steps()
            self._retry(step.sequences, error)
            return False
        self._last = step
        now = self._clock.now()
        if step.drafts:
            self._take(step.sequences[0], step.drafts, sampled, now)
        else:
            width = len(sampled) // len(step.sequences)  # more than one with log-probabilities
            for row, sequence in enumerate(step.sequences):
                self._take_row(sequence, sampled[row * width:(row + 1) * width], now)
        return True

    def _take_row(self, sequence: Sequence, columns: list[int], now: float) -> None:
        """Append a token, which may have log-probabilities beside it."""
        self._take(sequence, [], columns[:1], now, unpack(columns, sequence.options.logprobs))

    def _take(self, sequence: Sequence, drafts: list[int], sampled: list[int], now: float,
              logprobs: TokenLogprobs | None = None) -> None:
        """Append the tokens that a step gave, and those that a grammar forces after them."""
        if sequence.is_over:  # it ended while the step ran
            return
        try:
            tokens = sequence.speculation.accept(drafts, sampled)
            goes_on = all(sequence.take(token, now, logprobs) for token in tokens)
            goes_on = goes_on and all(sequence.take(token, now) for token in self._find_forced(sequence))
            if drafts:  # a rejected draft may lie where the last token belongs
                self._rewind(sequence)
            if goes_on:
                sequence.tell()
            else:
                self._end(sequence)
        except Exception as error:
            self._fail(sequence, error)

    def _find_forced(self, sequence: Sequence) -> list[int]:
        """Tokens that a grammar makes certain; the next step computes all of them at once."""
        # Log-probabilities come one a step; dynamic rope rotates several positions of one call alike.
        if sequence.constraint is None or sequence.options.logprobs is not None or rope.length_dependent(self.model.config):
            return []
        return sequence.constraint.forced()

    # Ends

    def _end(self, sequence: Sequence) -> None:
        """Remove a sequence and keep its row as a prefix. An interrupt may come between any two lines: it is done again."""
        self._close(sequence)
        self._leave(sequence, self.rows.keep)
        self._remove(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence by an error, and forget its row."""
        if not sequence.is_over:
            sequence.error = error
            sequence.writer.fail(error)
            self._close(sequence)
        self._leave(sequence, self.rows.release)
        self._remove(sequence)

    def _leave(self, sequence: Sequence, leave: Callable[[int], None]) -> None:
        """Call rows.keep or rows.release; a row that fails even then is freed."""
        if sequence.row != NO_ROW:
            try:
                leave(sequence.row)
                sequence.row = NO_ROW
            except Exception:
                sequence.row = NO_ROW
                self._repair()

    def _close(self, sequence: Sequence) -> None:
        if sequence.is_over:
            return
        sequence.writer.add_notices(self.model.notices)  # compiling or capturing a step may have added some
        sequence.is_over = True
        try:
            sequence.tell()
        except Exception as error:
            sequence.error = sequence.error or error

    def _remove(self, sequence: Sequence) -> None:
        if sequence is self.prefilling:
            self.prefilling = None
        elif sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    # Failures

    def _retry(self, sequences: list[Sequence], error: Exception) -> None:
        """A step failed: compute its rows one by one and end those that fail again."""
        self._last = None
        if self._find_memory(error):
            for sequence in sequences:
                self._rewind(sequence)
            return
        for sequence in list(sequences):
            if sequence.is_over:
                continue
            if len(sequences) == 1:
                self._fail(sequence, error)
                return
            self._rewind(sequence)
            if sequence.is_over:
                continue
            try:
                step = self._step([sequence], np.array([sequence.text[self.cache.lengths[sequence.row]:]], np.int32))
                sampled = self.device.read(step.sampled, [sequence.writer])
            except Exception as again:
                self._fail(sequence, again)
            else:
                self._take_row(sequence, sampled, self._clock.now())

    def _forget_steps(self) -> None:
        """Drop all launched steps; rows go on from the tokens known on the host."""
        self.steps, self._last = [], None
        for sequence in self._alive():
            self._rewind(sequence)

    def _rewind(self, sequence: Sequence) -> None:
        """Keep the positions before the last known token, which is the next step's input."""
        if sequence.row != NO_ROW:
            self._trim(sequence, min(self.cache.lengths[sequence.row], len(sequence.text) - 1))

    def _trim(self, sequence: Sequence, length: int) -> None:
        try:
            self.cache.trim(length, sequence.row)
        except Exception as error:
            self._fail(sequence, error)

    def _recover(self) -> None:
        """Make rows and queues consistent after an interrupt at any point."""
        first = self.prefilling
        if first is not None and (first in self.waiting or first in self.running or first.row == NO_ROW):
            self.prefilling = None
        self.running = [sequence for sequence in self.running if sequence not in self.waiting and sequence.row != NO_ROW]
        for sequence in self.waiting:
            self._leave_row(sequence)
        if self._rows is None:
            return
        self._repair()
        self._forget_steps()

    def _repair(self) -> None:
        """Free all rows but those of running requests and of prefixes, after a call of the backend failed half way."""
        self.rows.settle({sequence.row for sequence in self._alive()})

    # Prefixes

    def count_known(self, tokens: Several[int], adapter: int = 0) -> int:
        """Tokens at the beginning of `tokens` that some row holds, computed by this adapter."""
        with self._hold():
            return self.rows.find_prefix([*tokens, -1], adapter)[1]

    def export(self, tokens: Several[int] | None = None, adapter: int = 0) -> dict[str, Any]:
        """State of the row with the longest prefix of `tokens` by this adapter; tokens None: of the last row that ended by it;
        {}: there is none. See Cache.state."""
        with self._hold():
            if tokens is None:
                row = next((row for row in reversed(self.rows.kept) if self.cache.adapters[row] == adapter), NO_ROW)
                length = len(self.rows.kept.get(row, ()))
            else:
                row, length = self.rows.find_prefix([*tokens, -1], adapter)
            return self.call(self.rows.export, row, length) if length else {}

    def erase(self, tokens: Several[int]) -> int:
        """Drop the kept rows that hold a prefix of `tokens` and nothing else; returns the longest one's length."""
        with self._hold():
            return self.call(self.rows.drop_prefixes, tokens)

    def install(self, state: dict[str, Any], adapter: int = 0) -> None:
        """Restore an exported state as a prefix of later prompts to the same adapter. Raises ContextError."""
        with self._hold():
            self.call(self.rows.install, state, adapter)


def _call_here(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


def _describe_shortage(nbytes: int, length: int) -> str:
    return (f"the answer ends because memory has no room for more keys and values: those of {length} tokens take "
            f"{nbytes / 1e6:.1f} MB; raise cache_memory or close other programs")
