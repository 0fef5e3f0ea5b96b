"""A thread that makes calls, and Ctrl-C while the main thread waits for it."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import numpy as np
import pytest
from cases.engine import alone, check_rows, make, request

from mlx_llama import load
from mlx_llama.core.engine.loop import Worker
from mlx_llama.core.errors import SessionError

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "pthread_kill"), reason="this system sends no signals to threads"
)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_leaves_a_call_that_ends_by_itself(ctrl_c):
    worker, may_end, ran = Worker(), threading.Event(), []

    def work():
        interrupt_main()
        may_end.wait(30)
        ran.append("work")

    with pytest.raises(KeyboardInterrupt):
        worker.call_or_leave(work)
    assert not ran
    behind = threading.Thread(target=worker.call, args=(lambda: ran.append("behind"),))
    behind.start()
    may_end.set()
    assert worker.call(lambda: 5) == 5
    behind.join(30)
    assert ran == ["work", "behind"]
    assert worker.call_or_leave(lambda: 6) == 6
    with pytest.raises(ZeroDivisionError):
        worker.call_or_leave(lambda: 1 / 0)
    worker.close()


def test_ctrl_c_leaves_a_call_that_has_not_begun(ctrl_c):
    """It waits behind another thread's call, and never runs."""
    worker, may_end, ran = Worker(), threading.Event(), []
    begun = threading.Event()

    def work():
        begun.set()
        may_end.wait(30)

    other = threading.Thread(target=worker.call, args=(work,))
    other.start()
    assert begun.wait(30)
    timer = threading.Timer(0.05, interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        worker.call_or_leave(lambda: ran.append("late"))
    may_end.set()
    other.join(30)
    assert worker.call(lambda: 5) == 5 and not ran
    worker.close()


def test_ctrl_c_stops_logits(toy, where, ctrl_c, monkeypatch):
    llm = load(toy, **where | {"device": "cpu"})
    wanted, may_end, forward = llm.logits([1, 2, 3]), threading.Event(), llm.model.forward

    def interrupted(*args, **kwargs):
        interrupt_main()
        may_end.wait(30)
        return forward(*args, **kwargs)

    monkeypatch.setattr(llm.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.logits([1, 2, 3])
    may_end.set()
    monkeypatch.undo()
    assert np.array_equal(llm.logits([1, 2, 3]), wanted)


def test_a_worker_ticks_while_tokens_are_awaited_and_no_further(runs_ahead):
    backend, loop = make(runs_ahead, eos=(), worker=Worker())
    threads = set()
    backend.fault = lambda *call: threads.add(threading.get_ident())
    handle, other = (loop.submit(request([3, first, 4], max_tokens=20)) for first in (1, 2))
    tokens = handle.tokens()
    for count in range(1, 6):
        next(tokens)
        loop.compute(lambda: None)  # returns after the tick
        assert len(handle.completion.tokens) == count
    handle.cancel()
    loop.compute(lambda: None)
    assert len(loop.scheduler.rows.used) == 1
    assert other.finish().tokens == alone([3, 2, 4], max_tokens=20, eos=()).tokens
    assert len(handle.completion.tokens) == 5 and handle.completion.finish_reason == "interrupted"
    assert threads == {loop.compute(threading.get_ident)} != {threading.get_ident()}
    loop.start()
    again = loop.submit(request([3, 1, 4], max_tokens=20))
    assert again.finish().tokens == alone([3, 1, 4], max_tokens=20, eos=()).tokens
    loop.close()
    check_rows(loop)
    assert (
        loop.submit(request([3, 1, 4], max_tokens=2)).finish().tokens == again.completion.tokens[:2]
    )


def test_calls_come_between_the_ticks_of_a_worker():
    """Rows are read, and callbacks that would wait for their own tick are refused."""
    backend, loop = make(eos=(), worker=Worker())
    refused, known = [], []

    def notify():
        known.append(loop.count_known([3, 1, 4, 1]))
        for call in (loop.tick, loop.close, lambda: loop.erase([3])):
            with pytest.raises(SessionError, match="a callback cannot"):
                call()
            refused.append(call)

    handle = loop.submit(request([3, 1, 4], max_tokens=200, notify=notify))
    reader = threading.Thread(target=handle.finish)
    reader.start()
    while reader.is_alive():
        assert loop.count_known([3, 1, 4, 1]) in (0, 3)
    assert len(refused) == 3 * len(known) >= 600 and set(known) <= {0, 3}
    assert not handle.error and len(handle.completion.tokens) == 200


def test_an_idle_worker_keeps_no_model_alive():
    backend, loop = make(worker=Worker())
    assert loop.submit(request([3, 1, 4], max_tokens=2)).finish().tokens
    gone = weakref.ref(loop.engine.model)
    del loop, backend
    gc.collect()
    assert gone() is None
