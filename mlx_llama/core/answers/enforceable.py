"""JSON schemas within the means of llguidance, which reads numbers as doubles and lacks keywords.

`make_enforceable` rewrites a schema so that all that llguidance then allows is valid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from mlx_llama.core.errors import shorten
from mlx_llama.core.text.json_schema import DEFINITIONS, NOTES, follow, rewrite_schema, walk_schema
from mlx_llama.core.text.tools import spell_list

# The size of a pattern with its counts written out, which bounds the work of compiling it

MAX_SIZE = 100_000  # a{100000} takes 0.1 s, (a{1003}){991} 1 to 3 s and 200 MB

_REPETITION = re.compile(r"(?:\{|~)\s*(\d*)\s*(?:(?:,|\.\.)\s*(\d*)\s*)?\}?")
_TOKENS = re.compile(  # a count, an escape, a class, or one other character
    r"\{\s*\d*\s*,?\s*\d*\s*\}|\\(?:[pPxuU]\{[^}]*\}|.)"
    r"|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|.",
    re.DOTALL,
)
_LARK_TOKENS = re.compile(  # a count, a text, a regular expression, a comment, a name, or another
    r'\{[\d\s,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?|"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\])+/'
    r"|[A-Za-z_]\w*|\S"
)
_LARK_HEAD = re.compile(r"^\s*[?!]?([A-Za-z_]\w*)(?:\.\d+)?(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a regular expression whose counts multiply beyond the limit."""
    _check(_measure_regex(pattern))


def check_lark(grammar: str) -> None:
    """Raise ValueError for a regular expression or a terminal beyond the limit. Rules, whose names
    are in lower case, are not expanded.
    """
    _, *parts = _LARK_HEAD.split(grammar)
    bodies = {name: _LARK_TOKENS.findall(body) for name, body in zip(parts[::2], parts[1::2])}
    sizes: dict[str, int] = {}

    def measure(token: str) -> int:
        if token[0] == "/":
            return 0 if token[:2] == "//" else _measure_regex(token[1:-1])
        if token[0] == '"':
            return len(token)
        if token.isupper() and token in bodies and token not in sizes:
            sizes[token] = 1  # within itself, which is an error
            sizes[token] = _measure(bodies[token], measure)
        return sizes.get(token, 1)

    for name, body in bodies.items():
        try:
            _check(measure(name))
            for token in body:
                _check(measure(token))
        except RecursionError:
            raise ValueError("its terminals refer to each other too deeply") from None


def _measure_regex(pattern: str) -> int:
    return _measure(_TOKENS.findall(pattern), lambda token: 1)


def _measure(tokens: Iterable[str], measure_atom: Callable[[str], int]) -> int:
    """Characters of a pattern whose counts are written out, at least. The dialects agree on groups
    and counts; a group that does not close is taken to begin with the pattern.
    """
    groups, last = [0], 0  # sizes of the open groups, and of the last part
    for token in tokens:
        if token in ("(", "["):
            groups.append(0)
        elif token in (")", "]"):
            last = groups.pop()
            groups = groups or [0]
            groups[-1] += last
        elif token[0] in "{~" and (count := _REPETITION.fullmatch(token)):
            times = max([1, *(int(digits[:12] or 1) for digits in count.groups(""))])
            groups[-1] += last * (times - 1)
            last *= times
        elif token not in "|?*+":
            last = measure_atom(token)
            groups[-1] += last
    return sum(groups)


def _check(size: int) -> None:
    if size > MAX_SIZE:
        written = f"{size}" if size < 10**18 else "over 10**18"
        raise ValueError(
            f"with its counts written out a pattern is {written} characters long, expected at "
            f"most {MAX_SIZE}"
        )


# Schemas

_EXACT = 1 << 53  # doubles hold all integers up to it
_LARGEST = (1 << 63) - 1024  # the largest double that is an integer of 64 bits
_OPEN = 10**18  # llguidance needs the other bound as well from here on
_PRACTICAL = 1e38  # a bound of a number from here on excludes nothing practical
_COUNT = (1 << 32) - 1  # the largest count of characters, items or properties
_LARGEST_STEP = ((1 << 32) - 10) // 10  # llguidance divides digit by digit in 32 bits
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_COUNTS = "minLength maxLength minItems maxItems minProperties maxProperties".split()
_FORMATS = "date time date-time duration email hostname ipv4 ipv6 uuid uri".split()


class SchemaFault(ValueError):
    """A part of a schema cannot be enforced; the message begins with its place."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"{place}: {reason}" if place else reason)


def make_enforceable(schema: dict[str, Any], changed: set[str], place: str = "") -> dict[str, Any]:
    """Rewrite a schema. Adds keywords to `changed` whose values are not enforced exactly: bounds
    that are narrowed to numbers that doubles hold, or dropped because they exclude nothing
    practical. place: of the schema, for errors. Raises SchemaFault.
    """
    steps: set[Decimal] = set()
    for inner, part in walk_schema(schema, place):
        _check_part(inner, part)
        if _is_number(step := part.get("multipleOf")):
            steps.add(Decimal(repr(step)).copy_abs())
            _check_steps(inner, steps)
    adapted = rewrite_schema(
        schema,
        lambda part: _adapt_bounds(_adapt_counts(_name_keys(part, schema), changed), changed),
    )
    return dict(adapted)


def relax(schema: dict[str, Any], keywords: set[str]) -> dict[str, Any]:
    """The schema without keywords that llguidance cannot enforce: unknown formats, uniqueItems,
    propertyNames, look-around in patterns, the exclusion of oneOf. Adds their names to `keywords`.
    """

    def is_lost(name: str, value: Any) -> bool:
        if not isinstance(value, str):
            return (name == "uniqueItems" and value is True) or name == "propertyNames"
        is_unknown = name == "format" and value not in _FORMATS
        return is_unknown or (name == "pattern" and re.search(r"\(\?<?[=!]", value) is not None)

    def relax_part(part: dict[str, Any]) -> dict[str, Any]:
        lost = {name for name, value in part.items() if is_lost(name, value)}
        keywords.update(lost, {"oneOf"} & part.keys())
        kept = {name: value for name, value in part.items() if name not in lost}
        return {"anyOf" if name == "oneOf" else name: value for name, value in kept.items()}

    return dict(rewrite_schema(schema, relax_part))


# Numbers and counts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_part(place: str, part: Mapping[str, Any]) -> None:
    for name, side in _BOUNDS.items():
        bound: Any = part.get(name)
        if _is_number(bound) and bound * side > _LARGEST:
            raise SchemaFault(
                place,
                f"{name} {shorten(json.dumps(bound), 40)} is outside the enforced range of "
                f"+-{_LARGEST}",
            )
    patterns = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        try:
            check_pattern(pattern if isinstance(pattern, str) else "")
        except ValueError as error:
            raise SchemaFault(place, str(error)) from None


def _check_steps(place: str, steps: set[Decimal]) -> None:
    """Check the values of multipleOf so far, of which allOf may join any."""
    places = max(-int(step.as_tuple().exponent) for step in steps)
    whole = [int(step.scaleb(max(0, places))) for step in steps]
    if math.prod(whole) > _LARGEST_STEP:
        shown = " and ".join(str(step)[:40] for step in sorted(steps))
        raise SchemaFault(
            place,
            f"multipleOf {shown}: at most {_LARGEST_STEP} steps of the last digit are enforced",
        )


def _adapt_bounds(part: dict[str, Any], changed: set[str]) -> dict[str, Any]:
    """Replace bounds by numbers that are the same for llguidance, within the old ones."""
    kinds = part.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_integer = "integer" in kinds and "number" not in kinds
    bounds = {name: part[name] for name in _BOUNDS if _is_number(part.get(name))}
    adapted: dict[str, Any] = {}
    for name, bound in bounds.items():
        side = _BOUNDS[name]
        if abs(bound) <= _EXACT:
            adapted[name] = bound
        elif abs(bound) <= _LARGEST:
            adapted[name] = _find_double(bound, side)
        elif is_integer or abs(bound) < _PRACTICAL:
            adapted[name] = -side * _LARGEST
    for side, other in ((1, "maximum"), (-1, "minimum")):
        is_high = any(adapted[name] * side >= _OPEN for name in adapted if _BOUNDS[name] == side)
        if is_high and not any(_BOUNDS[name] == -side for name in adapted):
            adapted[other] = side * _LARGEST
    names = bounds.keys() | adapted.keys()
    changed.update(name for name in names if bounds.get(name) != adapted.get(name))
    kept = {name: value for name, value in part.items() if name not in bounds}
    return {**kept, **adapted}


def _find_double(bound: float, side: int) -> int:
    """The integer on the allowed side of a large bound that is nearest to it, of those whose
    double is exact and is printed with the same digits or with allowed ones.
    """
    exact, double = Decimal(repr(bound)), float(bound)
    while (Decimal(double) - exact) * side < 0 or (Decimal(repr(double)) - exact) * side < 0:
        double = math.nextafter(double, side * math.inf)
    return int(double)


def _adapt_counts(part: dict[str, Any], changed: set[str]) -> dict[str, Any]:
    """Write counts as integers (10.0 is one in JSON); drop limits that no answer reaches."""
    adapted = dict(part)
    for name in _COUNTS:
        count: Any = part.get(name)
        if isinstance(count, float) and count.is_integer():
            adapted[name] = count = int(count)
        if name.startswith("max") and _is_number(count) and count > _COUNT:
            del adapted[name]
            changed.add(name)
    return adapted


# Names of properties


def _name_keys(part: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Express propertyNames by other keywords, as far as they can."""
    if "propertyNames" not in part:
        return part
    rest = {name: value for name, value in part.items() if name != "propertyNames"}
    names = part["propertyNames"]
    names = {} if names is True else follow(names, root) if isinstance(names, dict) else None
    if names is None or names.get("type", "string") != "string":
        return part
    rules = names.keys() - NOTES - {"type"}
    if not rules:
        return rest
    properties, values = part.get("properties", {}), part.get("additionalProperties", True)
    if "patternProperties" in part or not isinstance(properties, dict):
        return part
    if rules <= {"const", "enum"} and len(rules) == 1:
        texts = [names["const"]] if "const" in names else names["enum"]
        texts = [text for text in texts if isinstance(text, str)]
        more = {} if values is False else dict.fromkeys(texts, values)
        known = {key: value for key, value in properties.items() if key in texts}
        return {**rest, "properties": {**known, **more, **known}, "additionalProperties": False}
    pattern = names.get("pattern")
    if rules <= {"minLength", "maxLength"}:
        pattern = f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    elif rules != {"pattern"}:
        return part
    if not isinstance(pattern, str) or properties or values is False:
        return part
    return {**rest, "patternProperties": {pattern: values}, "additionalProperties": False}


# Schemas as rules of a Lark grammar, for constants that llguidance's doubles do not hold: it
# compiles `{"const": 9007199254740993}` to 9007199254740992. Here such constants are texts; the
# objects, lists and choices around them are rules, and all else stays `%json`.

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
        return SchemaFault(
            where, f"the number {shorten(f'{value}', 40)} cannot be enforced exactly {reason}"
        )

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
        name = name or f"{self._prefix}_{len(self.rules) + len(self._names)}"
        self.rules.append(f"{name}: {body}")
        return name

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
