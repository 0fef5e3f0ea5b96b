"""What the standard library knows of this machine, and may ask of it."""

from __future__ import annotations

import mmap
import sys


def peak_memory() -> int:
    """Most bytes this process has had in memory; 0 where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def release_pages(mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Tell the system that part of a mapped file may leave memory; it is read again when touched again.

    Pages shared with what lies beside the part stay. Does nothing where the system has no madvise (Windows).
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
