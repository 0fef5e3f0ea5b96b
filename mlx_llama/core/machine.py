"""What the standard library knows of this machine."""

from __future__ import annotations

import sys


def peak_memory() -> int:
    """Most bytes this process has had in memory; 0 where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
