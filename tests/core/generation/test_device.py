"""Launches and reads are counted in the completions that they serve."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_llama import load
from mlx_llama.core.generation.completion import Completion, Writer
from mlx_llama.core.generation.device import Device
from mlx_llama.core.generation.options import resolve

PROMPT = [1, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def llm(toy):
    return load(toy, backend="cpu")


@pytest.fixture
def launched(llm, monkeypatch):
    found: list[tuple] = []
    monkeypatch.setattr(llm.backend.runtime, "launch", lambda *arrays: found.append(arrays))
    return found


def test_a_chunk_is_launched_and_counted_nowhere(llm, launched):
    cache = llm.model.make_cache(16, 2)
    for chunk in (PROMPT[:2], PROMPT[2:4], PROMPT[4:]):
        Device(llm.backend).prefill(llm.model, chunk, cache, 1)
    assert len(launched) == 3 and cache.state(1)["tokens"].tolist() == PROMPT and cache.lengths == [0, 5]


def test_steps_and_reads_are_counted_for_each_row(llm, launched):
    device, cache = Device(llm.backend), llm.model.make_cache(16, 3)
    sampling = llm.backend.sampling_batch([resolve({}).options])
    writers = [Writer(Completion()), Writer(Completion())]
    wanted = llm.logits(PROMPT).argmax(-1).tolist()
    sampled = device.step(llm.model, np.array([PROMPT], np.int32), cache, [2], sampling, writers[:1])
    assert device.read(sampled, writers[:1]) == wanted[-1:] and launched[0][0] is sampled
    cache.trim(2, 2)
    run = device.verify(llm.model, PROMPT[2:], cache, 2, sampling, writers[0])
    assert device.read(run, writers[:1]) == wanted[2:]
    assert device.read_all([sampled, run], writers[0]) == [wanted[-1], *wanted[2:]]
    done = writers[0].completion
    assert (done.launches, done.waits, done.read_bytes) == (2, 3, 4 + 12 + 16)
    device.prefill(llm.model, PROMPT[:3], cache, 0)
    cache.trim(4, 2)
    both = llm.backend.sampling_batch([resolve({}).options] * 2)
    pair = device.step(llm.model, np.array([[PROMPT[4]], [PROMPT[3]]], np.int32), cache, [2, 0], both, writers)
    assert device.read(pair, writers) == [wanted[4], wanted[3]]
    assert [(one.completion.launches, one.completion.read_bytes) for one in writers] == [(3, 36), (1, 4)]


def test_a_step_whose_logits_a_function_changes_waits_once_more(llm, launched):
    device, cache = Device(llm.backend), llm.model.make_cache(16, 2)
    sampling, writer = llm.backend.sampling_batch([resolve({}).options]), Writer(Completion())
    wanted = llm.logits(PROMPT)[-1]
    seen = []

    def process(logits):
        seen.append(logits.copy())
        logits[0, wanted.argmax()] = -np.inf
        return logits

    sampled = device.step_processed(llm.model, np.array([PROMPT], np.int32), cache, 1, sampling, writer, process)
    assert device.read(sampled, [writer]) == [int(wanted.argsort()[-2])] and cache.lengths == [0, 5]
    assert np.allclose(seen[0][0], wanted, atol=1e-4) and launched[-1][0] is sampled
    done = writer.completion
    assert (done.launches, done.waits, done.read_bytes) == (1, 2, 4 * len(wanted) + 4)
