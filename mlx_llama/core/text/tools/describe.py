"""Descriptions of tools: from Python functions, or in OpenAI's form."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.errors import OptionsError, show
from mlx_llama.core.text.json_schema import rewrite_schema

MAX_TOOLS = 1024
MAX_CHARACTERS = 1 << 19  # maximum length of all tools as JSON
_NAME = re.compile(r"[\w.:/@-]{1,128}", re.ASCII)


class ArgumentsError(ValueError):
    """Arguments of a call do not fit its function."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of an object
    function: Callable[..., Any] | None = None  # runs the call; None if the caller does
    model: Any = None  # pydantic model of the arguments

    @classmethod
    def of(cls, value: Any) -> Tool:
        """Build from a Python function, or from OpenAI's {"type": "function", "function": {...}}.

        Raises OptionsError that names the missing or wrong part.
        """
        if isinstance(value, Tool):
            return value
        if callable(value):
            return _from_function(value)
        inner = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(inner, Mapping) or value.get("type", "function") != "function":
            form = '{"type": "function", "function": {...}}'
            raise _fault(f"{show(value)} is neither a function nor {form}")
        name, description = inner.get("name"), inner.get("description") or ""
        parameters = inner.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            allowed = "1 to 128 letters, digits and characters of _-.:/@"
            raise _fault(f"name is {show(name)}, expected {allowed}")
        if not isinstance(description, str) or not isinstance(parameters, Mapping):
            raise _fault(
                f"{name} has a description that is not text, or parameters that are not a JSON "
                "schema"
            )
        if parameters.get("type", "object") != "object":
            kind = show(parameters["type"])
            reason = "a call has named arguments"
            raise _fault(f"{name} has parameters of type {kind}, expected object: {reason}")
        return cls(name, description, dict(parameters))

    def as_dict(self) -> dict[str, Any]:
        """The description in OpenAI's form, which templates print."""
        inner = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": inner}

    def run(self, arguments: str) -> str:
        """Call the function with arguments as JSON; returns its result as JSON, a text as it is.

        Raises OptionsError without a function, ArgumentsError for arguments that do not fit, and
        errors of the function.
        """
        from pydantic import ValidationError

        if self.function is None:
            raise _fault(f"{self.name} is only described: pass the function itself")
        try:
            values = self.model.model_validate_json(arguments or "{}")
        except ValidationError as e:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'all'}: {fault['msg']}"
                for fault in e.errors()[:8]
            )
            raise ArgumentsError(f"the arguments of {self.name} do not fit: {faults}") from None
        named = {name: getattr(values, name) for name in type(values).model_fields}
        result = self.function(**named)
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)


def _fault(text: str) -> OptionsError:
    return OptionsError(f"tools: {text}")


def read_tools(values: Sequence[Any]) -> list[Tool]:
    """Build tools. Raises OptionsError as `Tool.of`; for duplicates, too many or too long."""
    if not isinstance(values, (list, tuple)):
        raise _fault(f"{show(values)} is not a list")
    tools = [Tool.of(value) for value in values]
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise _fault(f"{', '.join(sorted(twice))} occurs twice: give each tool a different name")
    try:
        characters = len(json.dumps([tool.as_dict() for tool in tools], allow_nan=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise _fault(f"not JSON: {show(str(e))}") from None
    if len(tools) > MAX_TOOLS or characters > MAX_CHARACTERS:
        allowed = f"{MAX_TOOLS} tools and {MAX_CHARACTERS} characters"
        raise _fault(f"{len(tools)} tools of {characters} characters, expected at most {allowed}")
    return tools


def _from_function(function: Callable[..., Any]) -> Tool:
    """Describe a function by its signature, its type hints and its docstring."""
    from typing import get_type_hints

    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    name = getattr(function, "__name__", type(function).__name__)
    if not _NAME.fullmatch(name):
        called = f"a function called {show(name)}"
        raise _fault(f"{called} cannot be named by a model: define it with def")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        reason = "its result would never be awaited"
        raise _fault(f"{name} is async, and {reason}: pass a plain function")
    summary, texts = _read_docstring(inspect.getdoc(function) or "")
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as e:
        raise _fault(f"the type hints of {name} cannot be read ({e}): import their names") from None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _fault(f"{name} takes {parameter}: only named parameters can be described")
        if parameter.name not in hints:
            hint = f"no type hint for {parameter.name}: add it, as in {parameter.name}: int"
            raise _fault(f"{name} has {hint}")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, description=texts.get(parameter.name))
        fields[parameter.name] = hints[parameter.name], field
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model = create_model(name, __config__=config, **fields)
        schema = rewrite_schema(  # without the titles that pydantic derives from names
            model.model_json_schema(),
            lambda part: {k: v for k, v in part.items() if k != "title" or not isinstance(v, str)},
        )
    except (PydanticUserError, NameError) as e:
        raise _fault(f"{name} has a parameter without a JSON schema ({show(str(e))})") from None
    schema.setdefault("properties", {})
    return Tool(name, summary, schema, function, model)


_SECTION = re.compile(
    r"(args|arguments|parameters|returns?|raises|yields|examples?|notes?):?", re.IGNORECASE
)
_ENTRY = re.compile(r"(?::param\s+)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Summary, and descriptions of parameters: "Args:" (Google) or ":param x:" (Sphinx)."""
    lines = text.splitlines()
    summary: list[str] = []
    texts: dict[str, str] = {}
    section, indent, current = "", 0, ""
    for line in lines:
        stripped = line.strip()
        heading = _SECTION.fullmatch(stripped)
        if heading and stripped.endswith(":") and line[:1] not in (" ", "\t"):
            section, indent, current = heading[1].lower(), 0, ""
        elif stripped.startswith(":"):
            section = "sphinx"
            entry = _ENTRY.fullmatch(stripped) if stripped.startswith(":param") else None
            current = entry[1] if entry else ""
            if entry:
                texts[current] = entry[2]
        elif section in ("args", "arguments", "parameters") and stripped:
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ENTRY.fullmatch(stripped) if depth <= indent else None
            if entry:
                current = entry[1]
                texts[current] = entry[2]
            elif current:
                texts[current] += " " + stripped
        elif section == "sphinx" and stripped and current:
            texts[current] += " " + stripped
        elif not section:
            summary.append(stripped)
    return "\n".join(summary).strip(), {name: entry.strip() for name, entry in texts.items()}
