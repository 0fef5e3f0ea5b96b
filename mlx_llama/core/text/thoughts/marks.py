"""Thoughts between two marks at the beginning of an answer: <think>, [THINK], <seed:think>."""

from __future__ import annotations

from .base import State, Thought, ThoughtFormat, ThoughtParser


class Marks(ThoughtFormat):
    """A format with a mark before and one after the thought.

    lead, tail: before and after the end mark. answer: marks around the answer, no part of it.
    """

    def __init__(
        self, start: str, end: str, lead: str = "", tail: str = "", answer: tuple[str, ...] = ()
    ):
        self.start, self.end, self.tail, self.answer = start, end, tail, answer
        self.closing = lead + end + tail
        self.marks = (start, end)

    def matches(self, source: str) -> bool:
        # A template that only drops thoughts has no start mark.
        has_mark = self.start in source or self.end in source
        return has_mark and all(mark in source for mark in self.answer)

    def parser(self, state: State = "before") -> ThoughtParser:
        """An answer that does not begin with the mark has no thought."""
        return MarkParser(self, state)


class MarkParser(ThoughtParser):
    """Splits at the marks, and drops the white space around a thought."""

    def __init__(self, form: Marks, state: State):
        self._form, self.waiting, self.state = form, "", state
        self._is_fresh = state != "text"  # white space at the beginning of a part is dropped

    def push(self, text: str, is_last: bool = False) -> list[Thought | str]:
        self.waiting += text
        pieces: list[Thought | str] = []
        if self.state == "before":
            begun = self.waiting.lstrip()
            if begun.startswith(self._form.start):
                self.state, self.waiting = "thought", begun[len(self._form.start) :]
            elif self._form.start.startswith(begun) and not is_last:
                return []
            else:
                self.state, self._is_fresh = "text", False
        if self.state == "thought":
            thought, mark, rest = self.waiting.partition(self._form.end)
            count = 0 if mark else count_withheld(thought, self._form.end)
            self.waiting = thought[len(thought) - count :]
            if not mark and not is_last:
                thought = thought[: len(thought) - count]
                # White space before the end mark is dropped with it.
                kept = thought.rstrip()
                self.waiting, thought = thought[len(kept) :] + self.waiting, kept
            if thought := self._trim(thought.rstrip() if mark or is_last else thought):
                pieces.append(Thought(thought))
            if mark:
                self.state, self._is_fresh, self.waiting = "text", True, rest
        if self.state == "text" and (answer := self._take_answer(is_last)):
            pieces.append(answer)
        return pieces

    def _take_answer(self, is_last: bool) -> str:
        text, self.waiting = self.waiting, ""
        for mark in self._form.answer:
            text = text.replace(mark, "")
            if not is_last and (count := count_withheld(text, mark)):
                text, self.waiting = text[:-count], text[-count:] + self.waiting
        return self._trim(text)

    def _trim(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text


def count_withheld(text: str, *marks: str) -> int:
    """Length of the text's end that may begin one of the marks."""
    counts = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return max(counts, default=0)
