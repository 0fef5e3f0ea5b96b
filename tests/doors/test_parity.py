"""python -m mlx_llama.parity: it agrees with transformers, and it finds faults that are planted, where they are."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from machine import to_run
from making import make_checkpoint
from making_gguf import make_gguf

from mlx_llama.core.errors import LlamaError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.proofs import parity as core
from mlx_llama.parity import command as parity, report as parity_report

BACKENDS = [name for name in ("mlx", "cpu", "cuda") if name in to_run()]
LAYERS = 3


@functools.cache
def model() -> Path:
    return make_checkpoint(Path(tempfile.mkdtemp()) / "m", num_hidden_layers=LAYERS, max_position_embeddings=256)


@functools.cache
def low_bit() -> Path:
    path = Path(tempfile.mkdtemp()) / "m-q8_0.gguf"
    make_gguf(path, kinds="Q8_0", num_hidden_layers=LAYERS, max_position_embeddings=256)
    return path


def run(door, *arguments, backends=BACKENDS, expect=0, path=None):
    done = door(parity.main, "--model", path or model(), "--backends", ",".join(backends), "--device=cpu", *arguments, "--json")
    assert done.code == expect, done.err
    return json.loads(done.out)


# What is right


def test_all_backends_agree(door):
    found = run(door, "--dtype", "float32", "--tokens", "40")
    assert [one["backend"] for one in found["backends"]] == BACKENDS and len(found["tokens"]) == 40
    names = ["embedding", *(f"{i}.{name}" for i in range(LAYERS) for name in core.IN_LAYER), "norm", "logits", core.AS_RUN]
    for one in found["backends"]:
        assert one["within"] and one["first_bad"] is None and one["verdict"] == "within 0.0001" and not one["not_compared"]
        assert [probe["probe"] for probe in one["probes"]] == names
        assert all(probe["worst_relative"] < 1e-5 and probe["cosine"] > 1 - 1e-9 and len(probe["positions"]) == 40
                   for probe in one["probes"])
        assert one["decoded"]["first_difference"] is None and len(one["decoded"]["tokens"]) == parity.STEPS
        assert one["logits"]["top5"] == 1 and one["logits"]["kl_max"] < 1e-9


def test_transformers_as_the_reference(door):
    found = run(door, "--dtype", "float32", "--reference", "transformers")
    assert found["reference"].startswith("transformers ")
    for one in found["backends"]:
        assert one["within"], one["verdict"]
        kinds = {name.split(".")[-1] for name in one["not_compared"]}
        assert kinds == {"query_rope", "key_rope"} and len(one["probes"]) == 1 + 8 * LAYERS + 3
        assert one["decoded"]["first_difference"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_judged_as_such(dtype, door):
    wide = [name for name in BACKENDS if name != "cpu"]  # which computes in float32
    if not wide:
        pytest.skip("neither mlx nor torch is here, and the cpu backend computes in float32")
    for one in run(door, "--dtype", dtype, backends=wide)["backends"]:
        assert one["dtype"] == dtype and one["tolerance"] == core.TOLERANCE[dtype] and one["within"]
        assert max(probe["worst_relative"] for probe in one["probes"]) > core.TOLERANCE["float32"]


def test_low_bit_weights(door):
    for one in run(door, path=low_bit())["backends"]:
        assert one["within"], one["verdict"]


def test_what_differences_are():
    """Against NumPy's own formulas on arrays small enough to see."""
    wanted = np.array([[3.0, 4.0], [0.0, 10.0]], np.float32)
    found = core.difference("x", wanted + np.array([[0.0, 0.5], [0.0, 0.0]], np.float32), wanted)
    assert (found.max_abs, found.mean_abs, found.worst) == (0.5, 0.125, 0)
    np.testing.assert_allclose(found.positions, [0.1, 0])
    assert found.relative == pytest.approx(0.5 / np.sqrt(125))
    broken = core.difference("x", np.full_like(wanted, np.nan), wanted)
    assert math.isinf(broken.peak) and math.isinf(broken.max_abs)


def test_agreement_is_scipys_or_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    wanted, found = rng.standard_normal((2, 5, 40)).astype(np.float32)
    a = core.agreement(found, wanted)
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (wanted, found))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert a.kl_mean == pytest.approx(float(kl.mean())) and a.kl_max == pytest.approx(float(kl.max()))
    tops = [torch.topk(torch.from_numpy(x), core.TOP).indices.tolist() for x in (wanted, found)]
    assert a.top == pytest.approx(np.mean([len({*x} & {*y}) / core.TOP for x, y in zip(*tops)]))
    first = int(np.flatnonzero(wanted.argmax(1) != found.argmax(1))[0])
    two = torch.topk(torch.from_numpy(wanted[first]).double(), 2).values
    assert a.first == first and a.margins[0] == pytest.approx(float(two[0] - two[1]))


# Planted faults


def planted(patch, backend: str, fault: str) -> None:
    """Make a backend's arithmetic wrong in one of the ways that happen."""
    import importlib

    home = {"mlx": "mlx_llama.mlx_native", "cuda": "cuda_fallback"}[backend]
    ops, cache = (importlib.import_module(f"{home}.{file}") for file in ("ops", "cache"))
    if backend == "mlx":
        import mlx.core as xp
    else:
        import torch as xp
    original = {name: getattr(ops, name) for name in ("rope", "attention", "rms_norm")}

    if fault == "rope pairing":  # neighbours in place of halves
        def rope(x, table):
            half = x.shape[-1] // 2
            order = [i // 2 + half * (i % 2) for i in range(2 * half)]
            back = [order.index(i) for i in range(2 * half)]
            return original["rope"](x[..., back], table)[..., order]

        patch.setattr(ops, "rope", rope)
    elif fault == "offset after the prompt":
        init = cache.View.__init__

        def shifted(self, cache, tokens, index_pos):
            init(self, cache, tokens, index_pos)
            if index_pos:
                self.tables = tuple(part[index_pos - 1:index_pos - 1 + tokens.shape[1]] for part in cache.tables)

        patch.setattr(cache.View, "__init__", shifted)
    elif fault == "stale row":  # of the values in layer 1, of the prompt's last token
        append = cache.View.append

        def stale(self, layer, key, value):
            append(self, layer, key, value)
            if layer == 1 and self.index_pos == 0:
                last = key.shape[2] - 1
                self.values[1][:, :, last:last + 1] = self.values[1][:, :, 2:3]

        patch.setattr(cache.View, "append", stale)
    elif fault == "no scale":
        patch.setattr(ops, "attention", lambda q, k, v, scale, mask=None: original["attention"](q, k, v, 1.0, mask))
    elif fault == "half norm":
        def norm(x, weight, eps):
            half = x.astype(xp.float16) if backend == "mlx" else x.to(xp.float16)
            mean = (half * half).mean(-1, keepdims=True)
            wrong = half * xp.rsqrt(mean + eps)
            return (wrong.astype(x.dtype) if backend == "mlx" else wrong.to(x.dtype)) * weight

        patch.setattr(ops, "rms_norm", norm)


PLACES = {  # fault: the first probe that is off, and at how many of the last positions
    "rope pairing": ("0.query_rope", None), "offset after the prompt": ("0.query_rope", 16), "stale row": ("1.attention", 17),
    "no scale": ("0.attention", None), "half norm": ("0.attention_norm", None)}


@pytest.mark.parametrize("fault", PLACES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_a_planted_fault_is_named(backend, fault, door, monkeypatch):
    probe, last = PLACES[fault]
    assert run(door, "--dtype", "float32", "--no-compile", backends=[backend])["backends"][0]["within"]
    planted(monkeypatch, backend, fault)
    (one,) = run(door, "--dtype", "float32", "--no-compile", backends=[backend], expect=1)["backends"]
    assert not one["within"] and one["first_bad"] == probe, one["verdict"]
    assert f"OUTSIDE: first at probe {probe}," in one["verdict"]
    if last:
        errors = next(each["positions"] for each in one["probes"] if each["probe"] == probe)
        assert max(errors[:-last]) < 1e-5 < max(errors[-last:])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_swapped_heads_are_named(backend, door, monkeypatch):
    from mlx_llama.core.backends import selection as backends

    original = backends.Backend.load

    def swapped(self, checkpoint, dtype="auto", **given):
        if self.name == backend:
            query = checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"]
            bits = query.bits.copy()
            bits[:16], bits[16:32] = query.bits[16:32], query.bits[:16]
            checkpoint.tensors[query.name] = type(query)(query.name, query.dtype, query.shape, bits)
        return original(self, checkpoint, dtype, **given)

    monkeypatch.setattr(backends.Backend, "load", swapped)
    (one,) = run(door, "--dtype", "float32", backends=[backend], expect=1)["backends"]
    assert one["first_bad"] == "1.query", one["verdict"]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_a_wrong_group_scale_is_named(backend, door, monkeypatch):
    from mlx_llama.core.backends import selection as backends

    original = backends.Backend.load

    def wrong(self, checkpoint, dtype="auto", **given):
        if self.name == backend:
            down = checkpoint.tensors["model.layers.2.mlp.down_proj.weight"]
            blocks = down.blocks.copy().reshape(down.shape[0], -1, 34)
            blocks[5, 1, :2] = (blocks[5, 1, :2].view(np.float16) * 3).view(np.uint8)
            down.blocks = blocks.reshape(down.blocks.shape)
        return original(self, checkpoint, dtype, **given)

    monkeypatch.setattr(backends.Backend, "load", wrong)
    (one,) = run(door, "--dtype", "float32", backends=[backend], expect=1, path=low_bit())["backends"]
    assert one["first_bad"] == "2.ffn", one["verdict"]


def test_a_decode_step_that_computes_something_else_is_found(door, monkeypatch):
    """What no probe sees: the step that the engine decodes with."""
    from cpu_fallback.model import Llama

    step = Llama.step

    def wrong(self, token, index_pos, cache, sampler):
        found = step(self, token, index_pos, cache, sampler)
        return (found + 1) % self.config.vocab_size if index_pos == 53 and self.compiled is not None else found

    if not open_cpu().compiled:
        pytest.skip("there are no compiled kernels here: the cpu backend is the reference itself")
    monkeypatch.setattr(Llama, "step", wrong)
    (one,) = run(door, backends=["cpu"], expect=1)["backends"]
    assert one["first_bad"] is None and one["decoded"]["first_difference"] == 6 and not one["decoded"]["near_tie"]
    assert "the decode step computes something else" in one["verdict"]


def open_cpu():
    from mlx_llama import load

    return load(model(), backend="cpu").model


def test_a_near_tie_is_told_from_a_bug():
    class Twin:
        """An engine whose greedy tokens differ at one place."""

        def __init__(self, logits):
            self.row = np.array(logits, np.float32)

        def logits(self, tokens):
            return np.stack([self.row] * len(tokens))

    reference = np.array([1.0, 5.0, 4.9999, -3.0], np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "greedy", lambda llm, prompt, count: [1, 2, 0][:count])
        near = core.compare_decoded(Twin([1, 4.9999, 5, -3]), [7], [1, 1, 0], 1e-4, lambda tokens: reference)
        far = core.compare_decoded(Twin([1, 4.9999, 5, -3]), [7], [1, 1, 0], 1e-6, lambda tokens: reference)
    assert near.first == far.first == 1 and near.is_tie and not far.is_tie
    assert near.margins == pytest.approx((1e-4, 1e-4), rel=0.02)


# The page


def test_the_page_is_whole_and_self_contained(door, tmp_path):
    page = tmp_path / "p.html"
    run(door, "--html", page, "--tokens", "100")
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("</svg>") == 2 * len(BACKENDS) and not re.search(r"https?://|src=|href=", text)
    assert text.count("<polyline") == 10 * len(BACKENDS) and 'class="within"' in text
    import html.parser

    class Reader(html.parser.HTMLParser):
        open: list[str] = []

        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                self.open.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    reader = Reader()
    reader.feed(re.sub(r"<style>.*?</style>", "", text, flags=re.S))
    assert reader.open == []


# Traces


def test_a_trace_is_checked_on_every_backend(door, tmp_path):
    file = tmp_path / "t.json"
    assert door(parity.main, "--model", model(), "--record", file, "--tokens", "30").code == 0
    for dtype in ("float32", "auto"):
        rows = run(door, "--check", file, "--dtype", dtype)["rows"]
        assert [row["backend"] for row in rows] == BACKENDS and all(row["within"] for row in rows)
        assert all(row["worst"] > 0 and row["first_greedy_difference"] is None for row in rows)


@pytest.mark.parametrize("fault", PLACES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_a_trace_names_a_planted_fault(backend, fault, door, monkeypatch, tmp_path):
    file = tmp_path / "t.json"
    door(parity.main, "--model", model(), "--record", file)
    planted(monkeypatch, backend, fault)
    (row,) = run(door, "--check", file, "--dtype", "float32", "--no-compile", backends=[backend], expect=1)["rows"]
    assert row["first_bad"] == PLACES[fault][0]


def test_the_guides_trace_holds_here():
    done = subprocess.run([sys.executable, "-m", "mlx_llama.parity", "--check", "--dtype", "float32", "--backends",
                           ",".join(BACKENDS)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("and the same greedy tokens") == len(BACKENDS)


def damaged(text: str):
    held = json.loads(text)

    def but(**fields):
        return json.dumps({**held, **fields})

    short = dict(held["sketches"], norm=base64.b64encode(base64.b64decode(held["sketches"]["norm"])[:-4]).decode())
    yield "", "is no trace"
    yield text[:len(text) // 2], "is no trace"
    yield "[1, 2]", '"format"'
    yield "[" * 100_000, "is no trace"
    yield but(format="other"), '"format"'
    yield but(version=2), '"version" is 2'
    yield but(tokens=[1]), '"tokens"'
    yield but(tokens=[1, "2"]), '"tokens"'
    yield but(decoded=0), '"decoded" is 0'
    yield but(decoded=len(held["tokens"])), '"decoded"'
    yield but(greedy=None), '"greedy"'
    yield but(hash=5), '"hash"'
    yield but(widths={}), '"sketches" and "widths"'
    yield but(sketches=short), '"sketches.norm" must hold'
    yield but(sketches=dict(held["sketches"], norm="!!!")), '"sketches.norm" is not float32'
    yield but(top_ids=[[1]]), '"top_ids"'
    yield but(logsumexp=held["logsumexp"][:8]), '"logsumexp"'
    yield but(hash="0" * 64), "was recorded from m (hash 000000000000), and this is /"


def test_a_damaged_trace_is_named(door, tmp_path):
    file = tmp_path / "t.json"
    door(parity.main, "--model", model(), "--record", file, "--tokens", "8")
    count = 0
    for text, wanted in damaged(file.read_text()):
        file.write_text(text)
        done = door(parity.main, "--model", model(), "--check", file, "--backends", "cpu")
        assert done.code == 2 and done.out == "", wanted
        (line,) = [line for line in done.err.splitlines() if not line.startswith("running")]
        assert line.startswith(f"error: {file}: ") and wanted in line
        count += 1
    assert count == 18
    done = door(parity.main, "--model", model(), "--check", tmp_path / "none.json")
    assert done.code == 2 and "none.json: cannot be read" in done.err


def test_other_weights_are_another_checkpoint(tmp_path):
    from mlx_llama.core.proofs.trace import checkpoint_hash

    first = open_checkpoint(model())
    assert checkpoint_hash(first) == checkpoint_hash(open_checkpoint(model()))
    seen = {checkpoint_hash(first)}
    for given in (dict(dtype="bfloat16"), dict(rope_theta=5000.0), dict(seed=1)):
        seen.add(checkpoint_hash(open_checkpoint(
            make_checkpoint(tmp_path / str(len(seen)), num_hidden_layers=LAYERS, max_position_embeddings=256, **given))))
    assert len(seen) == 4


# The cache, determinism


def test_every_way_of_filling_a_cache(door):
    rows = run(door, "--verify-cache", "--dtype", "float32", "--tokens", "40")["rows"]
    assert len(rows) == 7 * len(BACKENDS) and all(row["within"] and row["relative"] < 1e-5 for row in rows)


STALE = {"trim": "after trim", "restore": "after save and load"}


@pytest.mark.parametrize("what", STALE)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_a_cache_that_forgets_is_found(what, backend, door, monkeypatch):
    import importlib

    cache = importlib.import_module({"mlx": "mlx_llama.mlx_native.cache", "cuda": "cuda_fallback.cache"}[backend]).Cache
    original = getattr(cache, what)
    inference = contextlib.nullcontext if backend == "mlx" else importlib.import_module("torch").inference_mode

    def wrong(self, given):
        original(self, given)
        if self.length > 3:
            with inference():
                self.keys[0][:, :, 2:3] = self.keys[0][:, :, 1:2]

    monkeypatch.setattr(cache, what, wrong)
    rows = run(door, "--verify-cache", "--dtype", "float32", backends=[backend], expect=1)["rows"]
    bad = [row["way"] for row in rows if not row["within"]]
    assert STALE[what] in bad and "in chunks of 12" not in bad and "token by token" not in bad


def test_the_same_bits_here_and_in_fresh_processes(door):
    rows = run(door, "--repeat", "2", "--tokens", "12")["rows"]
    assert all(row["within"] and row["runs"] == 4 for row in rows) and len(rows) == len(BACKENDS)


def test_the_operation_that_differs_is_named(door, monkeypatch):
    from cpu_fallback import ops

    original, calls = ops.swiglu, iter(range(10**9))
    monkeypatch.setattr(ops, "swiglu", lambda x: original(x) * (1 + 1e-6 * (next(calls) % 7 == 3)))
    (row,) = run(door, "--repeat", "2", "--tokens", "12", "--no-compile", backends=["cpu"], expect=1)["rows"]
    assert row["first_difference"].split(".")[-1] == "ffn" and row["run"] == 2 and not row["in_a_fresh_process"]
    assert "differs first at" in parity_report.repeated(row)


# Perplexity


@pytest.mark.parametrize("window, stride", [(64, 32), (50, 49), (40, 7), (256, 128)])
def test_perplexity_is_that_of_transformers(window, stride, door, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    text = " ".join(["Once upon a time there was a little llama who lived on a hill."] * 9)
    (tmp_path / "t.txt").write_text(text)
    found = run(door, "--perplexity", tmp_path / "t.txt", "--ctx-size", str(window), "--stride", str(stride), "--dtype", "float32")
    tokens = open_checkpoint(model()).tokenizer.encode(text, add_bos=True)
    assert found["tokens"] == len(tokens) > 100
    peer, ids = AutoModelForCausalLM.from_pretrained(model(), dtype=torch.float32), torch.tensor([tokens])
    total, before = 0.0, 0
    for begin in range(0, len(tokens), stride):  # as in https://huggingface.co/docs/transformers/perplexity
        end = min(begin + window, len(tokens))
        labels = ids[:, begin:end].clone()
        labels[:, :-(end - before)] = -100
        with torch.no_grad():
            loss = peer(ids[:, begin:end], labels=labels).loss
        total += float(loss) * int((labels[:, 1:] != -100).sum())
        before = end
        if end == len(tokens):
            break
    wanted = math.exp(total / (len(tokens) - 1))
    for row in found["rows"]:
        assert row["perplexity"] == pytest.approx(wanted, rel=1e-3)
        assert row["perplexity"] == pytest.approx(wanted, rel=1e-5)


# Bad input


@pytest.mark.parametrize("arguments, wanted", [
    (["--backends", "tpu"], "--backends 'tpu': must be some of mlx, cpu, cuda"),
    (["--backends", ","], "--backends"),
    (["--tokens", "1"], "--tokens '1': must be a whole number, 2 to 256"),
    (["--tokens", "many"], "--tokens 'many'"),
    (["--prompt", ""], "--prompt: 1 token is too few"),
    (["--prompt", "a " * 600, "--backends", "cpu"], "do not fit the context of 256: give --tokens"),
    (["--repeat", "1"], "--repeat '1': must be a whole number, 2 to 1000"),
    (["--stride", "5"], "--stride is for --perplexity"),
    (["--verify-cache", "--html", "x.html"], "--html has no meaning with --verify-cache"),
    (["--check", "x", "--prompt", "p"], "--prompt has no meaning with --check"),
    (["--record", "/nowhere/x", "--tokens", "4"], "/nowhere/x: cannot be written"),
    (["--record", "x", "--dtype", "float16"], "a trace is recorded at float32"),
    (["--html", "/nowhere/x.html", "--backends", "cpu", "--tokens", "4"], "--html /nowhere/x.html: cannot be written"),
    (["--perplexity", "/nowhere/t.txt"], "/nowhere/t.txt: cannot be read"),
    (["--perplexity", "-", "--backends", "cpu"], "-: has 1 tokens, a perplexity needs at least 2"),
    (["--perplexity", "-", "--ctx-size", "10", "--stride", "10"], "--stride '10': must be a whole number, 1 to 9"),
    (["--perplexity", "-", "--ctx-size", "300"], "--ctx-size '300': must be a whole number, 2 to 256"),
    (["--verify-cache", "--tokens", "5"], "--verify-cache needs at least 8 tokens"),
    (["--dtype", "int8"], "--dtype 'int8'"),
    (["--backends", "cpu", "--device", "gpu"], "the cpu backend has no GPU"),
])
def test_bad_input_gets_one_line(arguments, wanted, door):
    done = door(parity.main, "--model", model(), *arguments)
    lines = [line for line in done.err.splitlines() if not line.startswith(("running", "("))]
    assert done.code == 2 and done.out == "" and len(lines) == 1, done.err
    assert lines[0].startswith("error: ") and wanted in lines[0]


def test_two_modes_at_once_are_refused(door):
    with pytest.raises((SystemExit, LlamaError)):
        parity.main(["--verify-cache", "--repeat", "2"])


def test_the_table_for_people(door):
    done = door(parity.main, "--model", model(), "--backends", "cpu", "--tokens", "20")
    assert done.code == 0 and "20 tokens, the last 10 one by one, against NumPy at float32" in done.out
    assert "all 24 greedy tokens are the same" in done.out and "within 0.0001" in done.out
    assert max(map(len, done.out.splitlines())) <= 110
