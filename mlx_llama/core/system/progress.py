"""Progress of long operations. The work and its display do not know each other:

    advance = progress.meter(checkpoint.nbytes)         # the work, in the thread that was called
    pool.map(lambda part: (pack(part), advance(part.nbytes)), parts)        # from any thread, in any order

    with progress.reported(lambda done, total: ...):    # the display (a door: cli.Bar)
        model = backend.load(checkpoint)

Without a display, `advance` does nothing. `show_count` is a display for calls from Python.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[int, int], None]

_report: ContextVar[Report | None] = ContextVar("report", default=None)


@contextmanager
def reported(report: Report) -> Iterator[None]:
    """Report the work that this thread starts inside: report(done, total), in bytes, one call at a time."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def meter(total: int) -> Callable[[int], None]:
    """A function that adds the bytes just done, out of `total`. Any thread may call it."""
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


@contextmanager
def show_count(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr for `total` items of work; yields a function to call with the number of those done."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
