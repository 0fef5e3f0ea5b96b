"""The interface of a format of thoughts, the part of an answer that a reasoning model writes first,
and of the parser that splits it off a streamed answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal, NamedTuple

from mlx_llama.core.text.tokenizer import Tokenizer

# A parser's state: a thought may begin here, is being read, or has ended
State = Literal["before", "thought", "text"]


class Thought(NamedTuple):
    text: str


class ThoughtParser(ABC):
    """Splits a streamed answer into thoughts and text."""

    state: State
    waiting: str  # the end of what was read: it may begin a mark

    @property
    def is_thinking(self) -> bool:
        return self.state == "thought"

    @abstractmethod
    def push(self, text: str, is_last: bool = False) -> list[Thought | str]:
        """Read a piece. is_last: return what waits for the rest of a mark as well."""


class ThoughtFormat(ABC):
    """Marks of thoughts. Attributes are texts that a model writes."""

    marks: tuple[str, ...]  # those that may be special tokens
    start: str  # opens a thought
    closing: str  # ends a thought and begins the answer
    tail: str  # between a thought that has ended and the answer
    # begins an answer without a thought; None: it needs no beginning
    bypass: str | None = None

    @abstractmethod
    def matches(self, source: str) -> bool:
        """True if a template uses this format. Called in the order of `FORMATS`."""

    @abstractmethod
    def parser(self, state: State = "before") -> ThoughtParser:
        """A parser of an answer. state: at its beginning, as the prompt left it."""

    def is_open(self, tokenizer: Tokenizer, prompt: Collection[int]) -> bool:
        """True if a prompt's end opens a thought, as R1's templates do."""
        end = tokenizer.decode(list(prompt)[-16:], skip_special=False)
        return end.rstrip().endswith(self.start)

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        before = tokenizer.encode_parts([self.start])
        return tokenizer.encode_parts([self.start, text])[len(before) :]
