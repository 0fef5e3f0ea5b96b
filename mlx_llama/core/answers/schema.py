"""JSON schemas as an option: from a dict, JSON text, or a Python type that pydantic knows."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mlx_llama.core.errors import shorten
from mlx_llama.core.text.json_schema import rewrite_schema

MAX_CHARACTERS = 1 << 16  # a schema as JSON
MAX_DEPTH = 64  # nested objects and arrays in a schema; llguidance reads 128


@dataclass(frozen=True, repr=False)
class Schema:
    """A JSON schema and the Python type it was made from, if any. Objects of a type have only the
    declared keys, unless it allows others (extra="allow").
    """

    text: str  # the schema as JSON, keys in their original order
    kind: Any = None  # the type
    # Keywords that cannot be enforced are dropped with a notice, not refused; true for types, which
    # check the answer when it is parsed.
    is_lenient: bool = False

    @classmethod
    def of(cls, value: Any, is_lenient: bool = False) -> Schema:
        """Build from a dict, a boolean, JSON text, a Schema or a type that pydantic knows. Raises
        ValueError with a clause that completes "it must be".
        """
        if isinstance(value, Schema):
            return value
        if isinstance(value, str):
            value = _parse(value)
        if isinstance(value, bool):  # JSON Schema's shorthands
            if not value:
                raise ValueError("a schema that some value satisfies; false allows none")
            value = {}
        if isinstance(value, Mapping):
            return cls(_dump(value), is_lenient=is_lenient)
        if isinstance(value, (list, tuple, int, float)) or value is None:
            raise ValueError("a JSON schema (an object), or a type such as a pydantic model")
        return cls(_dump(_schema_of(value)), value, is_lenient=True)

    def parse(self, text: str) -> Any:
        """The answer as an instance of `kind`, else its JSON value. Raises ValueError."""
        return json.loads(text) if self.kind is None else _adapter(self.kind).validate_json(text)

    def as_dict(self) -> dict[str, Any]:
        """The schema as Python values."""
        return json.loads(self.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Schema({shorten(self.text, 60)})"


def _parse(text: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"at most {MAX_CHARACTERS} characters, not {len(text)}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"at most {MAX_DEPTH} levels deep") from None
    except ValueError as e:
        raise ValueError(f"valid JSON: {e}") from None


def _dump(schema: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, default=_refuse)
        text.encode()
    except RecursionError:
        raise ValueError(f"at most {MAX_DEPTH} levels deep") from None
    except UnicodeEncodeError:
        raise ValueError("valid Unicode: a text in it is not UTF-8") from None
    except (TypeError, ValueError) as e:
        raise ValueError(f"JSON values only: {e}") from None
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"at most {MAX_CHARACTERS} characters as JSON, not {len(text)}")
    if _depth(text) > MAX_DEPTH:
        raise ValueError(f"at most {MAX_DEPTH} levels deep, not {_depth(text)}")
    return text


def _refuse(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is none")


def _depth(text: str) -> int:
    """Levels of nesting in JSON text."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return max(accumulate((sign in "{[") - (sign in "}]") for sign in bare), default=0)


@functools.lru_cache(maxsize=64)
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _schema_of(kind: Any) -> dict[str, Any]:
    from pydantic.errors import PydanticUserError

    try:
        return rewrite_schema(_adapter(kind).json_schema(), _close)
    except (PydanticUserError, TypeError):
        raise ValueError("a JSON schema (an object), or a type that pydantic knows") from None


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid keys that the type would ignore, which small models like to add."""
    return {"additionalProperties": False, **schema} if "properties" in schema else schema
