"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and others: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>, one after the other. SmolLM2: <tool_call>[{...}, ...]</tool_call>. SmolLM3: as
Hermes, and <code>...</code> for an interpreter of Python.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.calls import CallText
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import FUNCTION
from mlx_llama.core.text.tools.python_calls import INTERPRETERS, read_code

from .base import Messages, Offer, ToolFormat


class Hermes(ToolFormat):
    name = "hermes"
    cue = "<tool_call>"
    others: tuple[str, ...] = (FUNCTION,)  # Hermes 2 Pro sometimes

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        # formats with the same mark whose arguments are XML
        xml = "<function=", "<arg_key>", "<invoke"
        is_json = "arguments" in source and not any(mark in source for mark in xml)
        return is_json and super().matches(source, tokenizer)


class SmolLM2(Hermes):
    name = "smollm"
    cue = r"<tool_call>\s*\["
    others: tuple[str, ...] = ()
    is_list = True


class SmolLM3(Hermes):
    name = "smollm"
    others: tuple[str, ...] = ("<code>",)
    folds = True

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return super().matches(source, tokenizer) and "xml_tools" in source

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """Describe an interpreter in python_tools, which teach <code>, others in xml_tools."""
        messages, _ = super().offer(messages, ())
        extras: dict[str, Any] = {}
        for tool in tools:
            variable = "python_tools" if tool.name in INTERPRETERS else "xml_tools"
            extras.setdefault(variable, []).append(tool.as_dict())
        return messages, extras

    def read(self, text: CallText) -> Generator[None]:
        if text.mark == "<code>":
            return read_code(text, "</code>")
        return super().read(text)


HERMES, SMOLLM2, SMOLLM3 = Hermes(), SmolLM2(), SmolLM3()
