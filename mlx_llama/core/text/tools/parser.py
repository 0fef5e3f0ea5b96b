"""Separate the calls in a model's streamed text from the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .calls import CallText, NoCall, ToolDelta
from .describe import Tool
from .formats import ToolFormat


class ToolParser(CallText):
    """Splits streamed text into `text` and `calls`.

    Text that begins like a call and turns out to be none is text again. White space after a call is
    dropped unless text follows. The split does not depend on the pieces that the text comes in.
    """

    def __init__(
        self, form: ToolFormat | None, tools: Sequence[Tool] = (), must_call: bool = False
    ):
        """form: None if no tools are offered, so that all is text. tools: on offer. must_call: the
        answer has no text.
        """
        super().__init__(tools, must_call)
        self.form = form
        self._reader: Iterator[None] | None = None  # reads the call that has begun
        self._first = 0  # number of calls when it began
        marks = (form.opens, *form.others) if form else ()
        self._opening = re.compile("|".join(map(re.escape, marks))) if marks else None
        # prefixes of the marks, by length
        self._prefixes = {mark[:n] for mark in marks for n in range(1, len(mark))}
        if form and form.is_open:
            self._open("")

    def push(self, piece: str) -> list[str | ToolDelta]:
        """Read a piece of text; returns new text and parts of calls, in order."""
        self.rest += piece
        while self.rest and (self._resume() if self._reader else self._read_text()):
            pass
        return self.take_news()

    def finish(self) -> list[str | ToolDelta]:
        """End the text; returns what was withheld. A cut call stays in `calls`, incomplete."""
        self.is_over = True
        while self._reader is not None and self._resume() and self.rest and self._read_text():
            pass
        self.emit(self.rest)
        self.rest = ""
        return self.take_news()

    def _read_text(self) -> bool:
        """Emit text up to a call; returns whether one begins."""
        if self.form and self.form.is_bare and not self.text.strip() and not self.calls:
            start = self.rest.lstrip()
            if not start:
                return False
            if start[0] == "{":
                return self._open("")
        match = self._opening.search(self.rest) if self._opening else None
        if match:
            at = match.start()
        else:  # keep the end if a mark may begin there
            longest = min(max(map(len, self._prefixes), default=0), len(self.rest))
            at = len(self.rest) - next(
                (n for n in range(longest, 0, -1) if self.rest[-n:] in self._prefixes), 0
            )
        self.emit(self.rest[:at])
        self.rest = self.rest[at:]
        return match is not None and self._open(match[0])

    def _open(self, mark: str) -> bool:
        assert self.form is not None
        self.mark, self.is_doubtful = mark, mark != self.form.opens
        self._first, self.taken = len(self.calls), ""
        self.take(len(mark))
        self._reader = self.form.read(self)
        return True

    def _resume(self) -> bool:
        """Read more of a call; returns whether text may follow: it has ended, or is none."""
        assert self._reader is not None
        try:
            next(self._reader)
            return False
        except StopIteration:
            self.taken = ""
        except NoCall:
            calls = self.calls[self._first :]
            if calls and (self.is_over or not calls[-1].is_complete):
                self.taken = ""  # it belongs to a call that was cut, or to the next one in a list
                self.rest = "" if self.is_over else self.rest
        self.emit(self.taken)
        self._reader, self.taken = None, ""
        return True
