"""Walk through JSON schemas and rewrite them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", *DEFINITIONS)  # {name: schema}
_VALUES = ("const", "enum", "default", "examples", "x-guidance")  # no schemas
# keywords that allow and forbid nothing
NOTES = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $id "
    "x-guidance $defs definitions".split()
)
_LINKS = 16  # maximum number of references to follow
# Keywords that forbid values, by the type that they are about; "" for any
LIMITS = {
    "": "$ref $dynamicRef allOf anyOf oneOf not if",
    "string": "pattern format minLength maxLength",
    "array": "prefixItems contains uniqueItems unevaluatedItems minItems maxItems",
    "object": "patternProperties propertyNames minProperties maxProperties dependentRequired "
    "dependentSchemas dependencies unevaluatedProperties",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
LIMITS["integer"] = LIMITS["number"]


def rewrite_schema(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply `change` to every object of a JSON schema that is one itself, the innermost first."""
    if isinstance(schema, list):
        return [rewrite_schema(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            changed[name] = {key: rewrite_schema(inner, change) for key, inner in value.items()}
        else:
            changed[name] = value if name in _VALUES else rewrite_schema(value, change)
    return change(changed)


def list_parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside one, each with its name: a property's is the key alone."""
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            prefix = "" if name == "properties" else f"{name}."
            inner = [(f"{prefix}{key}", part) for key, part in value.items()]
        elif isinstance(value, list):
            inner = [(f"{name}.{number}", part) for number, part in enumerate(value)]
        else:
            inner = [(name, value)]
        if name not in _VALUES:
            yield from ((place, part) for place, part in inner if isinstance(part, dict))


def walk_schema(schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all inside it, the outermost first, with places such as "user.tags.items"."""
    yield place, schema
    for name, part in list_parts(schema):
        yield from walk_schema(part, f"{place}.{name}" if place else name)


def find_limits(schema: Mapping[str, Any], *kinds: str) -> set[str]:
    """Keywords of a schema that forbid values of these types, but for their members' and items'."""
    names = " ".join(LIMITS.get(kind, "") for kind in ("", *kinds)).split()
    return {name for name in names if schema.get(name) not in (None, False)}


def list_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of an object's schema by key, and required ones that it does not declare."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    return {**properties, **{key: {} for key in required if key not in properties}}


def follow(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references; returns {} for `true` and broken ones. root: has the definitions."""
    for _ in range(_LINKS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target
    return schema if isinstance(schema, Mapping) else {}


_OBJECT = ("properties", "additionalProperties")  # the latter depends on the former


def merge_parts(schema: Any, root: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """A schema with the keywords of its reference and of the parts of `allOf`. What cannot be one
    keyword stays in `allOf`. root: has the definitions.
    """
    if not isinstance(schema, Mapping) or depth > _LINKS:
        return {}
    merged = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    apart = list[Any]()
    for part in [follow(schema, root)] * ("$ref" in schema) + list(schema.get("allOf") or ()):
        part = merge_parts(part, root, depth + 1)
        sides = [side for side in (merged, part) if side.keys() & _OBJECT]
        if len(sides) == 2 and any(side.get(_OBJECT[1], True) is not True for side in sides):
            apart.append(part)
            continue
        for key, value in part.items():
            old = merged.get(key)
            if key == "properties" and isinstance(old, Mapping) and not old.keys() & value.keys():
                merged[key] = {**old, **value}
            elif key == "required" and isinstance(old, list):
                merged[key] = list(dict.fromkeys([*old, *value]))
            elif key == "type" and isinstance(old, list) and value in old:
                merged[key] = value
            elif old is None or key in NOTES:
                merged.setdefault(key, value)
            elif old != value:
                apart.append({key: value})
    return {**merged, "allOf": apart} if apart else merged
