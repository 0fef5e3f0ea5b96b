"""A JSON list of calls behind a mark, as Granite 3's <|tool_call|>[{"name": ..., "arguments":
{...}}, ...]: functools[...] of FireFunction 2 and Phi-4 mini, which also writes
<|tool_call|>[...]<|/tool_call|>.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from datetime import date
from typing import Any

from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import read_json_call, read_json_calls

from .base import Messages, Offer, Spell, ToolFormat, quote


class Granite3(ToolFormat):
    name = "granite-3"
    cue = r"<\|tool_call\|> followed by a JSON list"
    opens, closes = "<|tool_call|>", ""
    others = ("<tool_call>",)  # Granite 3.1
    is_list = folds = True

    def read(self, text: CallText) -> Generator[None]:
        return read_json_calls(text, "</tool_call>")


class Apriel(ToolFormat):
    name = "apriel"
    cue = r"<tool_calls>\["
    opens, closes = "<tool_calls>", "</tool_calls>"
    is_list = True


class Nemotron(ToolFormat):
    """Nemotron Nano 2."""

    name = "nemotron"
    cue = "<TOOLCALL>"
    opens, closes = "<TOOLCALL>", "</TOOLCALL>"
    is_list = True


class Apertus(ToolFormat):
    """The name of a tool is the key of its arguments."""

    name = "apertus"
    cue = r"<\|tools_prefix\|>"
    opens, closes = "<|tools_prefix|>", "<|tools_suffix|>"
    is_list = True

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        named = ({call["name"]: call["arguments"]} for call in calls)
        texts = (json.dumps(call, ensure_ascii=False) for call in named)
        return f"{self.opens}[{', '.join(texts)}]{self.closes}"

    def read(self, text: CallText) -> Generator[None]:
        if not (yield from text.skip("[")):
            raise NoCall
        while (yield from text.peek()) != "]":
            if not (yield from text.skip('{"')):
                raise NoCall
            name = yield from text.until('"')
            text.take(1)
            if not (yield from text.skip(":")):
                raise NoCall
            yield from read_json_call(text, name)
            if (yield from text.skip("}")):
                text.taken = ""
            if not (yield from text.skip(",")):
                break
        if (yield from text.skip("]")):
            text.taken = ""
        yield from text.skip(self.closes)

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        return f'{quote(f"{{{json.dumps(name)}: ")} {arguments} "}}"'


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

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        today = date.today().strftime("%b %d %Y")
        return messages, {"functions": _list_functions(tools), "datetime": today}


class Phi4Mini(Functools):
    """Microsoft's template of Phi-4 mini: tools are a field of the system message."""

    name = "phi-4-mini"
    cue = r"<\|/tool\|>"
    opens, closes = "<|tool_call|>", "<|/tool_call|>"
    others = ("functools",)
    folds = True

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        folded = [dict(message) for message in super().offer(messages, ())[0]]
        if tools:
            if not folded or folded[0]["role"] != "system":
                content = "You are a helpful assistant with some tools."
                folded.insert(0, {"role": "system", "content": content})
            folded[0]["tools"] = _list_functions(tools)
        return folded, {}

    def read(self, text: CallText) -> Generator[None]:
        return read_json_calls(text, "" if text.mark == "functools" else self.closes)


GRANITE_3, APRIEL, NEMOTRON, APERTUS = Granite3(), Apriel(), Nemotron(), Apertus()
FUNCTOOLS, FIREFUNCTION, PHI_4_MINI = Functools(), FireFunction(), Phi4Mini()
