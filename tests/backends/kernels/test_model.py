"""Models on the compiled path: close to NumPy's, which the parity tests compare with transformers,
and the same bits for any number of threads, any cut of the prompt and any batch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from backends.conftest import relative_error
from backends.kernels.models import LENGTH, MODELS, TOKENS, answer, load, model, plain
from cpu_fallback import kernels
from cpu_fallback.kernels import runner, workspace
from cpu_fallback.kernels.target import available
from mlx_llama.core.errors import ContextError

# ---- against NumPy


@pytest.mark.slow_for("head 128", "head 36")
@pytest.mark.parametrize("case", MODELS)
def test_every_model_is_numpys_at_float32(case):
    llama = model(case)
    assert llama.runner is not None and "NumPy" not in " ".join(llama.notices)
    wanted, slow = answer(plain(case))
    got, cache = answer(llama)
    assert relative_error(got, wanted) < 1e-5
    for row in range(3):
        for name in ("keys", "values"):
            assert relative_error(cache.state(row)[name], slow.state(row)[name]) < 1e-5
    # a cache that NumPy fills and kernels continue
    mixed, slow = llama.make_cache(LENGTH, 3), llama.make_cache(LENGTH, 3)
    for cache in (mixed, slow):
        plain(case).forward(TOKENS[:, :20], 0, cache)
    wanted = plain(case).forward(TOKENS[:, 20:], 20, slow)
    assert relative_error(llama.forward(TOKENS[:, 20:], 20, mixed), wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("bits,bound", [(16, 1e-3), (8, 0.2)])
@pytest.mark.parametrize("case", ["Q4_K_M", "Q8_0 tied"])
def test_fixed_point_activations_stay_within_a_bound(case, bits, bound):
    wanted, _ = answer(plain(case))
    got, _ = answer(model(case, activation_bits=bits))
    error = np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))
    assert 1e-7 < error < bound


def test_float_weights_ignore_activation_bits():
    np.testing.assert_array_equal(
        answer(model("odd widths", activation_bits=16))[0], answer(model("odd widths"))[0]
    )


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("case", ["head 36", "Q4_K_M"])
def test_every_target_runs_a_model(case, name, monkeypatch):
    wanted, _ = answer(plain(case))
    monkeypatch.setenv(kernels.VARIABLE, name)
    for bits, bound in ((32, 1e-5), (16, 1e-3)):
        llama = load(case, "auto", threads=2, activation_bits=bits)
        assert llama.runner.code.recipe.target.name == name
        got, _ = answer(llama)
        assert relative_error(got, wanted) < bound
        np.testing.assert_array_equal(answer(llama, cuts=(*range(1, LENGTH),))[0], got)


@pytest.mark.parametrize("how", ["variable", "llvmlite"])
def test_plain_numpy_gives_the_same_answers_and_a_notice(how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv(kernels.VARIABLE, "numpy")
        reason = "MLX_LLAMA_CPU_TARGET asks for it"
    else:
        monkeypatch.setitem(sys.modules, "llvmlite", None)
        monkeypatch.delenv(kernels.VARIABLE, raising=False)
        reason = "the package 'llvmlite' is not installed (pip install llvmlite)"
    for case in ("head 20", "Q4_K_M"):
        llama = load(case)
        assert llama.runner is None and llama.notices == (f"plain NumPy: {reason}",)
        np.testing.assert_array_equal(answer(llama)[0], answer(plain(case))[0])


# ---- the same bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, bits", [("odd widths", 32), ("many formats", 16), ("Q4_K_M", 16), ("Q4_K_M", 32)]
)
def test_the_bits_do_not_depend_on_threads_or_cuts(case, bits):
    alone, _ = answer(model(case, 1, bits))
    for threads in (1, 2, 3, 5):
        for cuts in ((), (1,), (16, 17), (5, 12, 36), tuple(range(1, LENGTH))):
            if threads == 1 or len(cuts) <= 3 or case == "Q4_K_M":
                got, _ = answer(model(case, threads, bits), cuts=cuts)
                np.testing.assert_array_equal(got, alone)


COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)  # tokens in one pass


@pytest.mark.slow_for("Q4_K_M-8")
@pytest.mark.parametrize(
    "case,bits,name",
    [
        (case, bits, available()[0])
        for case, bits in (("odd widths", 32), ("head 20", 32), ("Q4_K_M", 16), ("Q4_K_M", 32))
    ]
    # the narrowest target has other tiles
    + [pytest.param("Q4_K_M", bits, available()[-1], marks=pytest.mark.slow) for bits in (8, 16)],
)
def test_a_token_has_the_same_bits_in_every_tile(case, bits, name, monkeypatch):
    """Alone, and in one pass with up to 16 others; probes as well."""
    monkeypatch.setenv(kernels.VARIABLE, name)
    llama = load(case, "float32" if bits == 32 else "auto", threads=2, activation_bits=bits)
    tiles = llama.runner.code.recipe.target.tiles(low_bit=bits != 32)
    assert len(
        {next((tile for tile in tiles if tile >= count), tiles[-1]) for count in COUNTS}
    ) == len(tiles)
    alone, _ = answer(llama, TOKENS[:1], cuts=tuple(range(1, LENGTH)))
    for count in COUNTS:
        cache = llama.make_cache(LENGTH)
        llama.forward(TOKENS[:1, :5], 0, cache)
        got = llama.forward(TOKENS[:1, 5 : 5 + count], 5, cache, all_positions=True)
        np.testing.assert_array_equal(got, alone[:, 5 : 5 + count])
        cache.trim(5)
        seen: dict[str, np.ndarray] = {}
        llama.forward(
            TOKENS[:1, 5 : 5 + count], 5, cache, all_positions=True, probe=seen.__setitem__
        )
        np.testing.assert_array_equal(seen["logits"], alone[:, 5 : 5 + count])
        if count == 1:
            first = seen
        for probed in seen:
            np.testing.assert_array_equal(np.take(seen[probed], [0], axis=-2), first[probed])


def test_a_prompt_of_several_chunks_has_the_same_bits():
    llama, rng = model("many formats", 2, 16), np.random.default_rng(2)
    assert llama.config.max_position_embeddings >= 256
    tokens = rng.integers(0, 384, (2, 2 * workspace.CHUNK + 21)).astype(np.int32)
    whole, cache = answer(llama, tokens, capacity=600)
    last, _ = answer(llama, tokens, all_positions=False, capacity=600)
    np.testing.assert_array_equal(last[:, 0], whole[:, -1])
    chunk = workspace.CHUNK
    for cuts in ((chunk,), (chunk - 1, chunk + 1), (chunk + 1, 2 * chunk + 20)):
        np.testing.assert_array_equal(answer(llama, tokens, cuts, capacity=600)[0], whole)
    cuts = (chunk - 1, chunk, chunk + 1)
    single, _ = answer(llama, tokens, cuts, all_positions=False, capacity=600)
    np.testing.assert_array_equal(single, whole[:, [*(end - 1 for end in cuts), -1]])
    wanted, _ = answer(plain("many formats"), tokens, capacity=600)
    assert relative_error(whole, wanted) < 5e-3


def test_infinite_activations_of_one_run_do_not_reach_the_next(monkeypatch):
    llama = load("odd widths", threads=2)
    wanted, _ = answer(llama)
    broken = np.array(llama.decoder.embedding.weight)
    broken[0] = np.inf
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(llama.runner.tables[0], "weight", broken)
        spoilt, _ = answer(llama, np.zeros((1, LENGTH), np.int32))
    assert not np.isfinite(spoilt).any()
    np.testing.assert_array_equal(answer(llama)[0], wanted)


# ---- several threads of the caller


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sessions_in_several_threads_get_what_they_get_alone(threads):
    """Two models and six sessions at once, prompts and single tokens mixed."""
    cases = ("Q4_K_M", "odd widths")
    llamas = [model(case, threads, 16) for case in cases]
    prompts = [
        np.random.default_rng(seed).integers(0, 384, (1, 20 + seed)).astype(np.int32)
        for seed in range(6)
    ]

    def session(number: int) -> np.ndarray:
        tokens = prompts[number]
        return answer(llamas[number % 2], tokens, cuts=(7, *range(10, tokens.shape[1])))[0]

    alone = [session(number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            for got, wanted in zip(pool.map(session, range(6)), alone):
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_interrupts_leave_a_model_that_answers_as_before(threads, monkeypatch):
    """Several interrupts in a row, at any time: no run hangs, and the next answer has the same
    bits.
    """
    if not hasattr(signal, "setitimer"):
        return  # Windows has no timer that interrupts
    llama = load("Q4_K_M", "auto", threads=threads)
    wanted, _ = answer(llama)
    left = 0
    # Python ignores an interrupt in a finalizer, and pytest's hook for it would be interrupted as
    # well.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def interrupt(_, frame):
        nonlocal left
        # between two answers, this test itself would be interrupted
        while frame and frame.f_code is not answer.__code__:
            frame = frame.f_back
        if left > 0 and frame:
            left -= 1
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(40):
            left = 1 + attempt % 4
            signal.setitimer(signal.ITIMER_REAL, 1e-3 + attempt * 1e-4, 3e-4)
            while left > 0:
                with contextlib.suppress(KeyboardInterrupt):
                    answer(llama, cuts=(1, 2, 30))
            signal.setitimer(signal.ITIMER_REAL, 0)
            np.testing.assert_array_equal(answer(llama)[0], wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_runs_in_parts_and_an_interrupt_ends_it_after_one(threads, ctrl_c, monkeypatch):
    """The bits are those of one run; an interrupt in a part leaves the parts after it undone, and
    the cache as it was.
    """
    llama = load("Q4_K_M", "auto", threads=threads)
    tokens, core = np.arange(200, dtype=np.int32)[None], llama.runner
    wanted = llama.forward(tokens, 0, llama.make_cache(200))
    monkeypatch.setattr(runner, "PART_WORK", 1.0)
    runs, run = [], core.team.run

    def counted(program, *arguments):
        runs.append(program)
        if len(runs) == stop_at:
            signal.raise_signal(signal.SIGINT)
        run(program, *arguments)

    monkeypatch.setattr(core.team, "run", counted)
    stop_at = 0
    np.testing.assert_array_equal(llama.forward(tokens, 0, llama.make_cache(200)), wanted)
    assert len(runs) >= len(core.prompt.program)
    cache, stop_at = llama.make_cache(200), len(runs) + 5
    with pytest.raises(KeyboardInterrupt):
        llama.forward(tokens, 0, cache)
    assert len(runs) == stop_at and cache.length == 0
    np.testing.assert_array_equal(llama.forward(tokens, 0, cache), wanted)


# ---- threads and memory


def test_a_dropped_model_frees_its_threads_and_memory():
    gc.collect()
    before = set(threading.enumerate())
    llama = load("Q4_K_M", "auto", threads=3)
    answer(llama)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    arena = llama.decoder.head.weight.arena
    gone = [
        weakref.ref(reference) for reference in (llama.runner, arena, llama.runner.decode.program)
    ]
    del llama, arena
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_failed_load_leaves_no_threads(monkeypatch):
    gc.collect()
    before = set(threading.enumerate())
    monkeypatch.setattr(runner, "Workspace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load("odd widths", threads=3)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before


# ---- checks before machine code runs


def test_another_models_cache_is_refused():
    for cache in (model("head 36").make_cache(40, 3), model("head 20").make_cache(40, 3)):
        with pytest.raises(ContextError, match="made by another model"):
            model("odd widths").forward(TOKENS, 0, cache)


def change(view, **fields):
    for name, value in fields.items():
        setattr(view, name, value)
    return view


def test_views_and_embeddings_of_other_shapes_are_refused(monkeypatch):
    llama = model("odd widths")
    core = llama.runner

    def fresh():
        return llama.make_cache(80, 3).view(TOKENS, 0)

    (cosine, sine), pages, page_tables, spans = (
        getattr(fresh(), name) for name in ("tables", "pages", "page_tables", "spans")
    )
    beyond = dataclasses.replace(spans[0], start=28)
    for view, message in (
        (
            change(fresh(), spans=(beyond, *spans[1:])),
            "37 positions from 28 on do not fit 64 positions of pages",
        ),
        (change(fresh(), pages=(pages[0], ((),), pages[2])), "do not fit 0 positions"),
        (
            change(fresh(), page_tables=(*page_tables[:2], (page_tables[2][0][:0], 0))),
            "do not fit 0 positions",
        ),
        (change(fresh(), spans=spans[:1]), "3 sequences do not fit a view of 1 rows"),
        (change(fresh(), tables=(cosine.astype(np.float64), sine)), "rope table float64"),
        (change(fresh(), tables=(cosine[:1], sine)), "rope table"),
        (change(fresh(), tables=(cosine, np.asfortranarray(sine))), "in C order"),
    ):
        with pytest.raises(ValueError, match=message):
            core.forward(TOKENS, view, False)
    assert core.forward(TOKENS, fresh(), False).shape == (3, 1003)
    monkeypatch.setattr(core.tables[0], "weight", llama.decoder.embedding.weight[:, :-1])
    with pytest.raises(ValueError, match="shape"):
        core.forward(TOKENS, fresh(), False)
