"""The bench runs on every backend and its figures hang together; how fast it is, is not a test."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlx_llama import bench
from mlx_llama.core.checkpoint import open_checkpoint


@pytest.fixture(autouse=True)
def small_probe(monkeypatch):
    monkeypatch.setattr(bench.HostMemory, "bandwidth", lambda self: 1e9)


def test_figures(backend, toy):
    checkpoint = open_checkpoint(toy)
    figures = bench.measure(checkpoint, backend, "float32", 20, 8, 2)
    assert figures["evaluations_per_token"] == 1 and figures["weights_bytes"] == checkpoint.nbytes
    for name in ("prompt_tps", "decode_tps", "first_token_seconds", "load_seconds", "peak_memory_bytes", "bandwidth"):
        assert figures[name] > 0, name
    # 384 rows of embedding less the one that is read, and keys and values of 20 + 4 positions, all float32
    assert figures["bytes_per_token"] == checkpoint.nbytes - 383 * 64 * 4 + 2 * 2 * 2 * 16 * 24 * 4
    assert figures["bandwidth_share"] == pytest.approx(
        figures["decode_tps"] * figures["bytes_per_token"] / figures["bandwidth"], rel=0.5)
    assert "evaluation per token" in bench.report(figures)


def test_low_bit_weights_count_what_they_take_in_the_file(backend, tmp_path):
    from making import make_checkpoint
    from mlx_llama.core.gguf_export import write_gguf

    write_gguf(open_checkpoint(make_checkpoint(tmp_path / "m")), tmp_path / "m.gguf", "Q4_0")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    figures = bench.measure(checkpoint, backend, "auto", 20, 8, 1)
    assert figures["stored"] == "Q4_0, Q8_0"  # the head is wider
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64
    rows = {"embedding": 64 * 18 // 32, "head": 384 * 64 * 34 // 32, "layers": 2 * layer * 18 // 32}
    norms, cache = 5 * 64, 2 * 2 * 2 * 16 * 24
    width = bench.itemsize(backend.load(checkpoint))
    assert figures["bytes_per_token"] == sum(rows.values()) + norms * (4 if backend.name == "cpu" else width) + cache * width


def test_what_a_model_says_of_itself_is_reported(backend, toy):
    figures = bench.measure(open_checkpoint(toy), backend, "float32", 8, 4, 1)
    assert isinstance(figures["notices"], list)
    assert bench.report(figures | {"notices": ["a word"]}).endswith("\nnote: a word")


def test_the_command(toy):
    done = subprocess.run([sys.executable, "-m", "mlx_llama.bench", "--model", str(toy), "--backend", "cpu", "-p", "8",
                           "-n", "4", "-r", "1", "--json"], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["generate"] == 4, done.stderr
    done = subprocess.run([sys.executable, "-m", "mlx_llama.bench", "--model", "no/such", "--backend", "cpu", "--threads",
                           "x"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--threads 'x'" in done.stderr
    done = subprocess.run([sys.executable, "-m", "mlx_llama.bench", "--model", str(toy), "-n", "1"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--generate-tokens 1: must be at least 2" in done.stderr
