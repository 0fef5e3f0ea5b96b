"""Where an answer appears, and which of its characters never reach a terminal."""

from __future__ import annotations

import sys
from typing import Protocol

# What a terminal would obey, as signs that can be seen: text from a model is data.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class View(Protocol):
    """Where an answer appears: entered before its first piece, left after its last."""

    def __enter__(self) -> View: ...
    def push(self, piece: str) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class Plain:
    """An answer as it is, with a newline at its end; `clean` shows control characters instead of sending them."""

    def __init__(self, clean: bool = False):
        self.clean = clean
        self.shown = False

    def __enter__(self) -> Plain:
        return self

    def push(self, piece: str) -> None:
        sys.stdout.write(piece.translate(CONTROLS) if self.clean else piece)
        sys.stdout.flush()
        self.shown = True

    def __exit__(self, *error: object) -> None:
        if self.shown or error[0] is None:
            sys.stdout.write("\n")
            sys.stdout.flush()
