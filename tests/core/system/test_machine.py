"""Memory and cores, against the C library, the kernel and psutil."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from launching import run_python

from mlx_llama.core.system import machine

CODE = """
import sys
from mlx_llama.core.system.machine import peak_memory
if not peak_memory():
    sys.exit(3)
before, held = peak_memory(), bytearray(50_000_000)
print(before, peak_memory())
"""


def test_peak_memory_is_the_processs_own():
    """Also where one that has had much more memory has started it."""
    held = np.ones(300_000_000, np.uint8)
    done = run_python("-c", CODE)
    if done.returncode == 3:
        pytest.skip("this system does not say how much memory a process has had")
    before, after = map(int, done.stdout.split())
    assert 1e6 < before < 200e6 < held.nbytes and after > before + 40e6


def test_free_memory_is_what_the_system_says():
    """At most all pages that the C library counts; on Linux what the kernel calls available, or a
    container's rest of it.
    """
    free = machine.free_memory()
    total = (
        psutil.virtual_memory().total
        if os.name == "nt"
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    assert 0 < free <= total
    if sys.platform == "linux":
        (line,) = (
            text
            for text in Path("/proc/meminfo").read_text().splitlines()
            if text.startswith("MemAvailable:")
        )
        available = int(line.split()[1]) * 1024
        assert free < available + total / 50  # other programs take and release memory meanwhile
        if not Path("/sys/fs/cgroup/memory.max").exists():
            assert free > available - total / 50


@pytest.fixture
def files(monkeypatch):
    """The contents of the system's files by path; others are missing."""
    contents: dict[str, str] = {}

    def read_text(self):
        if str(self) not in contents:
            raise OSError
        return contents[str(self)]

    monkeypatch.setattr(machine.Path, "read_text", read_text)
    monkeypatch.setattr(sys, "platform", "linux")
    return contents


def test_a_containers_limit_counts(files, monkeypatch):
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * 1024, total=900 * 1024)
    )
    files |= {
        "/sys/fs/cgroup/memory.current": "200000\n",
        "/sys/fs/cgroup/memory.max": "300000\n",
        "/sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 5000\nx 1\n",
    }
    assert machine.free_memory() == 300000 - 200000 + 5000
    files["/sys/fs/cgroup/memory.max"] = "9000000\n"
    assert machine.free_memory() == 500 * 1024
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.free_memory() == 500 * 1024
    files.clear()
    assert machine.free_memory() == 500 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.free_memory() == 900 * 1024


def test_memory_that_the_system_hides_is_unknown(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=PermissionError))
    assert machine.free_memory() is None


def test_cores_are_those_of_the_machine_or_fewer():
    assert 1 <= machine.physical_cores() <= (psutil.cpu_count(logical=False) or os.cpu_count())


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken from a process here"
)
def test_a_process_on_one_core_counts_one():
    code = """
import os
from mlx_llama.core.system.machine import physical_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(physical_cores())
"""
    done = run_python("-c", code)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.parametrize(
    "siblings, quota, expected",
    [
        (["0,4", "1,5", "0,4", "1,5"], "max 100000", 2),
        (["0", "1", "2", "3"], "max 100000", 4),
        (["0", "1", "2", "3"], "250000 100000", 2),
        (["0", "1"], "50000 100000", 1),
        (["0", "1", None], None, 3),
    ],
)
def test_hyper_threads_and_a_containers_processors(siblings, quota, expected, files, monkeypatch):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(len(siblings))), raising=False
    )
    for cpu, text in enumerate(siblings):
        if text is not None:
            files[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text + "\n"
    if quota:
        files["/sys/fs/cgroup/cpu.max"] = quota + "\n"
    assert machine.physical_cores() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages through /proc")
def test_released_pages_leave_memory_and_come_back(tmp_path):
    """Of the part alone: pages that it shares with its neighbours stay."""
    page = mmap.PAGESIZE
    (tmp_path / "f").write_bytes(bytes(range(256)) * (page // 256 * 64))
    with open(tmp_path / "f", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    before = bytes(mapped)

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text().split(str(tmp_path / "f"))[1]
        return int(text.split("Rss:")[1].split()[0]) * 1024

    assert resident() == 64 * page
    machine.release_pages(mapped, page - 1, 10 * page)  # whole pages: 1 to 9
    assert resident() == 55 * page
    machine.release_pages(mapped, 1, page - 2)  # not one whole page
    assert resident() == 55 * page
    assert bytes(mapped) == before
