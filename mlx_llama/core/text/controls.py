"""Text of strangers for a terminal: control characters made visible, long values cut."""

from __future__ import annotations

# Control characters -> visible symbols: a model's or a template's text is data and must not command the terminal.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def show_controls(text: str) -> str:
    """The text with visible symbols for control characters; newlines and tabs stay."""
    return text.translate(CONTROLS)


def shorten(text: str, limit: int) -> str:
    """The text, or its beginning and three dots, of at most `limit` characters."""
    return text if len(text) <= limit else text[:limit - 3] + "..."


def one_line(text: str, limit: int = 300) -> str:
    """The text in one line of at most `limit` characters, control characters made visible."""
    return show_controls(" ".join(shorten(text, limit).split()))
