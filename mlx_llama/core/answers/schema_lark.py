"""JSON schemas as rules of a Lark grammar, for constants that llguidance's doubles do not hold.

llguidance compiles `{"const": 9007199254740993}` to 9007199254740992. Here such constants are
texts; the objects, lists and choices around them are rules, and all else stays `%json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from mlx_llama.core.text.json_schema import DEFINITIONS, NOTES, follow, walk_schema
from mlx_llama.core.text.tools import spell_list

from .enforceable import SchemaFault

_TYPES = {
    "null": type(None), "boolean": bool, "string": str, "array": list, "object": dict,
}  # fmt: skip
_DIGITS = 15  # every reader of doubles reads a decimal number of so many digits alike
_POWER = 22  # likewise the power of ten


def is_inexact(value: Any) -> bool:
    """True if a constant is or contains a number that llguidance would change."""
    if isinstance(value, dict):
        return any(map(is_inexact, value.values()))
    if isinstance(value, list):
        return any(map(is_inexact, value))
    if not isinstance(value, (int, float)):
        return False
    if isinstance(value, int) or abs(value) > 1 << 53:
        return abs(value) > 1 << 53
    _, digits, power = Decimal(repr(value)).as_tuple()
    return len(digits) > _DIGITS or abs(int(power)) > _POWER


def _find_inexact(schema: dict[str, Any]) -> tuple[str, Any] | None:
    """The place of a constant that llguidance would change, and the constant."""
    for place, part in walk_schema(schema):
        values = part.get("enum", ())
        for value in (*(values if isinstance(values, list) else ()), part.get("const")):
            if is_inexact(value):
                return place, value
    return None


class SchemaRules:
    """Writes the rules of one schema. prefix: of their names; options: llguidance's, of `%json`."""

    def __init__(self, schema: dict[str, Any], prefix: str, options: Mapping[str, Any]):
        self.rules: list[str] = []
        self._root, self._prefix, self._options = schema, prefix, options
        self._definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
        self._names: dict[str, str] = {}  # references -> the names of their rules
        self._inexact: dict[str, bool] = {}  # by reference

    @classmethod
    def of(
        cls, schema: dict[str, Any], prefix: str, options: Mapping[str, Any], place: str = ""
    ) -> tuple[str, list[str]] | None:
        """An expression for the schema, and the rules that it needs; None if llguidance compiles
        the schema without changing a constant. place: of the schema, for errors. Raises
        SchemaFault.
        """
        if _find_inexact(schema) is None:
            return None
        rules = cls(schema, prefix, options)
        return rules.write(schema, place), rules.rules

    def write(self, schema: Any, place: str) -> str:
        """The expression of a schema."""
        if not isinstance(schema, dict) or not self._needs_rules(schema):
            part = schema if isinstance(schema, dict) else {"allOf": [schema]}
            rule = {**self._definitions, **part, "x-guidance": self._options}
            return f"%json {json.dumps(rule)}"
        schema = _simplify(schema)
        keywords = schema.keys() - NOTES
        if keywords & {"const", "enum"} and keywords <= {"const", "enum", "type"}:
            return self._write_values(schema, place)
        if keywords == {"$ref"}:
            return self._refer(schema["$ref"], place)
        if keywords <= {"anyOf", "allOf", "oneOf"} and len(keywords) == 1:
            (keyword,) = keywords
            parts = schema[keyword]
            if keyword == "anyOf" or len(parts) == 1:
                choices = [
                    self.write(part, f"{place}.{keyword}.{i}") for i, part in enumerate(parts)
                ]
                return f"({' | '.join(choices)})"
        if schema.get("type") == "array" and keywords <= {"type", "items", "minItems", "maxItems"}:
            return self._write_list(schema, place)
        known = {"type", "properties", "required", "additionalProperties"}
        if schema.get("type") == "object" and keywords <= known and "properties" in schema:
            return self._write_object(schema, place)
        raise self._fault(schema, place, "beside " + ", ".join(sorted(keywords - {"type"})))

    def _fault(self, schema: dict[str, Any], place: str, reason: str) -> SchemaFault:
        inner, value = _find_inexact(schema) or ("", "a number")
        where = ".".join(filter(None, (place.lstrip("."), inner)))
        shown = f"{value}" if len(f"{value}") <= 40 else f"{value}"[:37] + "..."
        return SchemaFault(where, f"the number {shown} cannot be enforced exactly {reason}")

    def _needs_rules(self, schema: dict[str, Any]) -> bool:
        """True if llguidance would change a constant of the schema or of its references."""
        bare = {key: value for key, value in schema.items() if key not in DEFINITIONS}
        if _find_inexact(bare):
            return True
        return any(
            self._is_inexact_reference(part["$ref"])
            for _, part in walk_schema(bare)
            if isinstance(part.get("$ref"), str)
        )

    def _is_inexact_reference(self, reference: str) -> bool:
        if reference not in self._inexact:
            self._inexact[reference] = False  # within itself
            target = follow({"$ref": reference}, self._root)
            self._inexact[reference] = self._needs_rules(dict(target))
        return self._inexact[reference]

    def _add(self, body: str, name: str = "") -> str:
        name = name or self._reserve()
        self.rules.append(f"{name}: {body}")
        return name

    def _reserve(self) -> str:
        return f"{self._prefix}_{len(self.rules) + len(self._names)}"

    def _refer(self, reference: str, place: str) -> str:
        if reference not in self._names:
            self._names[reference] = f"{self._prefix}_ref_{len(self._names)}"
            body = self.write(follow({"$ref": reference}, self._root), place)
            self._add(body, self._names[reference])
        return self._names[reference]

    def _write_values(self, schema: dict[str, Any], place: str) -> str:
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        texts = [
            json.dumps(value, ensure_ascii=False)
            for value in values
            if not kinds or any(_is_of(value, kind) for kind in kinds)
        ]
        if not texts:
            raise self._fault(schema, place, "with its type")
        return "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + ")"

    def _write_list(self, schema: dict[str, Any], place: str) -> str:
        item = self._add(self.write(schema["items"], f"{place}.items"))
        items = spell_list(item, '", "', schema.get("minItems", 0), schema.get("maxItems"))
        return f'"[" {items} "]"'

    def _write_object(self, schema: dict[str, Any], place: str) -> str:
        """The declared keys in their order, and no others."""
        properties, required = schema["properties"], schema.get("required", ())
        if missing := [name for name in required if name not in properties]:
            raise self._fault(schema, place, f"beside the undeclared required {missing[0]}")
        first, later = "", ""  # what follows at the start, and after another key
        for key, part in reversed(properties.items()):
            value = self._add(self.write(part, f"{place}.{key}"))
            text = json.dumps(f"{json.dumps(key, ensure_ascii=False)}: ", ensure_ascii=False)
            pair = f"{text} {value}"
            begin, follow_on = f"{pair} {later}", f'", " {pair} {later}'
            if key in required:
                first, later = self._add(begin), self._add(follow_on)
            else:
                first = self._add(f"{begin} | {first}" if first else f"({begin})?")
                later = self._add(f"{follow_on} | {later}" if later else f"({follow_on})?")
        return f'"{{" {first} "}}"'


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("integer", "number") and not isinstance(value, bool):
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return is_whole or (kind == "number" and isinstance(value, float))
    return isinstance(value, _TYPES.get(kind, ()))


def _simplify(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without a `minProperties` that `required` implies, and with the types and
    values of `allOf` in place of it if none of them occurs twice.
    """
    required, least, parts = (schema.get(name) for name in ("required", "minProperties", "allOf"))
    kept = {**schema}
    if (
        isinstance(required, list)
        and isinstance(least, int)
        and least <= len({*map(str, required)})
    ):
        del kept["minProperties"]
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        pairs = [pair for part in parts for pair in part.items() if pair[0] not in NOTES]
        names = {name for name, _ in pairs}
        if len(names) == len(pairs) and names <= {"type", "const", "enum"} - schema.keys():
            del kept["allOf"]
            kept.update(pairs)
    return kept
