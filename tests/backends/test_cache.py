"""The cache: allocated in steps, trimmed, moved between backends."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from machine import open_backend
from making import make_checkpoint

from backends.conftest import relative_error, relative_rms, same_state, transformers_logits
from mlx_llama import load as load_llm
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request
from mlx_llama.core.errors import ContextError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models import rope
from mlx_llama.core.options import resolve


@pytest.fixture(scope="module")
def model(load, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("cache") / "m", max_position_embeddings=1024)
    return load(folder)


KINDS = {  # fields of a config.json
    "plain": {},
    "sliding": dict(architectures=["MistralForCausalLM"], sliding_window=7),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], num_attention_heads=6),
    "dynamic rope": dict(
        rope_scaling=dict(rope_type="dynamic", factor=4.0), max_position_embeddings=16
    ),
}


@functools.cache
def folder(kind: str, head_dim: int) -> Path:
    path = Path(tempfile.mkdtemp()) / "m"
    return make_checkpoint(path, tokenizer=False, head_dim=head_dim, **KINDS[kind])


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 384, (1, length)).astype(np.int32)


def test_growth_is_in_steps_and_keeps_the_contents(model, backend):
    model, to_numpy = model
    cache, sizes = model.make_cache(700), set()
    for start in range(0, 600, 10):
        got = to_numpy(model.forward(ids(600)[:, start : start + 10], start, cache))
        sizes.add(cache.nbytes)
    # keys and values, layers, heads, head_dim, float32; a token id
    per_position = 2 * 2 * 2 * 16 * 4 + 4
    # the CPU takes pages, and copies none
    steps = range(64, 641, 64) if backend.name == "cpu" else (256, 512, 700)
    assert sizes == {step * per_position for step in steps}
    fresh = model.make_cache(700)
    assert relative_error(got, to_numpy(model.forward(ids(600), 0, fresh))) < 1e-4


def test_a_long_sequence_is_copied_a_few_times_only(model, backend):
    cache = model[0].make_cache(100_000)
    if backend.name == "cpu":
        assert all(end <= cache.storage_for(end) < end + 64 for end in range(1, 100_001))
        return
    rooms = [cache.storage_for(end) for end in range(1, 100_001)]
    assert all(end <= room <= max(end + 256, end * 1.13) for end, room in enumerate(rooms, 1))
    assert len(set(rooms)) < 60 and rooms == sorted(rooms)


def test_trim_then_continue_is_as_if_the_rest_never_was(model):
    model, to_numpy = model
    cache = model.make_cache(64)
    model.forward(ids(20), 0, cache)
    model.forward(ids(9, seed=5), 20, cache)
    cache.trim(13)
    got = to_numpy(model.forward(ids(20)[:, 13:], 13, cache))
    never = model.make_cache(64)
    model.forward(ids(20), 0, never)
    never.trim(13)
    assert got.tobytes() == to_numpy(model.forward(ids(20)[:, 13:], 13, never)).tobytes()
    cold = model.make_cache(64)
    assert relative_error(got, to_numpy(model.forward(ids(20), 0, cold))) < 1e-5


def test_a_call_that_fails_changes_nothing(model):
    model, to_numpy = model
    cache = model.make_cache(30, 3)
    lengths = [10, 1, 4]
    for row, length in enumerate(lengths):
        model.forward(ids(length, seed=row), 0, cache, rows=[row])
    before = [cache.state(row) for row in range(3)]

    def fail(name, array):
        if name == "1.query":
            raise RuntimeError("in the middle of a layer")

    with pytest.raises(RuntimeError):
        model.forward(ids(3, seed=9).T, lengths, cache, probe=fail)
    assert cache.lengths == lengths
    assert all(same_state(cache.state(row), state) for row, state in enumerate(before))
    got = to_numpy(model.forward(ids(15)[:, 10:], 10, cache, rows=[0]))
    fresh = model.make_cache(30)
    model.forward(ids(10), 0, fresh)
    assert got.tobytes() == to_numpy(model.forward(ids(15)[:, 10:], 10, fresh)).tobytes()


@pytest.mark.parametrize("other", ["cpu", "mlx", "cuda"])
def test_state_moves_to_any_backend(other, model):
    model, to_numpy = model
    target = open_backend(other)
    cache = model.make_cache(40)
    model.forward(ids(20), 0, cache)
    state = cache.state()
    assert state["tokens"].tolist() == ids(20)[0].tolist()
    assert state["keys"].shape == state["values"].shape == (2, 2, 20, 16)
    restored = model.make_cache(40)
    moved = target.model.Cache(
        model.config,
        40,
        target.runtime.pick_dtype("float32", "float32", target.device),
        target.device,
    )
    moved.restore(state)
    restored.restore(moved.state())
    got = to_numpy(model.forward(ids(3, seed=4), 20, restored))
    assert got.tobytes() == to_numpy(model.forward(ids(3, seed=4), 20, cache)).tobytes()


def test_an_interrupt_while_storage_grows_changes_nothing(model, monkeypatch):
    model, to_numpy = model
    cache = model.make_cache(600)
    model.forward(ids(250), 0, cache)
    with monkeypatch.context() as patch:
        for name in ("tables", "inverse_frequencies"):
            patch.setattr(rope, name, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.forward(ids(20, seed=3), 250, cache)
    assert cache.nbytes == 256 * (2 * 2 * 2 * 16 * 4 + 4)
    got = to_numpy(model.forward(ids(20, seed=3), 250, cache))
    fresh = model.make_cache(600)
    model.forward(ids(250), 0, fresh)
    assert got.tobytes() == to_numpy(model.forward(ids(20, seed=3), 250, fresh)).tobytes()


def test_a_sliding_window_across_a_growth_step(load, tmp_path):
    folder = make_checkpoint(
        tmp_path / "m",
        architectures=["MistralForCausalLM"],
        sliding_window=31,
        max_position_embeddings=1024,
    )
    model, to_numpy = load(folder)
    wanted = transformers_logits(folder, ids(300))[:, -1]
    cache = model.make_cache(1024)
    for start in (0, 100, 200, 290):
        model.forward(
            ids(300)[:, start : {0: 100, 100: 200, 200: 290, 290: 299}[start]], start, cache
        )
    assert relative_error(to_numpy(model.forward(ids(300)[:, 299:], 299, cache)), wanted) < 1e-4


@pytest.mark.parametrize(
    "dtype, scaled, bound",
    [("float32", False, 1e-6), ("float32", True, 1e-6), ("bfloat16", True, 2**-6)],
)
def test_far_positions_are_rotated_alike(dtype, scaled, bound, backend, tmp_path):
    """Angles of thousands of radians leave float32 few digits and bfloat16 none, so they are
    computed in float64 for all backends.
    """
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling |= dict(original_max_position_embeddings=8192)
    fields = dict(max_position_embeddings=131072, rope_theta=500000.0)
    path = make_checkpoint(
        tmp_path / "m", dtype=dtype, rope_scaling=scaling if scaled else None, **fields
    )
    model = backend.load(open_checkpoint(path), dtype if backend.name != "cpu" else "float32")
    cache, at, seen = model.make_cache(131072), 100_001, {}
    cache.lengths[0] = at  # zeros in place of the tokens before
    listen = lambda name, array: seen.__setitem__(name, backend.runtime.to_numpy(array))  # noqa: E731
    model.forward(ids(3), at, cache, probe=listen)
    frequencies, factor = rope.inverse_frequencies(model.config)
    turn = np.exp(1j * np.arange(at, at + 3)[:, None] * frequencies) * factor
    before = seen["0.query"][..., :8].astype(np.complex128) + 1j * seen["0.query"][..., 8:]
    after = before * turn
    wanted = np.concatenate([after.real, after.imag], -1).astype(np.float32)
    assert relative_error(seen["0.query_rope"], wanted) < bound


def test_storage_that_does_not_fit_memory_is_refused_before_it_is_made(
    backend, tmp_path, monkeypatch
):
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=100_000)
    model = backend.load(open_checkpoint(folder), "float32")
    cache = model.make_cache(100_000)
    per_position = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head_dim, float32
    room = 20_480 * per_position  # 10 steps of 2048
    monkeypatch.setattr(backend.runtime, "free_memory", lambda device: room)
    model.forward(ids(20), 0, cache)
    before = cache.nbytes
    # Pages are taken besides those that the row has; arrays are made anew.
    with pytest.raises(
        ContextError,
        match=r"of (22528|20544) positions take 0.01 GB, and 0.01 GB of memory are free",
    ):
        cache.check_memory({0: 20_545})
    cache.check_memory({0: 20_480})
    with pytest.raises(ContextError, match="lower `ctx_size`"):
        model.forward(ids(20_600), 20, cache)
    assert (cache.nbytes, cache.length) == (before, 20)
    model.forward(ids(5), 20, cache)  # the cache is still usable
    monkeypatch.undo()
    with pytest.raises(
        ContextError, match=r"positions take \d+\.\d\d GB, and \d+\.\d\d GB of memory are free"
    ):
        model.make_cache(10**12).check_memory({0: 10**12})


def test_a_prompt_that_memory_has_no_room_for_is_refused_before_its_first_chunk(
    backend, tmp_path, monkeypatch
):
    model = backend.load(
        open_checkpoint(make_checkpoint(tmp_path / "m", max_position_embeddings=100_000)), "float32"
    )
    loop = Loop(backend, model, None, frozenset(), 100_000, cache_memory=10**9)
    monkeypatch.setattr(backend.runtime, "free_memory", lambda device: 2_000_000)
    resolved = resolve({"max_tokens": 3})
    with pytest.raises(ContextError, match="of (9216|9024) positions take 0.00 GB"):
        loop.submit(Request([5] * 9000, resolved, wants_text=False)).finish()
    assert loop.scheduler.cache.nbytes == 0
    assert len(loop.submit(Request([5] * 900, resolved, wants_text=False)).finish().tokens) == 3


def test_the_remedy_for_a_full_context_is_one_that_helps(toy):
    for size in (32, None):
        llm = load_llm(toy, backend="cpu", ctx_size=size)
        with pytest.raises(ContextError, match="answer included: shorten the prompt") as caught:
            llm.generate("a llama " * llm.engine.context)
        assert ("raise `ctx_size`" in str(caught.value)) is (size is not None)


def lengths_and_states(cache):
    return cache.lengths[:], [cache.state(row) for row in range(cache.rows)]


def test_rows_come_and_go_without_touching_others(model):
    """Every change of a row leaves the state of all other rows as it was, bit for bit."""
    model, to_numpy = model
    cache = model.make_cache(600, 5)
    for row, length in ((0, 20), (1, 3), (3, 270)):
        model.forward(ids(length, seed=row), 0, cache, rows=[row])
    changes = [
        (lambda: model.forward(ids(5, seed=9), 20, cache, rows=[0]), [0]),
        (
            lambda: model.forward(
                np.concatenate([ids(2, seed=7), ids(2, seed=8)]), [270, 3], cache, rows=[3, 1]
            ),
            [3, 1],
        ),
        (lambda: cache.trim(11, 0), [0]),
        (lambda: cache.copy_prefix(3, 2, 260), [2]),
        (lambda: cache.copy_prefix(0, 4, 11), [4]),
        (lambda: model.forward(ids(300, seed=5), 260, cache, rows=[2]), [2]),
        (lambda: cache.trim(100, 2), [2]),
        (lambda: model.forward(ids(1, seed=4), 100, cache, rows=[2]), [2]),
        (lambda: cache.reset(3), [3]),
        (lambda: cache.restore(cache.state(2), 3), [3]),
        (lambda: cache.trim(0, 1), [1]),
        (lambda: cache.reset(4), [4]),
    ]
    for change, touched in changes:
        _, before = lengths_and_states(cache)
        change()
        lengths, after = lengths_and_states(cache)
        for row in range(5):
            assert lengths[row] == len(after[row].get("tokens", ()))
            assert row in touched or same_state(before[row], after[row])
    assert cache.lengths == [11, 0, 101, 101, 0]
    cache.reset()
    assert cache.lengths == [0] * 5 and cache.nbytes == 0


def test_a_copied_prefix_goes_on_as_its_source(model):
    model, to_numpy = model
    cache = model.make_cache(600, 3)
    model.forward(ids(300), 0, cache, rows=[1])
    cache.copy_prefix(1, 2, 290)
    model.forward(ids(4, seed=6), 300, cache, rows=[1])  # the source goes on by itself
    got = to_numpy(model.forward(ids(300)[:, 290:], 290, cache, rows=[2]))
    fresh = model.make_cache(600)
    model.forward(ids(300)[:, :290], 0, fresh)
    assert relative_error(got, to_numpy(model.forward(ids(300)[:, 290:], 290, fresh))) < 1e-5
    assert cache.state(2)["tokens"].tolist() == ids(300)[0].tolist()
    assert to_numpy(cache.recent(3, [2, 1])).tolist() == [
        ids(300)[0, -3:].tolist(),
        ids(4, seed=6)[0, -3:].tolist(),
    ]
    assert to_numpy(cache.recent(3, [2, 1], [2, 300])).tolist() == [
        [-1, *ids(300)[0, :2].tolist()],
        ids(300)[0, -3:].tolist(),
    ]


@pytest.mark.slow_for("cuda")
def test_a_step_of_rows_gives_each_its_own_token(backend, model):
    """Rows of different lengths, in any order and number, with the tokens that they get alone."""
    model, to_numpy = model
    options = [
        resolve(
            {
                "temperature": 0.0 if i % 2 else 0.9,
                "seed": i,
                "repetition_penalty": 1.2 if i == 2 else 1.0,
            }
        ).options
        for i in range(5)
    ]
    lengths = [20, 3, 255, 60, 1]
    alone = []
    for i, length in enumerate(lengths):
        cache, sampling, drawn = model.make_cache(600), backend.sampling_batch([options[i]]), []
        token = model.step(ids(length, seed=i), 0, cache, sampling)
        for _ in range(6):
            drawn += backend.runtime.read([token])
            token = model.step(token, cache.length, cache, sampling)
        alone.append(drawn)
    for order in ([0, 1, 2, 3, 4], [3, 0], [2, 4, 1], [4]):
        cache = model.make_cache(600, 7)
        rows = [6 - i for i in order]
        first = backend.runtime.read(
            [
                model.step(
                    ids(lengths[i], seed=i),
                    0,
                    cache,
                    backend.sampling_batch([options[i]]),
                    rows=[row],
                )
                for i, row in zip(order, rows)
            ]
        )
        drawn, sampling = [first], backend.sampling_batch([options[i] for i in order])
        tokens = np.array(first, np.int32)[:, None]
        for _ in range(5):
            tokens = model.step(
                tokens, [cache.lengths[row] for row in rows], cache, sampling, rows=rows
            )
            assert tuple(tokens.shape) == (len(rows), 1)
            drawn.append(backend.runtime.read([tokens]))
        for column, i in enumerate(order):
            assert [step[column] for step in drawn] == alone[i], (order, i)
        assert [cache.lengths[row] for row in rows] == [lengths[i] + 5 for i in order]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_different_lengths_are_transformers_rows(kind, load):
    """A token and then three of rows in an order that is not theirs."""
    model, to_numpy = load(folder(kind, 24))
    cache, rows, texts = model.make_cache(64, 5), [4, 0, 2], [ids(n)[0] for n in (4, 1, 9)]
    for row, text in zip(rows, texts):
        model.forward([text], 0, cache, rows=[row])
    for count in (1, 3):
        more = ids(3 * count, seed=count).reshape(3, count)
        lengths = [cache.lengths[row] for row in rows]
        got = to_numpy(model.forward(more, lengths, cache, rows=rows))
        texts = [np.concatenate(pair) for pair in zip(texts, more)]
        for logits, text in zip(got, texts):
            wanted = transformers_logits(folder(kind, 24), text[None])[0, -1]
            assert relative_error(logits, wanted) < 1e-4


def prompt_and_steps(model, to_numpy):
    """(logits of 40 positions, the cache), after a copy of the prompt to another row."""
    cache, tokens = model.make_cache(64, 2), ids(40)
    logits = [model.forward(tokens[:, :30], 0, cache, rows=[1], all_positions=True)[0]]
    cache.copy_prefix(1, 0, 30)
    logits += [model.forward(tokens[:, at : at + 1], at, cache) for at in range(30, 40)]
    return np.concatenate([to_numpy(part) for part in logits]), cache


@pytest.mark.parametrize("bits, bound", [(8, 2e-2), (16, 1e-3)])
@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_in_few_bits(kind, bits, bound, backend):
    """Numbers of 16 bits are NumPy's float16, those of 8 bits close."""
    checkpoint, to_numpy = open_checkpoint(folder(kind, 64)), backend.runtime.to_numpy
    wide = backend.load(checkpoint, "float32")
    narrow = backend.load(checkpoint, "float32", cache_bits=bits)
    (wanted, full), (got, cache) = (prompt_and_steps(model, to_numpy) for model in (wide, narrow))
    assert narrow.cache_bits == bits and 0 < relative_rms(got, wanted) < bound
    assert bits / 32 <= cache.position_nbytes / full.position_nbytes < bits / 32 + 0.07
    assert cache.nbytes < (bits / 32 + 0.08) * full.nbytes
    again = narrow.make_cache(64)
    again.restore(cache.state(0))
    for name in ("keys", "values"):
        exact, state, restored = (each.state(0)[name][0] for each in (full, cache, again))
        if bits == 16:
            exact = exact.astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(state, exact)
            np.testing.assert_array_equal(restored, state)
        assert relative_rms(state, exact) < 1e-2 and relative_rms(restored, state) < 1e-2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations_of_16_bits_are_stored_as_they_are(dtype, backend):
    if backend.name == "cpu":
        pytest.skip("the cpu backend computes in float32")
    logits = [
        prompt_and_steps(
            backend.load(open_checkpoint(folder("plain", 24)), dtype, cache_bits=bits),
            backend.runtime.to_numpy,
        )[0]
        for bits in (None, 16)
    ]
    np.testing.assert_array_equal(*logits)
