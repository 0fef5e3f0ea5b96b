"""What is asked of the system."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

CODE = """
import sys
from mlx_llama.core.machine import peak_memory
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
