"""Ctrl-C put off while work must not be left half done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType, TracebackType


# _signal's functions are signal's without a search in enums, which takes longer than the rest of a short tick.
class uninterrupted:
    """Put Ctrl-C off to the end of the block, in the main thread; others do not receive it."""

    def __enter__(self) -> None:
        self._received = False
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            self._handler = _signal.getsignal(signal.SIGINT)  # None: it was not set by Python
            if self._handler is not None:
                _signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._handler)
            if self._received:
                signal.raise_signal(signal.SIGINT)
