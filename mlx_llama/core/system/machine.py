"""What the standard library knows of this machine, and may ask of it."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path


def peak_memory() -> int:
    """Most bytes this process has had in memory; 0 where the system does not say (Windows)."""
    try:
        # Linux hands ru_maxrss on to the programs that a process starts: there, a small one may have a large one's.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int | None:
    """Bytes that programs may still take without others being moved to disk, a container's limit (cgroup 2) included;
    on a Mac all that there are; None where the system does not say (Windows)."""
    if sys.platform == "darwin":
        answer = subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True).stdout.strip()
        return int(answer) if answer.isdigit() else None
    try:
        free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        held = int((group / "memory.current").read_text())
        files = int((group / "memory.stat").read_text().split("inactive_file ")[1].split()[0])  # given back when needed
        return min(free, int((group / "memory.max").read_text()) - held + files)
    except (OSError, IndexError, ValueError):  # no such group, or "max": no limit
        return free


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


def physical_cores() -> int:
    """Cores that this process may run on, counting those that share one core's units (hyper-threads) once."""
    if sys.platform == "darwin":
        # Performance cores only, where there are two kinds: the slow ones would hold up the others.
        for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()
            if answer.isdigit() and int(answer) > 0:
                return int(answer)
        return os.cpu_count() or 1
    if not hasattr(os, "sched_getaffinity"):
        shared = platform.machine().lower() in ("amd64", "x86_64")  # Windows does not say; most of these have two threads
        return max(1, (os.cpu_count() or 1) // (2 if shared else 1))
    allowed = os.sched_getaffinity(0)
    siblings = set()
    for cpu in allowed:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return min(len(siblings), _quota())


def _quota() -> int:
    """Processors that a container's limit (cgroup 2) grants; a large number where there is none."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(most) // int(period))
    except (OSError, ValueError):
        return 1 << 30
