"""Gemma 4: <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>, one after the other. Keys are
bare, and sorted in templates.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mlx_llama.core.text.json_schema import follow
from mlx_llama.core.text.template import check_messages
from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.literals import QUOTE, read_mapping, resolve_types

from .base import Messages, Offer, Spell, ToolFormat, quote, spell_json, spell_members

_ANY = [
    'any: string | any_object | any_list | %json {"type": ["number", "boolean", "null"]}',
    'any_list: "[" (any ("," any)*)? "]"',
    'any_object: "{" (any_key any ("," any_key any)*)? "}"',
    r"any_key: /[^\s,:(){}\[\]<>\"']{1,64}:/",
]


class Gemma4(ToolFormat):
    name = "gemma4"
    cue = r"<\|tool_call>call:"
    opens, closes, marks = "<|tool_call>", "<tool_call|>", (QUOTE,)

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """Results and the answer to them move into the message of their calls, where older
        templates print them. A text before calls becomes a message, or it would follow the results.
        """
        turns = list[dict[str, Any]]()
        for message in check_messages(messages):
            last, calls = turns[-1] if turns else {}, message.get("tool_calls")
            if message["role"] == "tool" and "tool_calls" in last:
                names = {call.get("id"): call["function"]["name"] for call in last["tool_calls"]}
                name = names.get(message.get("tool_call_id"), message.get("name", "unknown"))
                response = {"name": name, "response": str(message["content"])}
                last.setdefault("tool_responses", []).append(response)
            elif "tool_responses" in last and message["role"] == "assistant" and not calls:
                last["content"] += message["content"]
            else:
                if calls and message["content"]:
                    turns.append({"role": "assistant", "content": message["content"]})
                    message["content"] = ""
                turns.append(message)
        return super().offer(turns, tools)

    def read(self, text: CallText) -> Generator[None]:
        if not (yield from text.skip("call:")):
            raise NoCall
        name = (yield from text.until("{")).strip()
        text.take(1)
        text.begin(name)
        yield from read_mapping(text)
        text.end()
        yield from text.skip(self.closes)

    def rules(self, tools: Sequence[Tool], mark: Spell, many: bool) -> list[str]:
        quotes = mark(QUOTE)
        if quotes == quote(QUOTE):
            string = [f"string: {quotes} text", f"text[suffix={quotes}]: /(?s:.*)/"]
        else:
            string = [f"string: {quotes} TEXT {quotes}", r'TEXT: /(?s:.*)/ & ~/(?s:.*<\|"\|>.*)/']
        return [*super().rules(tools, mark, many), *string, *_ANY]

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        return f"{mark(self.opens)} {quote(f'call:{name}')} {arguments} {mark(self.closes)}"

    def spell_calls(self, mark: Spell, many: bool) -> str:
        return "call+" if many else "call"

    def spell_arguments(self, tool: Tool, rule: str, mark: Spell) -> list[str]:
        values = _Values(tool, rule, mark(QUOTE))
        values.spell_object(rule, tool.parameters)
        return values.rules


class _Values:
    """Lark rules of a tool's values, one a schema, so that schemas may contain themselves."""

    def __init__(self, tool: Tool, rule: str, quotes: str):
        self.rules = list[str]()
        self._tool, self._rule, self._quotes = tool, rule, quotes
        self._names = dict[str, str]()

    def _spell(self, schema: Any) -> str:
        """The name of the rule of a schema."""
        key = json.dumps(schema)
        if key not in self._names:
            self._names[key] = name = f"{self._rule}_{len(self._names)}"
            self.rules.append(f"{name}: {' | '.join(self._spell_kinds(name, schema))}")
        return self._names[key]

    def _spell_kinds(self, name: str, schema: Any) -> list[str]:
        types = resolve_types(schema, self._tool.parameters)
        schema = follow(schema, self._tool.parameters)
        if choices := [schema["const"]] if "const" in schema else schema.get("enum"):
            return [self._spell_choice(choice) for choice in choices]
        parts = schema.get("anyOf") or schema.get("oneOf") or (schema.get("allOf") or ())[:1]
        if parts:
            return [self._spell(part) for part in parts]
        kinds = []
        for kind in sorted(types):
            if kind == "object":
                self.spell_object(f"{name}_object", schema)
                kinds.append(f"{name}_object")
            elif kind == "array":
                item = self._spell(schema["items"]) if "items" in schema else "any"
                kinds.append(f'"[" ({item} ("," {item})*)? "]"')
            elif kind == "string":
                kinds.append("string")
            else:
                kinds.append(spell_json({**schema, "type": kind}, self._tool.name))
        return kinds or ["any"]

    def _spell_choice(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quotes} {quote(value)} {self._quotes}"
        return quote(json.dumps(value, ensure_ascii=False))

    def spell_object(self, rule: str, schema: Mapping[str, Any]) -> None:
        """Add the rule of an object, whose keys are sorted as templates sort them."""
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        if properties or others is False or rule == self._rule:
            members = {
                key: f"{quote(f'{key}:')} {self._spell(properties[key])}"
                for key in sorted(properties, key=str.lower)
            }
            self.rules += spell_members(f"{rule}_keys", members, schema.get("required") or (), ",")
            self.rules.append(f'{rule}: "{{" {rule}_keys "}}"')
        elif isinstance(others, Mapping):
            pair = f"any_key {self._spell(others)}"
            self.rules.append(f'{rule}: "{{" ({pair} ("," {pair})*)? "}}"')
        else:
            self.rules.append(f"{rule}: any_object")


GEMMA_4 = Gemma4()
