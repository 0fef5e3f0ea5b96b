"""Templates that know no tools: these are described in the system message, with SmolLM2's format of
calls.

A template in ChatML gets SmolLM2's words
(https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct), others fewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mlx_llama.core.text.template import check_messages
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.describe import Tool

from .base import Message
from .smollm import SmolLM2

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


class InSystem(SmolLM2):
    words = _SMOLLM2  # of the system message, with a place for the tools

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return not re.search(r"\b(tools|functions)\b", source) and "<|im_start|>" in source

    def offer(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        """Describe the tools in the system message; calls and results become text."""
        folded: list[dict[str, Any]] = []
        for message in check_messages(messages):
            content = message.get("content") or ""
            if calls := message.get("tool_calls"):
                written = json.dumps([call["function"] for call in calls], ensure_ascii=False)
                content += f"<tool_call>{written}</tool_call>"
            rest: dict[str, Any] = {
                name: message[name] for name in ("name", "reasoning_content") if name in message
            }
            if message["role"] == "tool":
                folded.append(
                    {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
                )
            else:
                folded.append({"role": message["role"], "content": content, **rest})
        if tools:
            system = self.words.format(
                tools=json.dumps([tool.as_dict() for tool in tools], ensure_ascii=False)
            )
            if folded and folded[0]["role"] == "system":
                folded[0]["content"] += "\n\n" + system
            else:
                folded.insert(0, {"role": "system", "content": system})
        return folded, {}


class Brief(InSystem):
    words = _BRIEF

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return not re.search(r"\b(tools|functions)\b", source)


IN_SYSTEM, BRIEF = InSystem(), Brief()
