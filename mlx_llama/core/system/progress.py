"""How far long work has come. Who does it and who shows it do not know each other:

    advance = progress.meter(checkpoint.nbytes)         # whoever works, in the thread that was called
    pool.map(lambda part: (pack(part), advance(part.nbytes)), parts)        # from any thread, in any order

    with progress.reported(lambda done, total: ...):    # whoever shows it (a door: cli.Bar)
        model = backend.load(checkpoint)

Where nobody shows anything, `advance` does nothing.
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
    """Inside, work that this thread starts is reported: report(done, total), in bytes, one call at a time."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def meter(total: int) -> Callable[[int], None]:
    """The function that takes the bytes just done, out of `total`; any thread may call it."""
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
