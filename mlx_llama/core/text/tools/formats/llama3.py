"""Llama 3.1 to 3.3: an answer that is {"name": ..., "parameters": {...}}, a built-in tool behind
<|python_tag|>, or <function=name>{...}</function>.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.calls import CallText
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import FUNCTION, read_function, read_json_call
from mlx_llama.core.text.tools.python_calls import read_code

from .base import Messages, Offer, Spell, ToolFormat

# The parameter of each tool that the template's builtin_tools name
_BUILTIN = {"brave_search": "query", "wolfram_alpha": "query", "code_interpreter": "code"}


class Llama3(ToolFormat):
    name = "llama3"
    opens, closes = "<|python_tag|>", ""
    others = (FUNCTION,)
    arguments = "parameters"
    is_bare = calls_once = True

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        words = '"parameters": dictionary of argument name'  # words of the prompt
        return words in source or self.opens in tokenizer.added_ids

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """A built-in tool is only named: the model knows it."""
        builtin = [
            tool.name
            for tool in tools
            if list(tool.parameters.get("properties", {})) == [_BUILTIN.get(tool.name)]
        ]
        others = [tool for tool in tools if tool.name not in builtin]
        messages, extras = super().offer(messages, others)
        return messages, {**extras, "builtin_tools": builtin} if builtin else extras

    def read(self, text: CallText) -> Generator[None]:
        if text.mark == FUNCTION:
            yield from read_function(text)
        elif text.mark and not text.calls and (yield from text.peek()) != "{":
            yield from read_code(text)
        else:
            yield from read_json_call(text)
            while (yield from text.skip(";")):
                yield from read_json_call(text)

    def spell_calls(self, mark: Spell, many: bool) -> str:
        return 'call ("; " call)*' if many else "call"


LLAMA3 = Llama3()
