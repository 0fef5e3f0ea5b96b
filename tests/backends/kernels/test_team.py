"""The thread pool: runs, interrupts, abandoned runs and the end of its threads, with work that needs no model."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref

import numpy as np
import pytest

from cpu_fallback.kernels.team import Job, Team

CONTEXT = np.zeros(1, np.int64)


class Work:
    """Records who prepares and walks it. gate: an event that all walks wait for."""

    def __init__(self, gate: threading.Event | None = None):
        self.gate = gate
        self.prepared: list[threading.Thread] = []
        self.walked: list[tuple[int, threading.Thread]] = []
        self.contexts: list[np.ndarray] = []

    def prepare(self, context: np.ndarray) -> None:
        assert not self.walked or len(self.walked) % len(self.prepared) == 0
        self.prepared.append(threading.current_thread())
        self.contexts.append(context)

    def walk(self, context: np.ndarray, thread: int) -> None:
        if self.gate:
            assert self.gate.wait(10)
        assert context is self.contexts[-1]
        self.walked.append((thread, threading.current_thread()))


class Pause(Work):
    """Work that takes some milliseconds."""

    def walk(self, context: np.ndarray, thread: int) -> None:
        time.sleep(0.002)
        super().walk(context, thread)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_walks_once(threads):
    team, caller = Team(threads), threading.current_thread()
    for _ in range(20):
        work, context = Work(), np.zeros(1, np.int64)
        team.run(work, context)
        assert sorted(number for number, _ in work.walked) == list(range(threads))
        assert len({thread for _, thread in work.walked}) == threads
        assert work.prepared == [caller] and work.contexts[0] is context
        assert (caller in {thread for _, thread in work.walked}) == (threads == 1)


def test_a_thread_keeps_its_number():
    """A thread's share of the weights stays in its core's caches."""
    team, work = Team(3), Work()
    for _ in range(10):
        team.run(work, CONTEXT)
    assert len(work.walked) == 30 and len(set(work.walked)) == 3


def test_run_returns_after_the_last_thread():
    class Slow(Work):
        def walk(self, context: np.ndarray, thread: int) -> None:
            time.sleep(0.05 * thread)
            super().walk(context, thread)

    work = Slow()
    Team(3).run(work, CONTEXT)
    assert len(work.walked) == 3


def test_a_job_keeps_its_memory_until_it_ends():
    """Also when its caller has left it."""
    class Memory:
        pass

    gate, team, memory = threading.Event(), Team(2), Memory()
    work, alive = Work(gate), weakref.ref(memory)
    work.prepare(CONTEXT)
    team._jobs.put(Job(work, CONTEXT, (memory,)))
    del memory
    gc.collect()
    assert alive() is not None
    gate.set()
    for _ in range(500):  # until the sleeping threads have dropped the job
        if alive() is None:
            return
        time.sleep(0.01)
    raise AssertionError("a finished job keeps its memory")


# ---- interrupts


class Stop(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def interrupts():
    """interrupts(first, every, count): raise Stop in the main thread `first` seconds from now, then every so often."""
    if not hasattr(signal, "setitimer"):
        pytest.skip("Windows has no timer that interrupts")
    left = 0

    def stop(*_):
        nonlocal left
        left -= 1
        if left <= 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise Stop

    def start(first: float, every: float = 0, count: int = 1) -> None:
        nonlocal left
        left = count
        signal.setitimer(signal.ITIMER_REAL, first, every)

    before = signal.signal(signal.SIGALRM, stop)
    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_is_raised_after_the_run(interrupts):
    gate, team = threading.Event(), Team(3)
    work = Work(gate)
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    interrupts(0.05)
    with pytest.raises(Stop):
        team.run(work, CONTEXT)
    assert gate.is_set() and len(work.walked) == 3 and team._job is None
    opener.join()


def test_several_interrupts_raise_once(interrupts):
    gate, team = threading.Event(), Team(2)
    work = Work(gate)
    opener = threading.Timer(0.3, gate.set)
    opener.start()
    interrupts(0.05, 0.05, 4)
    with pytest.raises(Stop):
        team.run(work, CONTEXT)
    assert gate.is_set() and len(work.walked) == 2
    team.run(work, CONTEXT)
    assert len(work.walked) == 4
    opener.join()


def test_interrupts_at_any_time_run_no_work_twice(interrupts):
    """Timers of 0.1 to 3 ms hit every part of a run of some milliseconds; each job still runs once."""
    team, stopped = Team(2), 0
    for attempt in range(60):
        work = Pause()
        try:
            interrupts(1e-4 + attempt * 5e-5)
            while True:
                team.run(work, CONTEXT)
        except Stop:
            stopped += 1
        team.settle()
        assert len(work.walked) % 2 == 0 and len(work.prepared) - len(work.walked) // 2 in (0, 1)
    assert stopped == 60


# ---- abandoned runs: left by two interrupts within microseconds


def test_settle_cancels_a_job_that_has_not_begun():
    team, work = Team(2), Work()
    team._job = job = Job(work, CONTEXT, ())
    team.settle()
    assert team._job is None and job.begin.locked() and not job.finished
    team._jobs.put(job)  # arrives too late
    other = Work()
    team.run(other, CONTEXT)
    assert work.walked == [] and len(other.walked) == 2


def test_settle_waits_for_a_job_that_runs():
    gate, team = threading.Event(), Team(2)
    work = Work(gate)
    work.prepare(CONTEXT)
    team._job = job = Job(work, CONTEXT, ())
    team._jobs.put(job)
    while not job.begin.locked():
        time.sleep(0)
    threading.Timer(0.1, gate.set).start()
    team.settle()
    assert gate.is_set() and job.finished and len(work.walked) == 2 and team._job is None


@pytest.mark.parametrize("threads", [1, 2])
def test_settle_without_an_abandoned_run_returns(threads):
    team = Team(threads)
    team.settle()
    team.run(Work(), CONTEXT)
    team.settle()


# ---- threads


def test_one_thread_starts_no_other():
    before = set(threading.enumerate())
    team = Team(1)
    team.run(Work(), CONTEXT)
    assert set(threading.enumerate()) == before


def test_a_dropped_team_ends_its_threads():
    gc.collect()
    before = set(threading.enumerate())
    team, work = Team(3), Work()
    team.run(work, CONTEXT)
    started = set(threading.enumerate()) - before
    assert len(started) == 3 and all(thread.daemon for thread in started)
    del team
    gc.collect()
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()


def measure_busy_seconds(seconds: float) -> float:
    """CPU time of this process in that many seconds of sleep."""
    begin = time.process_time()
    time.sleep(seconds)
    return time.process_time() - begin


def test_idle_threads_sleep():
    team = Team(4)
    team.run(Work(), CONTEXT)
    gc.collect()
    assert min(measure_busy_seconds(0.3) for _ in range(3)) < 0.005
