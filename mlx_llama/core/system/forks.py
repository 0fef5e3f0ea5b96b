"""Locks and lazy properties that a process may be forked beside: a fork copies a lock that another
thread holds, and nobody releases the copy.
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
        """As functools' of Python 3.12. Before, it has a lock, which all instances share."""

        def __init__(self, function: Callable[[Any], Any]):
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            return vars(instance).setdefault(self._name, self._function(instance))


__all__ = ["Lock", "cached_property"]
_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """A lock for `with`, which is free in a forked process."""

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def _renew_locks() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
