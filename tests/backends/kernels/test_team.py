"""The team of threads: runs, interrupts, and the sleep and end of its threads, with machine code
that needs no model.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from cpu_fallback.kernels import find_target, team as teams
from cpu_fallback.kernels.emit import Function, Module, Variable, i64
from cpu_fallback.kernels.target import compile_module
from cpu_fallback.kernels.team import Team

CONTEXT = np.zeros(1, np.int64)


class Machine:
    """Compiled `start` and `serve`, and `work`: counts its calls by thread, then waits until
    `context` is not 0.
    """

    def __init__(self) -> None:
        self.compiled = compile_module(
            find_target()[0], "a team and its work", ["start", "serve", "work"], self._write
        )
        self.start, self.serve = (
            self.compiled.function("start", 2),
            self.compiled.function("serve", 3),
        )

    @staticmethod
    def _write() -> Module:
        module = Module()
        module.triple = find_target()[0].triple
        teams.write(module)
        f = Function(module, "work", teams.WALK, public=True)
        f.atomic_add(f.program + f.thread * 8, f.count)
        polls = Variable(f, f.constant(i64, 0))
        with f.forever() as break_if:
            break_if(f.atomic_load(f.context).compare("!=", 0))
            teams.wait(f, polls)
        f.store(f.thread, f.times, 0, 8)
        f.finish()
        return module


@pytest.fixture(scope="module")
def machine():
    return Machine()


class Work:
    """walks: by thread. is_open: the run can end."""

    def __init__(self, machine: Machine, threads: int, is_open: bool = True):
        self.address, self.prepared = machine.compiled.address["work"], 0
        self.walks, self.numbers = np.zeros(threads, np.int64), np.full(threads, -1)
        self.gate = np.array([int(is_open)])

    def prepare(self, context: np.ndarray) -> teams.Call:
        assert len(set(self.walks.tolist())) == 1  # between runs
        self.prepared += 1
        return (
            self.address,
            self.walks.ctypes.data,
            1,
            self.gate.ctypes.data,
            self.numbers.ctypes.data,
            8,
        )

    def open_after(self, seconds: float) -> threading.Timer:
        """Let the run end then."""
        timer = threading.Timer(seconds, lambda: self.gate.fill(1))
        timer.start()
        return timer


@pytest.mark.parametrize("pause", [0, 0.01])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_walks_once_in_each_run(machine, threads, pause):
    """With a pause the followers fall asleep between the runs."""
    team, work = Team(machine, threads), Work(machine, threads)
    for run in range(1, 21):
        team.run(work, CONTEXT)
        assert work.prepared == run and work.walks.tolist() == [run] * threads
        assert work.numbers.tolist() == list(range(threads))
        time.sleep(pause)


def test_run_returns_after_the_last_thread(machine):
    team, work = Team(machine, 3), Work(machine, 3, is_open=False)
    timer = work.open_after(0.1)
    team.run(work, CONTEXT)
    assert work.gate[0] and work.walks.tolist() == [1] * 3 and work.numbers.tolist() == [0, 1, 2]
    timer.join()


def test_teams_run_beside_each_other(machine):
    """More threads than cores; teams of several models share nothing."""
    works = [Work(machine, 3) for _ in range(4)]

    def run(work: Work) -> None:
        team = Team(machine, 3)
        for _ in range(50):
            team.run(work, CONTEXT)

    callers = [threading.Thread(target=run, args=(work,)) for work in works]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(work.walks.tolist() == [50] * 3 for work in works)


def test_nothing_runs_without_a_sleeping_follower(machine):
    """The others are as before, and the caller wakes the sleeper and tries again."""
    work, box = Work(machine, 3), teams._make_box(3)
    box[: teams._RAN] = work.prepare(CONTEXT)
    states = box[teams._LINE :: teams._LINE]
    states[0] = teams._READY
    machine.start(box.ctypes.data, 3)
    assert work.walks.tolist() == [0] * 3 and box[teams._RAN] == 0
    assert states.tolist() == [teams._READY, teams._ASLEEP]


# ---- interrupts


class Stop(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def interrupts():
    """interrupts(seconds): raise Stop in the main thread so many seconds from now; 0: never."""
    if not hasattr(signal, "setitimer"):
        pytest.skip("Windows has no timer that interrupts")

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_several_interrupts_raise_after_the_run(machine, interrupts):
    """All come while the main thread is in machine code: sent by events, since a timer on a busy
    machine fires after the test.
    """
    team, work = Team(machine, 2), Work(machine, 2, is_open=False)

    def interrupt_and_open() -> None:
        while not work.walks.all():
            time.sleep(0.001)
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(0.01)
        work.gate.fill(1)

    sender = threading.Thread(target=interrupt_and_open)
    with pytest.raises(Stop):
        sender.start()
        team.run(work, CONTEXT)
    sender.join()
    assert work.gate[0] and work.walks.tolist() == [1] * 2
    team.run(work, CONTEXT)
    assert work.walks.tolist() == [2] * 2


@pytest.mark.parametrize("pause", [0, 0.004])
def test_an_interrupt_at_any_time_leaves_whole_runs(machine, interrupts, pause):
    """Timers of 0.1 to 3 ms hit every part of a run, with followers awake and asleep; none is begun
    and left.
    """
    team, stopped = Team(machine, 2), 0
    work = Work(machine, 2)
    for attempt in range(60):
        try:
            interrupts(1e-4 + attempt * 5e-5)
            while True:
                team.run(work, CONTEXT)
                time.sleep(pause)
        except Stop:
            stopped += 1
        assert work.walks[0] == work.walks[1] and work.prepared - work.walks[0] <= stopped
    assert stopped == 60


# ---- threads


def test_one_thread_starts_no_other(machine):
    before = set(threading.enumerate())
    team = Team(machine, 1)
    team.run(Work(machine, 1), CONTEXT)
    assert set(threading.enumerate()) == before


def measure_busy_seconds(seconds: float) -> float:
    """CPU time of this process in that many seconds of sleep."""
    begin = time.process_time()
    time.sleep(seconds)
    return time.process_time() - begin


@pytest.mark.slow
def test_idle_threads_sleep(machine):
    team = Team(machine, 4)
    team.run(Work(machine, 4), CONTEXT)
    gc.collect()
    assert min(measure_busy_seconds(0.3) for _ in range(3)) < 0.005
