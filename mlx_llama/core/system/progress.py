"""Progress of long operations. The work and its display do not know each other:

    advance = progress.meter(checkpoint.nbytes)         # the work, in the thread that was called
    pool.map(lambda part: (pack(part), advance(part.nbytes)), parts)        # from any thread, in any order

    with progress.reported(lambda done, total: ...):    # the display (a door: cli.Bar)
        model = backend.load(checkpoint)

Without a display, `advance` does nothing.
"""

from __future__ import annotations

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
