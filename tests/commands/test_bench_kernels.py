"""mlx_llama.bench --kernels: candidates for the kernels of decoding, and the table that ships."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from llvmlite import binding as llvm

from cpu_fallback.kernels import target as targets
from mlx_llama import load
from mlx_llama.bench import candidates, command as bench
from mlx_llama.core.files.quantized import GGUF_FORMATS

FLAGS = ("--kernels", "--backend", "cpu")


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A copy of the table, and short measurements of two candidates."""
    copy = tmp_path / "prefetches.json"
    shutil.copy(targets.PREFETCHES, copy)
    for module in (targets, candidates):
        monkeypatch.setattr(module, "PREFETCHES", copy)
    monkeypatch.setattr(candidates, "NBYTES", 1 << 20)
    monkeypatch.setattr(candidates, "ROUNDS", 1)
    monkeypatch.setattr(candidates, "CANDIDATES", ((), ((1, 512),)))
    return copy


@pytest.mark.slow
def test_every_format_is_measured_and_the_best_saved(table, capsys):
    before = json.loads(table.read_text())
    assert bench.main([*FLAGS, "--json", "--save", "--threads", "1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    named = {name for names in figures["formats"] for name in names.split(", ")}
    assert named == {*GGUF_FORMATS, "F16", "BF16", "F32"}
    assert all(
        len(rates) == len(figures["candidates"]) and min(rates) > 0
        for rates in figures["formats"].values()
    )
    wanted = np.exp(np.log(list(figures["formats"].values())).mean(0))
    assert figures["mean"] == pytest.approx(wanted.tolist())
    # One round: its ratios are those of the figures.
    assert figures["best"] == int(np.argmax(wanted))
    chosen = {
        name: best
        for name, rates in figures["formats"].items()
        if rates[best := int(np.argmax(rates))] >= candidates.MARGIN * rates[figures["best"]]
    }
    assert figures["best_own"] == chosen
    processor = llvm.get_host_cpu_name()
    after = json.loads(table.read_text())
    assert after[processor].pop(figures["target"])["any"] == figures["candidates"][figures["best"]]
    before.setdefault(processor, {}).pop(figures["target"], None)
    assert after == before
    targets._best.cache_clear()
    target = targets.build_target(figures["target"])
    for name, layout in candidates.layouts_by_format().items():
        wanted = figures["candidates"][chosen.get(name, figures["best"])]
        assert [list(place) for place in target.prefetch(layout.name)] == wanted


def test_the_text_names_the_processor_and_the_choice(table, capsys):
    assert bench.main([*FLAGS, "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert llvm.get_host_cpu_name() in text and "best here: " in text and "Q4_K" in text
    assert json.loads(table.read_text()) == json.loads(targets.PREFETCHES.read_text())


@pytest.mark.slow
def test_prefetches_change_no_bit(monkeypatch):
    prompt, answers = list(range(5, 45)), []
    for prefetch in ((), ((1, 1024), (2, 3072)), ((0, 4096),)):
        monkeypatch.setattr(
            targets, "find_prefetches", lambda processor, name: ((("any", prefetch),), True)
        )
        llm = load(backend="cpu", threads=1)
        tokens = list(llm.generate(prompt, max_tokens=20).tokens)
        answers.append((llm.logits(prompt).tobytes(), tokens))
    assert answers[1:] == answers[:1] * 2


def test_a_table_that_cannot_be_written_is_told(door, table, monkeypatch):
    def refuse(path, content, **args):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(candidates, "write_file", refuse)
    done = door(bench.main, *FLAGS, "--save", "--threads", "1")
    assert done.code == 2 and "prefetches" in done.err and "Permission denied" in done.err
