"""Who ticks: consumers on one thread or many, a thread of the loop; Ctrl-C at any time."""

from __future__ import annotations

import itertools
import signal
import sys
import threading

import pytest
from cases.engine import (
    POSITION_NBYTES,
    alone,
    alone_tokens,
    check_rows,
    make,
    make_prompts,
    request,
)
from cases.threads import on_threads

PROMPT = [3, 1, 4]


@pytest.mark.slow_for("False")
def test_an_interrupt_at_any_line_leaves_the_others_alone(runs_ahead, ctrl_c):
    """Ctrl-C between any two lines of a tick: rows, queues and the others' tokens are right."""
    prompts = [[1, 2, 3] * 4, *make_prompts(3, longest=30)]
    all_options = [
        {"speculate": "prompt"},
        {"regex": "[a-f]{3}forced(x|y)[a-c]{2}z"},
        {},
        {"regex": "(once|twice)uponatime"},
    ]
    asked = [(prompt, {"max_tokens": 6} | more) for prompt, more in zip(prompts, all_options)]
    wanted = [alone(prompt, **options).tokens for prompt, options in asked]
    # Not loop.py: a trace raises between a block and the release of its lock, where no signal
    # arrives.
    names = "scheduler queues memory rows steps device speculate".split()
    files = tuple(f"{name}.py" for name in names)
    for line in itertools.count(3, 7):
        backend, loop = make(runs_ahead, kept_rows=1)
        handles = [loop.submit(request(prompt, **options)) for prompt, options in asked]
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            if not frame.f_code.co_filename.endswith(files):
                return None
            if event == "line":
                count += 1
                if count == line:
                    signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            handles[1].finish()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert [handles[i].finish().tokens for i in (0, 2, 3)] == [wanted[0], *wanted[2:]], line
        assert handles[1].completion.tokens == wanted[1][: len(handles[1].completion.tokens)]
        loop.tick()
        check_rows(loop)
        if count < line:
            break
    assert line > 500


@pytest.mark.parametrize("width", [1, 10])
def test_ctrl_c_ends_a_chunk_of_a_prompt_at_once_and_waits_for_a_step(width, ctrl_c):
    backend, loop = make(eos=())
    other = loop.submit(request([7, 8], max_tokens=9))
    next(other)
    handle, computed = loop.submit(request([1] * 50, max_tokens=5, prefill_step_size=10)), []

    def fault(model, tokens, view):
        if tokens.shape[1] == width:
            signal.raise_signal(signal.SIGINT)
            computed.append(width)

    backend.fault = fault
    with pytest.raises(KeyboardInterrupt):
        handle.finish()
    backend.fault = None
    assert computed == ([1] if width == 1 else []) and handle.done and not handle.completion.tokens
    assert other.finish().tokens == alone([7, 8], max_tokens=9, eos=()).tokens
    loop.tick()
    check_rows(loop)


# On a thread of its own


def test_a_thread_serves_consumers_on_many_threads(runs_ahead):
    backend, loop = make(runs_ahead, memory=6 * 512 * POSITION_NBYTES)
    loop.start()
    loop.start()  # no second one
    prompts = make_prompts(24, longest=100)

    def consume(i):
        handle = loop.submit(request(prompts[i], max_tokens=30))
        if i % 5 == 4:
            next(handle)
            handle.cancel()
        return handle.finish().tokens

    answers = on_threads(24, consume)
    loop.close()
    for i, wanted in enumerate(alone_tokens(prompts, max_tokens=30)):
        assert answers[i] == wanted[: None if i % 5 < 4 else len(answers[i])]
    assert not loop.scheduler.running and loop.scheduler.cache.nbytes == 0
    again = loop.submit(request(PROMPT, max_tokens=4)).finish()  # inline
    assert again.tokens == alone(PROMPT, max_tokens=4).tokens


def test_closing_ends_requests_that_someone_waits_for():
    backend, loop = make()
    backend.step_seconds = 0.01
    loop.start()
    handle = loop.submit(request(PROMPT, max_tokens=900))
    next(handle)
    threading.Timer(0.1, loop.close).start()
    assert handle.finish().finish_reason == "interrupted" and handle.done


def test_consumers_on_many_threads_tick_inline():
    backend, loop = make()
    backend.step_seconds = 0.002  # so that the requests meet
    prompts = make_prompts(12, longest=100)

    def consume(i):
        return loop.submit(request(prompts[i], max_tokens=30)).finish().tokens

    assert on_threads(12, consume) == alone_tokens(prompts, max_tokens=30)
    assert any(batch > 1 for batch, _ in backend.calls)
