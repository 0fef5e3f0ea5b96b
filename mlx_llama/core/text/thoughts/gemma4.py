"""Gemma 4's thoughts in channels: <|channel>thought ... <channel|>. Larger models also write an
empty one, or a mark of one, where they do not think.
"""

from __future__ import annotations

import re

from .base import State, Thought, ThoughtParser
from .marks import Marks, count_withheld

_MARKS = re.compile(r"(<\|channel>thought|<\|channel>|<channel\|>)")


class Gemma4(Marks):
    def __init__(self) -> None:
        super().__init__("<|channel>thought", "<channel|>", lead="\n")
        self.marks = ("<|channel>", "<channel|>")

    def parser(self, state: State = "before") -> ThoughtParser:
        """Thoughts may follow a text."""
        return ChannelParser(self, state)


class ChannelParser(ThoughtParser):
    """Splits at the marks, and drops the white space around a thought."""

    def __init__(self, form: Gemma4, state: State):
        self._form, self.waiting, self.state = form, "", state
        self._is_fresh = state == "thought"  # white space at the beginning of a part is dropped

    def push(self, text: str, is_last: bool = False) -> list[Thought | str]:
        self.waiting += text
        count = 0 if is_last else count_withheld(self.waiting, self._form.start, self._form.end)
        known = len(self.waiting) - count
        *parts, rest = _MARKS.split(self.waiting[:known])
        pieces: list[Thought | str] = []
        for content, mark in zip(parts[::2], parts[1::2]):
            self._add(pieces, content)
            if mark == self._form.start:
                self.state, self._is_fresh = "thought", True
            elif mark == self._form.end:
                self.state, self._is_fresh = "text", True
        kept = self._add(pieces, rest)
        self.waiting = rest[kept:] + self.waiting[known:]
        return pieces

    def _add(self, pieces: list[Thought | str], content: str) -> int:
        """Add a part's content; returns its length without white space that a mark may follow."""
        if self.state == "before" and content.strip():
            self.state = "text"
        kept = content if self.state == "text" else content.rstrip()
        shown = kept.lstrip() if self._is_fresh else kept
        if shown:
            self._is_fresh = False
            pieces.append(Thought(shown) if self.state == "thought" else shown)
        return len(kept)
