"""The loop that ticks the scheduler: who ticks, Ctrl-C, and forked processes.

Ticks run inline, in the thread that waits for a token, or on the loop's own thread: on mlx, whose
streams and traces are per thread, from the load on, elsewhere after `start`. Ctrl-C is deferred to
the end of a tick or of another change of the rows, so that the state stays consistent; only the
computation of a prompt ends at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import itertools
import os
import queue
import threading
import time
import weakref
from collections import abc, deque
from concurrent.futures import Future
from typing import Any, TypeVar

from mlx_llama.core.backends.interface import Model
from mlx_llama.core.backends.load_options import MAX_ROWS
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.errors import SessionError
from mlx_llama.core.system.interrupts import uninterrupted
from mlx_llama.core.text.tokenizer import Tokenizer

from .request import Answer, Request, Sequence
from .rows import Rows
from .scheduler import Scheduler

KEPT_ROWS = 8  # rows of ended requests that stay as prefixes
REST_SECONDS = 30.0  # a thread without work looks after its memory
WAKE_SECONDS = 0.5  # a thread that waits checks again after this time

Result = TypeVar("Result")


class Worker:
    """A thread that makes calls one after the other. It ends with `close`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[abc.Callable[[], object] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name="mlx_llama loop", daemon=True
        )
        self._thread.start()

    def call(self, function: abc.Callable[[], Result]) -> Result:
        """Return `function`'s result, or raise its error. Ctrl-C is raised after the call."""
        with uninterrupted():
            return self._submit(function).result()

    def call_until_interrupt(self, function: abc.Callable[[], Result]) -> Result:
        """As `call`, but Ctrl-C also ends the call, at its next line of Python."""
        future = self._submit(function)
        try:
            future.exception()  # waits
        except BaseException:
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))
            raise
        return future.result()

    def call_or_leave(self, function: abc.Callable[[], Result]) -> Result:
        """As `call`, but Ctrl-C stops waiting for it: a call that has begun ends by itself."""
        # Ctrl-C inside a Future's Condition may leave its lock held, not inside a SimpleQueue. One
        # that arrives just before the wait begins is noticed after WAKE_SECONDS.
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        with uninterrupted():
            future = self._submit(function, ended.put)
        try:
            while ended.empty():
                with contextlib.suppress(queue.Empty):
                    ended.put(ended.get(timeout=WAKE_SECONDS))
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def post(self, function: abc.Callable[[], object]) -> None:
        """Queue a call in this thread's context without waiting for it. It may not raise."""
        self._calls.put(functools.partial(contextvars.copy_context().run, function))

    def make_queued(self) -> None:
        """Make the calls that wait, within a call."""
        for _ in range(self._calls.qsize()):
            self.make_next(0)

    def make_next(self, timeout: float) -> bool:
        """Wait for another call and make it, within a call. False: none came in `timeout`."""
        try:
            call = self._calls.get(timeout=timeout)
        except queue.Empty:
            return False
        if call is None:  # for `_serve`, after this call
            self._calls.put(None)
        else:
            call()
        return True

    def close(self) -> None:
        """End the thread after the calls that are queued."""
        self._calls.put(None)

    def join(self) -> None:
        """`close`, and wait for the end."""
        self.close()
        self._thread.join()

    def _submit(
        self, function: abc.Callable[[], Result], end: abc.Callable[[Future], object] | None = None
    ) -> Future[Result]:
        """Queue a call, or make it if this is the worker's thread. end: called at its end."""
        future: Future[Result] = Future()
        if end:
            future.add_done_callback(end)
        # A forked process lacks the thread; the backend's call reports the error there.
        if threading.get_ident() == self._thread.ident or os.getpid() != self._process:
            _run(future, function)
        else:
            self.post(functools.partial(_run, future, function))
        return future


def _run(future: Future, function: abc.Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _serve(calls: queue.SimpleQueue[abc.Callable[[], object] | None]) -> None:
    try:
        while call := calls.get():
            call()
            del call  # an idle thread keeps no model alive
    except KeyboardInterrupt:  # raised just after the call had ended
        pass


class Loop:
    """Serves requests on one model; any thread may call it.

    context: positions of a request, prompt and answer together. draft: a smaller model that guesses
    tokens. cache_memory: bytes of all keys and values; None: half of the memory that is free, at
    most 8 GB. max_rows: requests in one step. kept_rows: ended ones
    that stay as prefixes for later prompts. worker: the thread that loaded the model and makes all
    calls of the backend, and ticks while tokens are awaited; None: the threads that read.
    """

    def __init__(
        self,
        backend: Backend,
        model: Model,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        context: int,
        *,
        draft: Model | None = None,
        cache_memory: int | None = None,
        max_rows: int = MAX_ROWS,
        kept_rows: int = KEPT_ROWS,
        worker: Worker | None = None,
    ):
        self.engine = RequestBuilder(backend, model, tokenizer, eos, context, draft)
        self.max_rows = max_rows
        self._new_scheduler = functools.partial(
            Scheduler, self.engine, cache_memory, max_rows, kept_rows
        )
        self._owner = worker  # the one thread for the arrays
        if worker:
            weakref.finalize(self, worker.close)
        self._start_over()

    def _start_over(self) -> None:
        """Begin without rows and requests."""
        self._process = os.getpid()
        self._scheduler: Scheduler | None = None
        self._arrived: deque[Sequence] = deque()  # submitted by any thread, seen by the next tick
        self._numbers = itertools.count()
        self._setup = threading.Lock()
        self._ticking = threading.Lock()
        self._ticker: int | None = None  # the thread that ticks or changes rows, and runs callbacks
        self._worker = self._owner  # ticks; None: the threads that read do
        self._is_started = False  # the worker ticks as long as there are requests
        self._is_running = False  # the worker is in `_run`

    def check_process(self) -> None:
        """Start over in a forked process. Raises BackendError where it cannot compute."""
        if self._process != os.getpid():
            self.engine.backend.check_process()
            self._start_over()

    @property
    def scheduler(self) -> Scheduler:
        """Queues and rows, made for the first request."""
        if self._scheduler or not self._owner:
            return self._scheduler or self._make_scheduler()
        return self._owner.call(self._make_scheduler)

    @property
    def preemptions(self) -> int:
        """Requests whose row was freed while memory was short."""
        return self._scheduler.preemptions if self._scheduler else 0

    def _make_scheduler(self) -> Scheduler:
        with self._setup:
            self._scheduler = self._scheduler or self._new_scheduler()
            return self._scheduler

    def refuse_callback(self, action: str) -> None:
        """Raise SessionError in a callback of a request, which would wait for itself."""
        if self._ticker == threading.get_ident():
            raise SessionError(
                f"a callback cannot {action}: it runs inside the loop that computes its answer; do "
                "this after the answer"
            )

    def compute(self, function: abc.Callable[[], Result]) -> Result:
        """Call a function of the model's arrays that concerns no row, in the thread that may. There
        Ctrl-C stops waiting for it. Raises BackendError in a forked process that cannot compute.
        """
        self.check_process()
        return self._owner.call_or_leave(function) if self._owner else function()

    # Requests

    def submit(self, request: Request) -> Answer[str]:
        """Check a request and queue it. Raises ContextError and OptionsError."""
        return Answer[str](self.prepare(request), self).begin()

    def prepare(self, request: Request) -> Sequence:
        """Check a request, for an Answer. Raises ContextError and OptionsError."""
        self.check_process()
        self.engine.check(request)
        self.scheduler.rows.check_fits(len(request.prompt))
        return self.engine.begin(request)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a request that `prepare` has checked."""
        self.check_process()
        sequence.number = next(self._numbers)
        sequence.writer.submitted = time.perf_counter()
        if sequence.limit == 0 and not sequence.logprob_prompt_tokens:
            sequence.writer.end("length")
            sequence.finish()
            return
        self._arrived.append(sequence)
        if self._worker and self._is_started:
            self._worker.post(self._run)

    # Ticks

    def tick(self) -> bool:
        """Compute a token of each running request. False: there was nothing to do."""
        self.refuse_callback("run a tick")
        self.check_process()
        return self._call_between_ticks(self._tick)

    def advance(self, sequence: Sequence, count: float) -> None:
        """Run a tick unless a request has `count` tokens, or await those that the worker runs."""
        self.refuse_callback("wait for an answer")
        self.check_process()
        if (worker := self._worker) is None:
            self._hold(functools.partial(self._tick_for, sequence, count))
            return
        sequence.awaited, sequence.news = count, queue.SimpleQueue()
        if not sequence.has(count):
            if not self._is_started:
                worker.post(self._run)
            with contextlib.suppress(queue.Empty):
                sequence.news.get(timeout=WAKE_SECONDS)
        sequence.news = None

    def sweep(self) -> None:
        """End cancelled requests now, or after the tick that runs."""
        if self._ticker == threading.get_ident():
            return
        if owner := self._owner:
            sweep = functools.partial(self._hold, self._sweep)
            (owner.post if self._is_started or self._ticker else owner.call)(sweep)
        elif self._ticking.acquire(blocking=False):
            try:
                with uninterrupted():
                    self._mark(self._sweep)
            finally:
                self._ticking.release()

    def _call_between_ticks(self, function: abc.Callable[[], Result]) -> Result:
        """Call a function that may change rows, in the thread that may."""
        hold = functools.partial(self._hold, function)
        return self._owner.call(hold) if self._owner else hold()

    def _hold(self, function: abc.Callable[[], Result]) -> Result:
        """Call a function while no other one ticks or changes rows. Ctrl-C waits for its end."""
        with self._ticking, uninterrupted():
            return self._mark(function)

    def _mark(self, function: abc.Callable[[], Result]) -> Result:
        """Call a function in this thread, which holds `_ticking` and may run callbacks."""
        self._ticker = threading.get_ident()
        try:
            return function()
        finally:
            self._ticker = None

    def _tick(self) -> bool:
        if self._arrived:
            self._queue_arrived()
        return (self._scheduler or self.scheduler).tick()

    def _tick_for(self, sequence: Sequence, count: float) -> None:
        if not sequence.has(count) and not self._tick() and not sequence.has(count):
            sequence.finish(SessionError("this request was lost: submit it again"))

    def _queue_arrived(self) -> None:
        while self._arrived:
            self.scheduler.waiting.append(self._arrived.popleft())

    def _sweep(self) -> None:
        self._queue_arrived()
        self.scheduler.sweep()

    # The loop's own thread

    def start(self) -> None:
        """Tick on the loop's own thread from now on, whether or not someone waits for tokens."""
        if not self._is_started:
            self._is_started = True
            self._worker = self._worker or Worker()
            self._worker.post(self._run)

    def _run(self) -> None:
        """Tick in the worker as long as there is reason to. Its other calls come between ticks."""
        worker = self._worker
        if self._is_running or worker is None:  # a call between two ticks
            return
        self._is_running = True
        try:
            while worker is self._worker:
                if self._has_work():
                    with self._ticking:
                        self._mark(self._tick)
                    worker.make_queued()
                elif not self._is_started:
                    return
                elif not worker.make_next(REST_SECONDS):
                    self._hold(self._rest)
        finally:
            self._is_running = False

    def _has_work(self) -> bool:
        """True if someone waits for tokens; once started, if there are requests."""
        requests = [*self._arrived]
        if scheduler := self._scheduler:
            requests += [*scheduler.waiting, *scheduler.admitted]
        return (self._is_started and bool(requests)) or any(not s.has(s.awaited) for s in requests)

    def _rest(self) -> None:
        if self._scheduler:
            self._scheduler.rows.rest()

    def close(self) -> None:
        """End all requests as interrupted, free the rows and undo `start`. Raises SessionError in a
        callback.
        """
        self.refuse_callback("close the model")
        if self._process != os.getpid():
            return
        worker, self._worker, self._is_started = self._worker, self._owner, False
        if worker is not None and worker is not self._owner:
            worker.join()
        self._call_between_ticks(self._close)

    def _close(self) -> None:
        self._queue_arrived()
        if self._scheduler:
            self._scheduler.close()

    # Prefixes

    def _read_rows(self, read: abc.Callable[[Rows], Result]) -> Result:
        """Call a function of the rows that changes nothing; in a callback, within its tick."""
        if self._ticker == threading.get_ident():
            return read(self.scheduler.rows)
        return self._change_rows("", read)

    def _change_rows(self, action: str, change: abc.Callable[[Rows], Result]) -> Result:
        """Call a function of the rows between ticks. action: for the error in a callback."""
        self.refuse_callback(action)
        self.check_process()
        return self._call_between_ticks(lambda: change(self.scheduler.rows))

    def count_known(self, tokens: abc.Sequence[int], adapter: int = 0) -> int:
        """Tokens at the beginning of `tokens` that some row holds, computed by this adapter."""
        return self._read_rows(lambda rows: rows.find_prefix([*tokens, -1], adapter)[1])

    def export(self, tokens: abc.Sequence[int] | None = None, adapter: int = 0) -> dict[str, Any]:
        """State of the longest prefix of `tokens` that some row holds. See Rows.export."""
        return self._read_rows(lambda rows: rows.export(tokens, adapter))

    def erase(self, tokens: abc.Sequence[int]) -> int:
        """Drop kept rows that hold only a prefix of `tokens`; returns the longest one's length.
        Raises SessionError in a callback.
        """
        return self._change_rows("erase a prefix", lambda rows: rows.drop_prefixes(tokens))

    def install(self, state: dict[str, Any], adapter: int = 0) -> None:
        """Restore a state as a prefix of later prompts to an adapter. Raises ContextError, and
        SessionError in a callback.
        """
        self._change_rows("load a cache", lambda rows: rows.install(state, adapter))
