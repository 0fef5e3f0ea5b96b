"""Defer Ctrl-C during work that must not be left half done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType
from typing import Any


# _signal has signal's functions without enum look-ups, the most of a short tick.
class uninterrupted:
    """Defer Ctrl-C to the end of the block, in the main thread; other threads never receive it."""

    def __enter__(self) -> None:
        self.is_pending = False
        self.handler = None
        if threading.get_ident() == threading.main_thread().ident:
            self.handler = _signal.getsignal(signal.SIGINT)  # None: it was not set by Python
            if self.handler is not None:
                _signal.signal(signal.SIGINT, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.is_pending = True

    def __exit__(self, *error: object) -> None:
        if self.handler is not None:
            _signal.signal(signal.SIGINT, self.handler)
            if self.is_pending:
                signal.raise_signal(signal.SIGINT)


class interruptible:
    """Let Ctrl-C through within `uninterrupted`, in a block that may be left at any line."""

    def __enter__(self) -> None:
        self._outer: Any = None
        if threading.get_ident() == threading.main_thread().ident:
            outer = getattr(_signal.getsignal(signal.SIGINT), "__self__", None)
            if isinstance(outer, uninterrupted):
                self._outer, is_pending, outer.is_pending = outer, outer.is_pending, False
                try:
                    _signal.signal(signal.SIGINT, outer.handler)
                    if is_pending:
                        signal.raise_signal(signal.SIGINT)
                except BaseException:
                    self.__exit__()
                    raise

    def __exit__(self, *error: object) -> None:
        if self._outer:
            _signal.signal(signal.SIGINT, self._outer.note)
