"""The bench's rows: what is run, and the columns of llama-batched-bench."""

from __future__ import annotations

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from cases.bench import check_curve, parse_table
from rows_toy import CONFIG, ToyBackend, ToyModel

from mlx_llama.bench import command as bench, report as bench_report
from mlx_llama.bench.measure import Batch, BatchRow, Loaded, measure, measure_batches
from mlx_llama.bench.profile import SKIPPED, TOKENS, measure_host
from mlx_llama.core.backends.selection import Backend

# From llama.cpp's README of its batched-bench.
PUBLISHED = """
|   128 |    128 |    1 |    256 |    0.108 |  1186.64 |    3.079 |    41.57 |    3.187 |    80.32 |
|   128 |    128 |    2 |    512 |    0.198 |  1295.19 |    5.029 |    50.90 |    5.227 |    97.95 |
|   128 |    128 |    4 |   1024 |    0.373 |  1373.96 |    6.878 |    74.44 |    7.251 |   141.23 |
|   128 |    128 |    8 |   2048 |    0.751 |  1363.27 |    7.344 |   139.43 |    8.095 |   252.99 |
|   128 |    256 |   16 |   6144 |    1.569 |  1304.93 |   18.073 |   226.64 |   19.642 |   312.80 |
"""
HEADER = ["PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"]


def loaded(runs_ahead: bool = False, backend=None) -> Loaded:
    checkpoint = dict(name="toy", config=CONFIG, nbytes=10**6, tensors={}, formats="")
    return Loaded(SimpleNamespace(**checkpoint), backend or ToyBackend(runs_ahead), ToyModel(), 0.5)


@pytest.mark.parametrize("line", PUBLISHED.split("\n")[1:-1])
def test_columns_are_those_of_llama_batched_bench(line):
    pp, tg, rows, n_kv, t_pp, s_pp, t_tg, s_tg, t, s = map(float, line.strip("|").split("|"))
    figures = BatchRow(Batch(int(pp), int(tg), int(rows)), [(t_pp, t_tg)]).figures()
    assert [figures[name] for name in ("pp", "tg", "pl", "n_kv")] == [pp, tg, rows, n_kv]
    assert figures["t"] == pytest.approx(t, abs=1.1e-3)
    rounding = 0.0006 / t_pp  # their times have three decimals, their speeds come from microseconds
    assert figures["speed_pp"] == pytest.approx(s_pp, rel=rounding)
    assert (figures["speed_tg"], figures["speed"]) == pytest.approx((s_tg, s), rel=1e-3)


def test_medians_and_their_spread():
    figures = BatchRow(Batch(10, 20, 4), [(1.0, 2.0), (2.0, 8.0), (3.0, 4.0)]).figures()
    assert (figures["t_pp"], figures["t_tg"], figures["t"]) == (2.0, 4.0, 7.0)
    assert (figures["speed_pp"], figures["speed_tg"]) == (20.0, 20.0)
    assert (figures["speed_tg_min"], figures["speed_tg_max"]) == (10.0, 40.0)


@pytest.mark.slow
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_batch_is_one_step_for_all_rows(runs_ahead):
    it = loaded(runs_ahead)
    [row] = measure_batches(it, [Batch(520, 3, 2)], 2)
    once = [((1, 512), [0]), ((1, 8), [512])] * 2 + [((2, 1), [520 + i] * 2) for i in range(3)]
    # the first run is not timed
    assert [(shape, starts) for shape, starts, _ in it.model.calls] == 3 * once
    assert [rows for _, _, rows in it.model.calls[:4]] == [[i // 2] for i in range(4)]
    assert len(row.seconds) == 2 and np.min(row.seconds) > 0
    ahead = ["launch", "launch", "read", "launch", "read", "read"]
    steps = ahead if runs_ahead else ["launch", "read"] * 3
    assert it.backend.events == 3 * (["launch"] * 4 + ["read"] + steps)


def test_rows_decode_what_they_decode_alone():
    """The tokens of a step are those of the rows' own texts, also where the step ran ahead."""
    from mlx_llama.core.backends.decoding import decode, prefill

    prompts = [[1, 2, 3], [4], [5, 6]]

    def run(chosen, runs_ahead):
        it = loaded(runs_ahead)
        cache = it.model.make_cache(20, rows=len(chosen))
        first = prefill(it.backend, it.model, cache, dict(enumerate(chosen)))
        return np.array([first, *decode(it.backend, it.model, cache, first, 5)]).T.tolist()

    alone = [run([prompt], False)[0] for prompt in prompts]
    assert run(prompts, False) == run(prompts, True) == alone


def test_rows_that_do_not_fit_are_refused_before_their_prompts(monkeypatch):
    from mlx_llama.core.errors import ContextError

    it = loaded()
    monkeypatch.setattr("rows_toy.ToyCache.free_memory", lambda self: 1 << 20)
    with pytest.raises(ContextError, match="of memory are free"):
        measure_batches(it, [Batch(128, 64, 400)], 1)
    assert it.model.calls == []


def whole(runs_ahead: bool = False, primitives=None) -> Loaded:
    """A stand-in with the modules of a backend."""
    toy = ToyBackend(runs_ahead)
    runtime = SimpleNamespace(
        **vars(toy.runtime)
        | {
            "launch": toy.launch,
            "read": toy.read,
            "runs_ahead": lambda device: toy.runs_ahead,
            "device_name": str,
            "bandwidth": lambda device: 1e9,
            "primitives": lambda arrays: primitives,
        }
    )
    sampling = SimpleNamespace(SamplingBatch=lambda options, device: toy.sampling_batch(options))
    return loaded(backend=Backend("toy", "toy", runtime, None, sampling))


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_hosts_time_of_a_step_of_all_rows(rows):
    it = whole(runs_ahead=True, primitives=7)
    host = measure_host(it, 256, rows)
    steps = [shape for shape, _, _ in it.model.calls if shape == (rows, 1)]
    assert host["rows"] == rows and host["tokens"] == TOKENS <= len(steps) - SKIPPED
    assert host["primitives"] == 7
    assert host["step_us"] > 0 and host["launch_us"] > 0 and host["thread_us"] > 0
    line = bench_report.host_line(host)
    assert ("per token" if rows == 1 else f"per step of {rows} rows") in line
    short = measure_host(whole(), rows + 8, rows)  # limited by the context
    assert short["tokens"] == 2 and short["host_computes"]


def test_one_prompt_runs_on_the_scheduler_and_from_an_empty_cache():
    it = whole()
    figures = measure(it, 20, 8, 3)
    calls = [(shape, starts) for shape, starts, _ in it.model.calls]
    assert calls == 4 * [((1, 20), [0]), *(((1, 1), [20 + i]) for i in range(7))]
    assert figures["evaluations_per_token"] == 1 and figures["launches_per_token"] == 1
    assert figures["read_bytes_per_token"] == 4
    assert figures["bytes_per_token"] == 24 * 2 * 2 * 1 * 4 * 4  # keys and values of 24 positions


@pytest.fixture
def run(door, toy, monkeypatch):
    """run(*arguments): the bench on the stand-in."""
    monkeypatch.setattr(bench, "load", lambda checkpoint, backend, options: loaded())
    return lambda *arguments: door(
        bench.main, "--model", toy, "--backend", "cpu", "-r", "1", *" ".join(arguments).split()
    )


def test_every_format_has_every_row(run):
    asked = "-npp 8,16 -ntg 4 -npl 1,2,8 -o"
    wanted = [[pp, 4, rows, rows * (pp + 4)] for pp in (8, 16) for rows in (1, 2, 8)]
    table = json.loads(run(asked, "json").out)
    assert [[row[name] for name in ("pp", "tg", "pl", "n_kv")] for row in table["rows"]] == wanted
    for row in table["rows"]:
        assert row["speed_tg"] == pytest.approx(row["pl"] * row["tg"] / row["t_tg"])
    listed = list(csv.DictReader(io.StringIO(run(asked, "csv").out)))
    assert [[int(row[name]) for name in ("pp", "tg", "pl", "n_kv")] for row in listed] == wanted
    table = parse_table(run(asked, "md").out)
    assert table[0][3:] == HEADER and [list(map(int, row[3:7])) for row in table[2:]] == wanted
    assert {len(row) for row in table} == {13}
    lines = run(asked, "text").out.splitlines()
    assert lines[1].split() == " ".join(HEADER).split()
    assert [list(map(int, line.split()[:4])) for line in lines[2:8]] == wanted
    assert len({len(line) for line in lines[1:8]}) == 1  # columns to the right


def test_names_of_both_programs(run):
    ours, other = (
        json.loads(run(words, "-o json").out)["rows"][0]
        for words in ("-b 2 -p 8 -n 4", "-npl 2 -npp 8 -ntg 4")
    )
    for row in (ours, other):
        assert [row[name] for name in ("pp", "tg", "pl")] == [8, 4, 2]


def test_keys_and_values_in_8_bits_reach_the_model_and_the_title(door, toy, monkeypatch):
    seen = {}

    def load(checkpoint, backend, options):
        seen["cache_bits"] = options.cache_bits
        it = loaded()
        it.model.cache_bits = options.cache_bits
        return it

    monkeypatch.setattr(bench, "load", load)
    flags = f"--model {toy} --backend cpu -b 2 -p 4 -n 2 -r 1 --cache-bits 8"
    done = door(bench.main, *flags.split())
    assert seen == {"cache_bits": 8} and "keys and values in 8 bits" in done.out


def test_a_picture_of_the_throughput(run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.png"
    done = run("-b 1,2,4 -p 8 -n 4 --plot", str(file))
    assert done.code == 0 and done.err == f"wrote {file}\n"
    check_curve(image.open(file))
    assert run("-b 1,2,4 -p 8,12 -n 4 --plot", str(tmp_path / "rows.svg")).code == 0
    text = (tmp_path / "rows.svg").read_text(encoding="utf-8")
    assert "<!-- rows decoded together -->" in text
    assert "<!-- 4 tokens after 12, each row -->" in text
    assert all(f"<!-- {rows} -->" in text for rows in (1, 2, 4))
