"""Functionary 3.1: <function=name>{...}</function>, which Llama 3.1 and Hermes write as well.
Functionary 3.2: a recipient and its text, "name\\n{...}" or "all\\ntext", with >>> between them;
the prompt ends with the first >>>.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence

from mlx_llama.core.text.template import JsonText, check_messages
from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import FUNCTION, read_json_call
from mlx_llama.core.text.tools.python_calls import INTERPRETERS, read_code

from .base import Messages, Offer, Spell, ToolFormat, quote


class Functionary31(ToolFormat):
    name = "functionary-3.1"
    cue = r"<function=example_function_name>\{"
    opens, closes = FUNCTION, "</function>"
    others = ("<|python_tag|>",)

    def read(self, text: CallText) -> Generator[None]:
        return read_code(text) if text.mark in self.others else super().read(text)

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        return f"{quote(f'{FUNCTION}{name}>')} {arguments} {mark(self.closes)}"

    def spell_calls(self, mark: Spell, many: bool) -> str:
        return "call+" if many else "call"


class Functionary32(ToolFormat):
    name = "functionary-3.2"
    cue = "recipient==all"
    opens, closes = ">>>", ""
    is_open = True

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """The template takes arguments as text."""
        checked = check_messages(messages)
        for message in checked:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                text = json.dumps(function["arguments"], ensure_ascii=False)
                function["arguments"] = JsonText(text)
        return super().offer(checked, tools)

    def read(self, text: CallText) -> Generator[None]:
        name = yield from text.until("\n")
        text.take(1)
        if name == "all":
            return
        if name not in text.tools:  # text without a recipient, in which a call may follow
            text.rest, text.taken = f"{name}\n{text.rest}", text.mark
            raise NoCall
        if name in INTERPRETERS and (yield from text.peek()) != "{":
            yield from read_code(text, interpreter=name)
        else:
            yield from read_json_call(text, name)

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        return f'{quote(name)} "\\n" {arguments}'

    def spell_calls(self, mark: Spell, many: bool) -> str:
        return f"call ({mark(self.opens)} call)*" if many else "call"


FUNCTIONARY_31, FUNCTIONARY_32 = Functionary31(), Functionary32()
