"""examples/benchmarks/measure_gpu.py on CPUs, from end to end; its proofs find planted faults."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from machine import missing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
COMMAND = [EXAMPLES / "measure_gpu.py", "--device", "cpu", "--shapes", "tiny"]
HERE = [name for name in ("cuda", "mlx") if not missing(name)]
PROOFS = {"low-bit products", "logits", "same bits", "steps", "same tokens", "peers' logits"}
SMALL = {"ROUNDS": 1, "DEPTH": 16, "BATCHES": (8,), "FORMATS": ("bf16", "4-bit", "q4_k_m")}
PLAIN = {(form, "ours eager") for form in SMALL["FORMATS"]}
LINES = {
    "cuda": PLAIN | {("bf16", "transformers static")},
    "mlx": PLAIN | {("bf16", "ours compiled"), ("bf16", "mlx-lm")},
}
HAS_LLAMA_CPP = shutil.which("llama-bench") or importlib.util.find_spec("llama_cpp")

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


@pytest.mark.slow
def test_all_of_it_on_cpus(example, monkeypatch, capsys):
    for name, value in SMALL.items():
        monkeypatch.setattr(example, name, value)
    asked = f"--minutes 4 --prompt 32 --generate 8 --json --backends {','.join(HERE)}"
    monkeypatch.setattr(sys, "argv", [*map(str, COMMAND), *asked.split()])
    code, (out, said) = example.main(), capsys.readouterr()
    assert code == 0, said
    result = json.loads(out)
    assert not result["failed"] and not result["interrupted"] and result["seconds"] < 240
    for check in result["left_out"]:
        assert not check["reason"].startswith("no time"), said
    for name in HERE:
        checks = [check for check in result["checks"] if check["backend"] == name]
        assert {check["what"] for check in checks} == PROOFS
        assert all(check["ok"] for check in checks)
        judged = [check for check in checks if "error" in check]
        assert len(judged) > 35
        assert all(0 < check["error"] <= check["bound"] <= 0.2 for check in judged)
        assert all(bound > 0 for check in result["bounds"][name] for bound in check.values())
        rows = {(row["form"], row["side"]): row for row in result["rows"] if row["backend"] == name}
        lines = LINES[name] | ({("q4_k_m", "llama.cpp")} if HAS_LLAMA_CPP else set())
        assert rows.keys() - {("bf16", "ours compiled")} == lines - {("bf16", "ours compiled")}
        for (_, side), row in rows.items():
            needed = ["decode", "decode_share", "prefill", "prefill_share", "8 rows"]
            needed += ["host"] if side.startswith("ours") else []
            needed += ["operations"] if name == "mlx" and side != "llama.cpp" else []
            needed += ["peak"] if name == "mlx" and side.startswith("ours") else []
            assert all(row[field] > 0 for field in needed), row
            assert row["waits"] == (1 if side.startswith("ours") or side == "mlx-lm" else None)
    if "mlx" in HERE:
        compiled, eager, peer = (
            rows["bf16", side]["operations"] for side in ("ours compiled", "ours eager", "mlx-lm")
        )
        assert compiled < eager < peer


def test_a_wrong_scale_is_found(example, ours):
    judge = example.random_weight("affine 4/64", 264, 512)
    scales = judge.scales.copy()
    scales[100, 3] += 1 << 7  # double the scale of one group: bfloat16's exponent starts at bit 7
    wrong = type(judge)("wrong", 4, 64, judge.packed, scales, judge.biases)
    for dtype, bound in example.PRODUCT_BOUNDS.items():
        assert ours.product_error(judge, dtype=dtype) <= bound
        assert bound < ours.product_error(judge, wrong, dtype)

    judge = example.random_weight("Q8_0", 264, 512)
    blocks = judge.blocks.copy()
    blocks[7, 0:2] = 0
    wrong = type(judge)("wrong", "Q8_0", judge.shape, blocks)
    bound = example.PRODUCT_BOUNDS["float16"]
    assert ours.product_error(judge) <= bound < ours.product_error(judge, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "4-bit", "q8_0"])
def test_a_wrong_matrix_in_a_model_is_found(example, ours, form):
    judge = example.random_checkpoint("tiny", form)
    names = [f"model.layers.0.self_attn.{which}_proj.weight" for which in "kv"]
    swapped = dict(judge.tensors) | dict(zip(names, (judge.tensors[name] for name in names[::-1])))
    wrong = example.dataclasses.replace(judge, tensors=swapped)
    for dtype in ("float32", "auto"):
        error, same, bound = ours.logit_error(wrong, dtype, judge)
        assert same and error > bound


def test_random_checkpoints_share_one_block_and_are_the_same_everywhere(example):
    for form, width in example.FORMATS.items():
        first = example.random_checkpoint("tiny", form)
        second = example.random_checkpoint("tiny", form)
        matrices = {
            name: tensor for name, tensor in first.tensors.items() if len(tensor.shape) == 2
        }
        assert first.nbytes == sum(tensor.nbytes for tensor in first.tensors.values())
        weights = sum(tensor.shape[0] * tensor.shape[1] for tensor in matrices.values())
        assert sum(tensor.nbytes for tensor in matrices.values()) == pytest.approx(
            width * weights, rel=0.02
        )
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

        return [
            (1, "opens", reached.append),
            (1, "breaks", broken),
            (1, "is lost", lambda slot: self.ask(name, "missing", slot, "hello")),
            (1, "is slow", lambda slot: self.ask(name, "ours", slot, "hello", limit=0.1)),
            (1, "works", reached.append),
        ]

    monkeypatch.setattr(example.Measurement, "parts", parts)
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", "--device", "cpu", "--backends", HERE[0]])
    assert example.main() == 1 and len(reached) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "- FAILED breaks: ValueError: broken on purpose",
        "- FAILED is lost: KeyError: 'missing'",
        "- FAILED is slow: did not end within 0 s",
    ]


def test_the_table_is_markdown_with_ratios_to_the_fastest_peer(example):
    from markdown_it import MarkdownIt

    def row(side: str, rate: float | None) -> dict:
        shares = dict(decode_share=0.5, prefill_share=None, host=1e-3, waits=1.0, peak=1.234)
        names = dict(backend="cuda", shape="8b", form="q4_k_m", side=side, operations=None)
        return names | shares | dict.fromkeys(example.RATES, rate)

    rates = {"ours compiled": 30.0, "slow": 10.0, "fast": 20.0, "broken": None}
    result = dict(machine={}, bounds={}, checks=[], kernel_rates={}, processes=[], seconds=1.0)
    result |= dict(failed=[dict(part="a", reason="b")], left_out=[dict(part="c", reason="d")])
    result |= dict(rows=[row(*rate) for rate in rates.items()], interrupted=False)
    tokens = MarkdownIt("js-default").parse(example.table(result))
    texts = {
        kind: [after.content for token, after in itertools.pairwise(tokens) if token.type == kind]
        for kind in ("th_open", "td_open")
    }
    assert texts["th_open"] == list(example.HEADER)
    assert len(texts["td_open"]) == 4 * len(example.HEADER)
    first = dict(zip(example.HEADER, texts["td_open"]))
    assert first["model"] == "cuda 8b q4_k_m"
    assert first["32 rows"] == first["8 rows"] == "30.0 (1.50)"
    assert first["of a copy"] == "50%" and first["host us"] == "1000"
    assert first["operations"] == first["of a product"] == ""
    assert [token.content for token in tokens if token.type == "inline"][:2] == [
        "FAILED a: b",
        "left out: c: d",
    ]


def test_llama_cpp_computes_the_same_model(example, tmp_path):
    """The file that llama.cpp reads has the weights of our checkpoint in memory: its logits, with
    its 8-bit activations.
    """
    pytest.importorskip("llama_cpp")
    for form in ("q8_0", "q4_k_m"):
        ours, peer = example.Ours(HERE[0], "cpu"), example.LlamaCpp(HERE[0], "cpu")
        right = np.array(ours.op_load("tiny", form, False)["logits"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "which", lambda name: None)
            logits = np.array(peer.op_load("tiny", form, False, str(tmp_path))["logits"])
            assert peer.op_rows(16, 4, 8)["rate"] > 0
        assert np.linalg.norm(logits - right) < 0.05 * np.linalg.norm(right)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends the signal of Ctrl-C")
def test_ctrl_c_prints_the_results_so_far():
    command = [sys.executable, *COMMAND, "--backends", HERE[0], "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # background jobs start with SIGINT ignored
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        for line in process.stderr:
            if "logits: " in line:
                process.send_signal(signal.SIGINT)
                break
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    result = json.loads(out)
    assert process.returncode == 130 and result["interrupted"] and result["checks"]
    assert not result["failed"]


def test_without_the_device_it_says_so(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "measure_gpu.py --backends cuda --minutes 0.3".split())
    code = example.main()
    if missing("cuda-gpu"):
        assert code == 1 and "\n- FAILED cuda: " in f"\n{capsys.readouterr().out}"


@pytest.mark.slow
def test_two_processes(example):
    """A model over two processes of torchrun has the tokens of one."""
    import argparse
    import math
    import time

    if reason := missing("cuda"):
        pytest.skip(reason)
    args = dict(device="cpu", shapes=["tiny"], minutes=4.0, processes=2, generate=8, prompt=32)
    args = argparse.Namespace(**args)
    measurement = example.Measurement(args, ["cuda"], True)
    measurement.processes("cuda", example.Slot(math.inf, time.perf_counter() + 200))
    (processes,) = measurement.result["processes"]
    assert processes["size"] == 2 and processes["rate"] > 0 and processes["alone"] > 0
    assert [check["ok"] for check in measurement.result["checks"]] == [True]
    assert "2 processes decode" in example.table(measurement.result | {"seconds": 1.0})
