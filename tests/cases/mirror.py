"""Public members of modules."""

from __future__ import annotations

import inspect


def members(protocol: type) -> dict:
    """Functions of a Protocol, by name."""
    return {
        name: member
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and (not name.startswith("_") or name == "__call__")
    }
