"""Threads that run a program together, and the machine code that starts a run.

Between two runs a follower polls for the next, first spinning, then yielding its core, since waking
a sleeping thread costs a decoded token some tenths of a millisecond. After LINGER polls it sleeps.
"""

from __future__ import annotations

import queue
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .emit import Function, Module, Value, Variable, i32, i64, kernel, void

SPINS = 2000  # polls, some 20 us, before a waiting thread yields the processor
LINGER = 4000  # polls that yield, some milliseconds on an idle core, before a follower sleeps
JOIN = 1000  # polls that yield, to wait for a thread that wakes

# Parameters of the machine code that runs a program on one thread.
WALK = {"program": i64, "count": i64, "thread": i64, "threads": i64, "context": i64, "times": i64}
Call = tuple[int, int, int, int, int, int]  # see _CALL

# A box: the call, whether it ran, and each follower's state on a cache line of its own. times:
# address of thread 0's int64 [times_bytes / 8], or 0.
_CALL = ("walk", "program", "count", "context", "times", "times_bytes")
_RAN = len(_CALL)
_HEAD = struct.Struct(f"{_RAN + 1}q")
_LINE = 8  # words
_ASLEEP, _READY, _CLAIMED, _RUN = range(4)


class Team:
    """Threads that sleep unless they ran recently; number 0 is the caller's, who serialises runs.

    A run is a single call of machine code, which an interrupt (Ctrl-C) cannot split.
    """

    def __init__(self, machine: Any, threads: int):
        """machine: has the compiled functions that `write` writes."""
        self.threads = threads
        self._machine, self._box = machine, _make_box(threads)
        self._address, self._words = self._box.ctypes.data, memoryview(self._box)
        # Ctrl-C inside threading.Event.set would leave its lock held
        self._wakes = [queue.SimpleQueue[None]() for _ in range(threads - 1)]
        ending: list[bool] = []
        for number, wakes in enumerate(self._wakes, 1):
            arguments = (machine.serve, self._box, number, threads, wakes, ending)
            threading.Thread(target=_follow, args=arguments, daemon=True).start()
        weakref.finalize(self, _end, self._wakes, ending)

    def run(self, program: Any, context: np.ndarray, *part: Any) -> None:
        """Run a Program, or a part of it: the call that program.prepare(context, *part) gives."""
        words = self._words
        _HEAD.pack_into(words, 0, *program.prepare(context, *part), 0)
        while not words[_RAN]:
            for number, wakes in enumerate(self._wakes, 1):
                if words[_LINE * number] == _ASLEEP:
                    wakes.put(None)
            self._machine.start(self._address, self.threads)


def _make_box(threads: int) -> np.ndarray:
    words = np.zeros(_LINE * (threads + 1), np.int64)
    skip = -words.ctypes.data // 8 % _LINE
    return words[skip : skip + _LINE * threads]


def _follow(
    serve: Callable,
    box: np.ndarray,
    number: int,
    threads: int,
    wakes: queue.SimpleQueue[None],
    ending: list[bool],
) -> None:
    while True:
        wakes.get()
        if ending:
            return
        serve(box.ctypes.data, number, threads)


def _end(followers: list[queue.SimpleQueue[None]], ending: list[bool]) -> None:
    ending.append(True)
    for wakes in followers:
        wakes.put(None)


# ---- machine code


def write(module: Module) -> None:
    start(module, public=True)
    serve(module, public=True)


@kernel
def start(f: Function, box, threads) -> None:
    """Run the box's call on all threads if each follower is ready within JOIN polls."""
    claimed = Variable(f, f.constant(i64, 1))
    with f.loop(threads, 1) as number:
        polls = Variable(f, f.constant(i64, 0))
        with f.forever() as break_if:
            is_ready = f.compare_exchange(_state(f, number), _READY, _CLAIMED)
            break_if(is_ready.compare("==", 1))
            break_if(polls.get().compare(">=", SPINS + JOIN))
            wait(f, polls)
        claimed.set(
            (polls.get().compare("<", SPINS + JOIN)).select(claimed.get() + 1, claimed.get())
        )
    with f.if_else(claimed.get().compare("==", threads)) as (all_, some):
        with all_:
            with f.loop(threads, 1) as number:
                f.atomic_store(_state(f, number), _RUN)
            _walk(f, f.constant(i64, 0))
            with f.loop(threads, 1) as number:
                polls = Variable(f, f.constant(i64, 0))
                with f.forever() as break_if:
                    break_if(f.atomic_load(_state(f, number)).compare("!=", _RUN))
                    wait(f, polls)
            f.store(f.constant(i64, 1), box, 8 * _RAN)
        with some, f.loop(threads, 1) as number:
            f.compare_exchange(_state(f, number), _CLAIMED, _READY)


@kernel
def serve(f: Function, box, thread, threads) -> None:
    """Take part in runs as a follower, until there was none for LINGER polls."""
    state = _state(f, thread)
    f.atomic_store(state, _READY)
    polls = Variable(f, f.constant(i64, 0))
    with f.forever() as break_if:
        with f.if_else(f.atomic_load(state).compare("==", _RUN)) as (run, other):
            with run:
                _walk(f, thread)
                f.atomic_store(state, _READY)
                polls.set(f.constant(i64, 0))
            with other:
                wait(f, polls)
        is_asleep = Variable(f, f.constant(i32, 0))
        with f.if_then(polls.get().compare(">=", SPINS + LINGER)):
            is_asleep.set(f.compare_exchange(state, _READY, _ASLEEP))
        break_if(is_asleep.get().compare("==", 1))


def _state(f: Function, number: Value) -> Value:
    return f.box + number * (8 * _LINE)


def _walk(f: Function, thread: Value) -> None:
    """Make the box's call as a thread."""
    words = (f.load_word(f.box, index) for index in range(len(_CALL)))
    walk, program, count, context, times, times_bytes = words
    own_times = times + thread * times_bytes
    f.call_address(walk, list(WALK.values()), program, count, thread, f.threads, context, own_times)


def wait(f: Function, polls: Variable) -> None:
    """Wait between two polls and count them: spin SPINS times, then yield the processor."""
    with f.if_else(polls.get().compare("<", SPINS)) as (spin, yield_):
        with spin:
            _pause(f)
        with yield_:
            f.intrinsic("mlx_llama_yield", i32)
    polls.set(polls.get() + 1)


def _pause(f: Function) -> None:
    """Tell the processor that this loop spins."""
    if "aarch64" in f.module.triple or "arm64" in f.module.triple:
        f.intrinsic("llvm.aarch64.hint", void, f.constant(i32, 1))
    else:
        f.intrinsic("llvm.x86.sse2.pause", void)
