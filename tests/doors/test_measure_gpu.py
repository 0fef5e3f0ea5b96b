"""examples/benchmarks/measure_gpu.py on CPUs, from end to end; its proofs find planted faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from machine import missing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
COMMAND = [sys.executable, str(EXAMPLES / "measure_gpu.py"), "--device", "cpu", "--shapes", "tiny"]
HERE = [name for name in ("cuda", "mlx") if not missing(name)]
PROOFS = {"low-bit products", "logits", "same bits", "steps", "same tokens"}
LINES = {  # (format, side): True if it is compared with a peer
    "cuda": {("bf16", "ours eager"): True, ("bf16", "transformers static"): False, ("4-bit", "ours eager"): False,
             ("q8_0", "ours eager"): False},
    "mlx": {("bf16", "ours compiled"): True, ("bf16", "ours eager"): True, ("bf16", "mlx-lm"): False,
            ("4-bit", "ours eager"): True, ("4-bit", "mlx-lm"): False, ("q8_0", "ours eager"): False},
}

pytestmark = pytest.mark.skipif(not HERE, reason="neither torch nor mlx is installed")


@pytest.fixture
def example(monkeypatch) -> Iterator:
    monkeypatch.syspath_prepend(EXAMPLES)
    import measure_gpu

    yield measure_gpu


@pytest.fixture(params=HERE)
def ours(request, example) -> Iterator:
    if request.param == "mlx":
        import mlx.core as mx

        before = mx.default_device()
    yield example.Ours(request.param, "cpu")
    if request.param == "mlx":
        mx.set_default_device(before)


def test_all_of_it_on_cpus():
    asked = ["--minutes", "4", "--prompt", "32", "--generate", "8", "--backends", ",".join(HERE), "--json"]
    done = subprocess.run([*COMMAND, *asked], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["failed"] and not result["interrupted"] and result["seconds"] < 240
    assert not [one for one in result["left_out"] if one["reason"].startswith("no time")], done.stderr
    for name in HERE:
        checks = [one for one in result["checks"] if one["backend"] == name]
        assert {one["what"] for one in checks} == PROOFS and all(one["ok"] for one in checks)
        judged = [one for one in checks if "error" in one]
        assert len(judged) > 35 and all(0 < one["error"] <= one["bound"] <= 0.1 for one in judged)
        assert all(bound > 0 for one in result["bounds"][name] for bound in one.values())
        rows = {(row["form"], row["side"]): row for row in result["rows"] if row["backend"] == name}
        lines = LINES[name] | ({("bf16", "ours compiled"): True} if ("bf16", "ours compiled") in rows else {})
        assert rows.keys() == lines.keys()
        for key, row in rows.items():
            needed = ["decode", "decode_share", "prefill", "prefill_share"]
            needed += ["decode_ratio", "prefill_ratio"] if lines[key] else []
            needed += ["host"] if key[1].startswith("ours") else []
            needed += ["operations"] if name == "mlx" else []
            needed += ["peak", "prefill_peak", "load_peak"] if name == "mlx" and key[1].startswith("ours") else []
            assert all(row[field] > 0 for field in needed), row
            assert row["waits"] == (None if key[1].startswith("transformers") else 1)
    if "mlx" in HERE:
        compiled, eager, peer = (rows["bf16", side]["operations"] for side in ("ours compiled", "ours eager", "mlx-lm"))
        assert compiled < eager < peer


def test_a_wrong_scale_is_found(example, ours):
    judge = example.random_weight("affine 4/64", 264, 512)
    scales = judge.scales.copy()
    scales[100, 3] += 1 << 7  # double the scale of one group: bfloat16's exponent starts at bit 7
    wrong = example.MLXWeight("wrong", 4, 64, judge.packed, scales, judge.biases)
    for dtype, bound in example.PRODUCT_BOUNDS.items():
        assert ours.product_error(judge, dtype=dtype) <= bound < ours.product_error(judge, wrong, dtype)

    judge = example.random_weight("Q8_0", 264, 512)
    blocks = judge.blocks.copy()
    blocks[7, 0:2] = 0
    wrong = example.GGUFWeight("wrong", "Q8_0", judge.shape, blocks)
    assert ours.product_error(judge) <= example.PRODUCT_BOUNDS["float16"] < ours.product_error(judge, wrong)


@pytest.mark.parametrize("form", ["bf16", "4-bit", "q8_0"])
def test_a_wrong_matrix_in_a_model_is_found(example, ours, form):
    judge = example.random_checkpoint("tiny", form)
    names = [f"model.layers.0.self_attn.{which}_proj.weight" for which in "kv"]
    swapped = dict(judge.tensors) | dict(zip(names, (judge.tensors[name] for name in names[::-1])))
    wrong = example.dataclasses.replace(judge, tensors=swapped)
    for dtype in ("float32", "auto"):
        error, same = ours.logit_error(wrong, dtype, judge)
        assert same and error > example.LOGIT_BOUNDS[judge.dtype if dtype == "auto" else dtype]


def test_random_checkpoints_share_one_block_and_are_the_same_everywhere(example):
    for form, width in example.FORMATS.items():
        first, second = example.random_checkpoint("tiny", form), example.random_checkpoint("tiny", form)
        matrices = {name: tensor for name, tensor in first.tensors.items() if len(tensor.shape) == 2}
        assert first.nbytes == sum(tensor.nbytes for tensor in first.tensors.values())
        assert sum(tensor.nbytes for tensor in matrices.values()) == width * sum(
            tensor.shape[0] * tensor.shape[1] for tensor in matrices.values())
        dense = {name: tensor.float32() for name, tensor in matrices.items()}
        for name, values in dense.items():
            assert np.array_equal(values, second.tensors[name].float32())
            assert 0.8 < values.std() * first.config.hidden_size**0.5 < 1.3, name
        heads = [values[:64].tobytes() for values in dense.values()]
        assert len(set(heads)) == len(heads)


def test_a_part_that_fails_says_why_and_the_others_go_on(example, monkeypatch, capsys):
    reached = []

    def parts(self, name):
        def broken(slot):
            raise ValueError("broken\non purpose")

        def lost(slot):
            worker = self.worker(name, "missing")
            worker.send("hello")
            worker.receive(60)

        def slow(slot):
            self.worker(name, "ours").receive(0.5)

        return [(1, "opens", reached.append), (1, "breaks", broken), (1, "is lost", lost), (1, "is slow", slow),
                (1, "works", reached.append)]

    monkeypatch.setattr(example.Measurement, "_parts", parts)
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", "--device", "cpu", "--backends", HERE[0]])
    assert example.main() == 1 and len(reached) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["FAILED breaks: ValueError: broken on purpose",
                         f"FAILED is lost: KeyError: ('{HERE[0]}', 'missing')", "FAILED is slow: did not end within 0 s"]


def test_the_table_stays_short(example):
    row = {"backend": "cuda", "shape": "tiny", "form": "4-bit", "side": "transformers compiled", "operations": 12345,
           "host": 1e-2, "waits": 1.0, "peak": 1.234, "load_peak": None}
    row |= {f"{kind}{part}": value for kind in ("decode", "prefill") for part, value in
            {"": 123456.7, "_ratio": 123.45, "_share": 9.99}.items()}
    assert len(example.shown(row)) == len(example.HEADER) == example.COLUMNS
    result = {"machine": {}, "bounds": {}, "checks": [], "kernel_rates": {}, "batches": [], "processes": [],
              "failed": [{"part": "a", "reason": "b" * 300}], "rows": [row] * 30,
              "left_out": [{"part": "c", "reason": "d"}] * 30, "seconds": 1.0, "interrupted": False}
    lines = example.table(result).splitlines()
    assert len(lines) == 40 and max(map(len, lines)) == 110 and lines[-1] == "1 s; 23 more lines with --json"


@pytest.mark.skipif(os.name != "posix", reason="sends the signal of Ctrl-C")
def test_ctrl_c_prints_the_results_so_far():
    process = subprocess.Popen([*COMMAND, "--backends", HERE[0], "--json"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True,
                               # background jobs start with SIGINT ignored
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        for line in process.stderr:
            if "logits: " in line:
                process.send_signal(signal.SIGINT)
                break
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    result = json.loads(out)
    assert process.returncode == 130 and result["interrupted"] and result["checks"] and not result["failed"]


def test_without_the_device_it_says_so():
    done = subprocess.run([sys.executable, str(EXAMPLES / "measure_gpu.py"), "--backends", "cuda", "--minutes", "0.01"],
                          capture_output=True, text=True, timeout=200)
    assert "Traceback" not in done.stderr
    if "sees no GPU here" in done.stdout:
        assert done.returncode == 1


@pytest.mark.slow
def test_two_processes(example):
    """A model over two processes of torchrun has the tokens of one."""
    import argparse
    import math
    import time

    if reason := missing("cuda"):
        pytest.skip(reason)
    given = argparse.Namespace(device="cpu", shapes=["tiny"], minutes=4.0, processes=2, generate=8, prompt=32)
    measurement = example.Measurement(given, ["cuda"], True)
    measurement.processes("cuda", example.Slot(math.inf, time.perf_counter() + 200))
    (found,) = measurement.result["processes"]
    assert found["size"] == 2 and found["rate"] > 0 and found["alone"] > 0
    assert [one["ok"] for one in measurement.result["checks"]] == [True]
    assert "2 processes decode" in example.table(measurement.result | {"seconds": 1.0})
