"""python -m mlx_llama.parity: agrees with transformers, and locates planted faults."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from cases.batches import Counting
from machine import to_run
from making import config_fields, make_checkpoint, stored_tensors
from making_gguf import make_gguf
from rows_toy import ToyBackend, ToyModel

from mlx_llama.parity import command as parity, probes as core, report as parity_report
from mlx_llama.parity.batches import STARTS
from mlx_llama.parity.command import STEPS, Job

BACKENDS = [name for name in ("mlx", "cpu", "cuda") if name in to_run()]
LAYERS = 3


@functools.cache
def make_model() -> Path:
    return make_checkpoint(
        Path(tempfile.mkdtemp()) / "m", num_hidden_layers=LAYERS, max_position_embeddings=256
    )


@functools.cache
def low_bit() -> Path:
    path = Path(tempfile.mkdtemp()) / "m-q8_0.gguf"
    make_gguf(path, kinds="Q8_0", num_hidden_layers=LAYERS, max_position_embeddings=256)
    return path


def run(door, *arguments, backends=BACKENDS, expect=0, path=None):
    flags = f"--model {path or make_model()} --backends {','.join(backends)} --device cpu --json"
    done = door(parity.main, *flags.split(), *arguments)
    assert done.code == expect, done.err
    return json.loads(done.out)


# Sound models


def test_all_backends_agree(door):
    facts = run(door, "--dtype", "float32", "--tokens", "40")
    assert [entry["backend"] for entry in facts["backends"]] == BACKENDS
    assert len(facts["tokens"]) == 40
    in_layers = (f"{i}.{name}" for i in range(LAYERS) for name in core.IN_LAYER if name != "state")
    names = ["embedding", *in_layers, "norm", "logits"]
    for entry in facts["backends"]:
        assert entry["within"] and entry["first_bad"] is None
        assert entry["verdict"] == "within 0.0001" and not entry["not_compared"]
        assert [probe["probe"] for probe in entry["probes"]] == names
        for probe in entry["probes"]:
            assert probe["worst_relative"] < 1e-5 and probe["cosine"] > 1 - 1e-9
            assert len(probe["positions"]) == 40
        assert entry["decoded"]["first_difference"] is None
        assert len(entry["decoded"]["tokens"]) == STEPS
        assert entry["logits"]["top5"] == 1 and entry["logits"]["kl_max"] < 1e-9


@pytest.mark.slow
def test_transformers_as_the_reference(door):
    flags = "--dtype float32 --reference transformers".split()
    facts = run(door, *flags, backends=BACKENDS[:2])
    assert facts["reference"].startswith("transformers ")
    for entry in facts["backends"]:
        assert entry["within"], entry["verdict"]
        kinds = {name.split(".")[-1] for name in entry["not_compared"]}
        assert kinds == {"query_rope", "key_rope"} and len(entry["probes"]) == 1 + 8 * LAYERS + 2
        assert entry["decoded"]["first_difference"] is None


@functools.cache
def make_hybrid() -> Path:
    fields = dict(architectures=["Lfm2ForCausalLM"], model_type="lfm2", full_attn_idxs=[1])
    fields |= dict(num_hidden_layers=LAYERS, tie_word_embeddings=True)
    tensors = stored_tensors(config_fields(**fields))
    return make_checkpoint(Path(tempfile.mkdtemp()) / "m", tensors=tensors, **fields)


def test_layers_with_a_recurrent_state_have_a_probe_of_it(door):
    facts = run(door, "--dtype", "float32", "--tokens", "40", path=make_hybrid())
    mixers = [["state"], core.HEAD_PROBES, ["state"]]
    for entry in facts["backends"]:
        assert entry["within"] and not entry["not_compared"]
        names = [probe["probe"] for probe in entry["probes"]]
        for i, kinds in enumerate(mixers):
            here = [name.partition(".")[2] for name in names if name.startswith(f"{i}.")]
            assert here == ["attention_norm", *kinds, "attention", "ffn_norm", "ffn", "block"]


@pytest.mark.slow
def test_transformers_judges_a_hybrid(door):
    flags = "--dtype float32 --reference transformers".split()
    for entry in run(door, *flags, path=make_hybrid())["backends"]:
        assert entry["within"], entry["verdict"]
        kinds = {name.split(".")[-1] for name in entry["not_compared"]}
        assert kinds == {"query_rope", "key_rope", "state"}


@pytest.mark.slow
def test_every_way_of_filling_a_hybrid_s_cache(door):
    facts = run(door, "--dtype", "float32", "--verify-cache", path=make_hybrid())
    ways = [entry["way"] for entry in facts["rows"] if entry["backend"] == BACKENDS[0]]
    assert "decoded by steps: recurrent states" in ways
    assert all(entry["within"] for entry in facts["rows"])


@pytest.mark.slow
def test_sixteen_bits_are_judged_as_such(door):
    wide = [name for name in BACKENDS if name != "cpu"]  # cpu computes in float32
    if not wide:
        pytest.skip("neither mlx nor torch is here, and the cpu backend computes in float32")
    for entry in run(door, "--dtype", "bfloat16", backends=wide)["backends"]:
        assert entry["dtype"] == "bfloat16" and entry["tolerance"] == core.TOLERANCE["bfloat16"]
        assert entry["within"]
        assert max(probe["worst_relative"] for probe in entry["probes"]) > core.TOLERANCE["float32"]


@pytest.mark.slow
def test_low_bit_weights(door):
    for entry in run(door, path=low_bit())["backends"]:
        assert entry["within"], entry["verdict"]


# Planted faults


def planted(patch, backend: str, fault: str) -> None:
    """Plant a common fault in a backend's arithmetic."""
    import importlib

    if backend == "cpu":
        planted_in_programs(patch, fault)
        return
    home = {"mlx": "mlx_llama.mlx_native", "cuda": "cuda_fallback"}[backend]
    ops, cache = (importlib.import_module(f"{home}.{file}") for file in ("ops", "cache"))
    if backend == "mlx":
        import mlx.core as xp
    else:
        import torch as xp
    rotate = ops.rope

    if fault == "rope pairing":  # pairs of neighbours, not of halves

        def rope(x, table):
            half = x.shape[-1] // 2
            order = [i // 2 + half * (i % 2) for i in range(2 * half)]
            back = [order.index(i) for i in range(2 * half)]
            return rotate(x[..., back], table)[..., order]

        patch.setattr(ops, "rope", rope)
    elif fault == "stale row":  # layer 1's value of the last prompt token
        append = cache.View.append

        def stale(self, layer, key, value):
            if layer == 1 and self.spans[0].start == 0:
                value = xp.concatenate([value[:, :, :-1], value[:, :, 2:3]], 2)
            append(self, layer, key, value)

        patch.setattr(cache.View, "append", stale)


def planted_in_programs(patch, fault: str) -> None:
    """Plant a fault in the CPU's compiled programs alone: plain NumPy is the reference."""
    from cpu_fallback.kernels import ops, runner

    forward, rotate = runner.Runner.forward, ops.rope_and_store
    if fault == "rope pairing":  # no rotation, since programs have no other pairing
        patch.setattr(
            ops,
            "rope_and_store",
            lambda heads, view, spec: rotate(heads, view, dataclasses.replace(spec, rotates=False)),
        )
    elif fault == "stale row":

        def stale(self, tokens, view, *rest):
            logits = forward(self, tokens, view, *rest)
            if view.spans[0].start == 0:
                ((pages,),), last = view.pages, view.spans[0].end - 1
                keys = [page.layer(1)[0][1, :] for page in (pages[0], pages[last // 64])]
                keys[1][:, last % 64] = keys[0][:, 2]
            return logits

        patch.setattr(runner.Runner, "forward", stale)


PLACES = {  # fault: (first probe that is off, number of last positions with it)
    "rope pairing": ("0.query_rope", None),
    "stale row": ("1.attention", 17),
}


@pytest.mark.slow_for("*stale row", "cuda", "mlx")
@pytest.mark.parametrize("fault", PLACES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_planted_fault_is_named(backend, fault, door, monkeypatch):
    """Faults in the compiled program, MLX's traced graph and torch's operations."""
    probe, last = PLACES[fault]
    if (backend, fault) == ("cpu", "stale row"):
        last = 16  # planted after the prompt
    if backend == "cpu" and not kernels():
        pytest.skip("there are no compiled kernels here: the cpu backend is the reference itself")
    compiled = ["--compile"] if backend == "mlx" else []
    if compiled and fault == "stale row":  # others: test_all_backends_agree
        (sound,) = run(door, "--dtype", "float32", *compiled, backends=[backend])["backends"]
        assert sound["within"]
    planted(monkeypatch, backend, fault)
    (entry,) = run(door, "--dtype", "float32", *compiled, backends=[backend], expect=1)["backends"]
    assert not entry["within"] and entry["first_bad"] == probe, entry["verdict"]
    assert f"OUTSIDE: first at probe {probe}," in entry["verdict"]
    if last:
        errors = next(each["positions"] for each in entry["probes"] if each["probe"] == probe)
        assert max(errors[:-last]) < 1e-5 < max(errors[-last:])


def test_a_decode_step_that_computes_something_else_is_found(door, monkeypatch):
    """A fault in the decode step of one backend alone, which no probe sees."""
    from cpu_fallback.model import Llama

    step = Llama.step

    def wrong(self, token, index_pos, cache, sampling, **options):
        reports = step(self, token, index_pos, cache, sampling, **options)
        return (
            (reports + 1) % self.config.vocab_size
            if index_pos == 53 and self.runner is not None
            else reports
        )

    if not kernels():
        pytest.skip("there are no compiled kernels here: the cpu backend is the reference itself")
    monkeypatch.setattr(Llama, "step", wrong)
    reports = {report["backend"]: report for report in run(door, expect=1)["backends"]}
    report = reports.pop("cpu")
    assert all(other["within"] for other in reports.values())
    assert report["first_bad"] is None and report["decoded"]["first_difference"] == 6
    assert not report["decoded"]["near_tie"]
    assert "the decode step computes something else" in report["verdict"]


# The page


@pytest.mark.slow
def test_the_page_is_whole_and_self_contained(door, tmp_path):
    page = tmp_path / "p.html"
    count = len(run(door, "--html", page, "--tokens", "100", backends=BACKENDS[:2])["backends"])
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("</svg>") == 2 * count
    assert not re.search(r"https?://|src=|href=", text)
    cells = 10 * LAYERS + (LAYERS + 3) * parity_report.COLUMNS
    assert text.count("<rect") == cells * count and 'class="within"' in text
    ElementTree.fromstring(re.sub(r"<!doctype html>|<meta[^>]*>|&\w+;", "", text, flags=re.I))


# Traces


@pytest.mark.slow
def test_a_trace_is_checked_on_every_backend(door, tmp_path):
    file = tmp_path / "t.json"
    assert door(parity.main, "--model", make_model(), "--record", file, "--tokens", "30").code == 0
    rows = run(door, "--check", file)["rows"]
    assert [row["backend"] for row in rows] == BACKENDS and all(row["within"] for row in rows)
    assert all(row["worst"] > 0 and row["first_greedy_difference"] is None for row in rows)


@pytest.mark.parametrize("flag", ["--record", "--html"])
def test_a_full_disk_keeps_the_old_file(flag, door, full_disk, tmp_path):
    file = tmp_path / "old.json"
    file.write_text("precious")
    backends = ("--backends", "cpu") if flag == "--html" else ()
    arguments = ("--model", make_model(), flag, file, "--tokens", "8", *backends)
    with full_disk(4096):
        done = door(parity.main, *arguments)
    assert done.code == 2 and f"{file}: cannot be written: File too large" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert file.read_text() == "precious"
    assert door(parity.main, *arguments).code == 0 and file.stat().st_size > 4096


@pytest.mark.slow
def test_the_guides_trace_holds_here(door):
    done = door(parity.main, "--check", "--dtype", "float32", "--backends", ",".join(BACKENDS))
    assert done.code == 0, done.err + done.out
    assert done.out.count("and the same greedy tokens") == len(BACKENDS)


# The cache, determinism


@pytest.mark.slow
def test_every_way_of_filling_a_cache(door):
    flags = "--verify-cache --dtype float32 --tokens 40".split()
    rows = run(door, *flags, backends=["cpu"])["rows"]
    assert len(rows) == 7 and all(row["within"] and row["relative"] < 1e-5 for row in rows)


@pytest.mark.slow
def test_the_same_bits_here_and_in_fresh_processes(door):
    rows = run(door, "--repeat", "2", "--tokens", "12", backends=BACKENDS[:2])["rows"]
    assert all(row["within"] and row["runs"] == 4 for row in rows)
    assert [row["backend"] for row in rows] == BACKENDS[:2]


@pytest.mark.slow
def test_the_operation_that_differs_is_named(door, monkeypatch):
    from cpu_fallback import ops

    original, calls = ops.gate, iter(range(10**9))
    monkeypatch.setattr(ops, "gate", lambda *x: original(*x) * (1 + 1e-6 * (next(calls) % 7 == 3)))
    flags = "--repeat 2 --tokens 12 --no-compile".split()
    (row,) = run(door, *flags, backends=["cpu"], expect=1)["rows"]
    assert row["first_difference"].split(".")[-1] == "ffn" and row["run"] == 2
    assert not row["in_a_fresh_process"]
    assert "differs first at" in parity_report.describe_repeat(row)


# Perplexity


@pytest.mark.slow
def test_a_perplexity_is_the_same_on_every_backend(door, tmp_path):
    (tmp_path / "t.txt").write_text(
        "Once upon a time there was a little llama who lived on a hill. " * 9
    )
    flags = f"--perplexity {tmp_path}/t.txt --ctx-size 64 --stride 32 --dtype float32"
    facts = run(door, *flags.split())
    values = [row["perplexity"] for row in facts["rows"]]
    assert [row["backend"] for row in facts["rows"]] == BACKENDS
    assert values == pytest.approx([values[0]] * len(values), rel=1e-5)
    assert (facts["window"], facts["stride"], facts["stored"]) == (64, 32, "float32")
    assert facts["tokens"] > 100


def test_the_table_for_people(door):
    done = door(parity.main, "--model", make_model(), "--backends", "cpu", "--tokens", "20")
    assert done.code == 0
    assert "20 tokens, the last 10 one by one, against NumPy at float32" in done.out
    assert "all 24 greedy tokens are the same" in done.out and "within 0.0001" in done.out
    assert max(map(len, done.out.splitlines())) <= 110


# Rows in result


@pytest.mark.slow
def test_rows_do_not_depend_on_the_rest_of_the_batch(door):
    """On every backend: bits where they are promised, tokens at float32 elsewhere."""
    facts = run(door, "--batch", "3", "--dtype", "float32", "--tokens", "24")
    assert [(row["backend"], row["rows"], row["start"]) for row in facts["rows"]] == [
        (name, 3, start) for name in BACKENDS for start in STARTS
    ]
    for row in facts["rows"]:
        assert row["within"] and row["same_tokens"] == f"{row['rows']} of {row['rows']}"
        assert row["relative"] < 1e-4
        assert row["promise"] == ("bits" if row["backend"] == "cpu" and kernels() else "tokens")


def kernels() -> bool:
    """The cpu backend has compiled kernels here."""
    from cpu_fallback import kernels

    return kernels.find_target()[0] is not None


class Loaded:
    """A stand-in for a loaded model, without a promise of bits unless it is asked for."""

    def __init__(self, model, promises_bits=False):
        self.backend, self.model = ToyBackend(), model
        model.is_batch_invariant, self.checkpoint = promises_bits, SimpleNamespace(low_bit=False)
        self.engine = self.loop = self


@pytest.fixture
def batch(door, monkeypatch):
    """batch(model, *arguments, promises_bits): --batch over a stand-in, here called mlx."""

    def go(model, *arguments, promises_bits=False):
        monkeypatch.setattr(Job, "load", lambda self, backend: Loaded(model, promises_bits))
        flags = ("--model", make_model(), *"--backends cpu --dtype float32 --batch".split())
        return door(parity.main, *flags, *arguments)

    return go


@pytest.mark.slow
def test_a_broken_promise_is_exit_code_1_and_named(batch):
    done = batch(Counting(), promises_bits=True)
    assert done.code == 1 and "is_batch" not in done.out
    lines = [line for line in done.out.splitlines() if line.startswith("OUTSIDE: ")]
    assert len(lines) == len(STARTS)
    assert all(line.startswith("OUTSIDE: cpu, 3 rows, ") for line in lines)
    words = "the same bits are promised; the same tokens in 3 of 3, the same bits in 0 of 3"
    assert words in lines[0]
    assert "do not depend on the rest of the batch" not in done.out
    assert batch(Counting()).code == 0


@pytest.mark.slow
def test_kept_promises_are_said_in_a_line(batch):
    done = batch(ToyModel(), promises_bits=True)
    words = "do not depend on the rest of the batch"
    assert done.code == 0
    assert done.out.splitlines()[-1] == f"cpu: a row's tokens and bits {words}"
    table = [line.split("│")[1:-1] for line in done.out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line][2:7] for line in table] == [
        [str(rows), start, f"{rows} of {rows}", f"{rows} of {rows}", "0"]
        for rows in (2, 3, 8, 32)
        for start in STARTS
    ]
    rows = [row["rows"] for row in json.loads(batch(ToyModel(), "4,2", "--json").out)["rows"]]
    assert rows == [2] * len(STARTS) + [4] * len(STARTS)
    assert batch(ToyModel(), "2").out.splitlines()[-1] == f"cpu: a row's tokens {words}"
