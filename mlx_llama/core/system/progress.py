"""Progress of long operations. The work makes `advance = meter(total)` in the calling thread, and
calls it from any. A display has the work in a block of `reported(f)`; without one, `advance` does
nothing. `show_count` and `show_bytes` are displays for Python.
"""

from __future__ import annotations

import html
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def draw_in_notebook(label: str, patience: float = 0.0) -> Iterator[Callable[[int, int], None]]:
    """Draw a bar in a cell's output after `patience` seconds, a few times a second, until the end
    of the block; yields a function of what is done and of all.
    """
    from IPython.display import HTML, display

    due, shown = time.monotonic() + patience, None

    def show(done: int, total: int) -> None:
        nonlocal due, shown
        if time.monotonic() < due and not (shown and done == total):
            return
        due = time.monotonic() + 0.1
        bar = f'<progress value="{done}" max="{total}"></progress>'
        content = HTML(f"{html.escape(label)} {bar} {done / max(1, total):.0%}")
        if shown is None:
            shown = display(content, display_id=True)
        else:
            shown.update(content)

    try:
        yield show
    finally:
        if shown is not None:
            shown.update(HTML(""))


@contextmanager
def show_bytes(label: str, patience: float = 1.0) -> Iterator[None]:
    """Show a bar in a notebook for the work in the block; nothing elsewhere."""
    if not in_notebook():
        yield
        return
    with draw_in_notebook(label, patience) as show, reported(show):
        yield


@contextmanager
def show_count(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr or in a notebook; yields a function of the number of items done."""
    if in_notebook():
        with draw_in_notebook(label) as show_both:
            yield lambda done: show_both(done, total)
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
    with Progress(
        text,
        BarColumn(),
        count,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=auto_refresh,
    ) as display:
        task = display.add_task(label, total=total)
        yield lambda done: display.update(task, completed=done, refresh=not auto_refresh)
