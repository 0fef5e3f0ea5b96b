"""The model of a server: loaded in the background, given back when idle, loaded again at the next
request.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from mlx_llama.core.errors import LlamaError, plain
from mlx_llama.core.generation.llm import LLM
from mlx_llama.core.system import progress

from .faults import Refusal

State = Literal["loading", "ready", "idle", "failed", "closed"]


class Keeper:
    """Holds one model for the event loop that calls `start`.

    load: makes the model, in a thread of its own. idle: after so many seconds without use the model
    is dropped; None: never. on_failure: called in the event loop if the first load fails; `error`
    is set by then. describe_model: what `facts` tell while the model is idle.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        idle: float | None = None,
        on_failure: Callable[[], None] = lambda: None,
        describe_model: Callable[[LLM], dict[str, Any]] = lambda llm: {},
    ):
        self._load = load
        self._idle = idle
        self._on_failure = on_failure
        self._describe_model = describe_model
        self.facts: dict[str, Any] = {}
        self._llm: LLM | None = None
        self._task: asyncio.Task[None] | None = None
        self._users = 0
        self._left = time.monotonic()  # the last user
        self.state: State = "loading"
        self.error: Exception | None = None
        self.done = self.total = 0  # bytes of weights, while loading
        self.loads = 0
        self._set_asides = 0  # of models that were given back
        self.name = ""
        self.adapters: tuple[str, ...] = ()  # names that requests may give for the model

    def start(self) -> None:
        """Begin to load, and to watch for idleness."""
        self._begin()
        if self._idle is not None:
            self._watcher = asyncio.create_task(self._watch(self._idle))

    def _begin(self) -> None:
        self.state, self.done, self.total = "loading", 0, 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        future: asyncio.Future[LLM] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def settle(result: LLM | None, error: Exception | None) -> None:
            if future.cancelled():
                return
            if result is not None:
                future.set_result(result)
            else:
                future.set_exception(error or RuntimeError("there is no model"))

        def work() -> None:
            result, error = None, None
            try:
                with progress.reported(self._report):
                    result = self._load()
            except Exception as caught:  # told to the clients, and to the command
                error = caught
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the server was closed meanwhile
                if result is not None:
                    result.loop.close()

        # A daemon: the process may end while a large model is being read.
        threading.Thread(target=work, name="load", daemon=True).start()
        try:
            llm = await future
        except Exception as error:
            self.error = error
            if self.loads:  # it was loaded before: the next request tries again
                self.state = "idle"
                return
            self.state = "failed"
            self._on_failure()
            return
        self.loads += 1
        self.error = None
        name = llm.checkpoint.name
        # Clients need not know where the model lies.
        self.name = os.path.basename(name.rstrip("/\\")) if os.path.exists(name) else name
        self.adapters = llm.model.adapters
        self._llm, self.state = llm, "ready"
        self._left = time.monotonic()
        llm.loop.start()

    def _report(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    @property
    def llm(self) -> LLM | None:
        """The model if it is loaded."""
        return self._llm

    @property
    def set_asides(self) -> int:
        """Requests that were set aside while memory was short, of all models so far."""
        return self._set_asides + (self._llm.loop.set_asides if self._llm else 0)

    def require(self) -> LLM:
        """The model. Raises Refusal while it is loaded, while it is given back, and after a
        failure.
        """
        if self._llm is None:
            raise self._refuse()
        return self._llm

    def _refuse(self) -> Refusal:
        if self.error is not None:
            reason = (
                plain(str(self.error))
                if isinstance(self.error, LlamaError)
                else type(self.error).__name__
            )
            return Refusal(503, "model_failed", message=f"the model could not be loaded: {reason}")
        if self.state == "closed":
            return Refusal(
                503,
                "shutting_down",
                message="the server is shutting down",
                headers={"Retry-After": "5"},
            )
        if self.state == "idle":
            return Refusal(
                503,
                "model_idle",
                message="the model's memory was given back; the next request for an answer loads "
                "it again",
            )
        return Refusal(
            503,
            "model_loading",
            message="the model is being loaded: ask /ready",
            headers={"Retry-After": "1"},
        )

    async def enter(self) -> LLM:
        """Begin to use the model; `leave` ends it. Loads a model that was given back. Raises
        Refusal.
        """
        self._users += 1
        try:
            if self.state == "idle":
                self._begin()
            if self._llm is None and self.loads and self._task:  # loaded before: wait
                await asyncio.shield(self._task)
            return self.require()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """End a use of the model."""
        self._users -= 1
        self._left = time.monotonic()

    async def _watch(self, idle: float) -> None:
        while True:
            await asyncio.sleep(min(1.0, idle / 4))
            if self.state == "ready" and not self._users and time.monotonic() - self._left >= idle:
                self._drop("idle")

    def _drop(self, state: State) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            self.facts = self._describe_model(llm)
            llm.loop.close()
            self._set_asides += llm.loop.set_asides
            del llm
            gc.collect()
        self.state = state  # last: threads that poll it may count on the memory

    def describe(self) -> dict[str, Any]:
        """State and progress, for clients."""
        share = self.done / self.total if self.total else float(self.state == "ready")
        return {
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "progress": round(share, 4),
        }

    def close(self) -> None:
        """Drop the model for good."""
        if self._idle is not None:
            self._watcher.cancel()
        if self._task is not None:
            self._task.cancel()
        self._drop("closed")
