"""Make untrusted text safe for a terminal: show control characters, shorten long values."""

from __future__ import annotations

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
