"""Views of an answer, and the control characters that they hide from a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol

from mlx_llama import cli
from mlx_llama.core.text.controls import show_controls

NEWS_SECONDS = 5.0  # between lines about the progress of a prompt, where they cannot be redrawn


def is_dumb() -> bool:
    """True for a terminal that knows no escape sequences."""
    return os.environ.get("TERM", "dumb" if os.name == "posix" else "") in ("dumb", "unknown")


def wraps_anew() -> bool:
    """True for a terminal that wraps the lines on the screen again when its width changes, as all
    but xterm do.
    """
    return "XTERM_VERSION" not in os.environ or "TMUX" in os.environ


def describe_progress(done: int, total: int) -> str:
    """A remark on a prompt that is being processed."""
    return f"reading the prompt: {done} of {total} tokens"


class View(Protocol):
    """Shows an answer: entered before its first piece, left after its last."""

    def __enter__(self) -> View: ...
    def begin(self, text: str) -> None: ...  # shown before, which the pieces go on from
    # tokens of the prompt so far, before the first piece
    def wait(self, done: int, total: int) -> None: ...
    def push(self, piece: str) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class Plain:
    """The plain text with a newline at its end. clean: replace control characters by visible
    symbols.
    """

    def __init__(self, clean: bool = False):
        self.clean = clean
        self.has_shown = False
        self.due = time.monotonic() + NEWS_SECONDS  # time of the next line about the progress

    def __enter__(self) -> Plain:
        return self

    def begin(self, text: str) -> None:
        """The text before stands in the output already."""

    def wait(self, done: int, total: int) -> None:
        if self.clean and time.monotonic() >= self.due:
            self.due = time.monotonic() + NEWS_SECONDS
            cli.say(f"({describe_progress(done, total)})")

    def push(self, piece: str) -> None:
        sys.stdout.write(show_controls(piece) if self.clean else piece)
        sys.stdout.flush()
        self.has_shown = True

    def __exit__(self, *error: object) -> None:
        if self.has_shown or error[0] is None:
            sys.stdout.write("\n")
            sys.stdout.flush()
