"""Memory, cores and GPUs of this machine, and limits of the container around this process.

psutil describes the machine, but not a container's limits (cgroup 2), the cores that this process
may run on, or a Mac's performance cores. Functions import it, which takes 15 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from mlx_llama.core.system.forks import cached_property

_POPULATE_READ = 22  # MADV_POPULATE_READ, missing in Python's mmap


def peak_memory() -> int:
    """Peak memory of this process in bytes."""
    with contextlib.suppress(OSError, IndexError):
        # Linux keeps ru_maxrss across exec: a small program may report the peak of a large parent.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    try:
        import resource
    except ImportError:
        import psutil

        return psutil.Process().memory_info().peak_wset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory() -> int | None:
    """Bytes free without swapping, in a container's limit; a Mac's whole memory; None: unknown."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError, KeyError):  # /proc is hidden or incomplete
        return None
    if sys.platform == "darwin":
        return memory.total  # macOS compresses and evicts other programs' memory before it swaps
    group = Path("/sys/fs/cgroup")
    try:
        used = int((group / "memory.current").read_text())
        # evicted when needed
        files = int((group / "memory.stat").read_text().split("inactive_file ")[1].split()[0])
        return min(memory.available, int((group / "memory.max").read_text()) - used + files)
    except (OSError, IndexError, ValueError):  # no such group, or "max": no limit
        return memory.available


def release_pages(mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Let the system evict the whole pages of a part of a mapped file. Nothing on Windows."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def read_pages(mapped: mmap.mmap, offset: int, nbytes: int) -> bool:
    """Read part of a mapped file into memory, on Linux; False if the file has been truncated."""
    if sys.platform != "linux":
        return True
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        mapped.madvise(_POPULATE_READ, first, min(offset + nbytes, len(mapped)) - first)
    except OSError as error:
        return error.errno != errno.EFAULT  # EINVAL: Linux before 5.14
    return True


def read_ahead(mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Read part of a mapped file in the background."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_WILLNEED, first, min(offset + nbytes, len(mapped)) - first)


class Guard(Protocol):
    """What makes this process survive that a mapped file is truncated."""

    # protect a mapping; its number, None if there is no room
    def add(self, address: int, nbytes: int) -> int | None: ...
    # a word, not 0 once a page was missing when it was touched
    def flag(self, number: int) -> memoryview: ...
    # the mapping ends
    def remove(self, number: int) -> None: ...
    # take the signal, also from a handler that was installed since
    def install(self) -> None: ...


class FileMap(mmap.mmap):
    """A file mapped for reading."""

    path: str  # absolute
    stamp: tuple[int, ...]  # identifies the file and its version
    _guard: Guard | None = None
    _number = 0  # this map's place in the guard
    cut: memoryview | None = None  # a word of the guard, not 0 once a page was missing
    last = byte = 0  # the file's last byte that is not 0, or its last one: place and value

    def protect(self, guard: Guard) -> None:
        """Survive the file's truncation: its missing pages become zeros."""
        if self._guard is None:
            page = len(self) - 1 - (len(self) - 1) % mmap.PAGESIZE
            self.last = page + max(len(self[page:].rstrip(b"\0")), 1) - 1
            self.byte = self[self.last]
            number = guard.add(np.frombuffer(self, np.uint8).ctypes.data, len(self))
            if number is not None:
                self._guard, self._number, self.cut = guard, number, guard.flag(number)

    def __del__(self) -> None:
        if self._guard:
            self._guard.remove(self._number)

    def is_truncated(self) -> bool:
        return self.size() < len(self)

    def is_overwritten(self) -> bool:
        """True if the file under this name is the mapped one, with another size or time of
        modification.
        """
        try:
            status = os.stat(self.path)
        except OSError:  # removed or renamed; the map keeps its content
            return False
        is_same = (status.st_dev, status.st_ino) == self.stamp[:2]
        return is_same and (status.st_size, status.st_mtime_ns) != self.stamp[2:4]


def map_file(file: BinaryIO) -> FileMap:
    """Map an open file. Raises OSError, ValueError if it is empty."""
    mapped = FileMap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.path = os.path.abspath(file.name)
    status = os.fstat(file.fileno())
    mapped.stamp = status.st_dev, status.st_ino, status.st_size
    mapped.stamp += status.st_mtime_ns, status.st_ctime_ns
    return mapped


def prefer_huge_pages(mapped: mmap.mmap) -> None:
    """Put a mapping in huge pages if the system can."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # disabled in this kernel
            mapped.madvise(mmap.MADV_HUGEPAGE)


def has_huge_pages(address: int, nbytes: int) -> bool:
    """True if at least half of the mapped memory is in huge pages, or if the system has none."""
    if sys.platform != "linux":
        return True
    huge = 0
    try:
        for mapping in re.split(
            r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
        )[1:]:
            first, last = (int(end, 16) for end in mapping.split(maxsplit=1)[0].split("-"))
            if first < address + nbytes and address < last:
                huge += sum(
                    1024 * int(size)
                    for size in re.findall(r"(?:FilePmdMapped|ShmemPmdMapped): +(\d+)", mapping)
                )
    except (OSError, ValueError):
        return False
    return huge >= nbytes // 2


def maps_huge_files(folder: Path) -> bool:
    """True if a small file of this folder is mapped in huge pages. Raises OSError."""
    size = 8 << 20
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(2):
            file.write(b"\1" * (size // 2))
        file.flush()
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    prefer_huge_pages(mapped)
    read_pages(mapped, 0, size)
    view = np.frombuffer(mapped, np.uint8)
    return has_huge_pages(view.ctypes.data, size)


def trim_memory() -> None:
    """Return freed memory to the system. glibc keeps a tenth of a model after loading."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def physical_cores() -> int:
    """Physical cores that this process may run on, without a Mac's efficiency cores."""
    if sys.platform == "darwin":
        # Threads share work evenly, so efficiency cores would delay the others.
        if cores := read_sysctl("hw.perflevel0.physicalcpu"):
            return cores
    if not hasattr(os, "sched_getaffinity"):
        import psutil

        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings.add(
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            )
        except OSError:
            siblings.add(str(cpu))
    return min(len(siblings), _quota())


def read_sysctl(name: str) -> int:
    """A number among macOS's settings; 0 if it has none of that name."""
    command = ["sysctl", "-n", name]
    answer = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return int(answer) if answer.isdigit() else 0


def _quota() -> int:
    """Processors within a container's limit (cgroup 2); a large number without a limit."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(most) // int(period))
    except (OSError, ValueError):
        return 1 << 30


# Sizes in bytes, as users write them

_SIZE = re.compile(
    r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(?:([KMGT]?)B?|([KMGT])iB)\s*", re.ASCII | re.IGNORECASE
)


def parse_size(text: str) -> int | None:
    """Bytes of a size such as "2GB", "512M", "1.5GiB" or "1000000"; None if it is malformed."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, decimal, binary = match.groups()
    return int(
        float(number)
        * (1024 if binary else 1000) ** " KMGT".index((binary or decimal or " ").upper())
    )


def format_bytes(nbytes: int | None) -> str:
    """A size in kB, MB or GB."""
    if nbytes is None:
        return "an unknown amount"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


# GPUs, found without a framework: torch takes a second to import

SMI_SECONDS = 0.8  # limit for nvidia-smi, which takes several seconds without its daemon


def has_gpu_driver() -> bool:
    """True if NVIDIA's driver is installed; AMD's GPUs are untested and need `backend='cuda'`."""
    if os.name == "nt":
        return os.path.exists(os.path.expandvars(r"%SystemRoot%\System32\nvcuda.dll"))
    # NVIDIA, NVIDIA inside WSL, NVIDIA Jetson
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")))


class Gpus:
    """GPUs that nvidia-smi reports. It starts at once; its answer is read within `SMI_SECONDS`."""

    def __init__(self) -> None:
        self.driver = has_gpu_driver()
        self._due, self._process = time.monotonic() + SMI_SECONDS, None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1")
        tool = shutil.which("nvidia-smi") if self.driver and not self._hidden else None
        if tool:
            which = ["-i", visible.split(",")[0].strip()] if visible else []
            query = ["--query-gpu=name,memory.free,compute_cap", "--format=csv,noheader,nounits"]
            pipes: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    [tool, *which, *query], stdout=subprocess.PIPE, text=True, **pipes
                )

    @cached_property
    def first(self) -> tuple[str, int, float] | None:
        """(name, free bytes, compute capability) of the GPU that CUDA uses; None if unknown."""
        if self._process is None:
            return None
        try:
            answer, _ = self._process.communicate(timeout=max(0.01, self._due - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()  # without waiting: a process inside a hanging driver does not end
            assert self._process.stdout is not None  # a pipe
            self._process.stdout.close()
            return None
        row = re.match(r"(.+), *(\d+), *(\d+\.\d+)\s*$", answer.split("\n")[0])
        if row is None or self._process.returncode:
            return None
        return row[1], int(row[2]) << 20, float(row[3])

    @property
    def seen(self) -> bool | None:
        """True if CUDA will find a GPU; None if unknown."""
        if not self.driver or self._hidden:
            return False
        return True if self.first else None

    @property
    def absence(self) -> str:
        """The reason why CUDA finds no GPU."""
        is_hidden = self._hidden and self.driver
        return "CUDA_VISIBLE_DEVICES hides the GPUs" if is_hidden else "no GPU driver is installed"
