"""Characters that need care: control characters on a terminal, lone surrogates in JSON."""

from __future__ import annotations

import json
from typing import Any

from mlx_llama.core.errors import shorten

# Control characters -> visible symbols, so that a model's text cannot control the terminal.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def show_controls(text: str) -> str:
    """Replace control characters by visible symbols; newlines and tabs stay."""
    return text.translate(CONTROLS)


def one_line(text: str, limit: int = 300) -> str:
    """Fit a text in one line of at most `limit` characters, and show control characters."""
    return show_controls(" ".join(shorten(text, limit).split()))


# Lone surrogates: halves of a pair that a program cut in two, which UTF-8 cannot express

NOTICE = "half of a surrogate pair in the prompt was replaced by U+FFFD: a character was cut in two"


def replace_surrogates(text: str) -> str:
    """Replace each lone surrogate by U+FFFD, and join pairs, as browsers do."""
    if is_unicode(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_unicode(value: Any) -> bool:
    """True if no text within a value of JSON's types has a surrogate."""
    try:
        text = value if isinstance(value, str) else _write(value)
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    except (TypeError, ValueError, RecursionError):  # no value of JSON's types
        return True
    return True


def mend(value: Any) -> Any:
    """Apply `replace_surrogates` to all texts within a value of JSON's types."""
    if is_unicode(value):
        return value
    return json.loads(replace_surrogates(_write(value)))


def _write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def find_notices(*values: Any) -> list[str]:
    """Return the notice if a text of the values has a surrogate."""
    return [] if all(map(is_unicode, values)) else [NOTICE]
