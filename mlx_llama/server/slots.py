"""Slots: numbers of running requests, by which clients of llama-server name conversations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.answers.completion import Completion
from mlx_llama.core.engine.request import Request
from mlx_llama.core.engine.rows import common_prefix

NO_SLOT = -1
MIN_SHARED = 8  # tokens that two texts of a conversation share; templates share fewer


@dataclass(eq=False)
class Task:
    """An answer to an HTTP request, and its slot, which it has from its admission to its end."""

    slots: Slots
    request: Request
    llm: Any = None  # its LLM
    ask: Any = None  # its PromptRequest
    index: int = 0  # among the answers to the HTTP request
    dropped: int = 0  # messages that no longer fitted the prompt
    began: float = 0.0  # when the HTTP request began
    reported: int = -1  # tokens of the prompt that the client was told of
    slot: int = NO_SLOT

    def __post_init__(self) -> None:
        self.number = next(self.slots.numbers)  # order of submission
        self.answer: Any = None  # its Answer, once it is submitted

    @property
    def is_running(self) -> bool:
        return self.answer is None or not self.answer.done

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt."""
        return self.request.prompt

    @property
    def completion(self) -> Completion:
        return self.answer.completion if self.answer else Completion()

    @property
    def are_probs(self) -> bool:
        """True if probabilities after the samplers are reported instead of log-probabilities."""
        return self.completion.options.get("post_sampling_probs", False)

    @property
    def is_cut(self) -> bool:
        """True if a limit ended the answer."""
        return self.completion.finish_reason in ("length", "context")

    @property
    def has_called(self) -> bool:
        """True if there are calls, none of them cut by a stop string or a limit."""
        calls = self.answer.calls
        return bool(calls) and all(call.is_complete for call in calls)

    @property
    def stop_string(self) -> str | None:
        return self.completion.stop if isinstance(self.completion.stop, str) else None

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
