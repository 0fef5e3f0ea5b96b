"""Read arguments that are no JSON while they stream, and add them to the call as JSON: Python's
literals, and Gemma 4's, which have bare keys and strings between <|"|>.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from mlx_llama.core.text.json_schema import follow

from .calls import CallText, NoCall, read_literal, write_arguments

QUOTE = '<|"|>'  # around Gemma 4's strings, which have no escapes
_QUOTES = (QUOTE, '"""', "'''", '"', "'")
_DEPTH = 64  # maximum nesting
_LENGTH = 400  # maximum length of a number or a word
_WORD = re.compile(r"[^\s,:(){}\[\]<>\"']*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_ESCAPES |= {character: character for character in "\\\"'"}
_DIGITS = frozenset("xuU01234567")  # escapes that go on after this character
_ESCAPE_LENGTH = 10


def read_mapping(
    text: CallText, assigns: str = ":", closes: str = "}", depth: int = 0
) -> Generator[None]:
    """Read keys and values behind an opening bracket. Raises NoCall if they are malformed.

    assigns: between a key and its value. closes: bracket at the end. depth: of nesting.
    """
    text.add("{")
    separator = ""
    while not (yield from text.skip(closes)):
        text.add(separator)
        if quote := (yield from _take_quote(text)):
            yield from _read_string(text, quote)
        else:
            key = (yield from text.until(assigns)).strip()
            text.add(json.dumps(key, ensure_ascii=False))
        if not (yield from text.skip(assigns)):
            raise NoCall
        text.add(": ")
        yield from _read_value(text, depth + 1)
        separator = yield from _read_separator(text, closes)
    text.add("}")


def _read_list(text: CallText, closes: str, depth: int) -> Generator[None]:
    text.add("[")
    separator = ""
    while not (yield from text.skip(closes)):
        text.add(separator)
        yield from _read_value(text, depth + 1)
        separator = yield from _read_separator(text, closes)
    text.add("]")


def _read_separator(text: CallText, closes: str) -> Generator[None, None, str]:
    if not (yield from text.skip(",")) and (yield from text.peek()) != closes:
        raise NoCall
    return ", "


def _read_value(text: CallText, depth: int) -> Generator[None]:
    if depth > _DEPTH:
        raise NoCall
    if quote := (yield from _take_quote(text)):
        yield from _read_string(text, quote)
    elif (yield from text.skip("{")):
        yield from read_mapping(text, depth=depth)
    elif (yield from text.skip("[")):
        yield from _read_list(text, "]", depth)
    elif (yield from text.skip("(")):
        yield from _read_list(text, ")", depth)
    else:
        while (word := _WORD.match(text.rest)) and word.end() == len(text.rest) < _LENGTH:
            yield from text.wait()
        if not word or not word[0]:
            raise NoCall
        written = text.take(word.end())
        is_json = _NUMBER.fullmatch(written)
        text.add(written if is_json else write_value(written, frozenset()))


def _take_quote(text: CallText) -> Generator[None, None, str]:
    """Take the quotation mark that begins a string; "", and nothing, if there is none."""
    yield from text.peek()
    while any(mark != text.rest and mark.startswith(text.rest) for mark in _QUOTES):
        yield from text.wait()
    return text.take(next((len(mark) for mark in _QUOTES if text.rest.startswith(mark)), 0))


@functools.cache
def _find_marks(quote: str) -> re.Pattern[str]:
    """Matches escapes in a string, its end, and the end of a text that may become one of these.

    Models forget to escape quotation marks: one is text unless what ends a value follows.
    """
    end, waits = re.escape(quote), [re.escape(quote[:n]) for n in range(1, len(quote))]
    if quote == QUOTE:
        return re.compile(rf"(?P<end>{end})|(?P<wait>(?:{'|'.join(waits)})\Z)")
    waits += [r"\\", end + r"\s{0,8}"]
    digits = "x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}"
    return re.compile(
        rf"(?s)(?P<escape>\\(?:{digits}|.))|(?P<end>{end}(?=\s{{0,8}}[,:)\]}}]))"
        rf"|(?P<wait>(?:{'|'.join(waits)})\Z)"
    )


def _read_string(text: CallText, quote: str) -> Generator[None]:
    """Read a string behind its quotation mark; its text is added while it arrives."""
    text.add('"')
    is_closed = False
    while not is_closed:
        pieces, at, end = list[str](), 0, len(text.rest)
        for mark in _find_marks(quote).finditer(text.rest):
            is_closed = mark.lastgroup == "end"
            is_short = mark[0][1:2] in _DIGITS and end - mark.start() < _ESCAPE_LENGTH
            if mark.lastgroup != "escape" or is_short:
                end = mark.start()
                break
            pieces += _dump(text.rest[at : mark.start()]), _read_escape(mark[0])
            at = mark.end()
        text.add("".join([*pieces, _dump(text.rest[at:end])]))
        text.take(end)
        if not is_closed:
            yield from text.wait()
    text.take(len(quote))
    text.add('"')


def _read_escape(escape: str) -> str:
    """Write an escape of Python as JSON does, where \\u is the same, surrogate pairs included."""
    kind, digits = escape[1], escape[2:]
    if kind == "u" and digits:
        return escape
    if kind in "01234567":
        return _dump(chr(int(escape[1:], 8)))
    if digits and (code := int(digits, 16)) <= 0x10FFFF:
        return json.dumps(chr(code))[1:-1]
    return _dump(_ESCAPES.get(kind, escape))


def _dump(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# Arguments that models write as plain text: their types are those of the tool's schema

_REFERENCES = 16  # maximum nesting of references and alternatives
_PYTHON_LENGTH = 1 << 14  # characters that are read as Python
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip


def resolve_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that a schema allows; none for any. root: has the definitions."""
    if depth > _REFERENCES:
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
    value = _parse_value(text.strip())
    if isinstance(value, float) and value.is_integer() and types & {"integer", "number"}:
        value = int(value) if "number" not in types else value
    if is_of(value, types) or "string" not in types:
        with contextlib.suppress(
            TypeError, ValueError, RecursionError
        ):  # a value that only Python has
            return write_arguments(value)
    return write_arguments(text)


def _parse_value(text: str) -> Any:
    """Read JSON, or Python as templates print it; the text itself if it is neither."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, strict=False)
    if len(text) <= _PYTHON_LENGTH and text[:1] in "[{(\"'":
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return read_literal(text)
    return text
