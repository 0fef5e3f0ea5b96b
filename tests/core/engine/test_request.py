"""Answers: reading, cancelling, leaving; threads, callbacks, asyncio and batches on a toy
backend.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases.engine import (
    EOS,
    ToyError,
    ToyTokenizer,
    alone,
    alone_tokens,
    check_rows,
    make,
    make_prompts,
    request,
)
from making import fail_at

from mlx_llama import LLM
from mlx_llama.core.engine.request import Answer
from mlx_llama.core.errors import ContextError, OptionsError, SessionError

PROMPT = [3, 1, 4]


@pytest.fixture
def llm():
    backend, loop = make()
    names = dict(name="toy", path=Path("toy"), generation_config={}, tokenizer=ToyTokenizer())
    checkpoint = SimpleNamespace(eos_token_ids=frozenset({EOS}), **names)
    return LLM(checkpoint, backend, loop.engine.model, None, 1000)


# Cancelling and leaving


@pytest.mark.parametrize("ticks", range(6))
def test_cancelling_twice_before_and_after_admission(ticks, runs_ahead):
    backend, loop = make(runs_ahead, max_rows=2, eos=())
    handles = [
        loop.submit(request(prompt, max_tokens=20, prefill_step_size=30))
        for prompt in make_prompts(4, longest=90)
    ]
    for _ in range(ticks):
        loop.tick()
    for handle in (handles[0], handles[3]):
        handle.cancel()
        handle.cancel()
        assert handle.done and handle.completion.finish_reason == "interrupted"
        assert list(handle.tokens()) == handle.completion.tokens
    seen = [list(handles[i].completion.tokens) for i in (0, 3)]
    wanted = alone_tokens(make_prompts(4, longest=90), eos=(), max_tokens=20)
    assert [handles[i].finish().tokens for i in (1, 2)] == wanted[1:3]
    assert [handles[i].completion.tokens for i in (0, 3)] == seen  # nothing came later
    assert seen == [wanted[0][: len(seen[0])], []]
    check_rows(loop)


def test_cancelling_while_a_step_computes_takes_no_more_tokens(runs_ahead):
    backend, loop = make(runs_ahead, eos=())
    handle = loop.submit(request(PROMPT, max_tokens=20))
    next(handle)
    backend.read_fault = lambda tokens: handle.cancel()
    seen = list(handle.completion.tokens)
    assert handle.finish().tokens == seen == alone(PROMPT, eos=(), max_tokens=20).tokens[:1]
    loop.tick()
    check_rows(loop)


def test_cancelling_before_the_first_use():
    backend, loop = make()
    handle = Answer(loop.prepare(request(PROMPT)), loop)
    handle.cancel()
    assert list(handle) == [] and handle.finish().tokens == [] and not backend.events
    loop.tick()
    assert not loop.scheduler.waiting and not backend.events


def test_cancelling_from_another_thread_ends_a_wait():
    backend, loop = make(eos=())
    backend.step_seconds = 0.002
    for start in (lambda: None, loop.start):
        start()
        handle = loop.submit(request(PROMPT, max_tokens=900))
        next(handle)
        threading.Timer(0.05, handle.cancel).start()
        assert 1 <= len(handle.finish().tokens) < 900
    loop.close()
    check_rows(loop)


def test_a_consumer_that_leaves_or_raises_frees_its_row():
    backend, loop = make(eos=())
    other = loop.submit(request([7, 8], max_tokens=30))
    with pytest.raises(ZeroDivisionError):
        for piece in loop.submit(request(PROMPT, max_tokens=900)):
            raise ZeroDivisionError
    gc.collect()
    for _ in loop.submit(request(PROMPT, max_tokens=900)):
        break
    gc.collect()
    assert other.finish().tokens == alone([7, 8], eos=(), max_tokens=30).tokens
    loop.tick()
    assert not loop.scheduler.running and len(backend.calls) < 60
    check_rows(loop)


# Two readers, callbacks


@pytest.mark.parametrize("is_threaded", [False, True])
def test_a_second_thread_that_reads_gets_a_session_error(is_threaded):
    backend, loop = make(eos=())
    if is_threaded:
        loop.start()
    gate, inside = threading.Event(), threading.Event()
    handle, pieces = loop.submit(request(PROMPT, max_tokens=4)), []

    def fault(*_):
        inside.set()
        gate.wait(10)

    backend.fault = fault
    reader = threading.Thread(target=lambda: pieces.extend(handle.tokens()))
    reader.start()
    inside.wait(10)
    for read in (lambda: next(handle), handle.finish, lambda: next(handle.tokens())):
        with pytest.raises(SessionError, match="another thread is reading this answer"):
            read()
    gate.set()
    reader.join(60)
    loop.close()
    assert pieces == alone(PROMPT, eos=(), max_tokens=4).tokens  # the first one lost nothing
    assert list(handle.tokens()) == pieces  # one after the other is no fault


@pytest.mark.parametrize("is_threaded", [False, True])
def test_a_callback_that_raises_ends_its_request_alone(is_threaded):
    backend, loop = make(eos=())
    counts = []

    def notify():
        counts.append(len(bad.completion.tokens))
        if len(counts) == 3:
            raise ToyError("the consumer is ill")

    good = loop.submit(request([7, 8], max_tokens=9))
    bad = loop.submit(request(PROMPT, max_tokens=9, notify=notify))
    if is_threaded:
        loop.start()
    assert good.finish().tokens == alone([7, 8], eos=(), max_tokens=9).tokens
    with pytest.raises(ToyError, match="the consumer is ill"):
        bad.finish()
    loop.close()
    # the end is reported, too
    assert counts == [1, 2, 3, 3] and bad.completion.error == "the consumer is ill"
    check_rows(loop)


def test_a_callback_that_waits_for_its_own_answer_is_refused():
    backend, loop = make(eos=())
    handle = loop.submit(request(PROMPT, max_tokens=9, notify=lambda: handle.finish()))
    with pytest.raises(SessionError, match="cannot wait for an answer|is reading this answer"):
        handle.finish()
    other = loop.submit(
        request(PROMPT, max_tokens=9, notify=lambda: loop.submit(request([5])).finish())
    )
    with pytest.raises(SessionError, match="a callback cannot wait for an answer"):
        other.finish()


# Batches and asyncio


def test_a_batch_is_in_order_and_each_as_alone(llm):
    prompts = ["abc", "hello", [5, 6, 7], "abc" * 30, "x"] * 3
    options = dict(max_tokens=20, temperature=1.0, seed=4)
    done = llm.batch(prompts, **options)
    assert [answer.tokens for answer in done] == [
        llm.generate(prompt, **options).tokens for prompt in prompts
    ]
    assert max(batch for batch, _ in llm.backend.calls) > 8
    assert llm.batch(iter(["abc"]), **options)[0].text == done[0].text
    drawn = llm.batch(["abc"] * 8, max_tokens=20, temperature=1.0)
    assert len({answer.seed for answer in drawn}) == 8  # each draws a seed of its own


def test_a_bad_batch_is_refused_before_any_work(llm):
    with pytest.raises(ContextError, match="a list of prompts, not a text"):
        llm.batch("hi")
    with pytest.raises(ContextError, match="batch needs at least one prompt"):
        llm.batch([])
    with pytest.raises(ContextError, match=r"prompts\[1\]: token id 50 is outside the vocabulary"):
        llm.batch(["abc", [50]])
    long = r"prompts\[2\]: the prompt has 1200 tokens and the context holds 1000"
    with pytest.raises(ContextError, match=long):
        llm.batch(["abc", "x", "a" * 1200])
    with pytest.raises(OptionsError, match="top_p"):
        llm.batch(["abc"], top_p=7)
    assert not llm.backend.events


def test_a_request_of_a_batch_that_fails_leaves_the_others(llm):
    def fault(model, tokens, view):
        if tokens.shape[1] > 20:
            raise ToyError("too long for this toy")

    llm.backend.fault = fault
    done = llm.batch(["abc", "a" * 30, "xyz"], max_tokens=5)
    assert [answer.finish_reason for answer in done] == ["length", "error", "length"]
    assert done[1].error == "too long for this toy"
    assert done[2].tokens == alone([23, 24, 25], max_tokens=5).tokens


def test_an_interrupt_of_a_batch_leaves_nothing_running(llm):
    llm.backend.fault = fail_at(9, KeyboardInterrupt)(lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        llm.batch(["abc", "def", "ghi"], max_tokens=100)
    llm.loop.tick()
    assert not llm.loop.scheduler.running and not llm.loop.scheduler.waiting
    assert llm.generate("abc", max_tokens=5).tokens == alone([0, 1, 2], max_tokens=5).tokens
    check_rows(llm.loop)


def test_asyncio_streams_share_the_steps_and_the_event_loop_stays_free(llm):
    llm.backend.step_seconds = 0.002

    async def consume(prompt):
        return [piece async for piece in llm.astream(prompt, max_tokens=20, seed=1)]

    async def leave(prompt):
        async for piece in llm.astream(prompt, max_tokens=900, logit_bias={EOS: -100}):
            break

    async def heartbeat(beats):
        while True:
            await asyncio.sleep(0.005)
            beats.append(1)

    async def run():
        beats = []
        heart = asyncio.create_task(heartbeat(beats))
        cancelled = asyncio.create_task(consume("zz"))
        texts = await asyncio.gather(
            *(consume(prompt) for prompt in ("abc", "hello", "x" * 50)), leave("left")
        )
        cancelled.cancel()
        heart.cancel()
        return texts[:3], len(beats)

    texts, beats = asyncio.run(run())
    assert ["".join(pieces) for pieces in texts] == [
        llm.generate(prompt, max_tokens=20, seed=1).text for prompt in ("abc", "hello", "x" * 50)
    ]
    assert beats > 3 and max(batch for batch, _ in llm.backend.calls) > 1
    llm.loop.tick()
    assert not llm.loop.scheduler.running


def test_asyncio_raises_errors_where_they_are_awaited(llm):
    async def run(**options):
        async for _ in llm.astream("abc", **options):
            pass

    with pytest.raises(OptionsError):
        asyncio.run(run(top_p=7))
    llm.backend.fault = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


def test_a_stream_that_is_not_begun_costs_nothing(llm):
    streams = [llm.stream("abc", max_tokens=5) for _ in range(3)]
    assert not llm.backend.events
    assert "".join(streams[1]) == llm.generate("abc", max_tokens=5).text
    assert len(streams[0].completion.tokens) == 0
    streams[2].close()
    assert list(streams[2]) == []
