"""The thread of a model's arrays, and Ctrl-C while the main thread waits for it."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from mlx_llama import load
from mlx_llama.core.engine.home import Home

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "pthread_kill"), reason="this system sends no signals to threads"
)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_leaves_a_call_that_ends_by_itself(ctrl_c):
    home, may_end, ran = Home(), threading.Event(), []

    def work():
        interrupt_main()
        may_end.wait(30)
        ran.append("work")

    with pytest.raises(KeyboardInterrupt):
        home.call_or_leave(work)
    assert not ran
    behind = threading.Thread(target=home.call, args=(ran.append, "behind"))
    behind.start()
    may_end.set()
    assert home.call(lambda: 5) == 5
    behind.join(30)
    assert ran == ["work", "behind"]
    assert home.call_or_leave(lambda: 6) == 6
    with pytest.raises(ZeroDivisionError):
        home.call_or_leave(lambda: 1 / 0)
    home.close()


def test_ctrl_c_leaves_a_call_that_has_not_begun(ctrl_c):
    """It waits behind another thread's call, and never runs."""
    home, may_end, ran = Home(), threading.Event(), []
    begun = threading.Event()

    def work():
        begun.set()
        may_end.wait(30)

    other = threading.Thread(target=home.call, args=(work,))
    other.start()
    assert begun.wait(30)
    timer = threading.Timer(0.05, interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        home.call_or_leave(ran.append, "late")
    may_end.set()
    other.join(30)
    assert home.call(lambda: 5) == 5 and not ran
    home.close()


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
