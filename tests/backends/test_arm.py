"""NEON's machine code, run by qemu-aarch64 (arm_emulation.py): the compiled path's own tests, and
the bits of x86's code.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import run_python

from backends.kernels.models import answer, load
from cpu_fallback import kernels
from cpu_fallback.kernels.target import available

HOME = Path(__file__).resolve().parents[2]
KERNELS = [
    f"tests/backends/kernels/test_{name}.py" for name in ("activations", "products", "panels")
]
MODEL, ROWS = "tests/backends/kernels/test_model.py", "tests/backends/kernels/test_rows.py"
# (logits' name, model, activation bits, cache bits)
STEPS = [
    (f"{case}, {bits}, {cache}", case, bits, cache)
    for case, bits, cache in (
        ("head 80, a window", 32, 8),
        ("Q4_K_M", 8, None),
        ("many formats", 16, 8),
        ("head 36", 16, 16),
    )
]


def reason_to_skip() -> str:
    if sys.platform != "linux":
        return "qemu emulates processes on Linux only"
    if platform.machine() != "x86_64":
        return f"the kernels' own tests run on {platform.machine()} without an emulator"
    tools = [
        tool for tool in ("qemu-aarch64", "aarch64-linux-gnu-gcc", "cc") if not shutil.which(tool)
    ]
    return (
        f"no {', '.join(tools)} (Debian: apt-get install qemu-user gcc gcc-aarch64-linux-gnu)"
        if tools
        else ""
    )


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())]


def emulate(*command: str, processor: str = "cortex-a76") -> str:
    """Run Python with the emulation; returns its output."""
    settings = {
        "PYTHONPATH": f"{HOME / 'tests'}{os.pathsep}{HOME}",
        "MLX_LLAMA_TEST_ARM": processor,
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (kernels.VARIABLE, "PYTEST_ADDOPTS")
    }
    done = run_python(*command, cwd=HOME, env=kept | settings, timeout=900)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    return done.stdout


X86_ALONE = [
    f"--deselect=tests/backends/kernels/test_products.py::{name}"
    for name in ("test_bfloat16_times_bfloat16", "test_codes_unpacked_once_give_the_same_bits")
]


def run_tests(*arguments: str, processor: str = "cortex-a76") -> tuple[int, int]:
    """Run tests of the compiled path in emulation; returns the numbers of tests and of calls to
    kernels.
    """
    text = emulate(
        *"-m pytest --all -n 0 -x -p no:cacheprovider -p backends.arm_emulation".split(),
        *X86_ALONE,
        *arguments,
        processor=processor,
    )
    counts = {
        kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", text)
    }
    assert list(counts) == ["passed"], text
    return counts["passed"], int(
        re.search(rf"(\d+) calls of NEON kernels on qemu's {processor}\n", text)[1]
    )


def test_the_kernels_tests():
    """Required instructions alone, on a processor with few others."""
    tests, calls = run_tests(*KERNELS)
    assert tests > 150 and calls > 10_000


def test_products_tuned_for_a_newer_processor():
    tests, calls = run_tests(
        f"{KERNELS[1]}::test_product",
        "-k",
        "Q4_K or float16",
        processor="max apple-m1",
    )
    assert tests > 5 and calls > 100


def test_models_on_several_threads():
    """Threads share the memory and the barrier of one emulated program."""
    tests, calls = run_tests(
        MODEL,
        ROWS,
        "-k",
        "in_several_threads and 2 or frees or probes and not few or draws_for_each_row and 3",
    )
    assert tests == 6 and calls > 500


FORWARD = """
import sys
import numpy as np
import backends.arm_emulation
from backends.test_arm import STEPS, logits
np.savez(sys.argv[1], **{name: logits(*step) for name, *step in STEPS})
"""


def logits(case: str, bits: int, cache: int | None) -> np.ndarray:
    """Logits of a prompt, a decoded token and another prompt, on two threads."""
    return answer(
        load(case, "auto", threads=2, activation_bits=bits, cache_bits=cache), cuts=(20, 21)
    )[0]


def test_a_forward_has_the_bits_of_x86(tmp_path, monkeypatch):
    """Every sum has one order on all processors, and integer products are exact."""
    emulate("-c", FORWARD, str(tmp_path / "neon.npz"))
    monkeypatch.setenv(kernels.VARIABLE, available()[-1])
    with np.load(tmp_path / "neon.npz") as neon:
        for name, *step in STEPS:
            np.testing.assert_array_equal(neon[name], logits(*step), err_msg=name)
