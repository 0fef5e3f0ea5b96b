"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and others: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>, one after the other.
"""

from __future__ import annotations

from collections.abc import Generator

from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.calls import CallText
from mlx_llama.core.text.tools.json_calls import read_json_calls

from .base import ToolFormat
from .function_tags import FUNCTION, read_function


class Hermes(ToolFormat):
    name = "hermes"
    others: tuple[str, ...] = (FUNCTION,)  # Hermes 2 Pro sometimes

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        # formats with the same mark whose arguments are XML
        xml = "<function=", "<arg_key>", "<invoke"
        return (
            "<tool_call>" in source
            and "arguments" in source
            and not any(mark in source for mark in xml)
        )

    def read(self, text: CallText) -> Generator[None]:
        if text.mark == FUNCTION:
            return read_function(text)
        return read_json_calls(text, self.closes)


HERMES = Hermes()
