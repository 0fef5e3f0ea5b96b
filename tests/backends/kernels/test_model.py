"""Whole models on the compiled path: against NumPy's (which the parity tests hold against transformers), against themselves
for any number of threads, any cut of the prompt and any company, and what threads do when there is nothing to do."""

from __future__ import annotations

import functools
import gc
import signal
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from making import make_checkpoint
from making_gguf import make_gguf, random_blocks

from backends.conftest import relative_error
from cpu_fallback import kernels as compiled
from cpu_fallback.kernels import runner
from cpu_fallback.kernels.program import Program
from cpu_fallback.kernels.target import available
from cpu_fallback.model import Llama
from mlx_llama.core.errors import ContextError
from mlx_llama.core.files.checkpoint import open_checkpoint

MISTRAL = {"architectures": ["MistralForCausalLM"]}
WIDE = dict(hidden_size=256, intermediate_size=512)
# (what the model is, kinds of its matrices: a GGUF type, a dtype of plain weights, or several)
MODELS = {
    "odd widths": (dict(hidden_size=40, intermediate_size=100, num_attention_heads=5, num_key_value_heads=1, vocab_size=1003), "float32"),
    "head 20": (dict(hidden_size=72, num_attention_heads=6, num_key_value_heads=3, head_dim=20, tie_word_embeddings=True), "bfloat16"),
    "head 36": (dict(hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=36, attention_bias=True,
                     mlp_bias=True), "float16"),
    "head 80, a window": (dict(**MISTRAL, hidden_size=64, head_dim=80, sliding_window=7), "float32"),
    "head 128, dynamic rope": (dict(head_dim=128, rope_scaling=dict(rope_type="dynamic", factor=4.0), max_position_embeddings=16),
                               "float32"),
    "Q4_K_M": (WIDE, {"default": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"}),
    "many formats": (WIDE | dict(num_attention_heads=8, num_key_value_heads=1),
                     {"default": "Q5_0", "k_proj": "Q8_0", "v_proj": "F16", "o_proj": "IQ4_NL", "gate_proj": "Q4_1",
                      "up_proj": "F32", "lm_head": "BF16"}),
    "Q8_0 tied": (WIDE | dict(tie_word_embeddings=True, vocab_size=384), "Q8_0"),
}
LENGTH = 37
TOKENS = np.random.default_rng(1).integers(0, 384, (3, LENGTH)).astype(np.int32)


@functools.cache
def files(case: str) -> Path:
    fields, kinds = MODELS[case]
    home = Path(tempfile.mkdtemp())
    if isinstance(kinds, str) and kinds.startswith(("float", "bfloat")):
        return make_checkpoint(home / "model", dtype=kinds, tokenizer=False, **fields)
    by_name = kinds if isinstance(kinds, dict) else {"default": kinds}
    with mock.patch("making_gguf.random_blocks", centred_blocks):
        make_gguf(home / "model.gguf", kinds=lambda name: by_name.get(name.split(".")[-2], by_name["default"]), **fields)
    return home / "model.gguf"


def centred_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Random weights around 0, as a model's are: with a mean of their own, rounding would grow from layer to layer."""
    blocks = random_blocks(kind, rows, columns, rng)
    if kind == "Q4_K":  # dmin, 7.5 times d
        scales = blocks.reshape(-1, 144)[:, :4].copy().view(np.float16)
        scales[:, 1] = 7.5 * scales[:, 0]
        blocks.reshape(-1, 144)[:, :4] = scales.view(np.uint8)
    return blocks


def load(case: str, dtype: str = "float32", **options) -> Llama:
    return Llama.load(open_checkpoint(files(case)), dtype, **options)


@functools.cache
def model(case: str, threads: int = 1, activation_bits: int = 32) -> Llama:
    return load(case, "float32" if activation_bits == 32 else "auto", threads=threads, activation_bits=activation_bits)


def answer(llama: Llama, tokens: np.ndarray = TOKENS, cuts: tuple[int, ...] = (), every: bool = True, numpy: bool = False,
           capacity: int | None = None):
    """float32 [B, T, V]: the logits of all positions, computed in pieces that end at `cuts`; and the cache."""
    cache = llama.make_cache(capacity or tokens.shape[1])
    probe = (lambda *_: None) if numpy else None
    found, begin = [], 0
    for end in (*cuts, tokens.shape[1]):
        logits = llama.forward(tokens[:, begin:end], begin, cache, every=every, probe=probe)
        found.append(logits if every else logits[:, None])
        begin = end
    return np.concatenate(found, axis=1), cache


# ---- against NumPy


@pytest.mark.parametrize("case", MODELS)
def test_every_model_is_numpys_at_float32(case):
    llama = model(case)
    assert llama.compiled is not None and "NumPy" not in " ".join(llama.notices)
    wanted, slow = answer(llama, numpy=True)
    got, cache = answer(llama)
    assert relative_error(got, wanted) < 1e-5
    for one, other in zip((*cache.keys, *cache.values), (*slow.keys, *slow.values)):
        assert relative_error(one, other) < 1e-5
    mixed, slow = llama.make_cache(LENGTH), llama.make_cache(LENGTH)  # a cache goes from one to the other
    for cache in (mixed, slow):
        llama.forward(TOKENS[:, :20], 0, cache, probe=lambda *_: None)
    wanted = llama.forward(TOKENS[:, 20:], 20, slow, probe=lambda *_: None)
    assert relative_error(llama.forward(TOKENS[:, 20:], 20, mixed), wanted) < 1e-5


@pytest.mark.parametrize("bits,bound", [(16, 1e-3), (8, 0.2)])
@pytest.mark.parametrize("case", ["Q4_K_M", "many formats", "Q8_0 tied"])
def test_fixed_point_activations_stay_within_a_bound(case, bits, bound):
    llama = model(case, activation_bits=bits)
    wanted, _ = answer(llama, numpy=True)
    got, _ = answer(llama)
    error = np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))
    assert 1e-7 < error < bound


def test_float_weights_are_multiplied_with_floats_whatever_is_asked():
    np.testing.assert_array_equal(answer(model("odd widths", activation_bits=16))[0], answer(model("odd widths"))[0])


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("case", ["head 36", "Q4_K_M"])
def test_every_target_runs_a_model(case, name, monkeypatch):
    wanted, _ = answer(model(case), numpy=True)
    monkeypatch.setenv(compiled.VARIABLE, name)
    for bits, bound in ((32, 1e-5), (16, 1e-3)):
        llama = load(case, "auto", threads=2, activation_bits=bits)
        assert llama.compiled.target.name == name
        got, _ = answer(llama)
        assert relative_error(got, wanted) < bound
        np.testing.assert_array_equal(answer(llama, cuts=(*range(1, LENGTH),))[0], got)


@pytest.mark.parametrize("how", ["variable", "llvmlite"])
def test_plain_numpy_gives_the_same_answers_and_says_so(how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv(compiled.VARIABLE, "numpy")
        reason = "MLX_LLAMA_CPU_TARGET asks for it"
    else:
        import sys

        monkeypatch.setitem(sys.modules, "llvmlite", None)
        monkeypatch.delenv(compiled.VARIABLE, raising=False)
        reason = "the package 'llvmlite' is not installed (pip install llvmlite)"
    for case in ("head 20", "Q4_K_M"):
        plain = load(case)
        assert plain.compiled is None and plain.notices == (f"plain NumPy: {reason}",)
        assert relative_error(answer(model(case))[0], answer(plain)[0]) < 1e-5


# ---- the same bits


BITWISE = ("odd widths", "head 80, a window", "many formats", "Q4_K_M")


@pytest.mark.parametrize("case", BITWISE)
def test_the_bits_do_not_depend_on_threads_or_cuts(case):
    for bits in (16, 32):
        alone, _ = answer(model(case, 1, bits))
        for threads in (1, 2, 3, 5):
            for cuts in ((), (1,), (16, 17), (5, 12, 36), tuple(range(1, LENGTH))):
                if threads > 1 and len(cuts) > 3 and case != BITWISE[-1]:
                    continue
                got, _ = answer(model(case, threads, bits), cuts=cuts)
                np.testing.assert_array_equal(got, alone)


def test_a_prompt_of_several_chunks_has_the_same_bits():
    llama, rng = model("many formats", 2, 16), np.random.default_rng(2)
    assert llama.config.max_position_embeddings >= 256
    tokens = rng.integers(0, 384, (2, 2 * runner.CHUNK + 21)).astype(np.int32)
    whole, cache = answer(llama, tokens, capacity=600)
    last, _ = answer(llama, tokens, every=False, capacity=600)
    np.testing.assert_array_equal(last[:, 0], whole[:, -1])
    for cuts in ((runner.CHUNK,), (runner.CHUNK - 1, runner.CHUNK + 1), (runner.CHUNK + 1, 2 * runner.CHUNK + 20)):
        np.testing.assert_array_equal(answer(llama, tokens, cuts, capacity=600)[0], whole)
    ends = (runner.CHUNK - 1, runner.CHUNK, runner.CHUNK + 1, tokens.shape[1] - 1)
    single, _ = answer(llama, tokens, tuple(range(ends[0], ends[2] + 1)), every=False, capacity=600)
    np.testing.assert_array_equal(single[:, :4], whole[:, [end - 1 for end in (ends[0], ends[1], ends[2])] + [-1]])
    wanted, _ = answer(llama, tokens, numpy=True, capacity=600)
    assert relative_error(whole, wanted) < 5e-3


@pytest.mark.parametrize("capacity", [LENGTH, 45, 48, 300])
def test_capacity_does_not_matter(capacity):
    np.testing.assert_array_equal(answer(model("odd widths"), capacity=capacity)[0], answer(model("odd widths"))[0])


def test_sequences_of_a_batch_do_not_see_each_other():
    together, _ = answer(model("head 80, a window", 2))
    for b in range(3):
        np.testing.assert_array_equal(answer(model("head 80, a window", 2), TOKENS[b:b + 1])[0][0], together[b])


def test_a_cache_that_grows_or_is_cut_back_has_the_same_bits():
    llama, tokens = model("odd widths", 2), np.random.default_rng(3).integers(0, 384, (1, 300)).astype(np.int32)
    whole, _ = answer(llama, tokens, capacity=1000)
    cache = llama.make_cache(1000)
    llama.forward(tokens[:, :200], 0, cache)
    llama.forward(tokens[:, 250:260], 200, cache)
    cache.trim(200)
    np.testing.assert_array_equal(llama.forward(tokens[:, 200:], 200, cache)[0], whole[0, -1])
    again = llama.make_cache(1000)
    again.restore(cache.state())
    cache.trim(299)
    again.trim(299)
    np.testing.assert_array_equal(llama.forward(tokens[:, 299:], 299, again), llama.forward(tokens[:, 299:], 299, cache))


def test_infinite_activations_of_one_run_do_not_reach_the_next(monkeypatch):
    llama = load("odd widths", threads=2)
    wanted, _ = answer(llama)
    rows = llama.embedding.weight[:2].copy()
    broken = np.array(llama.embedding.weight)
    broken[0] = np.inf
    sound = llama.embedding
    llama.embedding = type(sound)(broken)
    with np.errstate(all="ignore"):
        spoilt, _ = answer(llama, np.zeros((1, LENGTH), np.int32))
    assert not np.isfinite(spoilt).any() and rows.shape[1] == 40
    llama.embedding = sound
    np.testing.assert_array_equal(answer(llama)[0], wanted)


# ---- several at a time


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sessions_in_several_threads_get_what_they_get_alone(threads):
    """Two models and six sessions at once, prompts and single tokens mixed."""
    cases = ("Q4_K_M", "odd widths")
    llamas = [model(case, threads, 16) for case in cases]
    prompts = [np.random.default_rng(seed).integers(0, 384, (1, 20 + seed)).astype(np.int32) for seed in range(6)]

    def session(number: int) -> np.ndarray:
        tokens = prompts[number]
        return answer(llamas[number % 2], tokens, cuts=(7, *range(10, tokens.shape[1])))[0]

    alone = [session(number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            for got, wanted in zip(pool.map(session, range(6)), alone):
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_interrupts_leave_a_model_that_answers_as_before(threads):
    """Ctrl-C at any time, several in a row: nothing hangs, and the next answer has the same bits."""
    if not hasattr(signal, "setitimer"):
        return  # Windows has no timer that interrupts
    llama = load("Q4_K_M", "auto", threads=threads)
    wanted, _ = answer(llama)
    left = 0

    def interrupt(*_):
        nonlocal left
        if left > 0:
            left -= 1
            raise KeyboardInterrupt

    def until_all_came():
        while left > 0:
            try:
                answer(llama, cuts=(1, 2, 30))
            except KeyboardInterrupt:
                pass

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(40):
            left = 1 + attempt % 4
            signal.setitimer(signal.ITIMER_REAL, 1e-3 + attempt * 1e-4, 3e-4)
            while left > 0:
                try:
                    until_all_came()
                except KeyboardInterrupt:  # it came between two of them
                    pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            np.testing.assert_array_equal(answer(llama)[0], wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_any_exception_of_a_signal_handler_is_passed_on_and_waits():
    if not hasattr(signal, "setitimer"):
        return  # Windows has no timer that interrupts

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    llama = load("Q4_K_M", "auto", threads=2)
    wanted, _ = answer(llama)
    before = signal.signal(signal.SIGALRM, stop)
    stopped = 0
    try:
        for attempt in range(20):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-4 + attempt * 1e-4)
                while True:
                    answer(llama)
            except Stop:
                stopped += 1
            assert llama.compiled.team._job is None
            np.testing.assert_array_equal(answer(llama)[0], wanted)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stopped == 20


def test_a_run_that_was_left_is_waited_for():
    """What two interrupts within microseconds would leave: a job that nobody waits for, begun or not."""
    llama = load("Q4_K_M", "auto", threads=2)
    wanted, _ = answer(llama)
    core = llama.compiled
    core.team._job = job = runner._Job(core.prompt, core.context, ())
    answer(llama)
    assert job.begin.locked() and not job.finished and core.team._job is None  # cancelled: it was never handed over
    held = llama.make_cache(200)
    llama.forward(np.zeros((1, 200), np.int32), 0, held)
    core._set("tokens", 200)
    core._set("first_row", 0)
    core.prompt.prepare(core.context)
    core.team._job = job = runner._Job(core.prompt, core.context, (held,))
    core.team._jobs.put(job)
    while not job.begin.locked():
        time.sleep(0)
    got, _ = answer(llama)
    assert job.finished
    np.testing.assert_array_equal(got, wanted)


# ---- threads and memory


def busy_seconds(seconds: float) -> float:
    begin = time.process_time()
    time.sleep(seconds)
    return time.process_time() - begin


def test_idle_threads_sleep():
    llama = load("Q4_K_M", "auto", threads=4)
    answer(llama)
    gc.collect()
    assert min(busy_seconds(0.3) for _ in range(3)) < 0.005


def test_a_dropped_model_takes_its_threads_and_memory_along():
    gc.collect()
    before = set(threading.enumerate())
    llama = load("Q4_K_M", "auto", threads=3)
    answer(llama)
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    arena = next(iter(llama.compiled.panels.values())).arena
    gone = [weakref.ref(one) for one in (llama.compiled, arena, llama.compiled.decode)]
    del llama, arena
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()


def test_one_thread_needs_no_other():
    before = set(threading.enumerate())
    llama = load("odd widths", threads=1)
    answer(llama)
    assert set(threading.enumerate()) == before


def test_a_failed_load_leaves_no_threads(monkeypatch):
    gc.collect()
    before = set(threading.enumerate())
    monkeypatch.setattr(runner.CompiledLlama, "_workspace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load("odd widths", threads=3)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


# ---- what must not reach the machine code


def test_another_models_cache_is_refused():
    for cache in (model("head 36").make_cache(40), model("head 20").make_cache(40)):
        with pytest.raises(ContextError, match="made by another model"):
            model("odd widths").forward(TOKENS, 0, cache)


def changed(cache, **fields):
    for name, value in fields.items():
        setattr(cache, name, value)
    return cache


def test_caches_and_embeddings_of_other_shapes_are_refused():
    llama = model("odd widths")
    core = llama.compiled

    def fresh():
        cache = llama.make_cache(40)
        cache.begin(TOKENS, 0)
        return cache

    def embed(part):
        return llama.embedding(TOKENS[:, part])

    cosine, sine = fresh().rope
    for cache, rows, message in (
            (changed(fresh(), length=5), embed, "do not fit a cache of 40"),
            (changed(fresh(), addresses=fresh().addresses[:, :1]), embed, "do not fit a cache"),
            (changed(fresh(), rope=(cosine.astype(np.float64), sine)), embed, "rope table float64"),
            (changed(fresh(), rope=(cosine, sine[:, :-1])), embed, "rope table"),
            (changed(fresh(), rope=(cosine, np.asfortranarray(sine))), embed, "in C order"),
            (fresh(), lambda part: embed(part)[..., :-1], "embeddings"),
            (fresh(), lambda part: embed(part)[:, :-1], "embeddings"),
            (fresh(), lambda part: embed(part)[:1], "embeddings")):
        with pytest.raises(ValueError, match=message):
            core.forward(rows, cache, False)
    assert core.forward(embed, fresh(), False).shape == (3, 1003)


def test_a_program_refuses_operations_that_are_not_whole():
    core = model("odd widths").compiled
    program = Program(core.code, 1)
    place = dict(qkv=1, qkv_bytes=1, heads=1, key_heads=1, keys_at=0, values_at=0, layer=0)
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add("rotate", 1, **{name: place[name] for name in place if name != "layer"})
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add("rotate", 1, **place, more=1)
    with pytest.raises(ValueError, match="not among the compiled operations"):
        program.add("attend nothing", 1, qkv=1, qkv_bytes=1, shared=1, key_heads=1, out=1, out_bytes=1, layer=0)
    for bad in (-1, 1.5, None):
        with pytest.raises(ValueError, match="whole numbers"):
            program.add("rotate", 1, **place | {"layer": bad})
    with pytest.raises(ValueError, match="finished program"):
        program.prepare(core.context)
    with pytest.raises(ValueError, match="finished program"):
        core.decode.prepare(core.context[:-1])
    with pytest.raises(ValueError, match="finished program"):
        core.decode.prepare(core.context.astype(np.int32))


def test_matrices_must_fit_the_buffers_they_read_and_write():
    core = model("odd widths").compiled
    name = "model.layers.0.mlp.down_proj.weight"
    narrow, wide = runner.Buffer(1, 0), runner.Buffer(1, 256)
    for packed, out, at, bias in ((narrow, core.hidden, 0, None), (wide, core.hidden, 250, None), (wide, core.scratch, 0, None),
                                  (wide, core.hidden, 0, np.zeros(3, np.float32))):
        with pytest.raises(ValueError, match="does not fit"):
            core._product(Program(core.code, 1), name, packed, out, True, at, bias=bias)
    with pytest.raises(ValueError, match="whole spans"):
        core._pack(Program(core.code, 1), "norm", [name], core.hidden, True, runner.Buffer(40))
