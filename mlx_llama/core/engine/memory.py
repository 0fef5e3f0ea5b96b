"""Memory of keys and values: the default budget, room for the next positions, eviction."""

from __future__ import annotations

from mlx_llama.core.errors import ContextError

from .queues import Queues
from .request import Sequence
from .steps import Steps

MIN_RESERVE = 256 << 20  # bytes left for activations, growing storage and other programs


def default_budget(free: int) -> int:
    """Bytes for all keys and values, of `free` bytes beside the weights; a tenth stays free."""
    return max(0, free - max(free // 10, MIN_RESERVE))


class Memory:
    """Finds room for admitted requests; while there is none, the youngest is set aside."""

    def __init__(self, queues: Queues, steps: Steps):
        self.queues = queues
        self.steps = steps
        self.rows = queues.rows
        self.is_short = False  # until the youngest request is set aside: no step may run ahead

    def check(self, length: int) -> None:
        """Raise ContextError for a prompt of `length` tokens that never fits."""
        needed, budget = self.rows.nbytes_for(length + 1), self.rows.budget
        if budget is not None and needed > budget:
            raise ContextError(
                f"keys and values of the prompt's {length} tokens take {needed / 1e6:.1f} MB, and "
                f"the cache may take {budget / 1e6:.1f} MB: shorten the prompt, raise "
                "`cache_memory`, or close other programs"
            )

    def make_room(self, sequences: list[Sequence], count: int) -> list[Sequence]:
        """Make room for `count` more positions of `sequences`; returns those that have it."""
        lengths = self.rows.cache.lengths
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
