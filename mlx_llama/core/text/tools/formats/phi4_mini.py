"""Functools: functools[{"name": ..., "arguments": {...}}, ...], of FireFunction 2 and Phi-4 mini,
which also writes <|tool_call|>[...]<|/tool_call|>.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from datetime import date
from typing import Any

from mlx_llama.core.text.tools.calls import CallText
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import read_json_calls

from .base import Message, ToolFormat


def _list_functions(tools: Sequence[Tool]) -> str:
    return json.dumps([tool.as_dict()["function"] for tool in tools], ensure_ascii=False)


class Functools(ToolFormat):
    """vLLM's template of Phi-4 mini."""

    name = "functools"
    cue = "functools"
    opens, closes = "functools", ""
    is_list = True


class FireFunction(Functools):
    name = "firefunction"
    cue = r"\+ functions -"
    opens, others = " functools", ("functools",)

    def offer(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        today = date.today().strftime("%B %d %Y")
        return messages, {"functions": _list_functions(tools), "datetime": today}


class Phi4Mini(Functools):
    """Microsoft's template of Phi-4 mini: tools are a field of the system message."""

    name = "phi-4-mini"
    cue = r"<\|/tool\|>"
    opens, closes = "<|tool_call|>", "<|/tool_call|>"
    others = ("functools",)
    folds = True

    def offer(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        folded = [dict(message) for message in super().offer(messages, ())[0]]
        if tools:
            if not folded or folded[0]["role"] != "system":
                content = "You are a helpful assistant with some tools."
                folded.insert(0, {"role": "system", "content": content})
            folded[0]["tools"] = _list_functions(tools)
        return folded, {}

    def read(self, text: CallText) -> Generator[None]:
        return read_json_calls(text, "" if text.mark == "functools" else self.closes)


FUNCTOOLS, FIREFUNCTION, PHI_4_MINI = Functools(), FireFunction(), Phi4Mini()
