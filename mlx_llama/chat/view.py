"""Views of an answer, and the control characters that they hide from a terminal."""

from __future__ import annotations

import sys
from typing import Protocol

# Control characters -> visible symbols: a model's text is data and must not command the terminal.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class View(Protocol):
    """Shows an answer: entered before its first piece, left after its last."""

    def __enter__(self) -> View: ...
    def push(self, piece: str) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class Plain:
    """The plain text with a newline at its end. clean: replace control characters by visible symbols."""

    def __init__(self, clean: bool = False):
        self.clean = clean
        self.has_shown = False

    def __enter__(self) -> Plain:
        return self

    def push(self, piece: str) -> None:
        sys.stdout.write(piece.translate(CONTROLS) if self.clean else piece)
        sys.stdout.flush()
        self.has_shown = True

    def __exit__(self, *error: object) -> None:
        if self.has_shown or error[0] is None:
            sys.stdout.write("\n")
            sys.stdout.flush()
