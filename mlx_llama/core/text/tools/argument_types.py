"""Arguments that models write as plain text: their types are those of the tool's schema."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

from mlx_llama.core.text.json_schema import follow

from .calls import write_arguments
from .python_text import read_literal

_DEPTH = 16  # maximum nesting of references and alternatives
_LENGTH = 1 << 14  # characters that are read as Python
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip


def resolve_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that a schema allows; none for any. root: has the definitions."""
    if depth > _DEPTH:
        return frozenset()
    schema = follow(schema, root)
    if kinds := schema.get("type"):
        return frozenset([kinds] if isinstance(kinds, str) else kinds)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES.get(type(value), "object") for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [resolve_types(part, root, depth + 1) for part in schema[word]]
            return frozenset(itertools.chain.from_iterable(parts if all(parts) else ()))
    parts = [resolve_types(part, root, depth + 1) for part in schema.get("allOf", ())]
    return next((part for part in parts if part), frozenset())


def is_of(value: Any, types: frozenset[str]) -> bool:
    """True if a JSON value has one of the types; none allow any."""
    kind = _TYPES.get(type(value), "object")
    return not types or kind in types or (kind == "integer" and "number" in types)


def write_value(text: str, types: frozenset[str]) -> str:
    """A value as JSON, of one of the types if the text can be read so, else as a string."""
    value = _read_value(text.strip())
    if isinstance(value, float) and value.is_integer() and types & {"integer", "number"}:
        value = int(value) if "number" not in types else value
    if is_of(value, types) or "string" not in types:
        with contextlib.suppress(
            TypeError, ValueError, RecursionError
        ):  # a value that only Python has
            return write_arguments(value)
    return write_arguments(text)


def _read_value(text: str) -> Any:
    """Read JSON, or Python as templates print it; the text itself if it is neither."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, strict=False)
    if len(text) <= _LENGTH and text[:1] in "[{(\"'":
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return read_literal(text)
    return text
