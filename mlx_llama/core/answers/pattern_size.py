"""The size of a pattern with its counts written out, which bounds the work of compiling it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

MAX_SIZE = 100_000  # a{100000} takes 0.1 s, (a{1003}){991} 1 to 3 s and 200 MB

_COUNT = re.compile(r"(?:\{|~)\s*(\d*)\s*(?:(?:,|\.\.)\s*(\d*)\s*)?\}?")
_TOKENS = re.compile(  # a count, an escape, a class, or one other character
    r"\{\s*\d*\s*,?\s*\d*\s*\}|\\(?:[pPxuU]\{[^}]*\}|.)"
    r"|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|.",
    re.DOTALL,
)
_LARK_TOKENS = re.compile(  # a count, a text, a regular expression, a comment, a name, or another
    r'\{[\d\s,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?|"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\])+/'
    r"|[A-Za-z_]\w*|\S"
)
_LARK_HEAD = re.compile(r"^\s*[?!]?([A-Za-z_]\w*)(?:\.\d+)?(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a regular expression whose counts multiply beyond the limit."""
    _check(_measure_regex(pattern))


def check_lark(grammar: str) -> None:
    """Raise ValueError for a regular expression or a terminal beyond the limit. Rules, whose names
    are in lower case, are not expanded.
    """
    _, *parts = _LARK_HEAD.split(grammar)
    bodies = {name: _LARK_TOKENS.findall(body) for name, body in zip(parts[::2], parts[1::2])}
    sizes: dict[str, int] = {}

    def measure(token: str) -> int:
        if token[0] == "/":
            return 0 if token[:2] == "//" else _measure_regex(token[1:-1])
        if token[0] == '"':
            return len(token)
        if token.isupper() and token in bodies and token not in sizes:
            sizes[token] = 1  # within itself, which is an error
            sizes[token] = _measure(bodies[token], measure)
        return sizes.get(token, 1)

    for name, body in bodies.items():
        try:
            _check(measure(name))
            for token in body:
                _check(measure(token))
        except RecursionError:
            raise ValueError("its terminals refer to each other too deeply") from None


def _measure_regex(pattern: str) -> int:
    return _measure(_TOKENS.findall(pattern), lambda token: 1)


def _measure(tokens: Iterable[str], measure_atom: Callable[[str], int]) -> int:
    """Characters of a pattern whose counts are written out, at least. The dialects agree on groups
    and counts; a group that does not close is taken to begin with the pattern.
    """
    groups, last = [0], 0  # sizes of the open groups, and of the last part
    for token in tokens:
        if token in ("(", "["):
            groups.append(0)
        elif token in (")", "]"):
            last = groups.pop()
            groups = groups or [0]
            groups[-1] += last
        elif token[0] in "{~" and (count := _COUNT.fullmatch(token)):
            times = max([1, *(int(digits[:12] or 1) for digits in count.groups(""))])
            groups[-1] += last * (times - 1)
            last *= times
        elif token not in "|?*+":
            last = measure_atom(token)
            groups[-1] += last
    return sum(groups)


def _check(size: int) -> None:
    if size > MAX_SIZE:
        written = f"{size}" if size < 10**18 else "over 10**18"
        raise ValueError(
            f"with its counts written out a pattern is {written} characters long, expected at "
            f"most {MAX_SIZE}"
        )
