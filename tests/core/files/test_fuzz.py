"""A short run of tests/fuzz_headers.py, in a process of its own, whose memory it measures."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).resolve().parents[2] / "fuzz_headers.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_damaged_headers_end_in_errors_of_ours(kind):
    command = [sys.executable, str(FUZZER), "--format", kind, "--count", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.startswith(f"{kind}: 2000 cases: ")
    # damage of every depth, or nothing was tried
    for outcome in ("CheckpointError", "ConfigError", "opened"):
        assert outcome in done.stdout
