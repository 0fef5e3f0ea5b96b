"""Slots: numbers of running requests, by which clients of llama-server name conversations."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from mlx_llama.core.engine.prefixes import common_prefix

MIN_SHARED = 8  # tokens that two texts of a conversation share; templates share fewer


class Slots:
    """Numbers 0 to count - 1, each with its latest text. Rows of the cache are freed when memory is
    short; slots are not.
    """

    def __init__(self, count: int):
        # prompt and answer by slot, [] for one that was never used; a running request appends
        self.texts: list[Sequence[int]] = [[] for _ in range(count)]
        self._times = itertools.count(1)
        self._used = [0] * count  # when each slot was taken

    def enter(self, text: Sequence[int], taken: Collection[int]) -> int:
        """A slot that is not taken: that of the longest common prefix, else the one unused for
        longest.
        """

        def rank(slot: int) -> tuple[int, int]:
            shared = common_prefix(self.texts[slot], text)
            return shared if shared >= MIN_SHARED else 0, -self._used[slot]

        slot = max((slot for slot in range(len(self.texts)) if slot not in taken), key=rank)
        self.put(slot, text)
        return slot

    def put(self, slot: int, text: Sequence[int]) -> None:
        """Give a slot another text."""
        self.texts[slot], self._used[slot] = text, next(self._times)
