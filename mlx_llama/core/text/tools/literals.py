"""Read arguments that are no JSON while they stream, and add them to the call as JSON: Python's
literals, and Gemma 4's, which have bare keys and strings between <|"|>.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Generator

from .argument_types import write_value
from .calls import CallText, NoCall

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
