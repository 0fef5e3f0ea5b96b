"""What is asked of the system."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

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
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    if done.returncode == 3:
        pytest.skip("this system does not say how much memory a process has had")
    before, after = map(int, done.stdout.split())
    assert 1e6 < before < 200e6 < held.nbytes and after > before + 40e6


def test_free_memory_is_what_the_system_says():
    """Against the C library's count of all pages and of those that nobody uses at all."""
    free = machine.free_memory()
    if sys.platform == "win32":
        assert free is None
        return
    page = os.sysconf("SC_PAGE_SIZE")
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * page
    held = np.ones(400_000_000, np.uint8)
    if sys.platform == "linux":
        assert free - machine.free_memory() > 200e6  # other programs come and go
    assert len(held)


def test_a_containers_limit_counts(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 900 kB\nMemAvailable:  500 kB\n", "/sys/fs/cgroup/memory.current": "200000\n",
             "/sys/fs/cgroup/memory.max": "300000\n", "/sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 5000\nx 1\n"}

    def read_text(self):
        if str(self) not in files:
            raise OSError
        return files[str(self)]

    monkeypatch.setattr(machine.Path, "read_text", read_text)
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.free_memory() == 300000 - 200000 + 5000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.free_memory() == 500 * 1024
    files.clear()
    assert machine.free_memory() is None
