"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; [TOOL_CALLS]name[ARGS]{...} since
Devstral and Ministral 3, in Small 3.2 with [CALL_ID]id before [ARGS].
"""

from __future__ import annotations

import re
from collections.abc import Generator

from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.json_calls import read_json_call, read_json_calls

from .base import Spell, ToolFormat, quote

_HEADER = re.compile(r"([\w.:/@-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?", re.ASCII)


class Mistral(ToolFormat):
    name = "mistral"
    cue = r"\[TOOL_CALLS\]"
    opens, closes, marks = "[TOOL_CALLS]", "", ("[ARGS]", "[CALL_ID]")
    is_list = True

    def read(self, text: CallText) -> Generator[None]:
        if (yield from text.peek()) in "[{":
            yield from read_json_calls(text)
            return
        header = _HEADER.fullmatch((yield from text.until("{")))
        if not header:
            raise NoCall
        yield from read_json_call(text, header[1], header[2])


class MistralHeaders(Mistral):
    cue = r"\[ARGS\]"
    is_list = False

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        return f"{quote(name)} {mark('[ARGS]')} {arguments}"

    def spell_calls(self, mark: Spell, many: bool) -> str:
        return f"({mark(self.opens)} call)+" if many else f"{mark(self.opens)} call"


class MistralIds(MistralHeaders):
    cue = r"\[CALL_ID\]"

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        number = "/[a-zA-Z0-9]{9}/"
        return f"{quote(name)} {mark('[CALL_ID]')} {number} {mark('[ARGS]')} {arguments}"


MISTRAL, MISTRAL_HEADERS, MISTRAL_IDS = Mistral(), MistralHeaders(), MistralIds()
