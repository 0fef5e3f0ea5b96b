"""Recurrent states on MLX: the delta rule in blocks and by its Metal kernel (tests/metal.py), and
states of rows that share a buffer. Their tokens are judged in test_mlx_rows.py, their bits and
logits in test_compiled_step.py."""

from __future__ import annotations

import functools
import shutil

import metal
import numpy as np
import pytest
from cases.compiled import MODELS, make_toy

from backends.conftest import in_chunks, relative_error, transformers_logits
from backends.evaluations import counted
from mlx_llama import load
from mlx_llama.core.backends.positions import CHECKPOINT
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.ops import DeltaWeights
from mlx_llama.core.options import resolve

mx = pytest.importorskip("mlx.core")

import itertools

from mlx_llama.mlx_native import weights
from mlx_llama.mlx_native.kernels import delta

HYBRIDS = ("LFM2", "Qwen3.5")
SIZES = delta.Sizes(2, 6, 10, 14, False)
TILED = SIZES._replace(tiled=True, key_size=33, value_size=5)

checkpoint = functools.cache(lambda name: make_toy(2048, MODELS[name]))


@functools.cache
def loaded(mlx, name: str, compile: bool | None = None):
    return mlx.load(open_checkpoint(checkpoint(name)), "float32", compile=compile)


def greedy(mlx, rows: int = 1):
    return mlx.sampling_batch([resolve({"temperature": 0}).options] * rows)


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 384, (1, length)).astype(np.int32)


def steps(mlx, model, cache, rows: list[int], count: int) -> np.ndarray:
    """Greedy tokens of `rows`, [count, rows]."""
    tokens, seen = np.full((len(rows), 1), 5, np.int32), []
    for _ in range(count):
        lengths = [cache.lengths[row] for row in rows]
        tokens = model.step(tokens, lengths, cache, greedy(mlx, len(rows)), rows=rows)
        seen.append(mlx.runtime.read([tokens]))
    return np.array(seen)


# ---- the delta rule


class Inputs:
    """Random inputs of the recurrence, for `count` positions of two rows."""

    def __init__(self, sizes: delta.Sizes, count: int, repeats: bool = False):
        rng, self.sizes = np.random.default_rng(0), sizes
        channels = 2 * sizes.key_heads * sizes.key_size + sizes.value_heads * sizes.value_size
        mixed = rng.standard_normal((2, count, channels))
        gates = rng.standard_normal((2, count, 2 * sizes.value_heads))
        if repeats:  # one key, stored whole, that nothing decays
            mixed[:] = mixed[:, :1]
            gates += 30 * np.repeat([1, -1], sizes.value_heads)
        self.mixed, self.gates = self.array(mixed), self.array(gates)
        heads = rng.standard_normal((2, sizes.value_heads))
        rate, bias = self.array(-np.exp(heads[0])), self.array(heads[1])
        self.weights = DeltaWeights(None, rate, bias, None)
        state = rng.standard_normal((2, sizes.value_heads, sizes.key_size, sizes.value_size))
        self.state = self.array(state)

    def array(self, numbers: np.ndarray):
        return mx.array(numbers.astype(np.float32))

    def one_by_one(self):
        outputs, state = [], self.state
        for t in range(self.mixed.shape[1]):
            at = np.s_[:, t : t + 1]
            out, state = delta.advance(
                self.mixed[at], self.gates[at], state, self.sizes, self.weights
            )
            outputs.append(out)
        return mx.concatenate(outputs, axis=1), state

    def in_blocks(self, cuts: list[int], starts=(0, 0)):
        outputs, state = [], self.state
        for first, end in itertools.pairwise(cuts):
            at, places = np.s_[:, first:end], [start + first for start in starts]
            mixed, gates = self.mixed[at], self.gates[at]
            out, state = delta.advance_blocks(mixed, gates, state, self.sizes, self.weights, places)
            outputs.append(out)
        return mx.concatenate(outputs, axis=1), state


def check(results, wanted, bound=2e-5):
    for result, judge in zip(results, wanted):
        assert relative_error(np.array(result), np.array(judge)) < bound


@pytest.mark.parametrize("sizes", [SIZES, TILED], ids=["grouped", "tiled"])
def test_blocks_give_what_positions_give_one_by_one(sizes, mlx):
    with mx.stream(mlx.device):
        inputs = Inputs(sizes, 150)
        wanted = inputs.one_by_one()
        check(inputs.in_blocks([0, 150]), wanted)
        check(inputs.in_blocks([0, 7, 8, 70, 150]), wanted)
        check(inputs.in_blocks([0, 7, 150], starts=(61, 3)), wanted)


def test_a_key_that_repeats_loses_no_digits(mlx):
    """Powers of the matrix that is inverted would reach 1e17."""
    with mx.stream(mlx.device):
        inputs = Inputs(SIZES, 130, repeats=True)
        check(inputs.in_blocks([0, 130]), inputs.one_by_one(), 1e-4)


def test_a_cut_between_blocks_changes_no_bit(mlx):
    with mx.stream(mlx.device):
        inputs, cuts = Inputs(SIZES, 200), [0, delta.BLOCK, 3 * delta.BLOCK, 200]
        for whole, more in ([0, 200], cuts), ([0, 7, 200], [0, 7, *cuts[1:]]):
            for one, other in zip(inputs.in_blocks(whole), inputs.in_blocks(more)):
                np.testing.assert_array_equal(np.array(one), np.array(other))


@pytest.fixture
def kernel(monkeypatch):
    """The Metal kernel, compiled as C++ and used on MLX's CPU device."""
    if shutil.which("g++") is None:
        pytest.skip("g++ compiles the Metal kernels here, and is not installed")
    use(monkeypatch, metal.metal_kernel)
    monkeypatch.setattr(delta, "is_for_metal", lambda device: True)


def use(monkeypatch, metal_kernel):
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    for name in ("_kernel", "find_fault"):
        monkeypatch.setattr(delta, name, functools.cache(getattr(delta, name).__wrapped__))


@pytest.mark.slow_for("mlx-tiled")
@pytest.mark.parametrize("sizes", [SIZES, TILED], ids=["grouped", "tiled"])
def test_the_kernel_gives_what_plain_operations_give(sizes, mlx, kernel):
    with mx.stream(mlx.device):
        inputs = Inputs(sizes, 9)
        results = delta.advance_by_kernel(
            inputs.mixed, inputs.gates, inputs.state, sizes, inputs.weights
        )
        check(results, inputs.one_by_one())
        assert delta.find_fault(sizes, mx.float16) == ""


@pytest.mark.slow
def test_a_model_that_uses_the_kernel_has_the_logits_of_transformers(mlx, kernel, monkeypatch):
    """In prompts and in steps."""
    calls, original = [], delta.advance_by_kernel
    monkeypatch.setattr(
        delta,
        "advance_by_kernel",
        lambda *args: (calls.append(args[0].shape[1]), original(*args))[1],
    )
    model, tokens = loaded(mlx, "Qwen3.5"), ids(30)
    got = in_chunks(model, mlx.runtime.to_numpy, tokens, (0, 20, 29, 30))
    assert relative_error(got, transformers_logits(checkpoint("Qwen3.5"), tokens)) < 1e-4
    cache = model.make_cache(40)
    model.forward(tokens, 0, cache)
    chosen = steps(mlx, model, cache, [0], 1)
    assert calls[-5:] == [20, 9, 1, 30, 1]  # after those of the trial
    longer = np.concatenate([tokens, [[5]]], axis=1)
    assert chosen == transformers_logits(checkpoint("Qwen3.5"), longer)[0, -1].argmax()


def no_metal(**settings):
    def call(**arguments):
        raise RuntimeError("[metal_kernel] No Metal back-end.\nnor any other")

    return call


def wrong_numbers(**settings):
    kernel = metal.metal_kernel(**settings)
    return lambda **arguments: [array * 1.01 for array in kernel(**arguments)]


@pytest.mark.parametrize(
    "metal_kernel, reason", [(no_metal, "No Metal back-end."), (wrong_numbers, "differ from plain")]
)
def test_a_kernel_that_fails_its_trial_is_not_used(metal_kernel, reason, mlx, kernel, monkeypatch):
    assert not weights.Weights(
        open_checkpoint(checkpoint("Qwen3.5")), mx.float32, mlx.device
    ).notices
    use(monkeypatch, metal_kernel)
    model = mlx.load(open_checkpoint(checkpoint("Qwen3.5")), "float32")
    assert [reason in notice for notice in model.notices].count(True) == 1
    monkeypatch.setattr(delta, "advance_by_kernel", None)
    model.forward(ids(5), 0, model.make_cache(9))
    assert not mlx.load(open_checkpoint(checkpoint("LFM2")), "float32").notices[1:]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernel_is_metal(dtype, mlx):
    if shutil.which("clang") is None:
        pytest.skip(
            "clang compiles the Metal source with its address spaces here, and is not installed"
        )
    inputs = Inputs(SIZES, 2)
    records = metal.exported(
        lambda mixed, gates, state: delta.advance_by_kernel(
            mixed, gates, state, SIZES, inputs.weights
        ),
        inputs.mixed,
        inputs.gates.astype(getattr(mx, dtype)),
        inputs.state,
    )
    (source,) = [record["arguments"][1] for record in records if record["name"] == "CustomKernel"]
    assert "define" in metal.compile_as_metal(source)


# ---- states of rows


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_in_any_chunks_has_the_same_greedy_answer(name, mlx):
    model, answers = loaded(mlx, name), []
    tokens = ids(200)
    judge = transformers_logits(checkpoint(name), tokens)
    for cuts in ((0, 200), (0, 64, 128, 200), (0, 1, 90, 91, 150, 200)):
        assert relative_error(in_chunks(model, mlx.runtime.to_numpy, tokens, cuts), judge) < 1e-4
        cache = model.make_cache(300)
        for first, end in itertools.pairwise(cuts):
            model.forward(tokens[:, first:end], first, cache)
        answers.append(steps(mlx, model, cache, [0], 30).tolist())
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("name", HYBRIDS)
def test_checkpoints_of_shared_steps_are_those_of_each_row_alone(name, mlx):
    model, starts = loaded(mlx, name), [CHECKPOINT - 3, CHECKPOINT - 5, 40]
    cache, rows = model.make_cache(600, 3), [2, 0, 1]
    for row, length in enumerate(starts):
        model.forward(ids(length, row), 0, cache, rows=[row])
    together = steps(mlx, model, cache, rows, 12)
    for row, length in enumerate(starts[:2]):
        assert list(cache.checkpoints[row]) == [length, CHECKPOINT]
        # a copy: it holds no other row's states
        assert cache.checkpoints[row][CHECKPOINT].rows == 1
        alone = model.make_cache(600)
        model.forward(ids(length, row), 0, alone)
        single = steps(mlx, model, alone, [0], 12)
        assert single[:, 0].tolist() == together[:, rows.index(row)].tolist()
        for caches in ((cache, row), (alone, 0)):
            assert caches[0].trim(CHECKPOINT + 1, caches[1]) == CHECKPOINT
        parts = cache.state(row), alone.state()
        assert parts[0]["tokens"].tolist() == parts[1]["tokens"].tolist()
        assert relative_error(parts[0]["recurrent"], parts[1]["recurrent"]) < 1e-5
        restored = model.make_cache(600)
        restored.restore(parts[0])
        assert (
            steps(mlx, model, restored, [0], 4).tolist()
            == steps(mlx, model, cache, [row], 4).tolist()
        )


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_step_over_the_same_rows_copies_no_state(name, mlx):
    """It takes the arrays of the last step; rows that rest have arrays of their own."""
    model = loaded(mlx, name)
    cache = model.make_cache(100, 4)
    for row in range(4):
        model.forward(ids(4 + row, row), 0, cache, rows=[row])
    steps(mlx, model, cache, [0, 1, 2, 3], 2)
    shared = cache.states[0].shared
    assert all(cache.states[row].shared is shared for row in range(4))
    assert cache.gather_states([0, 1, 2, 3]) is shared
    before = cache.state(3)
    steps(mlx, model, cache, [1, 2], 2)
    assert [cache.states[row].rows for row in range(4)] == [1, 4, 4, 1]
    assert cache.gather_states([None, 1, 2, None]) is cache.states[1].shared
    assert all(np.array_equal(part, cache.state(3)[name]) for name, part in before.items())
    for row in (0, 1, 3):
        cache.reset(row)
    assert cache.states[0] == () and cache.states[2].rows == 1  # of the last row in the buffer
    assert cache.states_nbytes() == 2 * cache.state_nbytes  # with the prompt's checkpoint


def test_a_prompt_keeps_no_more_than_its_state(mlx):
    """Not all inputs of its convolutions."""
    model = loaded(mlx, "LFM2")
    cache = model.make_cache(1800)
    mx.eval(model.forward(ids(1700), 0, cache), cache.arrays())
    (history,) = cache.states[0].shared[0]
    held, nbytes = mx.get_active_memory(), history.nbytes
    del history
    cache.states[0], cache.checkpoints[0] = (), {}
    assert held - mx.get_active_memory() < nbytes + (1 << 15)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_one_launch_and_one_wait_per_token(name, compile, mlx, monkeypatch):
    llm = load(checkpoint(name), backend="mlx", device=str(mlx.device.type)[-3:], compile=compile)
    llm.generate("A fox", max_tokens=4)
    prompt = "Once upon a time " * 19  # 249 tokens: a step takes a checkpoint
    with counted(mlx, monkeypatch) as count:
        completion = llm.generate(prompt, max_tokens=20)
    assert len(completion.tokens) == count["launch"] == count["wait"] == 20
