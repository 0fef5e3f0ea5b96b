"""A team of threads that walk a program together."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Protocol

import numpy as np


class Walkable(Protocol):
    """A piece of work for a team (program.Program, or a part of one)."""

    def prepare(self, context: np.ndarray) -> None:
        """Called once before each run."""

    def walk(self, context: np.ndarray, thread: int) -> None:
        """Called once per thread; returns when all of the work is done."""


class Team:
    """Threads that sleep between runs. One run at a time; the caller keeps runs apart.

    The caller's thread does not take part: an interrupt (Ctrl-C) reaches only Python's main thread, and a run that one
    of its threads has left could not end. threads: 1 runs on the caller's thread.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._job: Job | None = None
        if threads > 1:
            self._jobs: queue.SimpleQueue = queue.SimpleQueue()
            others = [queue.SimpleQueue() for _ in range(threads - 1)]
            done: queue.SimpleQueue = queue.SimpleQueue()
            threading.Thread(target=_lead, args=(self._jobs, others, done), daemon=True).start()
            for number, jobs in enumerate(others, 1):
                threading.Thread(target=_follow, args=(jobs, done, number), daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def run(self, program: Walkable, context: np.ndarray, *keep: object) -> None:
        """Walk the program; return when it is done. An interrupt is raised after that.

        keep: owners of the memory that the context points to.
        """
        program.prepare(context)
        if self.threads == 1:
            program.walk(context, 0)
            return
        job = self._job = Job(program, context, keep)
        interrupt: BaseException | None = None
        while not job.finished:
            try:
                self._jobs.put(job)  # again after an interrupt, which may precede the first put; a job begins once
                job.wake.get()
            except BaseException as caught:
                interrupt = caught
        self._job = None
        if interrupt is not None:
            raise interrupt

    def settle(self) -> None:
        """Wait for a run that several interrupts in a row have left, before its memory is used again."""
        while (job := self._job) is not None and not job.finished and not job.begin.acquire(blocking=False):
            job.wake.get()
        self._job = None


class Job:
    """A run. begin: locked once, by the thread that begins or cancels it. wake: gets an item at the end."""

    def __init__(self, program: Walkable, context: np.ndarray, keep: tuple[object, ...]):
        self.program, self.context, self.keep = program, context, keep
        self.begin = threading.Lock()
        self.finished = False
        self.wake: queue.SimpleQueue = queue.SimpleQueue()


def _lead(jobs: queue.SimpleQueue, others: list[queue.SimpleQueue], done: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        if job.begin.acquire(blocking=False):
            for other in others:
                other.put(job)
            job.program.walk(job.context, 0)
            for _ in others:
                done.get()
            job.finished = True
            job.wake.put(None)
        del job  # keep nothing alive while asleep
    for other in others:
        other.put(None)


def _follow(jobs: queue.SimpleQueue, done: queue.SimpleQueue, number: int) -> None:
    while (job := jobs.get()) is not None:
        job.program.walk(job.context, number)
        del job
        done.put(None)
