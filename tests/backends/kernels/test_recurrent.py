"""Mixers with a recurrent state in compiled programs: short convolutions, gated delta rules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from making_adapters import write_random

from backends.conftest import relative_error, transformers_logits
from backends.kernels.models import HYBRIDS, LENGTH, TOKENS, answer, checkpoint, files, load, model
from backends.kernels.test_lowering import probed
from cpu_fallback import states
from cpu_fallback.kernels.workspace import CHUNK
from cpu_fallback.model import Llama
from mlx_llama.core.backends.profile import CONVOLUTION, GATED_DELTA
from mlx_llama.core.files.adapters import open_adapters
from mlx_llama.core.options import LoadOptions

CONVOLUTIONS, DELTAS = "short convolutions", "gated delta rules"


def plain(case: str) -> Llama:
    return load(case, compile=False)


@pytest.mark.parametrize("cuts", [(), (30, 31, 32)], ids=["prompt", "decoded"])
@pytest.mark.parametrize("case", HYBRIDS)
def test_probes_are_those_of_plain_arrays(case, cuts):
    llama = model(case)
    logits, seen = probed(llama, cuts)
    np.testing.assert_array_equal(logits, answer(llama, cuts=cuts)[0])
    _, wanted = probed(plain(case), cuts)
    assert seen.keys() == wanted.keys()
    for name, array in seen.items():  # random weights double errors from layer to layer
        assert relative_error(array, wanted[name]) < 3e-5, name
    last, _ = answer(llama, all_positions=False)
    np.testing.assert_array_equal(last[:, -1], logits[:, -1])


@pytest.mark.slow_for("gated")
@pytest.mark.parametrize("case", [CONVOLUTIONS, DELTAS])
def test_logits_are_those_of_transformers(case):
    wanted = transformers_logits(files(case), TOKENS)
    for threads in (1, 2):
        assert relative_error(answer(model(case, threads))[0], wanted) < 1e-5


@pytest.mark.parametrize("case", HYBRIDS)
def test_bits_do_not_depend_on_chunks_and_threads(case):
    wanted, cache = answer(model(case, 2))
    for threads, cuts in ((1, (1, 2, 18)), (2, (16, 17)), (3, (5, 21, 36))):
        logits, other = answer(model(case, threads), cuts=cuts)
        np.testing.assert_array_equal(logits, wanted)
        for row in range(len(TOKENS)):
            for name, array in cache.state(row).items():
                np.testing.assert_array_equal(other.state(row)[name], array)


def test_states_go_from_one_vocabulary_to_the_other():
    for case in HYBRIDS:
        for first, second in ((model(case), plain(case)), (plain(case), model(case))):
            _, cache = answer(first, TOKENS[:, :20])
            target = second.make_cache(LENGTH)
            target.restore(cache.state(1))
            logits = second.forward(TOKENS[1:2, 20:], 20, target)
            wanted, _ = answer(second, TOKENS[1:2], all_positions=False)
            assert relative_error(logits, wanted[:, 0]) < 1e-5


def test_probes_of_several_chunks_are_those_of_one():
    tokens = np.random.default_rng(2).integers(0, 384, (2, CHUNK + 20)).astype(np.int32)
    for case in HYBRIDS:
        llama, seen, rest = model(case), {}, {}
        answer(llama, tokens, probe=seen.__setitem__)
        answer(llama, tokens, (CHUNK + 10,), probe=rest.__setitem__)
        for name, array in rest.items():
            np.testing.assert_array_equal(seen[name][..., -array.shape[-2] :, :], array)


@pytest.mark.parametrize("case", HYBRIDS)
def test_adapters_change_the_inputs_and_outputs_of_mixers(case, tmp_path):
    stored = checkpoint(case)
    folder = write_random(files(case), tmp_path / "adapter")
    adapters = open_adapters([folder], stored.config, stored.tensors)
    adapted, logits = dataclasses.replace(stored, adapters=adapters), []
    for compile_ in (True, False):
        llama = Llama.load(adapted, LoadOptions(dtype="float32", compile=compile_))
        cache = llama.make_cache(LENGTH, 2)
        cache.adapters[:] = [1, 0]
        llama.forward(TOKENS[:2, :20], 0, cache)
        logits.append(llama.forward(TOKENS[:2, 20:21], 20, cache))
    assert relative_error(*logits) < 1e-5
    np.testing.assert_array_equal(logits[0][1], answer(model(case), TOKENS[:2, :21])[0][1, -1])


# ---- blocks of states


def test_decoding_takes_no_fresh_memory(monkeypatch):
    made, allocate = [], states.allocate
    monkeypatch.setattr(states, "allocate", lambda *a, **n: made.append(a) or allocate(*a, **n))
    llama, rows = model(DELTAS), 3
    cache = llama.make_cache(LENGTH, rows)
    for position in range(20):
        llama.forward(TOKENS[:, position : position + 1], position, cache)
    assert len(made) == 2 * rows
    llama.forward(TOKENS[:1, :3], 20, cache, rows=[1])  # keeps a checkpoint of before and after
    cache.trim(20, row=1)
    llama.forward(TOKENS[:, :1], 20, cache)
    assert len(made) <= 3 * rows
    cache.reset()
    assert cache.nbytes == 0 and not cache.blocks._spare


def test_states_that_someone_holds_do_not_change():
    llama = model(DELTAS)
    cache = llama.make_cache(LENGTH)
    llama.forward(TOKENS[:1, :5], 0, cache)
    held = [part for parts in cache.states[0] for part in parts]
    copies = [part.copy() for part in held]
    for position in range(5, 12):
        llama.forward(TOKENS[:1, position : position + 1], position, cache)
    cache.reset()
    for part, copy in zip(held, copies):
        np.testing.assert_array_equal(part, copy)


def test_the_profile_names_recurrences():
    for llama, names in (
        (model(CONVOLUTIONS), {CONVOLUTION}),
        (plain(CONVOLUTIONS), {CONVOLUTION}),
        (model(DELTAS), {CONVOLUTION, GATED_DELTA}),
        (plain(DELTAS), {GATED_DELTA}),  # whose convolution is a part of it
    ):
        with llama.profile() as profile:
            answer(llama, all_positions=False)
        assert {CONVOLUTION, GATED_DELTA} & {*profile.operations} == names
