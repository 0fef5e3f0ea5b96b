"""gpt-oss's messages in channels (harmony): analysis is a thought, final and commentary are text,
and a message to a recipient is a call of a tool, which stays as it is written.
"""

from __future__ import annotations

import re

from .base import State, Thought, ThoughtFormat, ThoughtParser

_MESSAGE = "<|message|>"  # between the header and the content
_ENDS = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|start\|>)")  # a message's end
_MARK = re.compile(r"<\|[a-z|]*$|<$")  # an unfinished mark


class Harmony(ThoughtFormat):
    """<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>..."""

    marks = tuple(f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end"))
    start = "<|channel|>analysis<|message|>"
    bypass = "<|channel|>final<|message|>"
    tail = "<|start|>assistant" + bypass
    closing = "<|end|>" + tail

    def matches(self, source: str) -> bool:
        return "<|channel|>" in source and "analysis" in source

    def parser(self, state: State = "before") -> ThoughtParser:
        """A text without a header is an answer."""
        return HarmonyParser(state)


class HarmonyParser(ThoughtParser):
    """Splits by the channels of the messages."""

    def __init__(self, state: State):
        self.state = state
        self.waiting = ""
        self._is_header = state == "before"
        self._has_text = False

    def push(self, text: str, is_last: bool = False) -> list[Thought | str]:
        self.waiting += text
        pieces: list[Thought | str] = []
        while self.waiting:
            if self._is_header:
                if not self._read_header(pieces, is_last):
                    break
            elif not self._read_content(pieces, is_last):
                break
        return pieces

    def _read_header(self, pieces: list[Thought | str], is_last: bool) -> bool:
        """Read up to the content; False if more is needed."""
        if not "<|".startswith(self.waiting[:2]):
            self._is_header, self.state = False, "text"
            return True
        header, mark, rest = self.waiting.partition(_MESSAGE)
        if not mark:
            if is_last:
                self.waiting = ""
            return False
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        self.state = "thought" if channel and channel[1] == "analysis" else "text"
        if "to=" in header:
            self.state = "text"
            pieces.append(header.removeprefix("<|start|>assistant") + mark)
        elif self.state == "text" and self._has_text:
            pieces.append("\n")
        self.waiting, self._is_header = rest, False
        return True

    def _read_content(self, pieces: list[Thought | str], is_last: bool) -> bool:
        """Read up to the end of the message; False if more is needed."""
        end = _ENDS.search(self.waiting)
        unfinished = None if end or is_last else _MARK.search(self.waiting)
        stop = end.start() if end else unfinished.start() if unfinished else len(self.waiting)
        if content := self.waiting[:stop]:
            is_thought = self.state == "thought"
            pieces.append(Thought(content) if is_thought else content)
            self._has_text = self._has_text or not is_thought
        self.waiting = self.waiting[end.end() if end else stop :]
        if end:
            self._is_header, self.state = True, "before"
        return bool(end)


HARMONY = Harmony()
