"""Rows on MLX: shared buffers, what joining and leaving copies, traces, and tokens that do not
depend on the rest of the batch.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from cases.compiled import MODELS as COMPILED, make_toy, traces
from hypothesis import HealthCheck, example, given, settings, strategies as st

from backends.conftest import relative_rms, same_state
from mlx_llama.core.backends.logprobs import unpack
from mlx_llama.core.backends.positions import GROWTH
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import resolve

mx = pytest.importorskip("mlx.core")

from mlx_llama.core.sample import process, sample
from mlx_llama.mlx_native import arrays, ops
from mlx_llama.mlx_native.kernels import buffers as home
from mlx_llama.mlx_native.kernels.buffers import Packing
from mlx_llama.mlx_native.kernels.view import StepView

MODELS = {
    "plain": dict(),
    **{name: COMPILED[name] for name in ("sliding", "qwen2", "qwen3")},
    "Q4_K": dict(kinds="Q4_K"),
    "dynamic": dict(rope_scaling=dict(rope_type="dynamic", factor=4.0)),
    **{name: COMPILED[name] for name in ("LFM2", "Qwen3.5")},
}


@functools.cache
def checkpoint(name: str, length: int = 2048) -> Path:
    return make_toy(16 if name == "dynamic" else length, MODELS[name])


_LOADED: dict[tuple, object] = {}


def loaded(
    mlx,
    name: str = "plain",
    compile: bool | None = None,
    length: int = 2048,
    dtype: str = "float32",
    bits: int | None = None,
):
    key = str(mlx.device), name, compile, length, dtype, bits
    if key not in _LOADED:
        _LOADED[key] = mlx.load(
            open_checkpoint(checkpoint(name, length)), dtype, compile=compile, cache_bits=bits
        )
    return _LOADED[key]


def sampling(mlx, *rows: dict):
    return mlx.sampling_batch([resolve({"seed": 1, **row}).options for row in rows])


def decode(mlx, model, cache, rows: list[int], batch=None, count: int = 1):
    """The tokens of the last of `count` steps of `rows`, launched and not read yet; greedy without
    a batch of sampling.
    """
    batch, tokens = batch or sampling(mlx, *[{}] * len(rows)), np.full((len(rows), 1), 5, np.int32)
    for _ in range(count):
        positions = [cache.lengths[row] for row in rows]
        tokens = model.step(tokens, positions, cache, batch, rows=rows)
        mlx.runtime.launch([tokens])
    return tokens


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 384, length).tolist()


def prefill(model, cache, row: int, tokens: list[int]) -> None:
    model.forward([tokens], 0, cache, rows=[row])


def filled(model, capacity: int, rows: int, lengths: Iterable[int]):
    """A cache whose first rows have texts of these lengths."""
    cache = model.make_cache(capacity, rows)
    for row, length in enumerate(lengths):
        prefill(model, cache, row, ids(length, seed=row))
    return cache


# ---- tokens


MIXES = [
    {},
    dict(temperature=0.9),
    dict(temperature=1.3, top_k=9, seed=2**40),
    dict(repetition_penalty=1.3, temperature=0.7),
    dict(temperature=1.0, top_p=0.8, min_p=0.02, logit_bias={7: 2.0}),
    dict(frequency_penalty=0.4, repetition_context_size=5),
]


class Batch:
    """Rows of one cache, and each of them alone in a cache of its own."""

    def __init__(self, mlx, model, rows: int, capacity: int):
        self.mlx, self.model, self.capacity = mlx, model, capacity
        self.cache = model.make_cache(capacity, rows)
        self.alone = [model.make_cache(capacity) for _ in range(rows)]
        self.options = [MIXES[row % len(MIXES)] for row in range(rows)]
        self.last: dict[int, int] = {}

    def start(self, row: int, tokens: list[int]) -> None:
        self.reset(row)
        for cache, place in ((self.cache, row), (self.alone[row], 0)):
            self.model.forward([tokens], 0, cache, rows=[place])
        self.last[row] = tokens[-1]

    def reset(self, row: int) -> None:
        self.cache.reset(row)
        self.alone[row].reset()
        self.last.pop(row, None)

    def trim(self, row: int, length: int) -> None:
        """A row of recurrent states is emptied unless both caches have a checkpoint there."""
        cuts = self.cache.trim(length, row), self.alone[row].trim(length)
        if cuts[0] != cuts[1] or (not cuts[0] and length):
            self.reset(row)

    def copy(self, source: int, target: int, length: int) -> None:
        self.reset(target)
        length = self.cache.copy_prefix(source, target, length)
        self.alone[target].restore(self.alone[source].state(length=length))
        self.last[target] = self.last[source]
        self.trim(target, length)

    def step(self, rows: list[int], count: int) -> None:
        rows = [
            row
            for row in rows
            if row in self.last and self.cache.lengths[row] + count <= self.capacity
        ]
        if not rows:
            return
        batch = sampling(self.mlx, *(self.options[row] for row in rows))
        tokens = np.array([[self.last[row]] for row in rows], np.int32)
        others = [row for row in self.last if row not in rows][:2]
        before = [self.cache.state(row) for row in others]
        answers = []
        for _ in range(count):
            tokens = self.model.step(
                tokens, [self.cache.lengths[row] for row in rows], self.cache, batch, rows=rows
            )
            assert tuple(tokens.shape) == (len(rows), 1)
            self.mlx.runtime.launch([tokens])
            answers.append(tokens)
        together = [self.mlx.runtime.read([tokens]) for tokens in answers]
        assert all(same_state(self.cache.state(row), state) for row, state in zip(others, before))
        for column, row in enumerate(rows):
            alone = sampling(self.mlx, self.options[row])
            token = np.array([[self.last[row]]], np.int32)
            for step in together:
                token = self.model.step(token, self.alone[row].length, self.alone[row], alone)
                assert [step[column]] == self.mlx.runtime.read([token]), (row, rows)
            self.last[row] = together[-1][column]
        assert self.cache.lengths == [cache.length for cache in self.alone]


ROWS = 6
ROW = st.integers(0, ROWS - 1)
SCHEDULE = st.lists(
    st.one_of(
        st.tuples(st.just("start"), ROW, st.integers(1, 270)),
        st.tuples(st.just("reset"), ROW),
        st.tuples(st.just("trim"), ROW, st.floats(0, 1)),
        st.tuples(st.just("copy"), ROW, ROW, st.floats(0, 1)),
        st.tuples(
            st.just("step"), st.permutations(range(ROWS)), st.integers(1, ROWS), st.integers(1, 4)
        ),
        st.tuples(st.just("step"), st.permutations(range(ROWS)), st.just(ROWS), st.integers(1, 9)),
    ),
    min_size=8,
    max_size=20,
)


def play(batch: Batch, schedule) -> None:
    for row in range(3):
        batch.start(row, ids(4 + row, seed=row))
    for what, *rest in schedule:
        if what == "start":
            batch.start(rest[0], ids(rest[1], seed=rest[1]))
        elif what == "reset":
            batch.reset(rest[0])
        elif what == "trim":
            batch.trim(rest[0], int(rest[1] * batch.cache.lengths[rest[0]]))
        elif what == "copy" and rest[0] != rest[1] and rest[0] in batch.last:
            batch.copy(rest[0], rest[1], int(rest[2] * batch.cache.lengths[rest[0]]))
        elif what == "step":
            batch.step(list(rest[0])[: rest[1]], rest[2])


@pytest.mark.slow_for("mlx-Q4_K", "mlx-d", "mlx-qwen", "mlx-sliding-8")
@pytest.mark.parametrize(
    "name, bits",
    [*((name, None) for name in MODELS), *((name, 8) for name in ("plain", "sliding", "qwen3"))],
)
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(schedule=[("step", (0, 1, 2), 3, 2), ("copy", 2, 3, 0.7), ("step", (3, 1), 2, 3)])
@given(schedule=SCHEDULE)
def test_tokens_do_not_depend_on_the_rest_of_the_batch(name, bits, mlx, schedule):
    if bits:  # a restored state is packed anew
        schedule = [part for part in schedule if part[0] != "copy"]
    if name == "dynamic":
        schedule = [
            (what, rest[0], rest[1] % 40 + 1) if what == "start" else (what, *rest)
            for what, *rest in schedule
        ]
    play(Batch(mlx, loaded(mlx, name, bits=bits), ROWS, 64 if name == "dynamic" else 600), schedule)


@pytest.mark.slow
def test_traced_rows_come_and_go(mlx):
    batch = Batch(mlx, loaded(mlx, "sliding", True), 6, 600)
    play(
        batch,
        [
            ("step", range(6), 6, 3),
            ("start", 4, 254),
            ("step", range(6), 6, 5),
            ("start", 3, 9),
            ("start", 5, 2),
            ("step", range(6), 6, 2),
            ("reset", 0),
            ("step", [5, 1, 3], 3, 4),
            ("copy", 4, 0, 0.5),
            ("trim", 1, 0.5),
            ("step", [0, 4, 1], 3, 2),
            ("step", range(6), 6, 2),
        ],
    )


def test_forty_rows_decode_in_groups(mlx):
    batch = Batch(mlx, loaded(mlx), 40, 100)
    for row in range(40):
        batch.start(row, ids(1 + row % 9, seed=row))
    batch.step(list(range(40)), 3)
    batch.step(list(range(39, -1, -3)), 2)
    batch.step(list(range(40)), 2)
    assert sorted(buffer.slots for buffer in batch.cache.buffers()) == [8, 32]


@pytest.mark.slow
def test_a_long_row_does_not_make_short_ones_take_its_storage(mlx, monkeypatch):
    monkeypatch.setattr(home, "SMALL", 0)
    batch = Batch(mlx, loaded(mlx), 6, 2000)
    for row in range(5):
        batch.start(row, ids(5, seed=row))
    batch.start(5, ids(1900))
    batch.step(list(range(6)), 3)
    cache = batch.cache
    assert sorted(buffer.slots for buffer in cache.buffers()) == [1, 8]
    assert cache.nbytes < 2 * sum(cache.nbytes_for(length) for length in cache.lengths)
    batch.step([5, 0], 2)
    monkeypatch.undo()
    batch.step(list(range(6)), 2)  # small enough to share
    assert [buffer.slots for buffer in cache.buffers()] == [8]


@pytest.mark.slow
def test_rows_that_memory_has_no_room_for_side_by_side_decode_one_by_one(mlx, monkeypatch):
    model = loaded(mlx, "plain", None, 20000)
    batch = Batch(mlx, model, 4, 3000)
    for row in range(4):
        batch.start(row, ids(900 + row, seed=row))
    monkeypatch.setattr(mlx.runtime, "free_memory", lambda device: 900_000)
    batch.step([0, 1, 2, 3], 3)
    assert [buffer.slots for buffer in batch.cache.buffers()] == [1] * 4
    monkeypatch.undo()
    batch.step([0, 1, 2, 3], 1)  # the layout stays until a row joins or leaves
    batch.reset(3)
    batch.step([0, 1, 2], 2)
    assert [buffer.slots for buffer in batch.cache.buffers()] == [4]


def test_the_kernel_of_gpus_rotates_each_row_at_its_own_position(mlx, monkeypatch):
    """mx.fast.rope with a vector of positions, at float32 within its rounding."""
    model, states = loaded(mlx), {}
    for tabulated in (True, False):
        cache, seen = model.make_cache(100, 3), {}
        cache.tabulated = tabulated
        for row, length in enumerate((4, 30, 11)):
            prefill(model, cache, row, ids(length, seed=row))
        append = StepView.append
        with monkeypatch.context() as patch:
            patch.setattr(
                StepView,
                "append",
                lambda self, layer, key, value: (
                    append(self, layer, key, value),
                    seen.setdefault(layer, (key, self.new_keys(model.config.attentions[layer]))),
                ),
            )
            model.step([[7], [8], [9]], [4, 30, 11], cache, sampling(mlx, {}, {}, {}))
        assert all(mx.array_equal(key, kept) for key, kept in seen.values())
        states[tabulated] = np.array(seen[0][0])[:3]
        for row, length in enumerate((4, 30, 11)):
            np.testing.assert_array_equal(
                cache.state(row)["keys"][0, :, length], states[tabulated][row, :, 0]
            )
    np.testing.assert_allclose(states[True], states[False], atol=1e-5)


# ---- sampling


OPTIONS = st.fixed_dictionaries(
    {},
    optional=dict(
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.integers(0, 60),
        top_p=st.floats(0.05, 1),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0.5, 2),
        presence_penalty=st.floats(-1, 1),
        frequency_penalty=st.floats(-1, 1),
        repetition_context_size=st.integers(0, 9),
        logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-5, 5), max_size=4),
        seed=st.integers(0, 2**64 - 1),
    ),
)


@given(rows=st.lists(OPTIONS, min_size=1, max_size=6), data=st.data())
def test_a_row_has_the_scores_and_the_token_that_it_has_alone(mlx, rows, data):
    """To the bit, at any place in a batch, behind padding, and with a longer history than it looks
    at.
    """
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    scores = (2 * rng.standard_normal((len(rows), 50))).astype(np.float32)
    scores[:, ::7] = scores[:, 3:4]  # ties
    history = rng.integers(-1, 50, (len(rows), 32)).astype(np.int32)
    batch = sampling(mlx, *rows)
    order = [*data.draw(st.permutations(range(len(rows)))), -1, -1]
    with mx.stream(mlx.device):
        values, at = batch.arrange(order), [max(i, 0) for i in order]
        logits, recent = mx.array(scores[at]), mx.array(history[at])
        processed = np.array(process(arrays, batch.features, logits, recent, values))
        drawn = np.array(
            sample(
                arrays,
                batch.features,
                logits,
                mx.array(np.array(at, np.uint32)[:, None] + 5),
                recent,
                values,
            )
        )
        for slot, i in enumerate(order[:-2]):
            alone = sampling(mlx, rows[i])
            last_tokens = (
                mx.array(history[i : i + 1, 32 - alone.window :]) if alone.window else None
            )
            wanted = np.array(
                process(
                    arrays,
                    alone.features,
                    mx.array(scores[i : i + 1]),
                    last_tokens,
                    alone.arrange(),
                )
            )[0]
            np.testing.assert_array_equal(processed[slot], wanted)
            assert [drawn[slot, 0]] == mlx.runtime.read(
                [alone(mx.array(scores[i : i + 1]), [i + 5], last_tokens)]
            )


# ---- masks and log-probabilities


def allow(batch: int, vocabulary: int, seed: int) -> np.ndarray:
    """bool [B, V]: a few tokens that each row may draw."""
    allowed = np.random.default_rng(seed).random((batch, vocabulary)) < 0.05
    allowed[:, seed] = True
    return allowed


def words(allowed: np.ndarray) -> np.ndarray:
    """As of core.backends.interface.Masks."""
    spare = np.zeros((len(allowed), -allowed.shape[1] % 32), bool)
    return np.packbits(np.concatenate([allowed, spare], axis=1), axis=1, bitorder="little").view(
        np.int32
    )


@pytest.mark.slow_for("mlx-rows2-False-True")
@pytest.mark.parametrize(
    "rows, is_masked, compile",
    [
        ([0], True, True),
        ([4, 1, 3], True, False),
        ([4, 1, 3], False, True),
        ([2, 0, 1, 3, 4], True, True),
        ([2, 0, 1, 3, 4], False, False),
    ],
)
def test_masks_and_logprobs_of_rows_are_those_of_each_alone(
    rows, is_masked, compile, mlx, monkeypatch
):
    """A forward and `SamplingBatch` alone are the judges."""
    model, launched = loaded(mlx, "plain", compile), []
    options = [dict(mix, logprobs=row) if row != 2 else mix for row, mix in enumerate(MIXES[:5])]
    options = [options[row] for row in rows]
    cache, alone = model.make_cache(300, 5), [model.make_cache(300) for _ in rows]
    for row, cache_alone in zip(rows, alone):
        for target, place in ((cache, row), (cache_alone, 0)):
            prefill(model, target, place, ids(4 + row, seed=row))
    batch, tokens = sampling(mlx, *options), np.full((len(rows), 1), 5, np.int32)
    for n in range(6):
        allowed = allow(len(rows), model.config.vocab_size, n)
        allowed |= not is_masked

        def compute():
            assert len(launched) == 1  # the device works meanwhile
            return words(allowed)

        with monkeypatch.context() as patch:
            patch.setattr(mx, "async_eval", lambda *arrays: launched.append(arrays))
            launched.clear()
            masks, lengths = compute if is_masked else None, [cache.lengths[row] for row in rows]
            drawn = model.step(tokens, lengths, cache, batch, rows=rows, masks=masks)
        packed = mlx.runtime.to_numpy(drawn)
        assert len(launched) == is_masked
        for i, cache_alone in enumerate(alone):
            logits = model.forward(tokens[i : i + 1], cache_alone.length, cache_alone)
            single, count = sampling(mlx, options[i]), options[i].get("logprobs")
            recent = cache_alone.recent(single.window) if single.window else None
            wanted = single(logits, [cache_alone.length], recent, lambda: words(allowed[i : i + 1]))
            wanted = mlx.runtime.to_numpy(wanted)[0]
            assert packed[i, 0] == wanted[0] and allowed[i, wanted[0]]
            if count is not None:
                got, entry = (unpack(row.tolist(), count) for row in (packed[i], wanted))
                assert got.logprob == pytest.approx(entry.logprob, abs=1e-5)
                assert dict(got.top) == pytest.approx(dict(entry.top), abs=1e-5)
        tokens = np.ascontiguousarray(packed[:, :1])
    assert [cache.lengths[row] for row in rows] == [cache_alone.length for cache_alone in alone]


def test_masks_and_logprobs_are_traced_once(mlx, monkeypatch):
    from mlx_llama.mlx_native.kernels import trace

    model = mlx.load(open_checkpoint(checkpoint("plain")), "float32", compile=True)
    forwards, draws = traces(monkeypatch), []
    cache = filled(model, 100, 3, (3, 4, 5))
    drawing = trace.sample
    monkeypatch.setattr(trace, "sample", lambda *args: (draws.append(0), drawing(*args))[1])

    def run(count: int, **args) -> tuple[int, int]:
        batch = sampling(mlx, *({"seed": n, **args} for n in range(3)))
        for n in range(3):
            masks = (lambda: words(allow(3, 384, n))) if count else None
            mlx.runtime.launch([model.step([[5]] * 3, cache.lengths[:], cache, batch, masks=masks)])
        return len(forwards), len(draws)

    assert run(1) == (1, 1)
    assert run(1, temperature=0.7) == (1, 2)
    assert run(1, temperature=0.9, logprobs=2) == (1, 3)
    assert run(0, logprobs=2) == (2, 4)
    assert run(0, logprobs=2) == (2, 4)


def test_groups_that_take_turns_stay_in_their_buffers(mlx):
    """Rows with a grammar step apart from the others."""
    batch = Batch(mlx, loaded(mlx), 6, 600)
    for row in range(5):
        batch.start(row, ids(4 + row, seed=row))
    batch.step([0, 1, 2], 2)
    batch.step([3, 4], 2)
    steps = dict(batch.cache.steps)
    assert len(steps) == 2
    for _ in range(3):
        batch.step([0, 1, 2], 1)
        batch.step([3, 4], 2)
    assert all(batch.cache.step_buffers(rows) is step for rows, step in steps.items())
    batch.start(5, ids(9))
    batch.step([0, 1, 2, 5], 2)
    batch.step([3, 4], 2)
    batch.reset(1)
    batch.step([0, 2, 5], 2)


def test_masks_that_fail_change_no_row(mlx):
    model = loaded(mlx)
    cache = filled(model, 100, 2, (4, 5))
    before = [cache.state(row) for row in range(2)]
    with pytest.raises(ZeroDivisionError):
        model.step([[5]] * 2, cache.lengths[:], cache, sampling(mlx, {}, {}), masks=lambda: 1 / 0)
    assert cache.lengths == [4, 5]
    assert all(same_state(cache.state(row), state) for row, state in enumerate(before))


# ---- bytes


def settle(cache) -> int:
    """Bytes of MLX's arrays once all work is done."""
    gc.collect()  # arrays of earlier tests
    mx.eval(cache.arrays())
    mx.synchronize(mx.default_stream(cache.device))
    return mx.get_active_memory()


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_joining_and_leaving_copy_no_other_row(compile, mlx):
    model = loaded(mlx, "plain", compile, 20000)
    cache = model.make_cache(8192, 6)
    for row in range(4):
        cache.reserve({row: 8000})
        cache.lengths[row] = 7500  # of zeros
    row_nbytes = cache.nbytes_for(8000)
    layer = row_nbytes // 4  # of keys or values, in two layers

    def run(rows: list[int], count: int = 3) -> None:
        mlx.runtime.read([decode(mlx, model, cache, rows, count=count)])

    run([0, 1, 2])
    assert [buffer.slots for buffer in cache.buffers() if buffer.slots > 1] == [4]
    held = settle(cache)
    mx.reset_peak_memory()
    run([0, 1, 2])
    # of steps; a copy of the shared keys of one layer would be 4 * layer
    clean = mx.get_peak_memory() - held
    assert clean < 2 * layer
    mx.reset_peak_memory()
    run([0, 1, 2, 3])  # joins a free slot
    assert mx.get_peak_memory() - held < clean + 2 * layer
    assert settle(cache) <= held - row_nbytes * 0.9  # it gave its own arrays up
    held = settle(cache)
    mx.reset_peak_memory()
    model.forward([[5, 6]], cache.lengths[3], cache, rows=[3])  # leaves
    mx.eval(cache.arrays())
    assert mx.get_peak_memory() - held < row_nbytes * 1.1 + 4 * layer
    cache.reset(4)
    run([0, 1, 2, 3])
    held = settle(cache)
    mx.reset_peak_memory()
    cache.copy_prefix(1, 4, 10)
    run([0, 1, 2, 3])
    assert mx.get_peak_memory() - held < clean + layer
    cache.reset(4)
    cache.reserve({4: 8000})
    cache.lengths[4] = 7500
    held = settle(cache)
    mx.reset_peak_memory()
    run([0, 1, 2, 4])  # row 3 makes place
    assert mx.get_peak_memory() - held < row_nbytes * 1.1 + 4 * layer
    kept = list(cache.buffers()[0].keys)  # a second reference makes the next step copy the array
    held = settle(cache)
    mx.reset_peak_memory()
    run([0, 1, 2], 1)
    assert mx.get_peak_memory() - held > 3.5 * layer and kept  # the measure works


@pytest.mark.slow
def test_memory_after_a_thousand_joins_is_that_after_ten(mlx):
    model, random = loaded(mlx), np.random.default_rng(0)
    cache, sizes = model.make_cache(300, 5), []
    greedy = {count: sampling(mlx, *[{}] * count) for count in range(1, 5)}
    for i in range(1000):
        row = int(random.integers(5))
        cache.reset(row)
        prefill(model, cache, row, ids(3 + i % 20, seed=i % 50))
        rows = [row for row in range(5) if 0 < cache.lengths[row] < 290][:4]
        tokens = decode(mlx, model, cache, rows, greedy[len(rows)])
        if i in (9, 999):
            mlx.runtime.read([tokens])
            del tokens
            for other in range(5):
                cache.reset(other)
            assert cache.nbytes == 0
            sizes.append(settle(cache))
    assert sizes[1] - sizes[0] < 100_000, sizes


def test_an_empty_row_takes_nothing_and_a_buffer_shrinks(mlx):
    model = loaded(mlx)
    cache = model.make_cache(2048, 300)
    assert cache.nbytes == 0 and cache.lengths == [0] * 300
    for row in range(8):
        prefill(model, cache, row, ids(5, seed=row))

    def run(rows: list[int]) -> int:
        decode(mlx, model, cache, rows)
        return cache.nbytes

    row_bytes = cache.nbytes_for(5) + 4 * GROWTH
    assert run(list(range(8))) == 8 * row_bytes
    for row in range(6):
        cache.reset(row)
    assert run([6, 7]) == 2 * row_bytes
    assert run([7]) == 2 * row_bytes and [buffer.slots for buffer in cache.buffers()] == [1, 1]
    assert run([6, 7]) == 2 * row_bytes
    for row in range(7):
        cache.reset(row)
    assert run([7]) == row_bytes


def test_a_row_that_fills_its_slot_and_waits_is_not_overwritten(mlx):
    """Its next position would be the first of another head or row."""
    model = loaded(mlx)
    cache = filled(model, 600, 4, (GROWTH - 2, 5, 6, 7))
    for rows in ([0, 1, 2, 3], [1, 2], [0, 1, 2]):
        mlx.runtime.read([decode(mlx, model, cache, rows)])
    assert cache.lengths[0] == cache.buffers()[0].length == GROWTH
    waiting = [cache.state(row) for row in (0, 3)]
    mlx.runtime.read([decode(mlx, model, cache, [1, 2])])
    assert all(same_state(cache.state(row), state) for row, state in zip((0, 3), waiting))


def test_rows_that_wait_leave_a_buffer_that_is_too_large_for_the_others(mlx):
    model = loaded(mlx)
    cache = filled(model, 600, 8, [5] * 8)

    def run(rows: list[int]) -> list[int]:
        decode(mlx, model, cache, rows)
        return sorted(buffer.slots for buffer in cache.buffers())

    assert run(list(range(8))) == [8]
    waiting = cache.state(5)
    sizes = [run([0, 1]) for _ in range(8)]
    assert sizes[0] == [8] and sizes[-1] == [1, 1, 1, 1, 1, 1, 4]
    assert same_state(cache.state(5), waiting)


# ---- traces


def test_one_trace_per_size_of_buffer(mlx, monkeypatch):
    seen = traces(monkeypatch)
    model = mlx.load(open_checkpoint(checkpoint("plain")), "float32", compile=True)
    cache = filled(model, 600, 9, range(3, 8))

    def run(*rows: int, **settings) -> list[tuple]:
        batch = sampling(
            mlx, *({name: value + 0.1 * row for name, value in settings.items()} for row in rows)
        )
        decode(mlx, model, cache, list(rows), batch, 3)
        return seen

    for rows in ((0, 1, 2), (1, 2, 0), (0, 1, 2, 3), (3, 1)):
        assert run(*rows) == [(4, GROWTH)]
    assert run(0, 1, 2, 3, 4) == [(4, GROWTH), (8, GROWTH)]
    run(0, 1, 2, 3, 4, temperature=0.5)
    assert run(2, 1, 4, temperature=0.9)[2:] == [(8, GROWTH)]
    assert run(0)[3:] == [(1, GROWTH)]


# ---- keys and values of 8 and 16 bits


@pytest.mark.parametrize("masked", [None, "causal", "window", "rows"])
@pytest.mark.parametrize("size", [64, 24])
def test_attention_over_codes_is_that_of_mlx_lm(size, masked, mlx):
    from mlx_lm.models.base import quantized_scaled_dot_product_attention

    rng = np.random.default_rng(0)
    count = 1 if masked == "rows" else 5
    packing = Packing(8, mx.float32, mx.float32)
    query, key, value = (
        mx.array(rng.standard_normal(shape).astype(np.float32))
        for shape in ((2, 6, count, size), (2, 3, 40, size), (2, 3, 40, size))
    )
    mask = {
        "window": mx.array(rng.random((count, 40)) < 0.5),
        "rows": mx.array(rng.random((2, 1, 1, 40)) < 0.5),
    }.get(masked, masked)
    with mx.stream(mlx.device):
        keys, values = packing.pack(key), packing.pack(value)
        got = np.array(ops.attention(query, keys, values, 0.2, mask))
        spare = ((0, 0), (0, 0), (0, 0), (0, -size % 32))
        wanted = quantized_scaled_dot_product_attention(
            mx.pad(query, spare), keys, values, 0.2, mask, 32, 8
        )[..., :size]
        exact = mx.fast.scaled_dot_product_attention(query, key, value, scale=0.2, mask=mask)
        np.testing.assert_allclose(got, np.array(wanted), rtol=1e-4, atol=1e-5)
        assert 0 < np.abs(got - np.array(exact)).max() < 0.03
        for parts, numbers in ((keys, key), (values, value)):
            assert relative_rms(np.array(packing.unpack(parts, size)), np.array(numbers)) < 7e-3


@pytest.mark.parametrize("bits", [8, 16])
def test_a_traced_step_of_few_bits_is_the_untraced(bits, mlx):
    states = []
    for compile in (False, True):
        model = loaded(mlx, "qwen3", compile, bits=bits)
        cache = filled(model, 300, 3, (5, 6, 7))
        batch = sampling(mlx, {}, dict(temperature=1.0), {})
        decode(mlx, model, cache, [0, 1, 2], batch, 8)
        states.append([cache.state(row) for row in range(3)])
    assert all(same_state(*pair) for pair in zip(*states))
