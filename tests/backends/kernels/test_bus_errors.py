"""The handler that survives truncated files, alone; with models: test_truncated_weights.py."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from cpu_fallback.kernels import bus_errors

GUARD = bus_errors.find_guard()
pytestmark = pytest.mark.skipif(GUARD is None, reason="this system has no such handler")
PAGE = mmap.PAGESIZE


@pytest.fixture
def mapped(tmp_path):
    """(path, numbers of a file of four pages of ones)"""
    GUARD.install()
    path = tmp_path / "file"
    path.write_bytes(b"\1" * 4 * PAGE)
    with open(path, "rb") as file:
        return path, np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def test_missing_pages_are_zeros_and_told(mapped):
    path, numbers = mapped
    first, second = (GUARD.add(numbers.ctypes.data, len(numbers)) for _ in range(2))
    assert numbers.sum() == 4 * PAGE and not GUARD.is_cut(first)
    os.truncate(path, PAGE + 5)
    assert numbers[PAGE:].sum() == 5 and numbers[:PAGE].all()
    assert GUARD.is_cut(first) and GUARD.is_cut(second)
    for number in (first, second):
        GUARD.remove(number)
    assert not GUARD.is_cut(GUARD.add(numbers.ctypes.data, len(numbers)))  # numbers are used again


def test_a_full_table_protects_no_more(mapped):
    guard, numbers = bus_errors.find_guard.__wrapped__(), mapped[1]
    added = [guard.add(numbers.ctypes.data, 1) for _ in range(bus_errors.MAPPINGS + 1)]
    assert added.count(None) == 1 and added[-1] is None
    guard.remove(added[0])
    assert guard.add(numbers.ctypes.data, 1) == added[0]


def test_a_forked_process_survives_too(mapped):
    path, numbers = mapped
    number = GUARD.add(numbers.ctypes.data, len(numbers))
    if (child := os.fork()) == 0:
        os.truncate(path, 0)
        os._exit(0 if numbers.sum() == 0 and GUARD.is_cut(number) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not GUARD.is_cut(number)
    GUARD.remove(number)


KILLED = """
import faulthandler, mmap, os, sys
import numpy as np
from cpu_fallback.kernels.bus_errors import find_guard

order, fault, path = sys.argv[1:]
guard = find_guard()
if order == "before":
    faulthandler.enable()
guard.install()
if order != "before":
    faulthandler.enable()
if order == "between":
    guard.install()
with open(path, "wb") as file:
    file.write(b"1" * 4 * mmap.PAGESIZE)
with open(path, "rb") as file:
    maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for _ in range(2)]
numbers, others = (np.frombuffer(part, np.uint8) for part in maps)
guard.add(numbers.ctypes.data, len(numbers))
os.truncate(path, 0)
if order != "after":
    assert numbers.sum() == 0
if fault == "sent":
    os.kill(os.getpid(), 7)
print(others.sum())
"""


@pytest.mark.parametrize("fault", ["another file", "sent"])
@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_other_bus_errors_still_kill_and_are_reported(fault, order, tmp_path):
    """order: when faulthandler, which pytest enables, takes the signal."""
    command = [sys.executable, "-c", KILLED, order, fault, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGBUS and not done.stdout
    assert "Fatal Python error: Bus error" in done.stderr and "<module>" in done.stderr
