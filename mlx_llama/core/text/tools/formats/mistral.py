"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and [TOOL_CALLS]name[ARGS]{...}
since Small 3.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.json_calls import read_json_call, read_json_calls

from .base import ToolFormat, quote

_HEADER = re.compile(
    r"([\w.-]{1,64})\s*(?:\[CALL_ID\]\s*\w{1,64}\s*)?(?:\[ARGS\]\s*)?(?=\{)", re.ASCII
)
_HEADER_LENGTH = 200  # characters before the brace


class Mistral(ToolFormat):
    name = "mistral"
    opens, closes, marks = "[TOOL_CALLS]", "", ("[ARGS]", "[CALL_ID]")

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return self.opens in source

    def read(self, text: CallText) -> Generator[None]:
        if (yield from text.peek()) in "[{":
            yield from read_json_calls(text)
            return
        while not (header := _HEADER.match(text.rest)):
            if "{" in text.rest or len(text.rest) >= _HEADER_LENGTH:
                raise NoCall
            yield from text.wait()
        text.take(header.end())
        yield from read_json_call(text, header[1])

    def spell_calls(self, mark: Callable[[str], str], many: bool) -> str:
        calls = 'call (", " call)*' if many else "call"
        return f'{mark(self.opens)} "[" {calls} "]"'


class MistralHeaders(Mistral):
    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return super().matches(source, tokenizer) and "[ARGS]" in source

    def spell_call(self, name: str, arguments: str, mark: Callable[[str], str]) -> str:
        return f"{quote(name)} {mark('[ARGS]')} {arguments}"

    def spell_calls(self, mark: Callable[[str], str], many: bool) -> str:
        return f"({mark(self.opens)} call)+" if many else f"{mark(self.opens)} call"


MISTRAL, MISTRAL_HEADERS = Mistral(), MistralHeaders()
