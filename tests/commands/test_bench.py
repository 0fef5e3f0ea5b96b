"""The bench runs on every backend with consistent figures. Speed is not tested."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
from backends.evaluations import counted
from cases.bench import check_curve, flags, parse_table
from making import make_checkpoint

from mlx_llama.bench import (
    command as bench,
    profile as bench_profile,
    report as bench_report,
)
from mlx_llama.bench.measure import Case, Row, load, measure, measure_rows
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import LoadOptions, resolve

pytestmark = pytest.mark.usefixtures("known_memory")


@pytest.fixture
def loaded(backend, toy):
    return load(open_checkpoint(toy), backend, LoadOptions(dtype="float32"))


def test_figures(loaded):
    checkpoint = loaded.checkpoint
    figures = measure(loaded, 20, 8, 2)
    assert figures["evaluations_per_token"] == 1 and figures["weights_bytes"] == checkpoint.nbytes
    for name in (
        "prompt_tps decode_tps first_token_seconds load_seconds peak_memory_bytes bandwidth"
    ).split():
        assert figures[name] > 0, name
    # all rows of the embedding but one, and keys and values of 20 + 4 positions, all float32
    assert figures["bytes_per_token"] == checkpoint.nbytes - 383 * 64 * 4 + 2 * 2 * 2 * 16 * 24 * 4
    assert figures["bandwidth_share"] == pytest.approx(
        figures["decode_tps"] * figures["bytes_per_token"] / figures["bandwidth"], rel=0.5
    )
    assert figures["launches_per_token"] == 1 and figures["read_bytes_per_token"] == 4
    assert "1 per token (1 launched, 1 waited for, 4 bytes read)" in bench_report.single(figures)


CASES = [Case("pp", 9), Case("pp", 9, 30), Case("tg", 5), Case("tg", 5, 30)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_runs_the_steps_of_its_name(case, loaded, monkeypatch):
    """Compare the position and number of tokens of each step, and the framework's waits."""
    asked, step = [], loaded.model.step

    def noted(tokens, index_pos, *rest, **named):
        asked.append((np.shape(tokens)[1], *np.ravel(index_pos)))
        return step(tokens, index_pos, *rest, **named)

    monkeypatch.setattr(loaded.model, "step", noted)
    if loaded.backend.name == "cpu":
        [row] = measure_rows(loaded, [case], 2)
    else:
        with counted(loaded.backend, monkeypatch) as count:
            [row] = measure_rows(loaded, [case], 2)
        assert count["wait"] == len(asked)
    filling = [(case.depth, 0)] if case.depth else []
    once = [(9, case.depth)] if case.kind == "pp" else [(1, case.depth + i) for i in range(5)]
    assert asked == filling + 3 * once  # the first run is not timed
    assert np.shape(row.per_token) == (2, len(once)) and np.min(row.per_token) > 0


def test_storage_grows_with_the_rows_only(loaded, monkeypatch):
    """Measure a row without the storage of a longer one before it."""
    made = []
    monkeypatch.setattr(
        loaded.model,
        "make_cache",
        lambda capacity, make=loaded.model.make_cache: made.append(make(capacity)) or made[-1],
    )
    measure_rows(
        loaded, [Case("pp", 200), Case("tg", 2), Case("tg", 2, 100), Case("tg", 2, 220)], 1
    )
    assert [cache.length for cache in made] == [0, 220]
    assert [Case("tg", 2).name, Case("tg", 2, 220).name] == ["tg2", "tg2 @ d220"]


def test_figures_of_a_row():
    row = Row(Case("tg", 4, 10), [[0.5] * 4, [0.25] * 4, [1.0, 1.0, 1.0, 5.0]]).figures()
    assert (row["tps"], row["tps_min"], row["tps_max"], row["seconds"]) == (2.0, 0.5, 4.0, 2.0)
    assert (row["test"], row["n_prompt"], row["n_gen"], row["n_depth"]) == ("tg4 @ d10", 0, 4, 10)


def shown(door, toy, kind: str, *more: str) -> str:
    asked = "-p 8,12 -p 4 -n 2,3 -d 0,40 -r 2 -o".split()
    done = door(bench.main, "--model", toy, *asked, kind, *more)
    assert done.code == 0, done.err
    return done.out


NAMES = (
    "pp8,pp12,pp4,pp8 @ d40,pp12 @ d40,pp4 @ d40,tg2,tg3,tg2 @ d40,tg3 @ d40"  # of shown
).split(",")


@pytest.mark.slow_for("cuda")
def test_every_format_has_every_row(door, toy, backend):
    report = json.loads(shown(door, toy, "json", "--host", *flags(backend)))
    assert [row["test"] for row in report["rows"]] == NAMES and report["repetitions"] == 2
    for row in report["rows"]:
        assert 0 < row["tps_min"] <= row["tps"] <= row["tps_max"] and len(row["samples_tps"]) == 2
        count = row["n_prompt"] + row["n_gen"]
        assert 0.8 * count / row["tps_max"] <= row["seconds"] <= 1.2 * count / row["tps_min"]
    listed = list(csv.DictReader(io.StringIO(shown(door, toy, "csv", "--host", *flags(backend)))))
    assert [row["test"] for row in listed] == NAMES
    assert {row["backend"] for row in listed} == {backend.name}
    for row in listed:
        assert 0 < float(row["tps_min"]) <= float(row["tps"]) <= float(row["tps_max"])
        assert float(row["host_step_us"]) > 0
        assert row["host_primitives"].isdigit() == (backend.name == "mlx")
    table = parse_table(shown(door, toy, "md", *flags(backend)))
    assert [row[table[0].index("test")] for row in table[2:]] == NAMES
    assert {len(row) for row in table} == {8}
    lines = shown(door, toy, "text", *flags(backend)).splitlines()
    assert [line[:12].strip() for line in lines[2:12]] == NAMES


def test_notices_are_said_once(door, toy):
    for kind in ("text", "md"):
        out = shown(door, toy, kind, "--backend", "cpu", "--threads", "1")
        assert out.count("note: ") == out.count("1 thread") == 1
    report = json.loads(shown(door, toy, "json", "--backend", "cpu", "--threads", "1"))
    assert report["notices"] == ["1 thread"]


def test_one_prompt_and_one_answer_are_reported_as_ever(door, toy):
    arguments = ("--model", toy, "--backend", "cpu", "-p", "8", "-n", "4", "-r", "1")
    for json_flag in (["--json"], ["-o", "json"], ["-d", "0", "--json", "-o", "json"]):
        figures = json.loads(door(bench.main, *arguments, *json_flag).out)
        assert figures["generate"] == 4 and figures["bandwidth_share"] > 0 and "rows" not in figures
    assert "of the bound" in door(bench.main, *arguments, "--host").out
    assert "tg4" in door(bench.main, *arguments, "-o", "md").out


def test_host(loaded, monkeypatch):
    order, step, read = [], loaded.model.step, loaded.backend.runtime.read
    monkeypatch.setattr(
        loaded.model, "step", lambda *rest, **named: (order.append("step"), step(*rest, **named))[1]
    )
    monkeypatch.setattr(
        loaded.backend.runtime, "read", lambda tokens: (order.append("read"), read(tokens))[1]
    )
    host = bench_profile.measure_host(loaded, 256)
    assert order == ["step", "read"] * (len(order) // 2)  # with a step ahead, launches would wait
    assert host["step_us"] > 0 and host["tokens"] == bench_profile.TOKENS
    assert host["host_computes"] == (
        loaded.backend.name == "cpu" or str(loaded.backend.device) == "cpu"
    )
    line = bench_report.host_line(host)
    if loaded.backend.name == "mlx":
        assert host["launch_us"] > 0 and host["thread_us"] > 0
        assert f"{host['primitives']} primitives" in line
    else:
        assert host["primitives"] is None and "primitives" not in line
        assert (host["thread_us"] is None) == host["host_computes"]
        assert ("computes the step itself" in line) == host["host_computes"]
    assert bench_profile.measure_host(loaded, 8)["tokens"] == 1  # limited by the context


def test_primitives_are_those_of_one_step(tmp_path):
    mx = pytest.importorskip("mlx.core")
    from mlx_llama.mlx_native import runtime

    x = mx.array([1.0, 2.0])
    mx.eval(x)
    exported = []  # MLX's own list of the same graph, by its exporter
    function = lambda x: mx.exp(x * x) @ mx.sin(x)  # noqa: E731
    mx.export_function(lambda part: exported.append(part["type"]), function, x)
    assert runtime.primitives([function(x)]) == exported.count("primitive") > 3
    assert runtime.primitives([x]) == 0
    # Each layer adds the same number; earlier tokens add none.
    backend = bench.select("mlx", "cpu")
    counts = []
    for layers in (1, 2, 4):
        folder = make_checkpoint(tmp_path / str(layers), num_hidden_layers=layers)
        checkpoint = open_checkpoint(folder)
        counts.append(bench_profile.measure_host(load(checkpoint, backend), 16)["primitives"])
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0
    text = io.StringIO()
    model = backend.load(checkpoint, "auto")
    sampling = backend.sampling_batch([resolve({"temperature": 0.0}).options])
    cache = model.make_cache(16)
    token = model.step(np.array([[1]], np.int32), 0, cache, sampling)
    mx.eval(token, cache.arrays())
    mx.export_to_dot(text, model.step(token, 1, cache, sampling), *cache.arrays())
    # The graph names arrays by letters in quotes and operations by numbers.
    ends = re.findall(r"^(\S+) -> (\S+)$", text.getvalue(), re.M)
    assert counts[2] == len({end for edge in ends for end in edge if end.isdigit()})


@pytest.mark.slow
def test_plot(door, toy, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    done = door(bench.main, *f"--model {toy} --backend cpu -p 4 -n 6 -r 1 --plot {file}".split())
    assert done.code == 0 and done.err == f"wrote {file}\n"
    check_curve(image.open(file))
    # Nine depths, from 0 to the end of the context of 256.
    assert re.findall(r"^tg6(?: @ d(\d+))?", done.out, re.M) == [
        "",
        *(str(250 * i // 8) for i in range(1, 9)),
    ]
    asked = f"--model {toy} --backend cpu -p 4 -n 6 -d 0,9 -r 1 --plot {tmp_path}/picture"
    for ending in ("svg", "pdf"):
        assert door(bench.main, *f"{asked}.{ending}".split()).code == 0
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert "<!-- decode time per token (ms) -->" in text and "tokens already in the cache" in text


def test_the_curve():
    rows = [
        Row(Case("pp", 4), [[1.0]]),
        Row(Case("tg", 4, 400), [[4e-3] * 4, [5e-3] * 4, [9e-3] * 4]),
        Row(Case("tg", 100), [[1e-3] * 50 + [2e-3] * 50]),
        Row(Case("tg", 2, 402), [[1e-3, 2e-3], [3e-3, 9e-3]]),
    ]
    curve = bench_report.curve(rows)
    assert curve[11].tolist()[::2] == pytest.approx([402.5, 2.5])
    assert len(curve) == 12 and curve[0].tolist() == [4.5, 1.0, 1.0, 1.0]
    assert curve[9].tolist() == [94.5, 2.0, 2.0, 2.0]
    assert curve[10].tolist()[:3:2] == [401.5, 5.0] and 4 <= curve[10][1] < 5 < curve[10][3] <= 9


def test_lengths_that_just_fit_run(door, toy):
    for arguments in ("-p 200 -n 56", "-p 8 -n 64 -d 192", "-p 8 -n 8 -d 0,192 -c 200"):
        flags = f"--model {toy} --backend cpu -r 1 {arguments}"
        assert door(bench.main, *flags.split()).code == 0


@pytest.mark.slow
def test_plot_without_its_library(door, toy, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_report.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "load", lambda *rest: pytest.fail("loaded"))
    done = door(bench.main, "--model", toy, "--backend", "cpu", "--plot", tmp_path / "x.png")
    assert done.code == 2 and "pip install matplotlib" in done.err
    assert len(done.err.splitlines()) == 1
