"""A thread pool that runs one program on all threads."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Protocol

import numpy as np


class Walkable(Protocol):
    """Work for a team: program.Program or a part of one."""

    def prepare(self, context: np.ndarray) -> None:
        """Called once before each run, on the caller's thread."""

    def walk(self, context: np.ndarray, thread: int) -> None:
        """Called once per thread; returns when all threads' work is done."""


class Team:
    """Threads that sleep between runs. The caller serialises runs.

    The caller's thread takes no part in a run of several threads. An interrupt (Ctrl-C) reaches Python's main thread alone,
    and the others would wait forever for a thread that left. With threads=1 the caller's thread runs the program.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._job: Job | None = None
        if threads > 1:
            self._jobs: queue.SimpleQueue = queue.SimpleQueue()
            followers = [queue.SimpleQueue() for _ in range(threads - 1)]
            done: queue.SimpleQueue = queue.SimpleQueue()
            threading.Thread(target=_lead, args=(self._jobs, followers, done), daemon=True).start()
            for number, jobs in enumerate(followers, 1):
                threading.Thread(target=_follow, args=(jobs, done, number), daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)  # ends the threads

    def run(self, program: Walkable, context: np.ndarray, *keep: object) -> None:
        """Run the program; return when it is done, then raise any interrupt.

        keep: owners of the memory that the context points to, referenced until then.
        """
        program.prepare(context)
        if self.threads == 1:
            program.walk(context, 0)
            return
        job = self._job = Job(program, context, keep)
        interrupt: BaseException | None = None
        while not job.finished:
            try:
                self._jobs.put(job)  # repeated after an interrupt, which may precede the first put; a job begins once
                job.wake.get()
            except BaseException as caught:
                interrupt = caught
        self._job = None
        if interrupt is not None:
            raise interrupt

    def settle(self) -> None:
        """Cancel or await a run abandoned after several interrupts, before its memory is reused."""
        while (job := self._job) is not None and not job.finished and not job.begin.acquire(blocking=False):
            job.wake.get()
        self._job = None


class Job:
    """One run. begin: locked once, by the thread that begins or cancels it. wake: receives an item at the end."""

    def __init__(self, program: Walkable, context: np.ndarray, keep: tuple[object, ...]):
        self.program, self.context, self.keep = program, context, keep
        self.begin = threading.Lock()
        self.finished = False
        self.wake: queue.SimpleQueue = queue.SimpleQueue()


def _lead(jobs: queue.SimpleQueue, followers: list[queue.SimpleQueue], done: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        if job.begin.acquire(blocking=False):
            for follower in followers:
                follower.put(job)
            job.program.walk(job.context, 0)
            for _ in followers:
                done.get()
            job.finished = True
            job.wake.put(None)
        del job  # release its memory while asleep
    for follower in followers:
        follower.put(None)


def _follow(jobs: queue.SimpleQueue, done: queue.SimpleQueue, number: int) -> None:
    while (job := jobs.get()) is not None:
        job.program.walk(job.context, number)
        del job
        done.put(None)
