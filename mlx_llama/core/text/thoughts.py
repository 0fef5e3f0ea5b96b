"""Thoughts of reasoning models: the part of an answer between two marks at its beginning, split off
as it streams.

The marks are those of the chat template, by name in vLLM's and llama.cpp's parsers: Qwen3, SmolLM3
and R1 (<think>), Ministral and Magistral ([THINK]), Seed-OSS (<seed:think>), Granite 3.3 (<think>,
then <response> around the answer).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from .tokenizer import Tokenizer


@dataclass(frozen=True)
class ThoughtFormat:
    """How a model marks its thoughts."""

    start: str
    end: str
    answer: tuple[str, ...] = ()  # marks around the answer, which are no part of it

    def special_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that a decoder must show to the parser."""
        return frozenset(
            tokenizer.special_ids[mark]
            for mark in (self.start, self.end)
            if mark in tokenizer.special_ids
        )

    def is_open(self, tokenizer: Tokenizer, prompt: Collection[int]) -> bool:
        """True if a prompt's end opens a thought, as R1's templates do."""
        return (
            tokenizer.decode(list(prompt)[-16:], skip_special=False).rstrip().endswith(self.start)
        )


FORMATS = (
    ThoughtFormat("<think>", "</think>", ("<response>", "</response>")),
    ThoughtFormat("[THINK]", "[/THINK]"),
    ThoughtFormat("<seed:think>", "</seed:think>"),
)


def find_thoughts(source: str) -> ThoughtFormat | None:
    """The format whose marks a chat template's source contains, None for a model without
    thoughts.
    """
    return next((form for form in FORMATS if form.start in source), None)


class Thought(NamedTuple):
    """A piece of a thought."""

    text: str


class ThoughtParser:
    """Splits a streamed answer in thoughts and text. An answer that does not begin with the mark
    has no thought.
    """

    def __init__(self, form: ThoughtFormat, is_open: bool = False):
        """is_open: the prompt has opened the thought."""
        self._form, self._waiting = form, ""
        self._state = "thought" if is_open else "before"
        self._is_fresh = True  # white space at the beginning of a part is dropped

    @property
    def is_thinking(self) -> bool:
        """True within a thought."""
        return self._state == "thought"

    def push(self, text: str, is_last: bool = False) -> list[Thought | str]:
        """Read a piece. is_last: return what waits for the rest of a mark as well."""
        self._waiting += text
        pieces: list[Thought | str] = []
        if self._state == "before":
            begun = self._waiting.lstrip()
            if begun.startswith(self._form.start):
                self._state, self._waiting = "thought", begun[len(self._form.start) :]
            elif self._form.start.startswith(begun) and not is_last:
                return []
            else:
                self._state, self._is_fresh = "text", False
        if self._state == "thought":
            thought, mark, rest = self._waiting.partition(self._form.end)
            self._waiting = "" if mark else thought[len(thought) - _held(thought, self._form.end) :]
            if not mark and not is_last:
                thought = thought[: len(thought) - len(self._waiting)]
                # White space before the end mark is dropped with it.
                kept = thought.rstrip()
                self._waiting, thought = thought[len(kept) :] + self._waiting, kept
            if thought := self._trim(thought.rstrip() if mark or is_last else thought):
                pieces.append(Thought(thought))
            if mark:
                self._state, self._is_fresh, self._waiting = "text", True, rest
        if self._state == "text" and (answer := self._take_answer(is_last)):
            pieces.append(answer)
        return pieces

    def _take_answer(self, is_last: bool) -> str:
        text, self._waiting = self._waiting, ""
        for mark in self._form.answer:
            text = text.replace(mark, "")
            if not is_last and (held := _held(text, mark)):
                text, self._waiting = text[:-held], text[-held:] + self._waiting
        return self._trim(text)

    def _trim(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text


def _held(text: str, mark: str) -> int:
    """Length of the text's end that may begin the mark."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )
