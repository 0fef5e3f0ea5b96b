"""Waiting requests and those with a row. Only this module changes their status and row."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mlx_llama.core.backends.interface import Model

from .request import NO_ROW, Sequence, Status
from .rows import Rows


@dataclass(eq=False)
class Queues:
    """All requests that have not ended, by status."""

    model: Model
    rows: Rows
    waiting: deque[Sequence] = field(default_factory=deque)
    prefilling: Sequence | None = None
    running: list[Sequence] = field(default_factory=list)  # in the order of admission
    set_asides: int = 0  # times that a row was freed for lack of memory, to be computed again

    @property
    def admitted(self) -> list[Sequence]:
        """Requests that have a row."""
        return [*self.running, self.prefilling] if self.prefilling else [*self.running]

    def admit(self, sequence: Sequence, row: int) -> None:
        self._remove(sequence)
        sequence.row, sequence.status, self.prefilling = row, Status.PREFILLING, sequence

    def run(self, sequence: Sequence) -> None:
        """Move an admitted request to the running ones, after its first step is launched."""
        self._remove(sequence)
        sequence.processed, sequence.status = sequence.prompt_length, Status.RUNNING
        self.running.append(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Free a request's row and queue it first. It is computed again, with the same tokens."""
        self.set_asides += 1
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

    def sweep(self) -> None:
        """End the requests that were cancelled."""
        for sequence in [s for s in (*self.waiting, *self.admitted) if s.is_cancelled]:
            self.end(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(sequence)
