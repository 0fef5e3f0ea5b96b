"""Views of an answer, and the control characters that they hide from a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol

from mlx_llama import cli
from mlx_llama.core.text.controls import show_controls

NEWS_SECONDS = 5.0  # between lines of progress, where they cannot be redrawn


def is_dumb() -> bool:
    """True for a terminal that knows no escape sequences."""
    return os.environ.get("TERM", "dumb" if os.name == "posix" else "") in ("dumb", "unknown")


def rewraps_lines() -> bool:
    """True for a terminal that rewraps lines when its width changes, as all but xterm do."""
    return "XTERM_VERSION" not in os.environ or "TMUX" in os.environ


def describe_progress(done: int, total: int) -> str:
    """A remark on a prompt that is being processed."""
    return f"reading the prompt: {done} of {total} tokens"


class View(Protocol):
    """Shows an answer: entered before its first piece, left after its last."""

    def __enter__(self) -> View: ...
    def begin(self, text: str) -> None: ...  # text on the screen, which the pieces continue
    # show the progress of the prompt, in tokens, before the first piece
    def wait(self, done: int, total: int) -> None: ...
    def push(self, piece: str) -> None: ...
    def think(self, piece: str) -> None: ...  # a piece of the thought before the text
    def fold(self, remark: str) -> None: ...  # replace the thought by a remark
    def __exit__(self, *error: object) -> None: ...


class Plain:
    """The plain text with a newline at its end."""

    def __init__(self, clean: bool = False):
        self.clean = clean  # replace control characters by visible symbols
        self.has_shown = False
        self.due = time.monotonic() + NEWS_SECONDS  # time of the next line of progress

    def __enter__(self) -> Plain:
        return self

    def begin(self, text: str) -> None:
        """Print nothing: the output has the text already."""

    def wait(self, done: int, total: int) -> None:
        if self.clean and time.monotonic() >= self.due:
            self.due = time.monotonic() + NEWS_SECONDS
            cli.say(f"({describe_progress(done, total)})")

    def think(self, piece: str) -> None:
        """Print nothing: it could not be folded."""

    def fold(self, remark: str) -> None:
        if self.clean:
            cli.say(f"({remark})")

    def push(self, piece: str) -> None:
        sys.stdout.write(show_controls(piece) if self.clean else piece)
        sys.stdout.flush()
        self.has_shown = True

    def __exit__(self, *error: object) -> None:
        if self.has_shown or error[0] is None:
            sys.stdout.write("\n")
            sys.stdout.flush()
