"""Limits of one template rendering: steps, seconds, sizes and numbers.

Jinja's sandbox stops a template from reaching into Python, but not from looping or growing. sandbox.py reports every loop
step, call, filter and operator here, before it runs. Sizes are estimated first, so that no giant string is ever built.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_STEPS = 1_000_000  # loop steps, calls and filters in one rendering; real templates take some hundred per message
MAX_SECONDS = 5.0
MAX_GROWTH = 1 << 20  # characters that a value may have beyond 16 times the conversation
MAX_NUMBER = 100_000  # widths, counts and sizes handed to string methods and filters; Jinja limits range() to the same


class LimitError(Exception):
    """A template reached a limit; the text names it."""


class Meter:
    """Steps, time and sizes of one rendering.

    max_size: characters and elements that any one value may have.
    """

    def __init__(self, characters: int = 0):
        """characters: the length of conversation and template together, in proportion to which values may grow."""
        self.max_size = MAX_GROWTH + 16 * characters
        self.steps = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def count_step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise LimitError(f"more than {MAX_STEPS} steps")
        if self.steps % 64 == 0:
            self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitError(f"more than {MAX_SECONDS:g} seconds")

    def check_size(self, size: int) -> None:
        if size > self.max_size:
            raise LimitError(f"a text or list of more than {self.max_size} characters or elements")
        if size > 10_000:  # takes long enough to pass the deadline between two steps
            self.check_time()

    def join(self, chunks: Iterable[str]) -> str:
        """Concatenate the output of a rendering, checked chunk by chunk."""
        parts, length = [], 0
        for chunk in chunks:
            parts.append(chunk)
            length += len(chunk)
            self.check_size(length)
            self.count_step()
        return "".join(parts)


_CURRENT: ContextVar[Meter | None] = ContextVar("meter", default=None)


@contextmanager
def start_meter(characters: int) -> Iterator[Meter]:
    """Meter everything that this thread renders inside the block."""
    meter = Meter(characters)
    token = _CURRENT.set(meter)
    try:
        yield meter
    finally:
        _CURRENT.reset(token)


def current_meter() -> Meter:
    return _CURRENT.get() or Meter()  # Jinja folds constants while compiling, outside of any rendering


# Checks that sandbox.py compiles into templates


def count_steps(values: Iterable[Any]) -> Iterator[Any]:
    """The same values, each counted as a step."""
    for value in values:
        current_meter().count_step()
        yield value


def check_value(value: Any) -> Any:
    """The value itself, if it is small enough."""
    if not isinstance(value, str) or len(value) > 1000:
        meter = current_meter()
        meter.check_size(_measure(value, meter.max_size))
    return value


def concatenate(parts: Iterable[Any]) -> str:
    """Jinja's `~`, and the pieces of a block or macro."""
    texts = [part if isinstance(part, str) else str(check_value(part)) for part in parts]
    current_meter().check_size(sum(map(len, texts)))
    return "".join(texts)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Count an arithmetic operator, and refuse operands whose result would be too large."""
    meter = current_meter()
    meter.count_step()
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    if operator == "**" and numbers and abs(right) * int(max(abs(left), 2)).bit_length() > 4096:
        raise LimitError("a power with a result of more than 4096 bits")
    if operator == "*" and numbers:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 8192:
            raise LimitError("a product of more than 8192 bits")
    elif operator == "*":
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int):
            meter.check_size(max(times, 0) * _measure(value, meter.max_size))
    elif operator == "+" and not numbers:
        meter.check_size(_measure(left, meter.max_size) + _measure(right, meter.max_size))
    elif operator == "%" and isinstance(left, str):
        meter.check_size(_estimate_size("mod", (left, right), {}))


# Methods of str, bytes and numbers whose result can be much longer than what they are given
_GROWING_METHODS = {
    "center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "to_bytes", "zfill",
}  # fmt: skip


def check_method(name: str, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a method call whose result would be too large. Returns the arguments to call it with."""
    if name in _GROWING_METHODS:
        if args and isinstance(args[0], Iterator):  # a filter's generator: consume it once, to measure it
            args = (list(args[0]), *args[1:])
        current_meter().check_size(_estimate_size(name, (owner, *args), kwargs))
    return tuple(args)


# Filters that make text; the others pass elements on and take no room
_TEXT_FILTERS = {
    "batch", "capitalize", "center", "e", "escape", "filesizeformat", "forceescape", "format", "indent", "join",
    "lower", "pprint", "replace", "round", "safe", "slice", "string", "striptags", "sum", "title", "tojson", "trim",
    "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr",
}  # fmt: skip


def limit_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A Jinja filter that counts as a step and refuses arguments whose result would be too large."""
    takes_context = getattr(function, "jinja_pass_arg", None) is not None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
        meter.count_step()
        given = args[1:] if takes_context else args
        if name in _TEXT_FILTERS and given:
            if isinstance(given[0], Iterator):  # another filter's generator: consume it once, to measure it
                values = list(given[0])
                args = tuple(values if arg is given[0] else arg for arg in args)
                given = (values, *given[1:])
            meter.check_size(_estimate_size(name, given, kwargs))
        return function(*args, **kwargs)

    return run


# Sizes

_CONTAINERS: tuple[type[Any], ...] = (
    list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()),
)  # fmt: skip


def _measure(value: Any, limit: int) -> int:
    """Characters and elements of a value, as often as they would be printed; stops soon after `limit`."""
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        total += 1
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, _CONTAINERS):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
    return total


def _estimate_size(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Upper bound of the length of a string method's or filter's result; args[0] is the string or list."""
    subject, rest = args[0], [*args[1:], *kwargs.values()]
    text = subject if isinstance(subject, str) else ""
    numbers = [abs(arg) for arg in rest if isinstance(arg, int)]
    lengths = [len(arg) for arg in rest if isinstance(arg, str)]
    if any(number > MAX_NUMBER for number in numbers):
        raise LimitError(f"{name}() with a number above {MAX_NUMBER}")
    limit = current_meter().max_size
    size = _measure(subject, limit) + sum(_measure(arg, limit) for arg in rest)
    if name == "replace":
        return size + len(text) * (max(lengths, default=0) + 1)
    if name == "join":  # both "sep".join(list) and list | join("sep")
        count = max((len(arg) for arg in args if isinstance(arg, (list, tuple, str, dict))), default=0)
        return size + count * max((len(arg) for arg in (subject, *rest) if isinstance(arg, str)), default=0)
    if name in ("indent", "expandtabs", "wordwrap", "tojson"):
        lines = 1 + text.count("\n") + text.count("\t") if isinstance(subject, str) and name != "tojson" else size
        return size + lines * max([8, *numbers, *lengths])
    if name == "pprint":
        return 20 * size  # bounds its time rather than its length
    if name in ("format", "format_map", "mod"):
        if re.search(r"\d{6}|\{[^}]*\{|%[^%a-z]*\*", text):
            raise LimitError("a format with a width that is too large or computed")
        widest = max((int(width) for width in re.findall(r"\d{1,5}", text)), default=0)
        return size + (text.count("{") + text.count("%")) * (size + widest)
    return size + sum(numbers)
