"""Answers asked for from any thread, and models that come and go: the same tokens as from one
thread.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from machine import device_of
from making import make_checkpoint

from mlx_llama import load
from mlx_llama.core.files.checkpoint import open_checkpoint

LONG = list(range(3, 90))


def elsewhere(function, *args, **named):
    """Call `function` in a new thread and return its result; raises its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **named).result()


@pytest.fixture(scope="module")
def llm(backend, toy):
    return load(toy, backend=backend.name, device=device_of(backend), dtype="float32")


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"max_tokens": 6},
        {"max_tokens": 6, "regex": "[a-z ]+"},
        {"max_tokens": 6, "prefill_step_size": 16},
        {"max_tokens": 12, "speculate": "prompt", "logit_bias": {5: 6.0}},
        {"max_tokens": 4, "temperature": 1.0, "seed": 3, "logprobs": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_each_answer_in_another_thread(options, backend, toy, llm):
    wanted = (
        load(toy, backend=backend.name, device=device_of(backend), dtype="float32")
        .generate(LONG, **options)
        .tokens
    )
    assert [elsewhere(llm.generate, LONG, **options).tokens for _ in range(3)] == [wanted] * 3
    longer = elsewhere(llm.generate, [*LONG, *wanted], max_tokens=3)
    assert longer.reused_tokens >= len(LONG)  # the row of another thread


def test_three_threads_and_asyncio_at_once(llm):
    options = {"max_tokens": 8, "temperature": 0.8, "seed": 1}
    wanted = [llm.generate(f"word {i}", **options).text for i in range(3)]

    async def stream(i: int) -> str:
        return "".join([piece async for piece in llm.astream(f"word {i}", **options)])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(stream, range(3)))

    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(llm.generate, f"word {i}", **options) for i in range(3)]
        assert asyncio.run(all_of_them()) == wanted
        assert [thread.result().text for thread in threads] == wanted


def test_logits_and_saved_caches_from_other_threads(llm, tmp_path):
    logits = llm.logits(LONG)
    np.testing.assert_array_equal(elsewhere(llm.logits, LONG), logits)
    wanted = elsewhere(llm.generate, LONG, max_tokens=5).tokens
    elsewhere(llm.save_cache, tmp_path / "cache")
    count = elsewhere(llm.load_cache, tmp_path / "cache")
    assert count == len(LONG) + 4 and llm.generate(LONG, max_tokens=5).tokens == wanted


def test_a_row_filled_in_one_thread_goes_on_in_another(backend, toy):
    """Without the loop: reading a prompt's logits stores its tokens too."""
    model = backend.load(open_checkpoint(toy), "float32")
    cache = model.make_cache(100)
    wanted = backend.runtime.to_numpy(model.forward([[*LONG, 7]], 0, model.make_cache(100)))
    elsewhere(lambda: backend.runtime.to_numpy(model.forward([LONG], 0, cache)))
    np.testing.assert_allclose(
        backend.runtime.to_numpy(model.forward([[7]], len(LONG), cache)),
        wanted,
        rtol=1e-3,
        atol=1e-4,
    )
    assert cache.state()["tokens"].tolist() == [*LONG, 7]


@pytest.mark.slow_for("*-50")
@pytest.mark.parametrize("count", [4, 50])
def test_a_model_never_runs_with_the_weights_of_the_one_before(count, backend, tmp_path):
    """Two models of one shape in turn, each used in two threads and dropped."""
    if backend.name == "mlx" and device_of(backend) == "cpu":
        shutil.which("g++") or pytest.skip(
            "for its CPU device MLX compiles with g++, which is not here"
        )
    paths = [make_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    wanted = [load(path, backend="cpu").generate(LONG, max_tokens=4).tokens for path in paths]
    assert wanted[0] != wanted[1]
    threads = threading.active_count()
    for number in range(count):
        llm = load(
            paths[number % 2],
            backend=backend.name,
            device=device_of(backend),
            dtype="float32",
            compile=backend.name != "cuda" or None,
        )
        assert llm.generate(LONG, max_tokens=4).tokens == wanted[number % 2], number
        assert elsewhere(llm.generate, LONG, max_tokens=4).tokens == wanted[number % 2], number
        del llm
        gc.collect()
    for _ in range(100):
        if threading.active_count() <= threads:
            return
        time.sleep(0.05)  # the last thread is ending
    assert threading.active_count() <= threads
