"""Ctrl-C put off while a call must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block, in the main thread: others do not see it."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    received: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *given: received.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if received:
        former(*received[0])
