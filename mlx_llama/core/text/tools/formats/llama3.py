"""Llama 3.1 to 3.3: an answer that is {"name": ..., "parameters": {...}}, or a built-in tool behind <|python_tag|>."""  # noqa: E501

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

from mlx_llama.core.text.template import check_messages
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import read_json_call

from .base import Message, ToolFormat

_INTERPRETERS = ("code_interpreter", "python", "ipython")
_CODE_LENGTH = 1 << 14  # characters of code that are read as a call


class Llama3(ToolFormat):
    name = "llama3"
    opens, closes = "<|python_tag|>", ""
    arguments = "parameters"
    is_bare = calls_once = True

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        # The words of the prompt, or the token of the vocabulary
        return (
            '"parameters": dictionary of argument name' in source
            or self.opens in tokenizer.added_ids
        )

    def offer(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        return super().offer(_split_calls(messages), tools)

    def read(self, text: CallText) -> Generator[None]:
        if (yield from text.peek()) != "{" and not text.is_bare and not text.calls:
            yield from self._read_code(text)
            return
        yield from read_json_call(text)
        while (yield from text.skip(";")):
            yield from read_json_call(text)

    def _read_code(self, text: CallText) -> Generator[None]:
        """Read a built-in tool's name.call(key="value"), else code for an interpreter."""
        text.take(len(text.rest))
        while not text.is_over:
            yield
            text.take(len(text.rest))
        code = text.taken.removeprefix(self.opens).strip()
        interpreter = next((name for name in _INTERPRETERS if name in text.names), None)
        call = _parse_builtin(code) or (interpreter and (interpreter, {"code": code}))
        if not call:
            raise NoCall
        text.begin(call[0])
        text.add(json.dumps(call[1], ensure_ascii=False))
        text.end()

    def spell_calls(self, mark: Callable[[str], str], many: bool) -> str:
        return 'call ("; " call)*' if many else "call"


def _split_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
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
        split += (
            [result for others in results.values() for result in others] if calls else [message]
        )
    return split


def _parse_builtin(code: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of name.call(key="value", ...); None for anything else."""
    if len(code) > _CODE_LENGTH or not re.match(r"\w+\.call\(", code):
        return None
    try:
        call = ast.parse(code, mode="eval").body
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
        ):
            if (
                call.func.attr == "call"
                and not call.args
                and all(word.arg for word in call.keywords)
            ):
                return call.func.value.id, {
                    str(word.arg): ast.literal_eval(word.value) for word in call.keywords
                }
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return None


LLAMA3 = Llama3()
