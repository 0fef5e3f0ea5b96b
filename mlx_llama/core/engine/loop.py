"""The loop that ticks the scheduler: its thread, Ctrl-C, and forked processes.

Ticks run inline, in the thread that waits for a token, or on a thread of the loop (`start`). Ctrl-C
is deferred to the end of a tick or of another change of the rows, so that the state stays
consistent; only the computation of a prompt ends at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections import abc, deque
from typing import Any

from mlx_llama.core.backends.interface import Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.errors import SessionError
from mlx_llama.core.options import MAX_ROWS
from mlx_llama.core.system.interrupts import uninterrupted
from mlx_llama.core.text.tokenizer import Tokenizer

from .home import WAKE_SECONDS, Home
from .request import Handle, Request, Sequence
from .rows import Rows
from .scheduler import Scheduler

KEPT_ROWS = 8  # rows of ended requests that stay as prefixes
REST_SECONDS = 30.0  # a thread without work looks after its memory


class Loop:
    """Serves requests on one model; any thread may call it.

    context: positions of a request, prompt and answer together. draft: a smaller model that guesses
    tokens. cache_memory: bytes of all keys and values; None: half of the memory that is free, at
    most 8 GB. max_rows: requests in one step. kept_rows: ended ones
    that stay as prefixes for later prompts. home: the thread for all calls of the backend; None:
    the threads that tick.
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
        home: Home | None = None,
    ):
        self.engine = RequestBuilder(backend, model, tokenizer, eos, context, draft)
        self.max_rows = max_rows
        self._limits = cache_memory, max_rows, kept_rows
        self.call = home.call if home else _call_here
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
        self._thread: threading.Thread | None = None
        # Ctrl-C inside a Condition or an Event may leave its lock held, not inside a SimpleQueue
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closing = False

    def check_process(self) -> None:
        """Start over in a forked process. Raises BackendError where it cannot compute."""
        if self._process != os.getpid():
            self.engine.backend.check_process()
            self._start_over()

    @property
    def scheduler(self) -> Scheduler:
        """Queues and rows, made for the first request."""
        return self._scheduler or self.call(self._make_scheduler)

    @property
    def preemptions(self) -> int:
        """Requests whose row was freed while memory was short."""
        return self._scheduler.preemptions if self._scheduler else 0

    def _make_scheduler(self) -> Scheduler:
        with self._setup:
            self._scheduler = self._scheduler or Scheduler(self.engine, *self._limits)
            return self._scheduler

    def refuse_callback(self, action: str) -> None:
        """Raise SessionError in a callback of a request, which would wait for itself."""
        if self._ticker == threading.get_ident():
            raise SessionError(
                f"a callback cannot {action}: it runs inside the loop that computes its answer; do "
                "this after the answer"
            )

    # Requests

    def submit(self, request: Request) -> Handle:
        """Check a request and queue it. Raises ContextError and OptionsError."""
        return self.prepare(request).begin()

    def prepare(self, request: Request) -> Handle:
        """As `submit`, but the handle queues the request at its first use."""
        self.check_process()
        self.engine.check(request)
        self.scheduler.rows.check_fits(len(request.prompt))
        return Handle(self.engine.begin(request), self)

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
        if self._thread is not None:
            self._wakes.put(None)

    # Ticks

    def tick(self) -> bool:
        """Compute a token of each running request. False: there was nothing to do."""
        self.refuse_callback("run a tick")
        self.check_process()
        with self._ticking:
            return self.call(self._tick)

    def _read_rows(self, read: abc.Callable[[Rows], Any]) -> Any:
        """Call a function of the rows that changes nothing; in a callback, within its tick."""
        if self._ticker == threading.get_ident():
            return read(self.scheduler.rows)
        return self._change_rows("", read)

    def _change_rows(self, action: str, change: abc.Callable[[Rows], Any]) -> Any:
        """Call a function of the rows between ticks. action: for the error in a callback."""
        self.refuse_callback(action)
        self.check_process()
        with self._ticking:
            return self.call(self._hold, lambda: change(self.scheduler.rows))

    def _hold(self, function: abc.Callable[[], Any]) -> Any:
        """Mark this thread, as `_tick` does, for callbacks of requests that the function ends."""
        self._ticker = threading.get_ident()
        try:
            return function()
        finally:
            self._ticker = None

    def _tick(self) -> bool:
        self._ticker = threading.get_ident()
        try:
            self._queue_arrived()
            return self.scheduler.tick()
        finally:
            self._ticker = None

    def _queue_arrived(self) -> None:
        while self._arrived:
            self.scheduler.waiting.append(self._arrived.popleft())

    def advance(self, sequence: Sequence, has_news: abc.Callable[[], bool]) -> None:
        """Wait for news of a request: run a tick, or await one where another thread ticks."""
        self.refuse_callback("wait for an answer")
        self.check_process()
        if self._thread is not None:
            sequence.news = queue.SimpleQueue()
            if not has_news():
                with contextlib.suppress(queue.Empty):
                    sequence.news.get(timeout=WAKE_SECONDS)
            sequence.news = None
            return
        with self._ticking:
            if not has_news() and not self.call(self._tick) and not has_news():
                sequence.finish(SessionError("this request was lost: submit it again"))

    def sweep(self) -> None:
        """End cancelled requests now, or in the tick that runs."""
        if self._ticker != threading.get_ident() and self._ticking.acquire(blocking=False):
            try:
                self.call(self._hold, self._sweep)
            finally:
                self._ticking.release()

    def _sweep(self) -> None:
        self._queue_arrived()
        self.scheduler.sweep()

    # A thread of the loop

    def start(self) -> None:
        """Tick on a thread of the loop from now on."""
        if self._thread is None:
            self._is_closing = False
            self._thread = threading.Thread(
                target=self._run, name="mlx_llama scheduler", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            while not (self._is_closing or self._has_work()):
                try:
                    self._wakes.get(timeout=REST_SECONDS)
                except queue.Empty:
                    with self._ticking:
                        self.call(self._hold, self._rest)
            if self._is_closing:
                return
            self.tick()

    def _rest(self) -> None:
        if self._scheduler:
            self._scheduler.rows.rest()

    def _has_work(self) -> bool:
        scheduler = self._scheduler
        return bool(self._arrived or (scheduler and (scheduler.waiting or scheduler.admitted)))

    def close(self) -> None:
        """Stop the thread, end all requests as interrupted and free the rows. Raises SessionError
        in a callback.
        """
        self.refuse_callback("close the model")
        if self._process != os.getpid():
            return
        self._is_closing = True
        if self._thread is not None:
            self._wakes.put(None)
            self._thread.join()
            self._thread = None
        with self._ticking:
            self.call(self._hold, self._close)

    def _close(self) -> None:
        self._queue_arrived()
        if self._scheduler:
            self._scheduler.close()

    # Prefixes

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


def _call_here(function: abc.Callable[..., Any], *arguments: Any) -> Any:
    with uninterrupted():
        return function(*arguments)
