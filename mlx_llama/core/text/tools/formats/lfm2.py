"""LFM2 and LFM2.5: <|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>, a list of Python's
calls, whose nested values may be JSON. A system message can ask for JSON objects instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mlx_llama.core.text.json_schema import find_limits, follow, list_properties
from mlx_llama.core.text.template import check_messages
from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import read_json_call
from mlx_llama.core.text.tools.literals import read_mapping

from .base import (
    Messages,
    Offer,
    Spell,
    ToolFormat,
    note_unenforced,
    quote,
    spell_members,
    spell_part,
)

_NAME = re.compile(r"[\w.:/@-]+", re.ASCII)
_THINK = ("<think>", "</think>")


class Lfm2(ToolFormat):
    name = "lfm2"
    cue = r"List of tools: |<\|tool_call_start\|>"
    opens, closes = "<|tool_call_start|>", "<|tool_call_end|>"
    is_list = folds = True  # templates print calls without escapes, or not at all

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """Calls become text, and so do the thoughts before them, for which templates differ."""
        checked = check_messages(messages)
        for message in checked:
            if "tool_calls" in message and (thought := message.pop("reasoning_content", "")):
                message["content"] = thought.join(_THINK) + message["content"]
        return super().offer(checked, tools)

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        texts = []
        for call in calls:
            pairs = (f"{key}={_write(value)}" for key, value in call["arguments"].items())
            texts.append(f"{call['name']}({', '.join(pairs)})")
        return f"{self.opens}[{', '.join(texts)}]{self.closes}"

    def written_marks(self) -> tuple[str, ...]:
        return (*super().written_marks(), *_THINK)

    def read(self, text: CallText) -> Generator[None]:
        if not (yield from text.skip("[")):
            raise NoCall
        while (first := (yield from text.peek())) != "]":
            if first == "{":
                yield from read_json_call(text)
            else:
                name = (yield from text.until("(")).strip()
                if not _NAME.fullmatch(name):
                    raise NoCall
                text.take(1)
                text.begin(name)
                yield from read_mapping(text, "=", ")")
                text.end()
            if not (yield from text.skip(",")):
                break
        if (yield from text.skip("]")):
            text.taken = ""
        yield from text.skip(self.closes)

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        return f'{quote(f"{name}(")} {arguments} ")"'

    def spell_arguments(self, tool: Tool, rule: str, mark: Spell) -> list[str]:
        root, members = tool.parameters, {}
        rules = note_unenforced(find_limits(root, "object"))
        for number, (key, schema) in enumerate(list_properties(root).items()):
            part = follow(schema, root)
            spelled = spell_part(schema, root, f"{tool.name}.{key}")
            if part.get("type") == "boolean" and not part.keys() & {"const", "enum"}:
                spelled = '"True" | "False"'
            rules.append(f"{rule}_{number}: {spelled}")
            members[key] = f"{quote(f'{key}=')} {rule}_{number}"
        return [*spell_members(rule, members, root.get("required") or (), ", "), *rules]


def _write(value: Any) -> str:
    is_json = value is not None and not isinstance(value, bool)
    return json.dumps(value, ensure_ascii=False) if is_json else repr(value)


LFM2 = Lfm2()
