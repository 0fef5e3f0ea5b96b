"""A JSON list of calls behind a mark, as Granite 3's <|tool_call|>[{"name": ..., "arguments":
{...}}, ...].
"""

from __future__ import annotations

from collections.abc import Generator

from mlx_llama.core.text.tools.calls import CallText
from mlx_llama.core.text.tools.json_calls import read_json_calls

from .base import ToolFormat


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


GRANITE_3, APRIEL, NEMOTRON = Granite3(), Apriel(), Nemotron()
