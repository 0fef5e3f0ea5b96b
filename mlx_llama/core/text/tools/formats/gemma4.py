"""Gemma 4: <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>, one after the other. Keys are
bare, and sorted in templates.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mlx_llama.core.text.json_schema import (
    LIMITS,
    NOTES,
    find_limits,
    list_properties,
    merge_parts,
)
from mlx_llama.core.text.template import check_messages
from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.literals import QUOTE, is_of, read_mapping, resolve_types

from .base import (
    Messages,
    Offer,
    Spell,
    ToolFormat,
    note_unenforced,
    quote,
    spell_json,
    spell_list,
    spell_members,
    spell_string,
)

_ANY = [
    'any: string | any_object | any_list | %json {"type": ["number", "boolean", "null"]}',
    'any_list: "[" (any ("," any)*)? "]"',
    'any_object: "{" (any_key any ("," any_key any)*)? "}"',
    r"any_key: /[^\s,:(){}\[\]<>\"']{1,64}:/",
]
_MOST_ITEMS = 1000  # of a list, that a grammar counts


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
        values.spell_object(rule, merge_parts(tool.parameters, tool.parameters))
        return [*values.rules, *note_unenforced(values.unenforced)]


class _Values:
    """Lark rules of a tool's values, one a schema, so that schemas may contain themselves."""

    def __init__(self, tool: Tool, rule: str, quotes: str):
        self.rules = list[str]()
        self._tool, self._rule, self._quotes = tool, rule, quotes
        self._names = dict[str, str]()
        self.unenforced = set[str]()  # keywords of the schemas

    def _spell(self, schema: Any) -> str:
        """The name of the rule of a schema."""
        key = json.dumps(schema)
        if key not in self._names:
            self._names[key] = name = f"{self._rule}_{len(self._names)}"
            self.rules.append(f"{name}: {' | '.join(self._spell_kinds(name, schema))}")
        return self._names[key]

    def _spell_kinds(self, name: str, schema: Any) -> list[str]:
        schema = merge_parts(schema, self._tool.parameters)
        types = resolve_types(schema, self._tool.parameters)
        if choices := [schema["const"]] if "const" in schema else schema.get("enum"):
            fitting = [choice for choice in choices if is_of(choice, types)]
            if not fitting:
                return [spell_json(schema, self._tool.name)]  # which no value satisfies
            return [self._spell_choice(choice) for choice in fitting]
        if word := next((word for word in ("anyOf", "oneOf") if schema.get(word)), None):
            if word == "oneOf":
                self.unenforced.add(word)
            rest = {key: schema[key] for key in schema.keys() - NOTES - {word}}
            return [self._spell({**rest, "allOf": [part]}) for part in schema[word]]
        if not types and schema.get("properties"):
            types = frozenset(["object"])
        if not types:
            self.unenforced |= find_limits(schema, *LIMITS)
        return [self._spell_kind(name, kind, schema) for kind in sorted(types)] or ["any"]

    def _spell_kind(self, name: str, kind: str, schema: Mapping[str, Any]) -> str:
        """Values of one type."""
        if kind == "object":
            self.spell_object(f"{name}_object", schema)
            return f"{name}_object"
        if kind == "array":
            return self._spell_list(schema)
        self.unenforced |= find_limits(schema, "")
        if kind == "string":
            return self._spell_string(name, schema)
        limits = {key: schema[key] for key in LIMITS["number"].split() if key in schema}
        return spell_json({**limits, "type": kind}, self._tool.name)

    def _spell_string(self, name: str, schema: Mapping[str, Any]) -> str:
        patterns, unenforced = spell_string(schema)
        self.unenforced |= unenforced
        if not patterns:
            return "string"
        if self._quotes == quote(QUOTE):
            self.rules.append(f"{name}_text[suffix={self._quotes}]: {' & '.join(patterns)}")
            return f"{self._quotes} {name}_text"
        terminal = f"{name}_text".upper()
        self.rules.append(f"{terminal}: TEXT & {' & '.join(patterns)}")
        return f"{self._quotes} {terminal} {self._quotes}"

    def _spell_list(self, schema: Mapping[str, Any]) -> str:
        """With all of `prefixItems`, or as many as `maxItems` allows."""
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        unenforced = find_limits(schema, "array") - {"prefixItems"}
        if all(isinstance(n, int) and n <= _MOST_ITEMS for n in (least, most or 0)):
            unenforced -= {"minItems", "maxItems"}
        else:
            least, most = 0, None
        self.unenforced |= unenforced
        first = [self._spell(part) for part in (schema.get("prefixItems") or ())[:most]]
        if schema.get("items") is False:
            most = len(first)
        if most is not None and least > most:
            return spell_json(schema, self._tool.name)  # which no value satisfies
        item = self._spell(schema["items"]) if "items" in schema else "any"
        rest = least - len(first), None if most is None else most - len(first)
        return f'"[" {spell_list(item, quote(","), *rest, first)} "]"'

    def _spell_choice(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quotes} {quote(value)} {self._quotes}"
        return quote(json.dumps(value, ensure_ascii=False))

    def spell_object(self, rule: str, schema: Mapping[str, Any]) -> None:
        """Add the rule of an object, whose keys are sorted as templates sort them."""
        properties, others = list_properties(schema), schema.get("additionalProperties")
        unenforced, required = find_limits(schema, "object"), schema.get("required") or ()
        if schema.get("minProperties", 0) <= len(required):
            unenforced.discard("minProperties")
        self.unenforced |= unenforced
        if properties or others is False or rule == self._rule:
            members = {
                key: f"{quote(f'{key}:')} {self._spell(properties[key])}"
                for key in sorted(properties, key=str.lower)
            }
            self.rules += spell_members(f"{rule}_keys", members, required, ",")
            self.rules.append(f'{rule}: "{{" {rule}_keys "}}"')
        elif isinstance(others, Mapping):
            pair = f"any_key {self._spell(others)}"
            self.rules.append(f'{rule}: "{{" ({pair} ("," {pair})*)? "}}"')
        else:
            self.rules.append(f"{rule}: any_object")


GEMMA_4 = Gemma4()
