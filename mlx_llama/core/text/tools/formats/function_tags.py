"""Functionary 3.1: <function=name>{...}</function>, which Llama 3.1 and Hermes write as well."""

from __future__ import annotations

from collections.abc import Callable, Generator

from mlx_llama.core.text.tools.calls import CallText
from mlx_llama.core.text.tools.json_calls import read_json_call
from mlx_llama.core.text.tools.python_calls import read_code

from .base import ToolFormat, quote

FUNCTION = "<function="


def read_function(text: CallText) -> Generator[None]:
    """Read a call behind `FUNCTION`."""
    name = yield from text.until(">")
    text.take(1)
    yield from read_json_call(text, name)
    yield from text.skip("</function>")


class Functionary31(ToolFormat):
    name = "functionary-3.1"
    cue = r"<function=example_function_name>\{"
    opens, closes = FUNCTION, "</function>"
    others = ("<|python_tag|>",)

    def read(self, text: CallText) -> Generator[None]:
        return read_code(text) if text.mark in self.others else read_function(text)

    def spell_call(self, name: str, arguments: str, mark: Callable[[str], str]) -> str:
        return f"{quote(f'{FUNCTION}{name}>')} {arguments} {mark(self.closes)}"

    def spell_calls(self, mark: Callable[[str], str], many: bool) -> str:
        return "call+" if many else "call"


FUNCTIONARY_31 = Functionary31()
