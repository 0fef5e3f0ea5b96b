"""The one thread that touches a model's arrays, for a framework whose streams and traces belong to threads (MLX)."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any


class Home:
    """Runs calls in one thread, one after the other. It ends with `close`, and with it MLX's cache of traces: a trace is known by
    the address of its function, which a later model's function may have."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="mlx_llama arrays", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The result of `function`, run in that thread; raises what it raises. After Ctrl-C the call goes on to its end, and this
        one returns then."""
        return self._call(_Call(function, given, named), _Call.wait)

    def call_until_interrupt(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """As `call`; Ctrl-C ends the call too, at its next line of Python."""
        return self._call(_Call(function, given, named), self._interrupt)

    def _call(self, call: _Call, on_interrupt: Callable[[_Call], object]) -> Any:
        if threading.get_ident() == self._thread.ident or os.getpid() != self._process:
            call.run()  # a forked process lacks the thread, and the framework says what it cannot do there
            return call.result()
        self._calls.put(call)
        try:
            call.wait()
        except BaseException:
            on_interrupt(call)
            raise
        return call.result()

    def _interrupt(self, call: _Call) -> None:
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))

    def close(self) -> None:
        """End the thread after the calls that wait."""
        self._calls.put(None)


class _Call:
    """A call, and what came of it."""

    def __init__(self, function: Callable[..., Any], given: tuple, named: dict[str, Any]):
        self._run: Callable[[], Any] | None = functools.partial(contextvars.copy_context().run, function, *given, **named)
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()

    def wait(self) -> None:
        self._is_over.wait()

    def run(self) -> None:
        try:
            self._value = self._run and self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._run = None
            self._is_over.set()

    def result(self) -> Any:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame
        return self._value


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    try:
        while call := calls.get():
            call.run()
            del call  # while it waits for the next one, nothing of the last one is kept
    except KeyboardInterrupt:  # it came when the call had just ended
        pass
