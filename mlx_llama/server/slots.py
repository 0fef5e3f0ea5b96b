"""Slots: numbers of running requests, by which clients of llama-server name conversations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mlx_llama.core.engine.request import Request
from mlx_llama.core.engine.rows import common_prefix

NO_SLOT = -1
MIN_SHARED = 8  # tokens that two texts of a conversation share; templates share fewer


class Task:
    """A request and its slot, which it has from its admission to its end."""

    def __init__(self, slots: Slots, request: Request, dropped: int = 0):
        self.slots, self.request = slots, request
        self.dropped = dropped  # messages that no longer fitted the prompt
        self.number = next(slots.numbers)  # order of submission
        self.slot = NO_SLOT
        self.handle: Any = None  # its Handle, once it is submitted

    @property
    def is_running(self) -> bool:
        return self.handle is None or not self.handle.done

    def admit(self, text: Sequence[int]) -> None:
        """Take a slot. text: prompt and answer, which grow. Later calls have no effect."""
        if self.slot == NO_SLOT:
            self.slot = self.slots.enter(text)
            self.slots.tasks[self.slot] = self


class Slots:
    """Numbers 0 to count - 1, each with its latest text. Rows of the cache are freed when memory is
    short; slots are not.
    """

    def __init__(self, count: int):
        # prompt and answer by slot, [] for one that was never used; a running request appends
        self.texts: list[Sequence[int]] = [[] for _ in range(count)]
        self.tasks: dict[int, Task] = {}  # the latest by slot
        self.numbers = itertools.count()
        self._times = itertools.count(1)
        self._used = [0] * count  # when each slot was taken

    @property
    def running(self) -> dict[int, Task]:
        """The slots that are taken, and their requests."""
        return {slot: task for slot, task in list(self.tasks.items()) if task.is_running}

    def enter(self, text: Sequence[int]) -> int:
        """A slot that is not taken: that of the longest common prefix, else the one unused for
        longest.
        """

        def rank(slot: int) -> tuple[int, int]:
            shared = common_prefix(self.texts[slot], text)
            return shared if shared >= MIN_SHARED else 0, -self._used[slot]

        slot = max(set(range(len(self.texts))) - set(self.running), key=rank)
        self.put(slot, text)
        return slot

    def put(self, slot: int, text: Sequence[int]) -> None:
        """Give a slot another text."""
        self.texts[slot], self._used[slot] = text, next(self._times)
