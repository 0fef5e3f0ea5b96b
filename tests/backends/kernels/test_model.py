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
from cpu_fallback import kernels
from cpu_fallback.kernels import runner, workspace
from cpu_fallback.kernels.lowering import Normed, Rows, Trace
from cpu_fallback.kernels.program import Program
from cpu_fallback.kernels.target import available
from cpu_fallback.kernels.team import Job
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
    "qwen2, a window in its last layer": (dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=7,
                                               max_window_layers=1), "float32"),
    "qwen3, head 20": (dict(architectures=["Qwen3ForCausalLM"], hidden_size=72, num_attention_heads=6, num_key_value_heads=3,
                            head_dim=20), "bfloat16"),
    "qwen3, head 64": (dict(architectures=["Qwen3ForCausalLM"], head_dim=64), "float32"),
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


@functools.cache
def plain(case: str) -> Llama:
    """The same forward on NumPy arrays."""
    return load(case, compile=False)


def answer(llama: Llama, tokens: np.ndarray = TOKENS, cuts: tuple[int, ...] = (), all_positions: bool = True,
           capacity: int | None = None, probe=None):
    """float32 [B, T, V]: the logits of all positions, computed in pieces that end at `cuts`; and the cache."""
    cache = llama.make_cache(capacity or tokens.shape[1])
    found, begin = [], 0
    for end in (*cuts, tokens.shape[1]):
        logits = llama.forward(tokens[:, begin:end], begin, cache, all_positions=all_positions, probe=probe)
        found.append(logits if all_positions else logits[:, None])
        begin = end
    return np.concatenate(found, axis=1), cache


# ---- against NumPy


@pytest.mark.parametrize("case", MODELS)
def test_every_model_is_numpys_at_float32(case):
    llama = model(case)
    assert llama._runner is not None and "NumPy" not in " ".join(llama.notices)
    wanted, slow = answer(plain(case))
    got, cache = answer(llama)
    assert relative_error(got, wanted) < 1e-5
    for one, other in zip((*cache.keys, *cache.values), (*slow.keys, *slow.values)):
        assert relative_error(one, other) < 1e-5
    mixed, slow = llama.make_cache(LENGTH), llama.make_cache(LENGTH)  # a cache goes from one to the other
    for cache in (mixed, slow):
        plain(case).forward(TOKENS[:, :20], 0, cache)
    wanted = plain(case).forward(TOKENS[:, 20:], 20, slow)
    assert relative_error(llama.forward(TOKENS[:, 20:], 20, mixed), wanted) < 1e-5


# ---- probes


def probed(llama: Llama, cuts: tuple[int, ...] = (), all_positions: bool = True) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and every probe's values over all tokens."""
    seen: dict[str, list[np.ndarray]] = {}
    logits, _ = answer(llama, cuts=cuts, all_positions=all_positions,
                       probe=lambda name, array: seen.setdefault(name, []).append(array))
    return logits, {name: np.concatenate(parts, axis=parts[0].ndim - 2) for name, parts in seen.items()}


@pytest.mark.parametrize("cuts", [(), (30, 31, 32)], ids=["prompt", "decoded"])
@pytest.mark.parametrize("case", MODELS)
def test_probes_read_the_program_that_runs(case, cuts):
    """Its own numbers, which are NumPy's within rounding, and the logits of a run without probes, to the bit."""
    llama = model(case)
    logits, found = probed(llama, cuts)
    np.testing.assert_array_equal(logits, answer(llama, cuts=cuts)[0])
    np.testing.assert_array_equal(found["logits"], logits)
    _, wanted = probed(plain(case), cuts)
    assert list(found) and found.keys() == wanted.keys()
    assert len(found) == 3 + 10 * llama.config.num_hidden_layers
    for name in wanted:
        assert relative_error(found[name], wanted[name]) < 1e-5, name
    last, _ = probed(llama, cuts, all_positions=False)
    np.testing.assert_array_equal(last[:, -1], logits[:, -1])


def test_probes_of_fixed_point_activations_show_their_rounding():
    _, exact = probed(plain("Q4_K_M"))
    for bits, low, high in ((16, 1e-7, 1e-3), (8, 1e-3, 0.2)):
        _, found = probed(model("Q4_K_M", activation_bits=bits))
        assert low < relative_error(found["0.attention_norm"], exact["0.attention_norm"]) < high


def test_probes_of_a_prompt_of_several_chunks():
    llama, seen = model("many formats", 2, 16), {}
    tokens = np.random.default_rng(2).integers(0, 384, (2, workspace.CHUNK + 50)).astype(np.int32)
    logits, _ = answer(llama, tokens, probe=seen.__setitem__)
    np.testing.assert_array_equal(logits, answer(llama, tokens)[0])
    for cut in (1, 60):
        parts: dict[str, list[np.ndarray]] = {}
        answer(llama, tokens, (cut,), probe=lambda name, array: parts.setdefault(name, []).append(array))
        for name, array in seen.items():
            np.testing.assert_array_equal(np.concatenate(parts[name], axis=array.ndim - 2), array)


FAULTS = ("no scale", "swapped heads", "half norm")


def plant(fault: str, patch) -> None:
    """A fault in layers.py or in the data that it reads."""
    from cpu_fallback import layers, ops
    from mlx_llama.core.models.spec import LayerSpec

    if fault == "no scale":
        patch.setattr(LayerSpec, "scale", 1.0)
    elif fault == "swapped heads":  # values for keys, keys for values
        linear = layers.Linear.__call__

        def swapped(self, x):
            q, k, v = self.weight if isinstance(self.weight, tuple) and len(self.weight) == 3 else (None,) * 3
            return linear(self, x) if q is None else ops.linear(x, (q, v, k), self.bias)

        patch.setattr(layers.Linear, "__call__", swapped)
    else:
        patch.setattr(layers.RMSNorm, "__call__", lambda self, x, delta=None: ops.add_rms_norm(
            x, delta, np.float32(0.5) * self.weight, self.eps))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_layers_shows_in_every_path(fault, monkeypatch):
    """In prompts and decoded tokens, compiled and not, and at the probe where it is."""
    case, first = "head 36", {"no scale": "0.attention", "swapped heads": "0.key", "half norm": "0.attention_norm"}[fault]
    sound, sound_probes = answer(model(case))[0], probed(model(case))[1]
    plant(fault, monkeypatch)
    wrong = load(case, threads=1, activation_bits=32)
    assert wrong._runner
    wanted, _ = answer(load(case, compile=False))
    assert relative_error(wanted, sound) > 0.01
    for cuts in ((), tuple(range(1, LENGTH))):
        assert relative_error(answer(wrong, cuts=cuts)[0], wanted) < 1e-5
    _, found = probed(wrong)
    off = [name for name in sound_probes if relative_error(found[name], sound_probes[name]) > 1e-3]
    order = ("attention_norm", "query", "key", "value", "query_rope", "key_rope", "attention", "ffn_norm", "ffn", "block")
    assert min((name for name in off if name.startswith("0.")), key=lambda name: order.index(name[2:])) == first


@pytest.mark.parametrize("bits,bound", [(16, 1e-3), (8, 0.2)])
@pytest.mark.parametrize("case", ["Q4_K_M", "many formats", "Q8_0 tied"])
def test_fixed_point_activations_stay_within_a_bound(case, bits, bound):
    wanted, _ = answer(plain(case))
    got, _ = answer(model(case, activation_bits=bits))
    error = np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))
    assert 1e-7 < error < bound


def test_float_weights_are_multiplied_with_floats_whatever_is_asked():
    np.testing.assert_array_equal(answer(model("odd widths", activation_bits=16))[0], answer(model("odd widths"))[0])


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("case", ["head 36", "Q4_K_M"])
def test_every_target_runs_a_model(case, name, monkeypatch):
    wanted, _ = answer(plain(case))
    monkeypatch.setenv(kernels.VARIABLE, name)
    for bits, bound in ((32, 1e-5), (16, 1e-3)):
        llama = load(case, "auto", threads=2, activation_bits=bits)
        assert llama._runner.code.recipe.target.name == name
        got, _ = answer(llama)
        assert relative_error(got, wanted) < bound
        np.testing.assert_array_equal(answer(llama, cuts=(*range(1, LENGTH),))[0], got)


@pytest.mark.parametrize("how", ["variable", "llvmlite"])
def test_plain_numpy_gives_the_same_answers_and_says_so(how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv(kernels.VARIABLE, "numpy")
        reason = "MLX_LLAMA_CPU_TARGET asks for it"
    else:
        import sys

        monkeypatch.setitem(sys.modules, "llvmlite", None)
        monkeypatch.delenv(kernels.VARIABLE, raising=False)
        reason = "the package 'llvmlite' is not installed (pip install llvmlite)"
    for case in ("head 20", "Q4_K_M"):
        llama = load(case)
        assert llama._runner is None and llama.notices == (f"plain NumPy: {reason}",)
        np.testing.assert_array_equal(answer(llama)[0], answer(plain(case))[0])


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
    tokens = rng.integers(0, 384, (2, 2 * workspace.CHUNK + 21)).astype(np.int32)
    whole, cache = answer(llama, tokens, capacity=600)
    last, _ = answer(llama, tokens, all_positions=False, capacity=600)
    np.testing.assert_array_equal(last[:, 0], whole[:, -1])
    for cuts in ((workspace.CHUNK,), (workspace.CHUNK - 1, workspace.CHUNK + 1), (workspace.CHUNK + 1, 2 * workspace.CHUNK + 20)):
        np.testing.assert_array_equal(answer(llama, tokens, cuts, capacity=600)[0], whole)
    ends = (workspace.CHUNK - 1, workspace.CHUNK, workspace.CHUNK + 1, tokens.shape[1] - 1)
    single, _ = answer(llama, tokens, tuple(range(ends[0], ends[2] + 1)), all_positions=False, capacity=600)
    np.testing.assert_array_equal(single[:, :4], whole[:, [end - 1 for end in (ends[0], ends[1], ends[2])] + [-1]])
    wanted, _ = answer(plain("many formats"), tokens, capacity=600)
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
    broken = np.array(llama.embedding.weight)
    broken[0] = np.inf
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(llama._runner, "_embedding", broken)
        spoilt, _ = answer(llama, np.zeros((1, LENGTH), np.int32))
    assert not np.isfinite(spoilt).any()
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
            assert llama._runner.team._job is None
            np.testing.assert_array_equal(answer(llama)[0], wanted)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stopped == 20


def test_a_run_that_was_left_is_waited_for():
    """What two interrupts within microseconds would leave: a job that nobody waits for, begun or not."""
    llama = load("Q4_K_M", "auto", threads=2)
    wanted, _ = answer(llama)
    core = llama._runner
    core.team._job = job = Job(core.prompt.program, core.context, ())
    answer(llama)
    assert job.begin.locked() and not job.finished and core.team._job is None  # cancelled: it was never handed over
    held = llama.make_cache(200)
    llama.forward(np.zeros((1, 200), np.int32), 0, held)
    core._set("tokens", 200)
    core._set("position", 0)
    core._set("first_row", 0)
    core.prompt.program.prepare(core.context)
    core.team._job = job = Job(core.prompt.program, core.context, (held,))
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
    arena = llama.head.weight.arena
    gone = [weakref.ref(one) for one in (llama._runner, arena, llama._runner.decode.program)]
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
    monkeypatch.setattr(runner, "Workspace", lambda *_: 1 / 0)
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


def changed(view, **fields):
    for name, value in fields.items():
        setattr(view, name, value)
    return view


def test_views_and_embeddings_of_other_shapes_are_refused(monkeypatch):
    llama = model("odd widths")
    core = llama._runner

    def fresh():
        return llama.make_cache(40).view(TOKENS, 0)

    cosine, sine = fresh().tables
    for view, message in (
            (changed(fresh(), index_pos=5), "do not fit a cache of 40"),
            (changed(fresh(), addresses=fresh().addresses[:, :1]), "do not fit a cache"),
            (changed(fresh(), tables=(cosine.astype(np.float64), sine)), "rope table float64"),
            (changed(fresh(), tables=(cosine, sine[:, :-1])), "rope table"),
            (changed(fresh(), tables=(cosine, np.asfortranarray(sine))), "in C order")):
        with pytest.raises(ValueError, match=message):
            core.forward(TOKENS, view, False)
    assert core.forward(TOKENS, fresh(), False).shape == (3, 1003)
    monkeypatch.setattr(core, "_embedding", llama.embedding.weight[:, :-1])
    with pytest.raises(ValueError, match="embeddings"):
        core.forward(TOKENS, fresh(), False)


def test_a_program_refuses_operations_that_are_not_whole():
    core = model("odd widths")._runner
    program = Program(core.code, 1)
    place = dict(qkv=1, qkv_bytes=1, heads=1, key_heads=1, keys_at=0, values_at=0, layer=0, rotates=1)
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add("rotate", 1, **{name: place[name] for name in place if name != "layer"})
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add("rotate", 1, **place, more=1)
    with pytest.raises(ValueError, match="not among the compiled operations"):
        program.add("attend nothing", 1, qkv=1, qkv_bytes=1, shared=1, key_heads=1, out=1, out_bytes=1, layer=0, window=1,
                    scale=0)
    for bad in (-1, 1.5, None):
        with pytest.raises(ValueError, match="whole numbers"):
            program.add("rotate", 1, **place | {"layer": bad})
    with pytest.raises(ValueError, match="finished program"):
        program.prepare(core.context)
    with pytest.raises(ValueError, match="finished program"):
        core.decode.program.prepare(core.context[:-1])
    with pytest.raises(ValueError, match="finished program"):
        core.decode.program.prepare(core.context.astype(np.int32))


def test_matrices_must_fit_the_buffers_they_read_and_write():
    llama = model("odd widths")
    core = llama._runner

    def trace() -> Trace:
        return Trace(llama.config, core.code, core.workspace, 1, True)

    down, qkv = llama.blocks[0].mlp.down.weight, llama.blocks[0].attention.qkv.weight
    narrow, one = workspace.Buffer(1, 0), trace()
    with pytest.raises(ValueError, match="does not fit inputs of 0"):
        one.multiply(Rows(one, narrow, 0, 0), (down,), None)
    with pytest.raises(ValueError, match="a bias of 3"):
        one.multiply(Rows(one, core.workspace.hidden, 0, 40), (down,), np.zeros(3, np.float32))
    for buffer in (narrow, core.workspace.scratch):
        product = one.multiply(Rows(one, core.workspace.hidden, 0, 40), (down,), None)
        with pytest.raises(ValueError, match="do not fit a buffer"):
            product.place(buffer)
    product.place(core.workspace.hidden)
    with pytest.raises(ValueError, match="lies elsewhere already"):
        product.place(core.workspace.hidden)
    with pytest.raises(ValueError, match="layer 0: query, key and value have"):
        runner.ops.split_heads(one.multiply(one.stream, qkv[:2], None), llama.config.layers[0])
    with pytest.raises(ValueError, match="whole spans"):
        one.pack(Normed(one, workspace.Buffer(40), 1e-5), list(core.code.recipe.activations))
    with pytest.raises(ValueError, match="not placed"):
        one.program.finish()
