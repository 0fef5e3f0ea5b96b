"""MLX's traced decode step: bits of the untraced step, one trace per allocation, no copy of the
cache, no waits.
"""

from __future__ import annotations

import functools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from making import fail_at

from backends.conftest import EVERYTHING, relative_error, transformers_logits
from mlx_llama import load
from mlx_llama.core import options
from mlx_llama.core.backends.positions import GROWTH
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import open_checkpoint

mx = pytest.importorskip("mlx.core")

from cases.compiled import MODELS, make_toy, traces

from mlx_llama.mlx_native import ops
from mlx_llama.mlx_native.cache import Cache

LOW_BIT = ("Q4_0", "mixed")
SAMPLING = {"greedy": dict(temperature=0), "everything": EVERYTHING}


@functools.cache
def checkpoint(name: str) -> Path:
    return make_toy(2048, MODELS[name])


def loaded(mlx, name: str, compile: bool):
    return mlx.load(open_checkpoint(checkpoint(name)), compile=compile)


def sampler(mlx, **settings):
    return mlx.sampling_batch([options.resolve(settings).options])


def decoded(
    mlx, model, count: int, prompt: int = 5, capacity: int = 1000, **settings
) -> tuple[list[int], dict]:
    """(tokens, the cache's state) of `count` steps after a prompt."""
    draw, cache = sampler(mlx, **settings), model.make_cache(capacity)
    token, tokens = np.arange(3, 3 + prompt, dtype=np.int32)[None] % 300, []
    for _ in range(count):
        token = model.step(token, cache.length, cache, draw)
        mx.async_eval(token)
        tokens.append(token.item())
    return tokens, cache.state()


TOKENS = np.random.default_rng(1).integers(3, 384, (1, 30)).astype(np.int32)


def logits(mlx, model) -> np.ndarray:
    """Logits [30, V] of steps after each of `TOKENS`."""
    cache, draw = model.make_cache(100), sampler(mlx, temperature=0)
    # A step then returns the logits.
    sample = "mlx_llama.mlx_native.kernels.trace.sample"
    with mock.patch(sample, lambda words, features, logits, *_: logits):
        return np.concatenate(
            [
                mlx.runtime.to_numpy(model.step(TOKENS[:, i : i + 1], i, cache, draw))
                for i in range(TOKENS.shape[1])
            ]
        )


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("bfloat16", *LOW_BIT)])
def test_steps_have_the_logits_of_transformers(name, compile, mlx):
    got = logits(mlx, loaded(mlx, name, compile))
    assert relative_error(got, transformers_logits(checkpoint(name), TOKENS)[0]) < 1e-4


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_that_fails_leaves_the_cache_as_it_was(compile, mlx, monkeypatch):
    model = loaded(mlx, "float32", compile)
    wanted, cache = logits(mlx, model), model.make_cache(100)
    model.forward(TOKENS[:, :20], 0, cache)
    before = cache.state()
    with monkeypatch.context() as patch:
        # in the second layer
        patch.setattr(ops, "gate", fail_at(2, ZeroDivisionError)(ops.gate))
        broken = loaded(mlx, "float32", compile)
        with pytest.raises(ZeroDivisionError):
            broken.step(TOKENS[:, 20:21], 20, cache, sampler(mlx, temperature=0))
    assert cache.length == 20
    for name, part in cache.state().items():
        np.testing.assert_array_equal(part, before[name])
    got = mlx.runtime.to_numpy(model.forward(TOKENS[:, 20:], 20, cache))
    assert relative_error(got[0], wanted[-1]) < 1e-5


@pytest.mark.slow_for("mlx-float32-everything", "mlx-Q4_0")
@pytest.mark.parametrize(
    "name, case", [*((name, "greedy") for name in MODELS), ("float32", "everything")]
)
def test_the_bits_are_those_of_the_untraced_step(name, case, mlx):
    plain, plain_state = decoded(mlx, loaded(mlx, name, False), 40, **SAMPLING[case])
    traced, traced_state = decoded(mlx, loaded(mlx, name, True), 40, **SAMPLING[case])
    assert traced == plain
    for part in plain_state:
        np.testing.assert_array_equal(traced_state[part], plain_state[part])


@pytest.mark.slow
def test_rotating_by_the_kernel_of_gpus(mlx, monkeypatch):
    """The rotation of GPUs at 16 bits: traced equals untraced, and the CPU's tables agree within
    rounding.
    """
    state = {}
    for tabulated in (True, False):
        fixed = property(lambda self: tabulated, lambda self, value: None)
        monkeypatch.setattr(Cache, "tabulated", fixed, raising=False)
        plain, state[tabulated] = decoded(mlx, loaded(mlx, "bfloat16", False), 20, temperature=0)
        traced, traced_state = decoded(mlx, loaded(mlx, "bfloat16", True), 20, temperature=0)
        assert traced == plain
        np.testing.assert_array_equal(traced_state["keys"], state[tabulated]["keys"])
    first = [each["keys"][0, ..., :5, :] for each in state.values()]  # the common prompt
    assert 0 < relative_error(*first) < 0.005


def test_one_trace_per_room(mlx, monkeypatch):
    seen, wanted = traces(monkeypatch), [(1, GROWTH), (1, 2 * GROWTH)]
    model = loaded(mlx, "float32", True)
    decoded(mlx, model, GROWTH + 30, temperature=0)
    assert seen == wanted
    decoded(mlx, model, 20, temperature=0)  # another conversation, another prompt
    decoded(mlx, model, 20, prompt=9, capacity=700, temperature=0)
    assert seen == wanted
    decoded(mlx, loaded(mlx, "float32", False), 5, temperature=0)
    assert len(seen) == 2 + 4  # the counter works


def test_a_wait_inside_a_traced_step_is_an_error(mlx, monkeypatch):
    original = ops.gate
    monkeypatch.setattr(ops, "gate", lambda x, kind: (x.sum().item(), original(x, kind))[1])
    model = loaded(mlx, "float32", True)
    with pytest.raises(ValueError, match="eval"):
        decoded(mlx, model, 3, temperature=0)


def test_without_a_compiler_that_mlx_calls(toy, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendError, match=r"g\+\+, which is not installed"):
        load(toy, backend="mlx", device="cpu", compile=True)
    load(toy, backend="mlx", device="cpu")


def test_reasons_for_no_compilation(toy):
    plain = load(toy, backend="mlx", device="cpu")
    assert any("C++ compiler" in notice for notice in plain.generate("a", max_tokens=2).notices)
    off = load(toy, backend="mlx", device="cpu", compile=False)
    summary = off.generate("a", max_tokens=2).summary()
    assert "decoding is not compiled: `compile=False` asks for it" in summary
    assert load(toy, backend="mlx", device="cpu", compile=True).model.notices == ()
    dynamic = make_toy(16, dict(rope_scaling=dict(rope_type="dynamic", factor=4.0)))
    with pytest.raises(BackendError, match="^`compile`: the angles of dynamic rope"):
        load(dynamic, backend="mlx", device="cpu", compile=True)
    assert "dynamic rope" in load(dynamic, backend="mlx", device="cpu").model.notices[0]


@pytest.mark.parametrize("compile", [True, False])
def test_a_prompt_of_one_token_is_a_step(compile, mlx):
    model = loaded(mlx, "float32", compile)
    draw = sampler(mlx, temperature=0)
    cache = model.make_cache(6)
    wanted = mlx.runtime.to_numpy(model.forward([[7]], 0, cache)).argmax()
    for token in ([[7]], np.array([[7]]), np.array([[7]], np.int32)):
        cache = model.make_cache(6)
        assert mlx.runtime.read([model.step(token, 0, cache, draw)]) == [wanted]
