"""Read calls that are written as Python: f(a=1), and code for an interpreter."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Generator
from typing import Any

from .calls import CallText, NoCall, parse_python, write_arguments

INTERPRETERS = ("code_interpreter", "python", "ipython")
_LENGTH = 1 << 14  # characters of code that are read as calls
# A built-in tool's call, whose argument Llama's template prints without escapes
_BUILTIN = re.compile(r"(\w+)\.call\((\w+)=\"(.*)\"\)", re.DOTALL)

Call = tuple[str, dict[str, Any]]


def read_code(text: CallText, closes: str = "", interpreter: str | None = None) -> Generator[None]:
    """Read Python up to a mark, "" for the end of the answer: calls of tools, or code for an
    interpreter. interpreter: the tool that the code is for, None to find out.
    """
    searched = 0
    while (at := text.rest.find(closes, searched) if closes else -1) < 0:
        searched = max(0, len(text.rest) - len(closes))
        if text.is_over:
            if closes:
                raise NoCall
            at = len(text.rest)
            break
        yield
    code = text.take(at).strip()
    text.take(len(closes))
    calls = [] if interpreter else parse_calls(code)
    is_builtin = len(calls) == 1 and code.startswith(f"{calls[0][0]}.call(")
    if not calls or not (is_builtin or all(name in text.tools for name, _ in calls)):
        interpreter = interpreter or next((n for n in INTERPRETERS if n in text.tools), None)
        if interpreter is None:
            raise NoCall
        calls = [(interpreter, _read_argument(text, interpreter, code))]
    for name, values in calls:
        text.begin(name)
        text.add(write_arguments(values))
        text.end()


def _read_argument(text: CallText, name: str, code: str) -> dict[str, Any]:
    """Arguments of an interpreter: its only parameter, or `code`. Models also write JSON."""
    names = list(text.tools[name].parameters.get("properties", {}))
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(code)
        if isinstance(values, dict) and values and set(values) <= {*names, "code"}:
            write_arguments(values)  # raises for NaN
            return values
    return {names[0] if len(names) == 1 else "code": code}


def parse_calls(code: str) -> list[Call]:
    """Calls with literal arguments, one a line: f(a=1), f.call(a=1), x = f(a=1)."""
    calls = []
    if len(code) > _LENGTH:
        return []
    try:
        for line in parse_python(code).body:
            if not isinstance(line, (ast.Expr, ast.Assign)) or line.value is None:
                return []
            calls.append(_parse_call(line.value))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        builtin = _BUILTIN.fullmatch(code)
        return [(builtin[1], {builtin[2]: builtin[3]})] if builtin else []
    return calls


def _parse_call(value: ast.expr) -> Call:
    """Raises ValueError for an expression of another kind."""
    if not isinstance(value, ast.Call):
        raise ValueError
    name = value.func
    if isinstance(name, ast.Attribute) and name.attr == "call":
        name = name.value
    if not isinstance(name, ast.Name):
        raise ValueError
    if name.id == "print" and len(value.args) == 1 and not value.keywords:
        return _parse_call(value.args[0])
    if value.args or not all(word.arg for word in value.keywords):
        raise ValueError
    values = {str(word.arg): ast.literal_eval(word.value) for word in value.keywords}
    write_arguments(values)  # raises for what JSON lacks
    return name.id, values
