"""Hermes 2 and 3, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one
after the other.
"""

from __future__ import annotations

from mlx_llama.core.text.tokenizer import Tokenizer

from .base import ToolFormat


class Hermes(ToolFormat):
    name = "hermes"

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        others = "<function=", "<arg_key>"  # arguments in XML
        return (
            "<tool_call>" in source
            and "arguments" in source
            and not any(other in source for other in others)
        )


HERMES = Hermes()
