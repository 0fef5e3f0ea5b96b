"""A thread for all calls on a model's arrays: MLX's streams and traces are per thread."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mlx_llama.core.system.interrupts import uninterrupted

WAKE_SECONDS = 0.5  # a thread that waits checks again after this time
Call = tuple[Future, Callable[[], Any]]


class Home:
    """Runs calls one after the other in a thread of its own, which ends with the model. MLX caches
    traces per thread by the address of the traced function, which a later one may have.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name="mlx_llama arrays", daemon=True
        )
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function`'s result, or raise its error. Ctrl-C is raised after the call."""
        with uninterrupted():
            return self._submit(function, arguments).result()

    def call_until_interrupt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """As `call`, but Ctrl-C also ends the call, at its next line of Python."""
        future = self._submit(function, arguments)
        try:
            future.exception()  # waits
        except BaseException:
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))
            raise
        return future.result()

    def call_or_leave(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """As `call`, but Ctrl-C stops waiting for it: a call that has begun ends by itself."""
        # Ctrl-C inside a Future's Condition may leave its lock held, not inside a SimpleQueue. One
        # that arrives just before the wait begins is noticed after WAKE_SECONDS.
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        with uninterrupted():
            future = self._submit(function, arguments, ended.put)
        try:
            while ended.empty():
                with contextlib.suppress(queue.Empty):
                    ended.put(ended.get(timeout=WAKE_SECONDS))
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """End the thread after the calls that are queued."""
        self._calls.put(None)

    def _submit(
        self,
        function: Callable[..., Any],
        arguments: tuple,
        end: Callable[[Future], object] | None = None,
    ) -> Future:
        """Queue a call, or run it in this thread if that is the home. end: called at its end."""
        future: Future = Future()
        if end:
            future.add_done_callback(end)
        call = (future, functools.partial(contextvars.copy_context().run, function, *arguments))
        # A forked process lacks the thread; the backend's call reports the error there.
        if threading.get_ident() == self._thread.ident or os.getpid() != self._process:
            _run(*call)
        else:
            self._calls.put(call)
        return future


def _run(future: Future, function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _serve(calls: queue.SimpleQueue[Call | None]) -> None:
    try:
        while call := calls.get():
            _run(*call)
            del call  # an idle thread keeps no model alive
    except KeyboardInterrupt:  # raised just after the call had ended
        pass
