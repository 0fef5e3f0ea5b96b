"""A tick: admit a request, launch a chunk of a prompt and a step for all rows, read its tokens.

An asynchronous device receives step n+1 before step n is read, as long as the rows stay the same;
the surplus step of a row that ended is trimmed. A row that drafts from its last token, which must
be on the host, has separate steps.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mlx_llama.core.answers.dry import write_columns
from mlx_llama.core.backends.interface import Array, SamplingBatch
from mlx_llama.core.backends.logprobs import unpack
from mlx_llama.core.backends.positions import CHECKPOINT
from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.errors import CheckpointError, ContextError
from mlx_llama.core.system.interrupts import interruptible

from .drafts import ModelDrafts
from .request import NO_ROW, Sequence, Status
from .rows import Rows

SHARED_CHUNK = 512  # maximum number of prompt tokens per tick while others run
PORTION = 256  # positions of an answer that admission reserves
TILE = 32  # positions of a chunk; the CPU's kernels take as long for fewer
STEPS = 4  # duration of a tick with a chunk, in steps, at most
WEIGHT = 0.25  # a new measurement's share in the running average
LOGPROB_CHUNK = 128  # maximum number of prompt tokens whose logits are computed together


@dataclass
class Step:
    sequences: list[Sequence]
    # on the device: int32 [B, 1], or [B, C] with log-probabilities, or [1, T] after each draft
    sampled: Array
    drafts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> Array:
        """The sampled tokens alone, int32 [B, 1] on the device, as the next step's input."""
        return self.sampled if self.sampled.shape[1] == 1 else self.sampled[:, :1]


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
    """Serves requests with the rows of a model, on one thread at a time. Parameters: see Loop.

    Only this class and `Sequence.finish` change a request's status.
    """

    def __init__(self, builder: RequestBuilder, cache_memory: int | None, rows: int, kept: int):
        backend, model, draft = builder.backend, builder.model, builder.draft
        self.runtime, drafts = backend.runtime, None
        self.backend, self.model, self.max_rows = backend, model, rows
        self.runs_ahead, self._files = backend.runs_ahead, builder.files
        self._is_invariant = model.is_batch_invariant
        self.cache = model.make_cache(builder.context, rows + kept)
        self.drafts: list[ModelDrafts] = []  # by row
        if draft:
            # Beyond trained positions a draft model guesses badly; dynamic rope forbids trimming.
            trained = draft.config.max_position_embeddings
            drafts = draft.make_cache(min(builder.context, trained), rows + kept)
            self.drafts = [
                ModelDrafts(self.runtime, draft, drafts, row) for row in range(rows + kept)
            ]

        def measure() -> int | None:
            return self.runtime.free_memory(backend.device)

        self.rows = Rows(
            model.config,
            self.cache,
            drafts,
            budget=cache_memory,
            max_kept=kept,
            is_out_of_memory=self.runtime.is_out_of_memory,
            measure=measure if cache_memory is None else None,
        )
        # Requests that have not ended, by status
        self.waiting: deque[Sequence] = deque()
        self.prefilling: Sequence | None = None
        self.running: list[Sequence] = []  # in the order of admission
        self.preemptions = 0  # rows freed for lack of memory, to be computed again
        self.launched: list[Step] = []  # launched and not read yet
        # the last step read: its tokens on the device are the input of the same rows' next step
        self._last: Step | None = None
        # options of the last rows that shared a step
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None
        self._is_short = False  # until the youngest request is preempted: no step may run ahead
        self._idle, self._stopped = 0.0, time.perf_counter()
        self._chunks = Chunks(SHARED_CHUNK)

    @property
    def admitted(self) -> list[Sequence]:
        """Requests that have a row."""
        return [*self.running, self.prefilling] if self.prefilling else [*self.running]

    def _now(self) -> float:
        """Busy seconds, in which a tick runs; not the time that consumers spend on a token."""
        return time.perf_counter() - self._idle

    def tick(self) -> bool:
        """Admit, prefill, step, read. False: there was nothing to do."""
        self._idle += time.perf_counter() - self._stopped
        try:
            if self._check_files():
                return True
            return self._tick()
        except Exception as error:  # a bug must not end the loop
            self._drop_steps()
            for sequence in self.admitted:
                self.end(sequence, error)
            return True
        except BaseException:  # Ctrl-C in a prompt: the consumer cancels its request
            self.forget_steps()
            raise
        finally:
            if self.rows.has_freed:
                self.rows.settle()
            self._stopped = time.perf_counter()

    def _check_files(self) -> bool:
        """End all requests if the model's file has changed."""
        if not (self.running or self.prefilling or self.waiting):
            return False
        try:
            self._files.check()
            return False
        except CheckpointError as error:
            self._drop_steps()
            for sequence in [*self.waiting, *self.admitted]:
                self.end(sequence, error)
            return True

    def _tick(self) -> bool:
        self.sweep()
        if self.waiting and not self.prefilling:
            self._admit()
        if not self.running and not self.prefilling:
            self.launched = []
            return bool(self.waiting)
        started, is_stepping = time.perf_counter(), bool(self.running)
        prompt_tokens = self._prefill(self.prefilling) if self.prefilling else 0
        self._launch()
        steps, self.launched = self.launched, []
        if self.runs_ahead:
            self._run_ahead(steps)
        for step in steps:
            if not self._read(step):
                break  # the others were forgotten with it
        if self._is_invariant:  # chunks of others have one size
            self._chunks.note(time.perf_counter() - started, prompt_tokens, is_stepping)
        if self.runs_ahead:
            self._launch(may_wait=False)  # the device works while consumers look at the tokens
        return True

    def close(self) -> None:
        """End all requests as interrupted and free the rows."""
        for sequence in [*self.waiting, *self.admitted]:
            sequence.writer.interrupt()
            self.end(sequence)
        self._drop_steps()
        self.rows.drop_all()

    # Admission and end

    def _admit(self) -> None:
        """Give the next request a row, if memory has room for its prompt and some of its answer."""
        if len(self.running) >= self.max_rows:
            return
        self.rows.look()
        sequence, rows = self.waiting[0], self.rows
        tokens, length = sequence.tokens, len(sequence.tokens)
        reuses, adapter = sequence.request.reuses, sequence.adapter
        try:
            end = length + min(PORTION, sequence.remaining)
            claimed = rows.claim(tokens, end, reuses, adapter)
            if claimed is None and not self.running:
                claimed = rows.claim(tokens, length, reuses, adapter)
                if claimed is None:
                    self._refuse(sequence)
            if claimed is None:
                return
            self._remove(sequence)
            sequence.row, sequence.status = claimed[0], Status.PREFILLING
            self.prefilling = sequence
            if sequence.request.on_admit:
                sequence.request.on_admit(tokens)
            sequence.writer.start(self._now(), min(claimed[1], sequence.prompt_length))
            sequence.sampling = sequence.sampling or self.backend.sampling_batch([sequence.options])
            if self.drafts and sequence.speculation.wants_model:
                drafts, chunk = self.drafts[sequence.row], self._chunk_size(sequence)
                sequence.speculation.begin(drafts, tokens, sequence.sampling, chunk)
            if rows.has_one_length(length):
                trained = self.model.config.max_position_embeddings
                sequence.writer.add_notices(
                    [
                        f"no prefix is reused: with dynamic RoPE scaling the keys of a text beyond "
                        f"{trained} tokens depend on its length"
                    ]
                )
        except Exception as error:
            self.end(sequence, error)

    def _refuse(self, sequence: Sequence) -> None:
        """End a request that does not fit alone. Raises ContextError if it never ran."""
        length = len(sequence.tokens)
        if length > sequence.prompt_length:
            self._end_full(sequence)
            return
        self.cache.check_memory({self.rows.free[-1]: length})
        self.rows.check_fits(length)
        raise ContextError(
            "memory has no room for the prompt's KV cache: shorten the prompt, or close other "
            "programs"
        )

    def preempt(self, sequence: Sequence) -> None:
        """Free a request's row and queue it first. It is computed again, with the same tokens."""
        self.preemptions += 1
        self._remove(sequence)
        self.waiting.appendleft(sequence)
        row, sequence.row, sequence.status = sequence.row, NO_ROW, Status.WAITING
        sequence.speculation.leave_row()
        self.rows.release(row)

    def end(self, sequence: Sequence, error: Exception | None = None) -> None:
        """End a request. Its row stays as a prefix, or is freed after an error. Idempotent."""
        if sequence.status is Status.ENDED:
            return
        self._remove(sequence)
        row, sequence.row = sequence.row, NO_ROW
        try:
            if row != NO_ROW:
                (self.rows.keep if error is None else self.rows.release)(row)
        finally:
            # compiling or capturing a step may have added some
            sequence.writer.add_notices(self.model.notices)
            sequence.finish(error)

    def _end_full(self, sequence: Sequence) -> None:
        """End an answer for which the KV cache is full."""
        length = len(sequence.tokens)
        sequence.writer.end(
            "context",
            f"the answer ends because the KV cache is full: its {length} tokens take "
            f"{self.rows.nbytes_for(length) / 1e6:.1f} MB; raise `cache_memory` or close other "
            "programs",
        )
        self.end(sequence)

    def sweep(self) -> None:
        """End the requests that were cancelled."""
        requests = [*self.waiting, *self.admitted]
        for sequence in requests:
            if sequence.is_cancelled:
                self.end(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(sequence)

    # Prefill

    def _prefill(self, sequence: Sequence) -> int:
        """Launch a chunk of a prompt, or the step of its first token. Returns its size."""
        start, tokens = self.cache.lengths[sequence.row], sequence.tokens
        end = min(start + self._choose_chunk(sequence, start), len(tokens))
        border = end // CHECKPOINT * CHECKPOINT
        if self.cache.state_nbytes and start < border:
            end = border  # a recurrent state can be kept there
        rated = sequence.logprob_prompt_tokens
        if start < rated:
            end = min(end, start + LOGPROB_CHUNK, rated)
        try:
            with interruptible():  # a chunk may take long
                sequence.speculation.prefill(end)
                if start < rated:
                    self._rate(sequence, start, end)
                elif end == len(tokens):
                    # samples in the same pass over the weights
                    self._launch_rest(sequence)
                else:
                    self._launch_chunk(sequence, start, end)
            if end == len(tokens):
                self._remove(sequence)
                sequence.processed, sequence.status = sequence.prompt_length, Status.RUNNING
                self.running.append(sequence)
            elif sequence.limit == 0 and end == rated:  # there is no answer
                sequence.writer.end("length")
                self.end(sequence)
            else:
                sequence.processed = min(end, sequence.prompt_length)
                sequence.writer.tell_prefill(self._now())
                sequence.tell()
        except Exception as error:
            if self._free_memory(error):
                self._rewind(sequence)
            else:
                self.end(sequence, error)
        return end - start

    def _chunk_size(self, sequence: Sequence) -> int:
        return sequence.options.prefill_step_size or self.model.prefill_chunk

    def _choose_chunk(self, sequence: Sequence, start: int) -> int:
        """Number of prompt tokens in the next chunk."""
        if self.rows.has_one_length(len(sequence.tokens)):
            # Chunks would be rotated for other lengths. Resumed answers were decoded by token.
            return sequence.prompt_length if start < sequence.prompt_length else 1
        chunk = min(self._chunk_size(sequence), self.model.prefill_width)
        if not self.running:
            return chunk
        return min(chunk, self._chunks.choose() if self._is_invariant else SHARED_CHUNK)

    def _launch_chunk(self, sequence: Sequence, start: int, end: int) -> None:
        """Launch a chunk of a prompt. A lazy device projects nothing to the vocabulary."""
        ids = np.array([sequence.tokens[start:end]], np.int32)
        self.model.forward(ids, start, self.cache, rows=[sequence.row])
        self.runtime.launch(self.cache.arrays())

    def _rate(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute a chunk of a prompt and wait for the log-probabilities of the tokens after it."""
        count, cache, row = sequence.request.prompt_logprobs or 0, self.cache, sequence.row
        ids = np.array([sequence.tokens[start:end]], np.int32)
        after = np.array([sequence.tokens[start + 1 : end + 1]], np.int32).T
        logits = self.model.forward(ids, start, cache, rows=[row], all_positions=True)
        packed = sequence.sampling.rate(logits[0], after, count)
        self.runtime.launch([packed, *cache.arrays()])
        columns = self.runtime.to_numpy(packed).tolist()
        self._files.check()
        rates = [unpack(numbers, count) for numbers in columns]
        sequence.writer.completion.prompt_logprobs[start + 1 : end + 1] = rates

    # Launch

    def _launch(self, may_wait: bool = True) -> None:
        """Launch idle sequences' steps. may_wait: including those that wait for their logits."""
        self._is_short = False
        busy = [id(sequence) for step in self.launched for sequence in step.sequences]
        idle = [*self.running]
        if busy or not may_wait:
            idle = [s for s in idle if id(s) not in busy and (may_wait or not s.needs_logits)]
        for sequences in group(idle, self.runs_ahead):
            batch = []
            for sequence in sequences:
                # a recurrent state may have been cut further back than to the last token
                lacks = self.cache.lengths[sequence.row] + 1 < len(sequence.tokens)
                may_be_alone = lacks or sequence.speculation.drafter
                is_alone = may_be_alone and self._launch_alone(sequence)
                if sequence.status is Status.RUNNING and not is_alone:
                    batch.append(sequence)
            if len(batch) < len(sequences):
                batch = [sequence for sequence in batch if sequence.is_running]
            if batch := self._make_room(batch, 1):
                try:
                    self._launch_step(batch)
                except Exception as error:
                    self._retry(batch, error)

    def _launch_step(self, sequences: list[Sequence], tokens: Array | None = None) -> None:
        """Launch the next token of each sequence. tokens: int32 [B, T], which continue the rows;
        None for the last ones.
        """
        if tokens is None:
            if self._last and self._last.sequences == sequences and not self._last.drafts:
                tokens = self._last.tokens
            else:
                tokens = np.array([[sequence.tokens[-1]] for sequence in sequences], np.int32)
        first, cache, masks = sequences[0], self.cache, None
        rows: list[int] = []
        starts: list[int] = []
        for sequence in sequences:
            rows.append(sequence.row)
            starts.append(cache.lengths[sequence.row])
            if masks is None and sequence.needs_token:
                masks = functools.partial(self._compute_masks, sequences)
        start = starts if len(starts) > 1 else starts[0]
        sampling = first.sampling if len(sequences) == 1 else self._share_sampling(sequences)
        if first.needs_logits:  # it is alone
            logits = self.runtime.to_numpy(self.model.forward(tokens, start, cache, rows=rows))
            first.writer.count_read(logits.nbytes)
            self._files.check()
            logits = first.request.hooks.process(first.tokens, logits)
            sampled = self.model.sample(logits, cache, sampling, rows=rows, masks=masks)
            self.runtime.launch(cache.arrays())
        else:
            sampled = self.model.step(tokens, start, cache, sampling, rows=rows, masks=masks)
        self._submit(Step(sequences, sampled))

    def _launch_rest(self, sequence: Sequence) -> None:
        """Launch one step over all tokens that the row lacks."""
        start = self.cache.lengths[sequence.row]
        self._launch_step([sequence], np.array([sequence.tokens[start:]], np.int32))

    def _submit(self, step: Step) -> None:
        self.runtime.launch([step.sampled])
        for sequence in step.sequences:
            sequence.writer.completion.launches += 1
        self.launched.append(step)

    def _share_sampling(self, sequences: list[Sequence]) -> SamplingBatch:
        if not self._batch or self._batch[0] != sequences:
            options = [sequence.options for sequence in sequences]
            self._batch = sequences, self.backend.sampling_batch(options)
        return self._batch[1]

    def _compute_masks(self, sequences: list[Sequence]) -> np.ndarray:
        """Allowed tokens and penalties, see Masks. Raises OptionsError for complex grammars."""
        vocabulary = self.model.config.vocab_size
        masks = np.full((len(sequences), -(-vocabulary // 32)), -1, np.int32)
        for row, sequence in enumerate(sequences):
            if sequence.constraint:
                masks[row] = sequence.constraint.mask()
        if any(sequence.dry for sequence in sequences):
            penalties = write_columns([sequence.dry for sequence in sequences], vocabulary)
            masks = np.concatenate([masks, penalties], axis=1)
        return masks

    def _launch_alone(self, sequence: Sequence) -> bool:
        """Launch several positions of a row: those that it lacks, or drafts. False: neither."""
        if not sequence.is_running:  # preempted for an earlier sequence
            return True
        if self._launch_missing(sequence):
            return True
        return sequence.speculation.drafter is not None and self._launch_drafts(sequence)

    def _launch_drafts(self, sequence: Sequence) -> bool:
        """Launch the verification of drafts; False if there are none."""
        row, lengths = sequence.row, self.cache.lengths
        try:
            room = int(min(sequence.remaining, sequence.unconstrained_ahead)) - 1
            drafts = sequence.speculation.draft(room)
            end = len(sequence.tokens) + len(drafts)
            if not drafts or not self.rows.reserve({row: end}):
                return False
            tokens = np.array([[sequence.tokens[-1], *drafts]], np.int32)
            sampled = self.model.verify(
                tokens, lengths[row], self.cache, sequence.sampling, rows=[row]
            )
            self._submit(Step([sequence], sampled, drafts))
        except Exception as error:
            sequence.speculation.end(error)
            self._rewind(sequence)
            return sequence.status is Status.ENDED
        return True

    def _launch_missing(self, sequence: Sequence) -> bool:
        """Launch one step over the tokens that a grammar forced, or that a row was cut before;
        False if it lacks the last one alone.
        """
        start = self.cache.lengths[sequence.row]
        count = len(sequence.tokens) - start
        if count == 1:
            return False
        if not self._make_room([sequence], min(count, SHARED_CHUNK)):
            return True
        try:
            if count > SHARED_CHUNK:  # the next tick continues
                self._launch_chunk(sequence, start, start + SHARED_CHUNK)
            else:
                self._launch_rest(sequence)
        except Exception as error:
            self.end(sequence, error)
        return True

    def _run_ahead(self, steps: list[Step]) -> None:
        """Launch the next steps unread, unless their tokens may change rows or give drafts."""
        groups = group(self.running, True)
        for step in steps:
            # A launched step cannot be cancelled: do not run ahead of a possible draft.
            if (
                self._is_short
                or step.drafts
                or step.sequences not in groups
                or any(
                    sequence.remaining == 1
                    or sequence.is_cancelled
                    or sequence.needs_token
                    or sequence.needs_logits
                    or (sequence.speculation.drafter and sequence.speculation.may_draft_next())
                    for sequence in step.sequences
                )
            ):
                continue
            lengths = self.cache.lengths
            ends = {sequence.row: lengths[sequence.row] + 1 for sequence in step.sequences}
            try:
                if self._has_storage(step.sequences, 1) or self.rows.reserve(ends):
                    self._launch_step(step.sequences, step.tokens)
            except Exception:  # it is launched again once the tokens are read
                for sequence in step.sequences:
                    self._rewind(sequence, ends[sequence.row] - 1)

    # Read

    def _read(self, step: Step) -> bool:
        """Read a step and take its tokens. False: it failed, and all steps are forgotten."""
        try:
            sampled = self._wait(step)
        except Exception as error:
            self.forget_steps()
            self._retry(step.sequences, error)
            return False
        self._take(step, sampled)
        return True

    def _wait(self, step: Step) -> list[int]:
        """Wait for a step's tokens, row by row."""
        sampled = self.runtime.read([step.sampled])
        nbytes = step.sampled.nbytes // len(step.sequences)
        for sequence in step.sequences:
            sequence.writer.count_read(nbytes)
        self._last = step
        return sampled

    def _take(self, step: Step, sampled: list[int]) -> None:
        """Append the tokens of a step, and those that a grammar forces after them. Raises
        CheckpointError if it computed with a changed file.
        """
        self._files.check()
        now, width = time.perf_counter() - self._idle, len(sampled) // len(step.sequences)
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
                    self.end(sequence)
            except Exception as error:
                self.end(sequence, error)

    # Memory

    def _make_room(self, sequences: list[Sequence], count: int) -> list[Sequence]:
        """Make room for `count` more positions of `sequences`; returns those that have it. While
        there is none, the youngest request is preempted.
        """
        if self._has_storage(sequences, count):  # most steps
            return sequences
        lengths = self.cache.lengths
        self.rows.look()
        while sequences:
            try:
                if self.rows.reserve({s.row: lengths[s.row] + count for s in sequences}):
                    return sequences
            except Exception as error:
                if len(sequences) == 1:
                    self.end(sequences[0], error)
                    return []
                grown = [s for s in sequences if s.is_running and self._make_room([s], count)]
                return [sequence for sequence in grown if sequence.is_running]
            youngest = max(self.admitted, key=lambda sequence: sequence.number)
            if self._is_launched(youngest):
                self._is_short = True  # read it first
                return []
            if len(self.admitted) > 1:
                self.preempt(youngest)
            else:
                self._end_full(youngest)
            sequences = [sequence for sequence in sequences if sequence is not youngest]
        return []

    def _has_storage(self, sequences: list[Sequence], count: int) -> bool:
        lengths, allocated = self.cache.lengths, self.cache.allocated
        for sequence in sequences:
            if lengths[sequence.row] + count > allocated[sequence.row]:
                return False
        return True

    def _is_launched(self, sequence: Sequence) -> bool:
        """True if a launched step computes the request's next token."""
        return any(sequence in step.sequences for step in self.launched)

    def _free_memory(self, error: Exception) -> bool:
        """Free memory after a step failed for lack of it; False if nothing can be freed."""
        if not self.rows.is_out_of_memory(error):
            return False
        if self.rows.kept:
            self.rows.drop_all()
            return True
        idle = [sequence for sequence in self.admitted if not self._is_launched(sequence)]
        if not idle or len(self.admitted) < 2:
            return False
        self.preempt(max(idle, key=lambda sequence: sequence.number))
        return True

    # Failures

    def _retry(self, sequences: list[Sequence], error: Exception) -> None:
        """Retry a failed step row by row, and end the rows that fail again."""
        is_freed = self._free_memory(error)
        if len(sequences) == 1 and not is_freed:
            self.end(sequences[0], error)
            return
        for sequence in sequences:
            self._rewind(sequence)
            if is_freed or not sequence.is_running:
                continue
            others, self.launched = self.launched, []
            try:
                self._launch_rest(sequence)
                self._take(self.launched[0], self._wait(self.launched[0]))
            except Exception as again:
                self.end(sequence, again)
            self.launched = others

    def forget_steps(self) -> None:
        """Drop all launched steps; rows continue from the tokens known on the host."""
        self._drop_steps()
        for sequence in self.admitted:
            self._rewind(sequence)

    def _drop_steps(self) -> None:
        self.launched, self._last, self._batch = [], None, None

    def _rewind(self, sequence: Sequence, length: int | None = None) -> None:
        """Trim a row to `length`; None: to the positions before the last token on the host."""
        if (row := sequence.row) == NO_ROW:
            return
        if length is None:
            length = min(self.cache.lengths[row], len(sequence.tokens) - 1)
        try:
            self.cache.trim(length, row)
        except Exception as error:
            self.end(sequence, error)


def group(sequences: list[Sequence], runs_ahead: bool) -> list[list[Sequence]]:
    """Split sequences into those that share a step.

    On a device that runs ahead a drafting sequence is alone, and those with a grammar or DRY form a
    group: they wait for their tokens, and the host computes their masks and penalties while the
    device works for the others. A sequence that waits for its logits is alone and comes last.
    """
    if len(sequences) < 2:
        return [sequences] if sequences else []
    waiting = [[sequence] for sequence in sequences if sequence.needs_logits]
    groups = [[sequence for sequence in sequences if not sequence.needs_logits]]
    if runs_ahead:
        drafting = [[sequence] for sequence in groups[0] if sequence.speculation.drafter]
        others = [sequence for sequence in groups[0] if not sequence.speculation.drafter]
        free = [sequence for sequence in others if not sequence.needs_token]
        held = [sequence for sequence in others if sequence.needs_token]
        groups = [free, *drafting, held]
    return [rows for rows in (*groups, *waiting) if rows]
