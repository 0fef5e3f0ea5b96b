"""Calls of tools, and the streamed text that formats read them from."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_llama.core.errors import show
from mlx_llama.core.text.template import check_messages

from .describe import Tool


def new_call_id() -> str:
    """Make the id of a call: nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass
class ToolCall:
    name: str
    # JSON as the model wrote it; may be cut, or invalid if no grammar was in force
    arguments: str = ""
    id: str = field(default_factory=new_call_id)
    is_complete: bool = False

    def values(self) -> dict[str, Any]:
        """Parse the arguments. Raises ValueError unless they are a JSON object."""
        values = json.loads(self.arguments)
        if not isinstance(values, dict):
            raise ValueError(f"the arguments of {self.name} are {show(values)}, expected an object")
        return values

    def as_dict(self) -> dict[str, Any]:
        """The entry of a message's tool_calls, in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def write_answer(text: str, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """An answer as a message. Its template decides whether later prompts contain the thought.
    Arguments that are no JSON object become {}.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = written = [call.as_dict() for call in calls]
        for call, entry in zip(calls, written):
            try:
                call.values()
            except ValueError:
                entry["function"]["arguments"] = "{}"
    return message


@dataclass(frozen=True)
class ToolDelta:
    """A streamed part of a call: first its id and name, then pieces of its arguments."""

    index: int  # the call's place in the answer
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def mentions_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a conversation has calls or results. Malformed messages have none."""
    return any(
        isinstance(message, Mapping)
        and (message.get("role") == "tool" or message.get("tool_calls"))
        for message in messages
    )


def write_arguments(values: Any) -> str:
    """Arguments as JSON. Raises ValueError or TypeError for values that JSON lacks."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def fold_calls(
    messages: Sequence[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], str]
) -> list[dict[str, Any]]:
    """Write calls into the messages' text, for templates that print none. Raises TemplateError."""
    folded = []
    for message in check_messages(messages):
        calls = message.pop("tool_calls", ())
        if calls:
            message["content"] += write([call["function"] for call in calls])
        folded.append(message)
    return folded


def split_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that prints one call a message, each with its result."""
    split: list[dict[str, Any]] = []
    waiting = check_messages(messages)[::-1]
    while waiting:
        message = waiting.pop()
        calls = message.get("tool_calls", ())
        results: dict[Any, list[dict[str, Any]]] = {}
        while calls and waiting and waiting[-1]["role"] == "tool":
            results.setdefault(waiting[-1].get("tool_call_id"), []).append(waiting.pop())
        for number, call in enumerate(calls):
            split.append(
                {**message, "content": "" if number else message["content"], "tool_calls": [call]}
            )
            split += results.pop(call.get("id"), ())
        rest = [result for others in results.values() for result in others]
        split += rest if calls else [message]
    return split


_HEAD_LENGTH = 300  # characters of a call before its arguments


class NoCall(Exception):
    """The text is not a call."""


class CallText:
    """Streamed text, split into calls and the rest.

    `ToolFormat.read` is a generator over it that yields whenever it needs more text. It raises
    NoCall to turn `taken` back into text, or to leave a call that has begun incomplete.
    """

    def __init__(self, tools: Sequence[Tool] = (), must_call: bool = False):
        self.must_call = must_call  # all is a call: drop the text of one that is unfinished
        self.tools = {tool.name: tool for tool in tools}  # on offer
        self.text = ""  # the answer so far, without calls
        self.calls: list[ToolCall] = []  # so far; the last may be incomplete
        self.rest = ""  # to be read
        self.taken = ""  # read since the last call
        self.mark = ""  # that opened this call, "" for none
        # other text may begin like this call, so that its name must be that of a tool
        self.is_doubtful = False
        self.is_over = False  # no more text will come
        self._news: list[str | ToolDelta] = []
        self._space = ""  # after a call; dropped unless text follows

    # Reading, for formats

    def take(self, count: int) -> str:
        text, self.rest = self.rest[:count], self.rest[count:]
        self.taken += text
        return text

    def wait(self) -> Generator[None]:
        """Wait for more text. Raises NoCall at its end."""
        if self.is_over:
            raise NoCall
        yield

    def peek(self) -> Generator[None, None, str]:
        """Take white space; returns the next character, which stays in `rest`."""
        while not (rest := self.rest.lstrip()):
            yield from self.wait()
        self.take(len(self.rest) - len(rest))
        return rest[0]

    def skip(self, mark: str) -> Generator[None, None, bool]:
        """Take a mark and the white space before it; False, and nothing, if it does not come."""
        while not (rest := self.rest.lstrip()).startswith(mark):
            if not mark.startswith(rest):
                return False
            yield from self.wait()
        self.take(len(self.rest) - len(rest) + len(mark))
        return True

    def until(self, mark: str) -> Generator[None, None, str]:
        """Take a name or key up to a mark, which stays in `rest`. Raises NoCall if too long."""
        while (at := self.rest.find(mark)) < 0 and len(self.rest) <= _HEAD_LENGTH:
            yield from self.wait()
        if not 0 <= at <= _HEAD_LENGTH:
            raise NoCall
        return self.take(at)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. call_id: the model's, kept if it is like ours and new."""
        if self.is_doubtful and name not in self.tools:
            raise NoCall
        self.taken = self._space = ""
        used = {call.id for call in self.calls}
        if call_id is None or call_id in used or not re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            call_id = new_call_id()
        self.calls.append(ToolCall(name, id=call_id))
        self._news.append(ToolDelta(len(self.calls) - 1, self.calls[-1].id, name))

    def add(self, arguments: str) -> None:
        if arguments:
            self.calls[-1].arguments += arguments
            self._news.append(ToolDelta(len(self.calls) - 1, arguments=arguments))

    def end(self) -> None:
        self.calls[-1].is_complete = True
        self.taken = ""

    # For the parser

    def emit(self, text: str) -> None:
        """Add to the text outside of calls."""
        if self.calls:
            text = self._space + text
            shown = text.rstrip()
            text, self._space = shown, text[len(shown) :]
        if text and not self.must_call:
            self.text += text
            self._news.append(text)

    def take_news(self) -> list[str | ToolDelta]:
        """Texts and parts of calls since the last time, in order."""
        news, self._news = self._news, []
        return news


# Python's parser, for the threads of a server

# In Python 3.11 and 3.12 all threads share one counter of a tree's depth: at times two at once end
# in a SystemError (https://github.com/python/cpython/issues/106905).
_ALONE = threading.Lock()


def parse_python(text: str) -> ast.Module:
    """The syntax tree. Raises SyntaxError, ValueError, RecursionError or MemoryError."""
    with _ALONE:
        return ast.parse(text)


def read_literal(text: str) -> object:
    """The value of a Python literal. Raises as `ast.literal_eval`."""
    with _ALONE:
        tree = ast.parse(text, mode="eval")
    return ast.literal_eval(tree)
