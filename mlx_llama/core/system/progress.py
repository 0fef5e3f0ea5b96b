"""Progress of long operations. The work and its display are independent:

    advance = progress.meter(checkpoint.nbytes)         # the work, in the calling thread
    pool.map(lambda part: (pack(part), advance(part.nbytes)), parts)        # from any thread

    with progress.reported(lambda done, total: ...):    # the display (a door: cli.Bar)
        model = backend.load(checkpoint)

Without a display, `advance` does nothing. `show_count` and `show_bytes` are displays for Python.
"""

from __future__ import annotations

import html
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

Report = Callable[[int, int], object]

_report: ContextVar[Report | None] = ContextVar("report", default=None)


@contextmanager
def reported(report: Report) -> Iterator[None]:
    """Report work that starts in the block: report(done, total), in bytes, never concurrently."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def meter(total: int) -> Callable[[int], None]:
    """A function to report further bytes done, out of `total`, from any thread."""
    report = _report.get()
    if report is None:
        return lambda nbytes: None
    lock, done = threading.Lock(), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            report(done, total)

    return advance


def moves_cursor(stream: TextIO | None) -> bool:
    """True for a terminal that can redraw a line, unlike TERM=dumb and a notebook's !command."""
    env = os.environ
    is_capable = env.get("TERM") != "dumb" and "JPY_PARENT_PID" not in env
    return is_capable and stream is not None and stream.isatty()


def in_notebook() -> bool:
    """True in a Jupyter kernel, which shows HTML but cannot move a cursor."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A progress bar in a cell's output, shown after `patience` seconds and removed at the end."""

    def __init__(self, label: str, patience: float = 0.0):
        self.label = label
        self._due = time.monotonic() + patience
        self._shown: Any = None

    def show(self, done: int, total: int) -> None:
        """Draw the bar, a few times a second."""
        if time.monotonic() < self._due and not (self._shown and done == total):
            return
        self._due = time.monotonic() + 0.1
        bar = f'<progress value="{done}" max="{total}"></progress>'
        self._draw(f"{html.escape(self.label)} {bar} {done / max(1, total):.0%}")

    def close(self) -> None:
        """Remove the bar."""
        if self._shown is not None:
            self._draw("")

    def _draw(self, text: str) -> None:
        from IPython.display import HTML, display

        if self._shown is None:
            self._shown = display(HTML(text), display_id=True)
        else:
            self._shown.update(HTML(text))


@contextmanager
def show_bytes(label: str, patience: float = 1.0) -> Iterator[None]:
    """Show a bar in a notebook for the work in the block; nothing elsewhere."""
    if not in_notebook():
        yield
        return
    with closing(NotebookBar(label, patience)) as bar, reported(bar.show):
        yield


@contextmanager
def show_count(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr or in a notebook; yields a function of the number of items done."""
    if in_notebook():
        with closing(NotebookBar(label)) as bar:
            yield lambda done: bar.show(done, total)
        return
    if not moves_cursor(sys.stderr):
        yield lambda done: None
        return
    from rich.progress import MofNCompleteColumn

    with draw(label, total, MofNCompleteColumn()) as show:
        yield show


@contextmanager
def draw(
    label: str, total: int, count: Any, auto_refresh: bool = True
) -> Iterator[Callable[[int], None]]:
    """Draw a bar on a terminal's stderr. count: rich's column of what is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns, console = (text, BarColumn(), count, TimeRemainingColumn()), Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=auto_refresh) as display:
        task = display.add_task(label, total=total)
        yield lambda done: display.update(task, completed=done, refresh=not auto_refresh)
