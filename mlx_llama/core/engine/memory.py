"""Memory of keys and values: the default budget, room for the next positions, eviction."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlx_llama.core.errors import ContextError
from mlx_llama.core.system import machine

from .queues import Queues
from .request import Sequence
from .steps import Steps

MIN_RESERVE = 256 << 20  # bytes left for activations, growing storage and other programs
MOST = 8 * 10**9  # bytes of a default budget
IDLE_SECONDS = 15 * 60  # until prefixes within a default budget are dropped
TRIM_BYTES = 1 << 20  # freed bytes worth returning to the system
TRIM_SECONDS = 1.0  # between two returns


def default_budget(free: int, promised: int = 0) -> int:
    """Bytes for all keys and values, of `free` bytes beside the weights: at most half of them and
    8 GB, or `promised` before, as long as a tenth stays free.
    """
    room = free - max(free // 10, MIN_RESERVE)
    return max(0, min(room, max(promised, min(free // 2, MOST))))


class Memory:
    """Decides what keys and values may take, and finds room for admitted requests; while there is
    none, the youngest is set aside.

    measure: returns the free bytes for a default budget, None if unknown; None: the rows' budget
    was chosen by the user.
    """

    def __init__(self, queues: Queues, steps: Steps, measure: Callable[[], int | None] | None):
        self.queues = queues
        self.steps = steps
        self.rows = queues.rows
        self.is_short = False  # until the youngest request is set aside: no step may run ahead
        self._measure, self._promised = measure, 0
        self._used = self._trimmed = time.monotonic()
        self.look()
        self._promised = self.rows.budget or 0

    def look(self) -> None:
        """Measure a default budget again, and drop the prefixes beyond it."""
        self.rows.budget = self._find_budget()
        self.rows.shrink()

    def _find_budget(self) -> int | None:
        """The chosen budget, or the default one now."""
        if self._measure and (free := self._measure()) is not None:
            return default_budget(free + self.rows.nbytes, self._promised)
        return self.rows.budget

    def settle(self) -> None:
        """End a tick: return much freed memory to the system."""
        self._used = time.monotonic()
        if self.rows.freed > TRIM_BYTES and self._used - self._trimmed > TRIM_SECONDS:
            self._trim()

    def rest(self) -> None:
        """Free memory between requests: prefixes go if the system is short, or after minutes."""
        self.look()
        if self._measure and time.monotonic() - self._used > IDLE_SECONDS:
            self.rows.drop_all()
        if self.rows.freed > TRIM_BYTES:
            self._trim()

    def _trim(self) -> None:
        self.rows.freed, self._trimmed = 0, time.monotonic()
        machine.trim_memory()

    def check(self, length: int) -> None:
        """Raise ContextError for a prompt of `length` tokens that never fits."""
        needed, budget = self.rows.nbytes_for(length + 1), self.rows.budget
        if budget is not None and needed > budget:
            budget = self._find_budget()
        if budget is not None and needed > budget:
            raise ContextError(
                f"keys and values of the prompt's {length} tokens take {needed / 1e6:.1f} MB, and "
                f"the cache may take {budget / 1e6:.1f} MB: shorten the prompt, raise "
                "`cache_memory`, or close other programs"
            )

    def make_room(self, sequences: list[Sequence], count: int) -> list[Sequence]:
        """Make room for `count` more positions of `sequences`; returns those that have it."""
        lengths, allocated = self.rows.cache.lengths, self.rows.cache.allocated
        if any(lengths[s.row] + count > allocated[s.row] for s in sequences):
            self.look()
        while sequences:
            try:
                if self.rows.reserve({s.row: lengths[s.row] + count for s in sequences}):
                    return sequences
            except Exception as error:
                if len(sequences) == 1:
                    self.queues.end(sequences[0], error)
                    return []
                grown = [s for s in sequences if s.is_running and self.make_room([s], count)]
                return [sequence for sequence in grown if sequence.is_running]
            youngest = max(self.queues.admitted, key=lambda sequence: sequence.number)
            if self.steps.has_launched(youngest):
                self.is_short = True  # read it first
                return []
            if len(self.queues.admitted) > 1:
                self.queues.set_aside(youngest)
            else:
                self._end_answer(youngest)
            sequences = [sequence for sequence in sequences if sequence is not youngest]
        return []

    def refuse(self, sequence: Sequence) -> None:
        """End a request that does not fit alone. Raises ContextError if it never ran."""
        length = len(sequence.tokens)
        if length > sequence.prompt_length:
            self._end_answer(sequence)
            return
        self.rows.cache.check_memory({self.rows.free[-1]: length})
        self.check(length)
        raise ContextError(
            "memory has no room for the prompt's keys and values: shorten the prompt, or close "
            "other programs"
        )

    def _end_answer(self, sequence: Sequence) -> None:
        length = len(sequence.tokens)
        sequence.writer.end(
            "context",
            "the answer ends because memory has no room for more keys and values: those of "
            f"{length} tokens take {self.rows.nbytes_for(length) / 1e6:.1f} MB; raise "
            "`cache_memory` or close other programs",
        )
        self.queues.end(sequence)

    def free(self, error: Exception) -> bool:
        """Free memory after a step failed for lack of it; False if nothing can be freed."""
        if not self.rows.is_out_of_memory(error):
            return False
        if self.rows.kept:
            self.rows.drop_all()
            return True
        admitted = self.queues.admitted
        idle = [sequence for sequence in admitted if not self.steps.has_launched(sequence)]
        if not idle or len(admitted) < 2:
            return False
        self.queues.set_aside(max(idle, key=lambda sequence: sequence.number))
        return True
