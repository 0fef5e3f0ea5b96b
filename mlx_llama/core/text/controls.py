"""Make untrusted text safe for a terminal: show control characters, shorten long values."""

from __future__ import annotations

# Control characters -> visible symbols, so that a model's text cannot control the terminal.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def show_controls(text: str) -> str:
    """Replace control characters by visible symbols; newlines and tabs stay."""
    return text.translate(CONTROLS)


def shorten(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters, with three dots at the end."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_line(text: str, limit: int = 300) -> str:
    """Fit a text in one line of at most `limit` characters, and show control characters."""
    return show_controls(" ".join(shorten(text, limit).split()))
