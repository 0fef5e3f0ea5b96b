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
