"""Processes: those of a launcher, and locks and lazy properties for those that are forked. A fork
copies a lock that another thread holds, and no thread is left to release the copy.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

_Value = TypeVar("_Value")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class cached_property(functools.cached_property[_Value]):
    """functools.cached_property without the lock that instances share before Python 3.12."""

    def __init__(self, function: Callable[[Any], _Value]):
        super().__init__(function)
        self.lock = nullcontext()


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


def find_launcher() -> str | None:
    """The backend that the launcher of this process connects with others, "mlx" or "cuda"; None for
    a single process.
    """
    env = os.environ
    if "MLX_RANK" in env:
        hosts = env.get("MLX_HOSTFILE")  # empty for one process
        is_alone = hosts and not Path(hosts).read_text(encoding="utf-8-sig").strip()
        return None if is_alone or env.get("MLX_WORLD_SIZE") == "1" else "mlx"
    is_cuda = all(name in env for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return "cuda" if is_cuda and env.get("WORLD_SIZE", "1") != "1" else None
