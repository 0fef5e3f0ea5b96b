"""Read calls that are written as JSON objects with a name and arguments, while they stream."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Literal

from .calls import CallText, NoCall

FUNCTION = "<function="  # begins calls of several formats


def read_function(text: CallText) -> Generator[None]:
    """Read a call behind `FUNCTION`: its name, ">", its arguments, and "</function>"."""
    name = yield from text.until(">")
    text.take(1)
    yield from read_json_call(text, name)
    yield from text.skip("</function>")


def read_json_calls(text: CallText, closes: str = "") -> Generator[None]:
    """Read a call, or a JSON list of calls, and the mark that closes them, which may be missing."""
    if (yield from text.peek()) == "[":
        text.take(1)
        while (yield from text.peek()) != "]":
            yield from read_json_call(text)
            if not (yield from text.skip(",")):
                break
        if (yield from text.skip("]")):
            text.taken = ""
    else:
        yield from read_json_call(text)
    if closes:
        yield from text.skip(closes)


def read_json_call(
    text: CallText, name: str | None = None, call_id: str | None = None
) -> Generator[None]:
    """Read one call. name: of the call, if the object is its arguments. call_id: the model's."""
    if (yield from text.peek()) != "{":
        raise NoCall
    scanner, sent = _Scanner(ends_with_arguments=name is not None), 0
    if name is not None:
        scanner.feed(f'{{"name": {json.dumps(name)}, "arguments": ')
    while not scanner.is_done and not scanner.has_failed:
        while not text.rest:
            yield from text.wait()
        text.take(scanner.feed(text.rest))
        if scanner.name is not None and scanner.start is not None:
            if not sent:
                text.begin(scanner.name, call_id)
                sent = scanner.start
            end = len(scanner.text) if scanner.end is None else scanner.end
            text.add(scanner.text[sent:end])
            sent = end
    if scanner.has_failed and (not sent or scanner.end is None):
        raise NoCall
    if not sent:
        name, arguments = scanner.parse()
        text.begin(name)
        text.add(arguments)
    text.end()


class _Scanner:
    """Scans one JSON object as it grows, and finds a call's name and arguments in it."""

    def __init__(self, ends_with_arguments: bool = False) -> None:
        self.text = ""
        self.name: str | None = None  # the call's, once read
        self.start: int | None = None  # start of the arguments in `text`, if they are an object
        self.end: int | None = None
        self.is_done = False
        self.has_failed = False  # the JSON of a call cannot go on like this
        self._ends_with_arguments = ends_with_arguments
        self._depth = 0
        self._in_string = self._escaped = False
        self._expects: Literal["key", "colon", "value", "comma"] = "key"  # on the outermost level
        self._key = ""
        self._string = 0  # where the last string of the outermost level began

    def feed(self, piece: str) -> int:
        """Scan more text; returns the number of characters that belong to the object."""
        text, self.text = self.text, ""
        for count, character in enumerate(piece):
            at = len(text)
            if self._in_string and character < " ":  # models write line breaks, which JSON lacks
                text += json.dumps(character)[1 + self._escaped : -1]
                self._escaped = False
                continue
            text += character
            try:
                self._read(text, at)
            except NoCall:
                self.has_failed, self.text = True, text[:at]
                return count
            if self.is_done:
                self.text = text
                return count + 1
        self.text = text
        return len(piece)

    def _read(self, text: str, at: int) -> None:
        """Scan the last character of the text, which is at `at`."""
        character, outermost = text[at], self._depth == 1
        if self._in_string:
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character == '"':
                self._in_string = False
                if outermost:
                    self._end_string(text[self._string :])
        elif character == '"':
            self._in_string = True
            if outermost:
                self._require("key", "value")
                self._string = at
        elif character in "{[":
            if outermost:
                self._require("value")
                if character == "{" and self._key in ("arguments", "parameters"):
                    self.start = at
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._expects = "comma"
                if self.start is not None and self.end is None:
                    self.end = at + 1
            self.is_done = self._depth == 0 or (self._ends_with_arguments and self.end is not None)
        elif not outermost or character.isspace():
            pass
        elif character == ":":
            self._require("colon")
            self._expects = "value"
        elif character == ",":
            self._require("comma", "value")
            self._expects = "key"
        else:
            self._require("value")  # a number or a word

    def _require(self, *expected: str) -> None:
        if self._expects not in expected:
            raise NoCall

    def _end_string(self, literal: str) -> None:
        try:
            value = json.loads(literal)
        except ValueError:
            raise NoCall from None
        if self._expects == "value":
            self._expects = "comma"
            if self._key == "name":
                self.name = value
            return
        self._key, self._expects = value, "colon"
        if value not in ("name", "arguments", "parameters", "type", "function", "id"):
            raise NoCall

    def parse(self) -> tuple[str, str]:
        """Name and arguments of a finished object in any form that models use. Raises NoCall."""
        try:
            call = json.loads(self.text)
        except (ValueError, RecursionError):
            raise NoCall from None
        call = call["function"] if isinstance(call.get("function"), dict) else call
        name = call.get("name", call.get("function"))
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(name, str):
            raise NoCall
        if isinstance(arguments, str):
            try:
                inner = json.loads(arguments, strict=False)  # with raw line breaks
            except (ValueError, RecursionError):
                return name, arguments
            arguments = inner if isinstance(inner, dict) else arguments
        return name, arguments if isinstance(arguments, str) else json.dumps(
            arguments, ensure_ascii=False
        )
