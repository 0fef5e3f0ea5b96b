"""Steps: chunks of a prompt, arrays that are launched, counts in the completion."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_llama import load
from mlx_llama.core.generation.completion import Completion
from mlx_llama.core.generation.options import resolve
from mlx_llama.core.generation.steps import Steps

PROMPT = [1, 50, 60, 70, 80]


@pytest.fixture(scope="module")
def llm(toy):
    return load(toy, backend="cpu")


@pytest.fixture
def launched(llm, monkeypatch):
    found: list[tuple] = []
    monkeypatch.setattr(llm.backend.runtime, "launch", lambda *arrays: found.append(arrays))
    return found


def test_prefill_appends_in_chunks_and_counts_nothing(llm, launched):
    completion, cache = Completion(), llm.model.make_cache(16)
    Steps(llm.backend, completion).prefill(llm.model, PROMPT, cache, 2)
    assert len(launched) == 3 and cache.state()["tokens"].tolist() == [PROMPT]
    assert (completion.launches, completion.waits) == (0, 0)


def test_a_step_is_launched_with_the_tokens_of_the_cache_and_counted(llm, launched):
    completion, cache = Completion(), llm.model.make_cache(16)
    sampler, steps = llm.backend.sampler(resolve({}).options), Steps(llm.backend, completion)
    wanted = llm.logits(PROMPT).argmax(-1).tolist()
    sampled = steps.launch(llm.model, np.array([PROMPT], np.int32), cache, sampler)
    assert steps.read(sampled) == wanted[-1]
    assert launched[0][0] is sampled and launched[0][1] is cache.tokens
    cache.trim(2)
    run = steps.launch_verification(llm.model, PROMPT[2:], cache, sampler)
    assert steps.read_all(run) == wanted[2:]
    assert steps.read_all(sampled, run) == [wanted[-1], *wanted[2:]]
    assert (completion.launches, completion.waits, completion.read_bytes) == (2, 3, 4 + 12 + 16)
