"""A tick: admit a request, launch a chunk of a prompt and a step for all rows, read its tokens.

An asynchronous device receives step n+1 before step n is read, as long as the rows stay the same;
the surplus step of a row that ended is trimmed. A row that drafts from its last token, which must
be on the host, has separate steps.
"""

from __future__ import annotations

import time

from mlx_llama.core.backends.logprobs import unpack
from mlx_llama.core.engine.engine import Engine
from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.system.interrupts import interruptible

from .device import Device
from .memory import Memory
from .queues import Queues
from .request import NO_ROW, Sequence, Status
from .rows import Rows
from .speculate import ModelDrafts
from .steps import Step, Steps, group

SHARED_CHUNK = 512  # maximum number of prompt tokens per tick while others run
PORTION = 256  # positions of an answer that admission reserves
TILE = 32  # positions of a chunk; the CPU's kernels take as long for fewer
STEPS = 4  # duration of a tick with a chunk, in steps, at most
WEIGHT = 0.25  # of a new measurement in the running average
RATED_CHUNK = 128  # maximum number of prompt tokens whose logits are computed together


class Clock:
    """Counts busy seconds, in which a tick runs; not the time that consumers spend on a token."""

    def __init__(self) -> None:
        self._idle = 0.0
        self._stopped = time.perf_counter()

    def start(self) -> None:
        self._idle += time.perf_counter() - self._stopped

    def stop(self) -> None:
        self._stopped = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._idle


class Chunks:
    """Chooses chunks by the measured speed of a model whose bits do not depend on them."""

    def __init__(self, maximum: int):
        self.maximum = maximum
        self.step_seconds: float | None = None  # averages
        self.token_seconds: float | None = None

    def note(self, seconds: float, tokens: int, is_stepping: bool) -> None:
        """Account for a tick. tokens: of prompts. is_stepping: it also computed a step."""
        if tokens == 0:
            self.step_seconds = _average(self.step_seconds, seconds)
        elif not is_stepping or self.step_seconds is not None:
            step = self.step_seconds if is_stepping and self.step_seconds else 0.0
            self.token_seconds = _average(self.token_seconds, max(seconds - step, 0.0) / tokens)

    def choose(self) -> int:
        """Positions of the next chunk, a multiple of TILE."""
        if not self.step_seconds or not self.token_seconds:
            return TILE
        fitting = int((STEPS - 1) * self.step_seconds / self.token_seconds)
        return max(TILE, min(self.maximum, fitting) // TILE * TILE)


def _average(known: float | None, new: float) -> float:
    return new if known is None else known + WEIGHT * (new - known)


class Scheduler:
    """Serves requests with the rows of a model, on one thread at a time. Parameters: see Loop."""

    def __init__(self, engine: Engine, cache_memory: int | None, max_rows: int, kept_rows: int):
        backend, model, draft = engine.backend, engine.model, engine.draft
        runtime, count, drafts = backend.runtime, max_rows + kept_rows, None
        self.backend, self.model, self.max_rows = backend, model, max_rows
        self.files = engine.files
        self.cache = model.make_cache(engine.context, count)
        self.drafts: list[ModelDrafts] = []  # by row
        if draft:
            # Beyond trained positions a draft model guesses badly; dynamic rope forbids trimming.
            trained = draft.config.max_position_embeddings
            drafts = draft.make_cache(min(engine.context, trained), count)
            device = Device(backend, draft, drafts)
            self.drafts = [ModelDrafts(device, row) for row in range(count)]
        limits = cache_memory, kept_rows, runtime.is_out_of_memory
        self.rows = Rows(model.config, self.cache, drafts, *limits)
        self.queues = Queues(model, self.rows)
        self.steps = Steps(backend, model, self.cache)
        self.memory = Memory(
            self.queues,
            self.steps,
            (lambda: runtime.free_memory(backend.device)) if cache_memory is None else None,
        )
        self.clock = Clock()
        self._chunks = Chunks(SHARED_CHUNK)

    def tick(self) -> bool:
        """Admit, prefill, step, read. False: there was nothing to do."""
        self.clock.start()
        try:
            if self._check_files():
                return True
            return self._tick()
        except Exception as error:  # a bug must not end the loop
            self.steps.forget()
            for sequence in self.queues.admitted:
                self.queues.end(sequence, error)
            return True
        except BaseException:  # Ctrl-C in a prompt: the consumer cancels its request
            self._forget_steps()
            raise
        finally:
            self.memory.settle()
            self.clock.stop()

    def _check_files(self) -> bool:
        """End all requests if the model's file has changed: no page of it is touched any more."""
        sequences = [*self.queues.waiting, *self.queues.admitted]
        try:
            if sequences:
                self.files.check()
            return False
        except CheckpointError as error:
            self.steps.forget()
            for sequence in sequences:
                self.queues.end(sequence, error)
            return True

    def _tick(self) -> bool:
        self.queues.sweep()
        self._admit()
        queues = self.queues
        if not queues.running and not queues.prefilling:
            self.steps.launched = []
            return bool(queues.waiting)
        started, is_stepping = time.perf_counter(), bool(queues.running)
        prompt_tokens = self._prefill()
        self._launch()
        launched, self.steps.launched = self.steps.launched, []
        if self.backend.runs_ahead:
            self._run_ahead(launched)
        for step in launched:
            if not self._read(step):
                break  # the others were forgotten with it
        self._chunks.note(time.perf_counter() - started, prompt_tokens, is_stepping)
        if self.backend.runs_ahead:
            self._launch(may_wait=False)  # the device works while consumers look at the tokens
        return True

    def close(self) -> None:
        """End all requests as interrupted and free the rows."""
        for sequence in [*self.queues.waiting, *self.queues.admitted]:
            sequence.writer.interrupt()
            self.queues.end(sequence)
        self.steps.forget()
        self.rows.drop_all()

    # Admission

    def _admit(self) -> None:
        """Give the next request a row, if memory has room for its prompt and some of its answer."""
        queues, rows = self.queues, self.rows
        if queues.prefilling or not queues.waiting or len(queues.running) >= self.max_rows:
            return
        self.memory.look()
        sequence = queues.waiting[0]
        tokens, length = sequence.tokens, len(sequence.tokens)
        wishes = sequence.request.reuses, sequence.adapter
        try:
            claimed = rows.claim(tokens, length + min(PORTION, sequence.left), *wishes)
            if claimed is None and not queues.running:
                claimed = rows.claim(tokens, length, *wishes)
                if claimed is None:
                    self.memory.refuse(sequence)
            if claimed is None:
                return
            queues.admit(sequence, claimed[0])
            if sequence.request.on_admit:
                sequence.request.on_admit(tokens)
            sequence.writer.start(self.clock.now(), min(claimed[1], sequence.prompt_length))
            sequence.sampling = sequence.sampling or self.backend.sampling_batch([sequence.options])
            if self.drafts and sequence.speculation.wants_model:
                drafts, chunk = self.drafts[sequence.row], self._chunk_size(sequence)
                sequence.speculation.begin(drafts, tokens, sequence.sampling, chunk)
            if rows.has_one_length(length):
                trained = self.model.config.max_position_embeddings
                text = (
                    "no prefix is reused: this model's dynamic rope rotates keys of a text beyond"
                )
                sequence.writer.add_notices([f"{text} {trained} tokens by angles of its length"])
        except Exception as error:
            queues.end(sequence, error)

    # Prefill

    def _prefill(self) -> int:
        """Launch a chunk of the prompt, or the step of the first token. Returns its size."""
        sequence = self.queues.prefilling
        if sequence is None:
            return 0
        start, tokens = self.cache.lengths[sequence.row], sequence.tokens
        end = min(start + self._choose_chunk(sequence, start), len(tokens))
        is_rated = start < sequence.rated
        if is_rated:
            end = min(end, start + RATED_CHUNK, sequence.rated)
        try:
            with interruptible():  # a chunk may take long
                sequence.speculation.prefill(end)
                if is_rated:
                    self.steps.rate(sequence, start, end)
                elif end == len(tokens):
                    # samples in the same pass over the weights
                    self.steps.launch_rest(sequence)
                else:
                    self.steps.prefill(tokens[start:end], sequence.row)
            if end == len(tokens):
                self.queues.run(sequence)
            elif sequence.limit == 0 and end == sequence.rated:  # there is no answer
                sequence.writer.end("length")
                self.queues.end(sequence)
            else:
                sequence.processed = min(end, sequence.prompt_length)
                sequence.writer.tell_prefill(self.clock.now())
                sequence.tell()
        except Exception as error:
            if self.memory.free(error):
                self._rewind(sequence)
            else:
                self.queues.end(sequence, error)
        return end - start

    def _chunk_size(self, sequence: Sequence) -> int:
        return sequence.options.prefill_step_size or self.model.prefill_chunk

    def _choose_chunk(self, sequence: Sequence, start: int) -> int:
        """Number of prompt tokens in the next chunk."""
        if self.rows.has_one_length(len(sequence.tokens)):
            # Chunks would be rotated for other lengths. Resumed answers were decoded by token.
            return sequence.prompt_length if start < sequence.prompt_length else 1
        chunk = min(self._chunk_size(sequence), self.model.prefill_width)
        if not self.queues.running:
            return chunk
        return min(chunk, self._chunks.choose() if self.model.is_batch_invariant else SHARED_CHUNK)

    # Step

    def _launch(self, may_wait: bool = True) -> None:
        """Launch idle sequences' steps. may_wait: including those that wait for their logits."""
        self.memory.is_short = False
        busy = {id(sequence) for step in self.steps.launched for sequence in step.sequences}
        idle = [sequence for sequence in self.queues.running if id(sequence) not in busy]
        if not may_wait:
            idle = [sequence for sequence in idle if not sequence.needs_logits]
        for sequences in group(idle, self.backend.runs_ahead):
            batch = [sequence for sequence in sequences if not self._launch_alone(sequence)]
            if len(batch) < len(sequences):
                batch = [sequence for sequence in batch if sequence.is_running]
            if batch := self.memory.make_room(batch, 1):
                try:
                    self.steps.launch(batch)
                except Exception as error:
                    self._retry(batch, error)

    def _launch_alone(self, sequence: Sequence) -> bool:
        """Launch several positions of a row with drafts or forced tokens. False: it has none."""
        if not sequence.is_running:  # set aside for an earlier sequence
            return True
        if sequence.constraint and self._launch_forced(sequence):
            return True
        return sequence.speculation.drafter is not None and self._launch_drafts(sequence)

    def _launch_drafts(self, sequence: Sequence) -> bool:
        """Launch the verification of drafts; False if there are none."""
        try:
            room = int(min(sequence.left, sequence.free)) - 1
            drafts = sequence.speculation.draft(room)
            end = len(sequence.tokens) + len(drafts)
            if not drafts or not self.rows.reserve({sequence.row: end}):
                return False
            self.steps.verify(sequence, drafts)
        except Exception as error:
            sequence.speculation.end(error)
            self._rewind(sequence)
            return sequence.status is Status.ENDED
        return True

    def _launch_forced(self, sequence: Sequence) -> bool:
        """Launch one step over the tokens that a grammar forced; False if there are none."""
        start = self.cache.lengths[sequence.row]
        count = len(sequence.tokens) - start
        if count == 1:
            return False
        if not self.memory.make_room([sequence], min(count, SHARED_CHUNK)):
            return True
        try:
            if count > SHARED_CHUNK:  # the next tick continues
                part = sequence.tokens[start : start + SHARED_CHUNK]
                self.steps.prefill(part, sequence.row)
            else:
                self.steps.launch_rest(sequence)
        except Exception as error:
            self.queues.end(sequence, error)
        return True

    def _run_ahead(self, launched: list[Step]) -> None:
        """Launch the next steps unread, unless their tokens may change rows or give drafts."""
        groups = group(self.queues.running, True)
        for step in launched:
            # A launched step cannot be cancelled: do not run ahead of a possible draft.
            if (
                self.memory.is_short
                or step.drafts
                or step.sequences not in groups
                or any(
                    sequence.left == 1
                    or sequence.is_cancelled
                    or sequence.needs_token
                    or sequence.needs_logits
                    or sequence.speculation.may_draft_next()
                    for sequence in step.sequences
                )
            ):
                continue
            lengths = self.cache.lengths
            ends = {sequence.row: lengths[sequence.row] + 1 for sequence in step.sequences}
            try:
                if self.rows.reserve(ends):
                    self.steps.launch(step.sequences, step.tokens)
            except Exception:  # it is launched again once the tokens are read
                for sequence in step.sequences:
                    self._rewind(sequence, ends[sequence.row] - 1)

    # Read

    def _read(self, step: Step) -> bool:
        """Read a step and take its tokens. False: it failed, and all steps are forgotten."""
        try:
            sampled = self.steps.read_step(step)
        except Exception as error:
            self._forget_steps()
            self._retry(step.sequences, error)
            return False
        self._take(step, sampled)
        return True

    def _take(self, step: Step, sampled: list[int]) -> None:
        """Append the tokens of a step, and those that a grammar forces after them."""
        now, width = self.clock.now(), len(sampled) // len(step.sequences)
        for row, sequence in enumerate(step.sequences):
            if sequence.status is not Status.RUNNING:  # it ended while the step ran
                continue
            try:
                if step.drafts:
                    tokens = sequence.speculation.accept(step.drafts, sampled)
                    goes_on = sequence.take_all(tokens, now)
                    self._rewind(sequence)  # a rejected draft may lie where the last token belongs
                elif width == 1:
                    goes_on = sequence.take(sampled[row], now)
                else:
                    columns = sampled[row * width : (row + 1) * width]
                    logprobs = unpack(columns, sequence.options.logprobs)
                    goes_on = sequence.take(columns[0], now, logprobs)
                # A step gives log-probabilities of one token; dynamic rope rotates all positions
                # of a call for one length.
                if (
                    goes_on
                    and sequence.constraint
                    and sequence.options.logprobs is None
                    and not self.rows.has_dynamic_rope
                ):
                    # the next step computes all of them
                    goes_on = sequence.take_all(sequence.constraint.forced(), now)
                if goes_on:
                    sequence.tell()
                else:
                    self.queues.end(sequence)
            except Exception as error:
                self.queues.end(sequence, error)

    # Failures

    def _retry(self, sequences: list[Sequence], error: Exception) -> None:
        """Retry a failed step row by row, and end the rows that fail again."""
        is_freed = self.memory.free(error)
        if len(sequences) == 1 and not is_freed:
            self.queues.end(sequences[0], error)
            return
        for sequence in sequences:
            self._rewind(sequence)
            if is_freed or not sequence.is_running:
                continue
            others, self.steps.launched = self.steps.launched, []
            try:
                self.steps.launch_rest(sequence)
                self._take(self.steps.launched[0], self.steps.read_step(self.steps.launched[0]))
            except Exception as again:
                self.queues.end(sequence, again)
            self.steps.launched = others

    def _forget_steps(self) -> None:
        """Drop all launched steps; rows continue from the tokens known on the host."""
        self.steps.forget()
        for sequence in self.queues.admitted:
            self._rewind(sequence)

    def _rewind(self, sequence: Sequence, length: int | None = None) -> None:
        """Trim a row to `length`; None: to the positions before the last token on the host."""
        if (row := sequence.row) == NO_ROW:
            return
        if length is None:
            length = min(self.cache.lengths[row], len(sequence.tokens) - 1)
        try:
            self.cache.trim(length, row)
        except Exception as error:
            self.queues.end(sequence, error)
