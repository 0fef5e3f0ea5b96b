"""Templates without tools, or with an unknown format: tools are described in the system message, with
SmolLM2's format of calls.

A template in ChatML gets SmolLM2's words
(https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct), others fewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.describe import Tool

from .base import Messages, Offer
from .hermes import SmolLM2

_SMOLLM2 = """You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, please make \
the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""

# For models that were trained on no such words
_BRIEF = """You may call these functions:
<tools>{tools}</tools>
To call, write nothing else than <tool_call>[{{"name": name, "arguments": {{...}}}}]</tool_call>"""


_TOOLS = re.compile(r"\b(tools|functions)\b")
_NO_SYSTEM = re.compile(r"system role (is )?not supported|^(?!.*system)", re.IGNORECASE | re.DOTALL)


class InSystem(SmolLM2):
    words = _SMOLLM2  # the system message's words, with a place for the tools
    folds = True

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return not _TOOLS.search(source) and "<|im_start|>" in source

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """Describe the tools in the system message; calls and results become text."""
        folded: list[dict[str, Any]] = []
        for message in super().offer(messages, ())[0]:
            if message["role"] == "tool":
                content = f"<tool_response>{message['content']}</tool_response>"
                folded.append({"role": "user", "content": content})
            else:
                folded.append(dict(message))
        if tools:
            system = self.words.format(
                tools=json.dumps([tool.as_dict() for tool in tools], ensure_ascii=False)
            )
            if folded and folded[0]["role"] == "system":
                folded[0]["content"] += "\n\n" + system
            else:
                folded.insert(0, {"role": "system", "content": system})
        return folded, {}


class Generic(InSystem):
    words = _BRIEF

    def __init__(self, *, has_tools: bool, has_system: bool):
        """Of templates that offer tools in an unknown format, and that take a system message."""
        self._has_tools, self._has_system = has_tools, has_system
        if has_tools:
            self.notice = (
                "tools: this template's format of calls is unknown: the tools are described in "
                "the first message"
            )

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        has_tools, has_system = bool(_TOOLS.search(source)), not _NO_SYSTEM.search(source)
        return (has_tools, has_system) == (self._has_tools, self._has_system)

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """As `InSystem`, with joined messages for templates whose roles must alternate."""
        joined: list[dict[str, Any]] = []
        for message in super().offer(messages, tools)[0]:
            if message["role"] == "system" and not self._has_system:
                message = {**message, "role": "user"}
            if joined and joined[-1]["role"] == message["role"] == "user":
                joined[-1]["content"] += "\n\n" + message["content"]
            else:
                joined.append(dict(message))
        return joined, {"tools": []} if self._has_tools else {}


BRIEF = Generic(has_tools=False, has_system=True)
IN_USER = Generic(has_tools=False, has_system=False)
UNKNOWN = Generic(has_tools=True, has_system=True)
UNKNOWN_IN_USER = Generic(has_tools=True, has_system=False)
IN_SYSTEM = InSystem()
