"""Ends of an answer: stop strings in streamed text, and a passage that repeats itself for ever, as
small models write it at any sampling.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

REPETITION_LIMIT = 200  # tokens, of a chat; lists and tables repeat less
MAX_PERIOD = 64  # tokens of the passage that repeats
MIN_TIMES = 4
_HEAD = 64  # characters to bisect by; longer stop strings are then compared one by one


class Stops:
    """Finds stop strings in a stream and withholds text that may begin one."""

    def __init__(self, stops: Collection[str]):
        # Sorted, without texts that begin with another, which is complete first. One bisection
        # then finds all that may begin at a position, however many there are.
        self.texts: list[str] = []
        for stop in sorted(stops):
            if not self.texts or not stop.startswith(self.texts[-1]):
                self.texts.append(stop)
        self._first_letters = {stop[0] for stop in self.texts}
        self._shortest = min(map(len, self.texts), default=0)
        self.withheld = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Append `piece`; returns text that is safe to show, which ends before a stop string."""
        if not self.texts:
            return piece
        text = self.withheld + piece
        begun: int | None = None  # the first place where a stop string may begin
        for at, letter in enumerate(text):
            if begun is not None and len(text) - at < self._shortest:
                break
            if letter in self._first_letters:
                match, may_begin = self._look(text, at)
                if match is not None:
                    self.withheld, self.matched = "", match
                    return text[:at]
                begun = at if may_begin and begun is None else begun
        begun = len(text) if begun is None else begun
        self.withheld = text[begun:]
        return text[:begun]

    def _look(self, text: str, at: int) -> tuple[str | None, bool]:
        """The stop string at a place of `text`, if any; and whether one may begin there."""
        head = text[at : at + _HEAD]
        place = bisect_right(self.texts, head)
        if place and head.startswith(stop := self.texts[place - 1]):
            return stop, False
        while place < len(self.texts) and (stop := self.texts[place]).startswith(head):
            if text.startswith(stop, at):
                return stop, False
            if len(stop) > len(text) - at and stop.startswith(text[at:]):
                return None, True
            place += 1
        return None, False

    def forget(self) -> None:
        """Begin with another text."""
        self.withheld, self.matched = "", None

    def finish(self) -> str:
        """End the stream; returns the text that was still withheld."""
        text, self.withheld = self.withheld, ""
        return text


def find_period(tokens: Sequence[int], token: int, limit: int) -> int:
    """Number of tokens of the passage that the end of `tokens` and `token` after them repeat, at
    least `limit` tokens long and MIN_TIMES times; 0 if there is none.
    """
    recent, period = tokens[: -MAX_PERIOD - 1 : -1], 0
    while token in recent[period:]:
        period = recent.index(token, period) + 1
        # the end repeats if it equals the text one period before it
        count = max(limit, MIN_TIMES * period) - 1
        if count > len(tokens):
            return 0
        if tokens[period - count :] == tokens[-count:-period]:
            return period
    return 0
