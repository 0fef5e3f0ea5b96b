"""Attributes that are computed at their first use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:
        """As functools' of Python 3.12. Before, all instances share a lock, which a process forked
        while another thread holds it waits for without end.
        """

        def __init__(self, function: Callable[[Any], Any]):
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            return vars(instance).setdefault(self._name, self._function(instance))


__all__ = ["cached_property"]
