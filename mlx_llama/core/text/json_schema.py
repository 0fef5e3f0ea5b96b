"""Rewrite JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NAMED = ("properties", "$defs", "definitions", "patternProperties")  # {name: schema}
_VALUES = ("const", "enum", "default", "examples", "x-guidance")  # no schemas


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
