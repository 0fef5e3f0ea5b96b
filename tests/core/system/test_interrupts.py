"""Ctrl-C during a block that must not be interrupted."""

from __future__ import annotations

import signal
import threading

import pytest

from mlx_llama.core.system.interrupts import interruptible, uninterrupted


@pytest.fixture(autouse=True)
def handler():
    """Python's handler before each test, and the same one after it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_ctrl_c_is_raised_at_the_end_of_the_outermost_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]


def test_an_error_of_the_block_does_not_swallow_ctrl_c():
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(ValueError), uninterrupted():
        raise ValueError


def test_ignored_and_own_handlers_get_the_signal_afterwards():
    received = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert not received
    assert received == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


def test_a_window_lets_ctrl_c_through_at_once():
    done = []
    with uninterrupted():
        for pending in (False, True):
            with pytest.raises(KeyboardInterrupt):
                if pending:
                    signal.raise_signal(signal.SIGINT)
                with interruptible():
                    done.append("inside")
                    signal.raise_signal(signal.SIGINT)
                    done.append("after")
    assert done == ["inside"]
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with interruptible():
            done.append("quiet")
        signal.raise_signal(signal.SIGINT)
        done.append("put off again")
    assert done == ["inside", "quiet", "put off again"]
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_leave_the_handler_alone():
    seen = []

    def run():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
