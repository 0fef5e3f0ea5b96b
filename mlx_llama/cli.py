"""Shared by every door: errors in one line, exit codes, robust standard streams, progress bars.

Exit codes: 0 done, 2 a user error (one line on stderr), 130 interrupted, 143 terminated, 1 anything else.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .core.errors import LlamaError, spelled_as_flags
from .core.system import progress
from .core.system.launch import find_launch
from .core.text.controls import shorten, show_controls

MOST_TEXT = 1 << 28  # characters of a file


def run(main: Callable[[list[str]], int | None], arguments: list[str] | None = None) -> int:
    """Call a door's `main`; turn errors into a line and an exit code. `--debug` shows the traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with spelled_as_flags():
        return _run(main, arguments)


def _run(main: Callable[[list[str]], int | None], arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # A model may write any character: UTF-8 into a file or pipe, an escape where a terminal cannot show it.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace", **({} if stream.isatty() else {"encoding": "utf-8"}))
    if sys.stdout is None:
        say("error: standard output is closed: open it to receive the answer")
        return 2
    try:
        if find_launch() is not None:
            from .core.backends.following import follow_leader

            if follow_leader():
                return 0
        return main(arguments) or 0
    except LlamaError as error:
        if "--debug" in arguments:
            raise
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`). Redirect stdout, or Python complains again when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if "--debug" in arguments or error.errno != errno.ENOSPC:
            raise
        say(f"error: the output cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def say(text: str) -> None:
    """Print a line for the user on stderr, apart from the answer, without control characters; an error in one short line."""
    if sys.stderr is not None:
        text = shorten(" ".join(text.split("\n")), 4000) if text.startswith("error: ") else text
        print(show_controls(text), file=sys.stderr, flush=True)


@contextmanager
def clean_up_when_terminated() -> Iterator[None]:
    """Have SIGTERM end the work inside as an exception would, so that it removes what it has half written; exit code 143."""
    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # another must not interrupt the removal
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # called from Python: signals are the caller's
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


class Bar:
    """A progress bar of the work inside (core.system.progress), on a terminal's stderr.

    Appears after `patience` seconds and disappears when the work is done.
    """

    def __init__(self, label: str, patience: float = 1.0):
        self.label = label
        self.patience = patience

    def __enter__(self) -> Bar:
        self._stack = ExitStack()
        self._show: Callable[[int], Any] | None = None
        self._due = time.monotonic() + self.patience
        if progress.moves_cursor(sys.stderr):
            self._stack.enter_context(progress.reported(self._report))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _report(self, done: int, total: int) -> None:
        if time.monotonic() < self._due:
            return
        if self._show is None:
            self._show = self._open(total)
        self._show(done)
        self._due = time.monotonic() + 0.1

    def _open(self, total: int) -> Callable[[int], Any]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        shown = self._stack.enter_context(
            Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False))
        task = shown.add_task(self.label, total=total)
        return lambda done: shown.update(task, completed=done, refresh=True)


def read_text(path: str) -> str:
    """The text of a file, or of standard input for "-". Raises LlamaError if it is unreadable, too long or not UTF-8."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise LlamaError("standard input is closed: there is no text to read")
            return sys.stdin.buffer.read().decode("utf-8-sig")
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read(MOST_TEXT + 1)  # a device may never end
        if len(text) > MOST_TEXT:
            raise LlamaError(f"{path}: is longer than {MOST_TEXT} characters: name a shorter text")
        return text
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise LlamaError(f"{name}: is not UTF-8 (byte {error.start}: {error.reason}): convert it, for example with "
                         f"iconv -t UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise LlamaError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
