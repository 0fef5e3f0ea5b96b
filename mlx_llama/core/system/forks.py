"""Locks and lazy properties for processes that are forked: a fork copies a lock that another thread
holds, and no thread is left to release the copy.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:
        """functools.cached_property without the lock that instances share before Python 3.12."""

        def __init__(self, function: Callable[[Any], Any]):
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            return vars(instance).setdefault(self._name, self._function(instance))


__all__ = ["cached_property", "make_lock"]
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def make_lock() -> Any:
    """A threading.RLock, which is free in a forked process."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_locks() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as threading's own classes do


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)
