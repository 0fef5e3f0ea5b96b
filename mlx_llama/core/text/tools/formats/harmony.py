"""gpt-oss (harmony): <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}, or
to=functions.NAME before the channel, as its template writes it. <|call|> ends a call.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.json_calls import read_json_call

from .base import Spell, ToolFormat, quote

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_START, _CHANNEL, _CONSTRAIN, _MESSAGE = (
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message")
)


class HarmonyCalls(ToolFormat):
    name = "harmony"
    cue = r"<\|channel\|>commentary"
    opens, closes = f"{_CHANNEL}commentary to=functions.", "<|call|>"
    others = (f"{_CHANNEL}analysis to=functions.", " to=functions.")
    marks = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE)
    calls_once = True

    def read(self, text: CallText) -> Generator[None]:
        name = _NAME.match((yield from text.until(_MESSAGE)))
        if not name:
            raise NoCall
        text.take(len(_MESSAGE))
        yield from read_json_call(text, name[0])
        if (yield from text.skip(self.closes)):
            yield from text.skip(f"{_START}assistant")

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        head = f"{mark(_CHANNEL)} {quote(f'commentary to=functions.{name} ')}"
        return f'{head} {mark(_CONSTRAIN)} "json" {mark(_MESSAGE)} {arguments}'

    def spell_calls(self, mark: Spell, many: bool) -> str:
        between = f'{mark(self.closes)} {mark(_START)} "assistant"'
        return f"call ({between} call)*" if many else "call"


HARMONY = HarmonyCalls()
