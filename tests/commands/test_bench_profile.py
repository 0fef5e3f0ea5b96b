"""The bench's profile: every backend, every format, sums and bytes; and flags that it refuses."""

from __future__ import annotations

import csv
import io
import json

import pytest
from cases.bench import flags, parse_table

from mlx_llama.bench import command as bench
from mlx_llama.bench.measure import Case, load
from mlx_llama.bench.profile import HOST, SAMPLING, Profiled, measure_profiles
from mlx_llama.core.backends.load_options import LoadOptions
from mlx_llama.core.backends.profile import ATTENTION, Profile
from mlx_llama.core.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("known_memory")
PRODUCTS = ("query, key, value", "attention output", "gate, up", "down", "head")


def profiled(door, toy, *arguments: str) -> str:
    done = door(bench.main, "--model", toy, "--profile", "-r", "2", *" ".join(arguments).split())
    assert done.code == 0, done.err
    return done.out


def test_a_token_and_a_prompt_on_every_backend(backend, door, toy):
    checkpoint = open_checkpoint(toy)
    report = json.loads(profiled(door, toy, "-p 9 -n 4 -d 0,30", "-o json", *flags(backend)))
    names = [profile["test"] for profile in report["profiles"]]
    assert names == ["pp9", "pp9 @ d30", "tg4", "tg4 @ d30"]
    weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].nbytes
    for profile in report["profiles"]:
        lines = {line["operation"]: line for line in profile["operations"]}
        between = {line["operation"]: line for line in profile["between"]}
        assert list(lines)[-1] == "head" and HOST in between
        assert (SAMPLING in between) == (not backend.runs_ahead)
        every = (*lines.values(), *between.values())
        assert sum(line["us"] for line in every) == pytest.approx(profile["us"])
        assert sum(line["share"] for line in every) == pytest.approx(1)
        # float32, whole panels
        assert sum(lines[name]["nbytes"] for name in PRODUCTS) == weights - embedding
        read = lines[ATTENTION]["nbytes"]
        if profile["n_gen"]:  # 4 tokens of 2 layers, 2 heads of 16 float32, keys and values
            assert read == (profile["n_depth"] + 2.5) * 2 * 2 * 2 * 16 * 4
        assert profile["nbytes"] == weights - embedding + (read or 0)
        for figure in (profile["slower_us"], lines["down"]["waiting_us"]):
            assert (figure is None) == (backend.name != "cpu")


def test_rows_are_one_step(backend, door, toy):
    lines = []
    for rows in (1, 4):
        text = profiled(door, toy, f"-b {rows} -n 4 -d 20 -o json", *flags(backend))
        [profile] = json.loads(text)["profiles"]
        lines.append({line["operation"]: line for line in profile["operations"]})
    assert profile["n_rows"] == 4
    assert lines[1][ATTENTION]["nbytes"] == 4 * lines[0][ATTENTION]["nbytes"]
    assert [profile["head"]["calls"] for profile in lines] == [1, 1]
    assert lines[0]["head"]["nbytes"] == lines[1]["head"]["nbytes"]
    flops = [profile["head"]["flops_per_second"] * profile["head"]["us"] for profile in lines]
    assert flops[1] == pytest.approx(4 * flops[0])


def test_a_sliding_window_bounds_what_attention_reads(tmp_path):
    from making import make_checkpoint

    from mlx_llama.core.backends.selection import select

    made = make_checkpoint(tmp_path / "m", architectures=["MistralForCausalLM"], sliding_window=7)
    loaded = load(open_checkpoint(made), select("cpu"), LoadOptions(dtype="float32"))
    [profile] = measure_profiles(loaded, [Case("tg", 2, 30)], [1], 1)
    read = profile.figures()["operations"][3]["nbytes"]
    assert read == 7 * loaded.model.make_cache(1).position_nbytes


def test_every_format_has_every_operation(door, toy):
    asked = "-p 9 -n 4 --backend cpu --threads 2 -o"
    report = json.loads(profiled(door, toy, asked, "json"))
    names = [
        line["operation"]
        for profile in report["profiles"]
        for line in (*profile["operations"], *profile["between"])
    ]
    assert len(names) == 2 * (12 + 4)
    listed = list(csv.DictReader(io.StringIO(profiled(door, toy, asked, "csv"))))
    assert [row["operation"] for row in listed] == names
    assert all(float(row["us"]) or row["operation"] for row in listed)
    table = parse_table(profiled(door, toy, asked, "md"))
    assert [row[0] for row in table if row[0] not in ("operation", "---")] == names
    assert {len(row) for row in table} == {8}
    text = profiled(door, toy, asked, "text")
    assert all(text.count(f"\n{name}  ") == names.count(name) for name in names)
    assert "us for slower threads" in text and "note: 2 threads" in text and "Gflop/s" in text
    assert "GB/s" in text


def test_figures_of_known_seconds():
    profile = Profile(slower=0.25, lost={"waking": 0.5})
    for _ in range(8):
        profile.add("down", 0.25, waiting=0.0625, nbytes=10**9, flops=125 * 10**6)
    profile.add(ATTENTION, 1.0)
    figures = Profiled(Case("tg", 4, 7), 2, 4, 4.0, 8e9, profile, 10**9).figures()
    down, attention = figures["operations"]
    assert (down["calls"], down["us"], down["share"], down["waiting_us"]) == (2, 5e5, 0.5, 125e3)
    assert down["nbytes"] == 2e9 and down["bytes_per_second"] == 4e9
    assert down["bandwidth_share"] == 0.5 and down["flops_per_second"] == 5e8
    assert attention["nbytes"] == 25e7 and attention["bytes_per_second"] == 1e9
    assert attention["flops_per_second"] is None
    assert [(line["operation"], line["us"]) for line in figures["between"]] == [
        ("waking", 125e3),
        (HOST, 125e3),
    ]
    assert figures["us"] == 1e6 and figures["nbytes"] == 2.25e9
    assert figures["bandwidth_share"] == 9e9 / 4 / 8e9
    assert (figures["slower_us"], figures["barriers_us"]) == (62500, 62500)


def test_the_lazy_graph_is_said_to_be_broken(door, toy):
    pytest.importorskip("mlx.core")
    out = profiled(door, toy, "-n 4 --backend mlx --device cpu")
    assert "an evaluation after each operation, which breaks the lazy graph: shares count" in out


def test_a_traced_step_is_not_profiled(toy):
    pytest.importorskip("mlx.core")
    from mlx_llama.core.backends.selection import select
    from mlx_llama.core.errors import BackendError

    model = select("mlx", "cpu").load(open_checkpoint(toy), compile=True)
    with pytest.raises(BackendError, match="load the model with `compile=False`"):
        model.profile()


def test_ops_are_restored(backend, toy):
    import importlib

    from mlx_llama.core.backends.selection import PACKAGES

    ops = importlib.import_module(f"{PACKAGES[backend.name]}.ops")
    before = dict(vars(ops))
    model = backend.load(open_checkpoint(toy), compile=False)
    with pytest.raises(ZeroDivisionError), model.profile():
        1 / 0
    assert vars(ops) == before
