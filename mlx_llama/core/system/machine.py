"""Memory and cores of this machine, and of the container around this process.

psutil knows the machine; it takes 15 ms to import, so functions import it. It does not know a container's limits
(cgroup 2), the cores that this process may run on, nor a Mac's performance cores: those are read here.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path


def peak_memory() -> int:
    """Peak of this process's memory in bytes."""
    try:
        # Linux keeps ru_maxrss across exec: a small program may report its large parent's.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        import psutil

        return psutil.Process().memory_info().peak_wset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int | None:
    """Bytes that programs may still take without swapping, within a container's limit; on a Mac all of its memory.

    None where the system does not tell.
    """
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, KeyError):  # /proc hidden or cut down
        return None
    if sys.platform == "darwin":
        return memory.total  # macOS compresses and evicts other programs' memory before it swaps
    group = Path("/sys/fs/cgroup")
    try:
        used = int((group / "memory.current").read_text())
        files = int((group / "memory.stat").read_text().split("inactive_file ")[1].split()[0])  # evicted when needed
        return min(memory.available, int((group / "memory.max").read_text()) - used + files)
    except (OSError, IndexError, ValueError):  # no such group, or "max": no limit
        return memory.available


def release_pages(mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Let the system evict part of a mapped file, which is read again when touched.

    Pages shared with the bytes beside that part stay. Does nothing on Windows, which has no madvise.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def physical_cores() -> int:
    """Cores that this process may run on. Hyper-threads of one core count once, a Mac's efficiency cores not at all."""
    if sys.platform == "darwin":
        # Threads share work evenly: efficiency cores would delay the others.
        answer = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True).stdout.strip()
        if answer.isdigit() and int(answer) > 0:
            return int(answer)
    if not hasattr(os, "sched_getaffinity"):
        import psutil

        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return min(len(siblings), _quota())


def _quota() -> int:
    """Processors that a container's limit (cgroup 2) grants; a large number without a limit."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(most) // int(period))
    except (OSError, ValueError):
        return 1 << 30
