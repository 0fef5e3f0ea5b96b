"""A server's model: loaded in the background, unloaded when idle, reloaded on the next request."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from mlx_llama.api.llm import LLM
from mlx_llama.core.errors import LlamaError, plain
from mlx_llama.core.system import machine, progress

from .faults import Refusal, shutting_down, unavailable
from .slots import Slots

State = Literal["loading", "ready", "idle", "failed", "closed"]


class ModelHolder:
    """Holds a model for the event loop that calls `start`.

    load: returns the model; called in a thread. idle: seconds without use until the model is
    dropped; None: never. on_failure: called in the event loop if the first load fails, with
    `error` set. describe_model: returns the `facts` to keep while the model is idle.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        idle: float | None,
        on_failure: Callable[[], None],
        describe_model: Callable[[LLM], dict[str, Any]],
    ):
        self._load, self._idle, self._on_failure = load, idle, on_failure
        self._describe_model = describe_model
        self.facts: dict[str, Any] = {}
        self.llm: LLM | None = None  # None if it is not loaded
        self._task: asyncio.Task[None] | None = None
        self._users = 0
        self._left = time.monotonic()  # when the last user left
        self.state: State = "loading"
        self.error: Exception | None = None
        self.done = self.total = 0  # bytes of weights, while loading
        self.loads = 0
        self._preemptions = 0  # in models that were unloaded
        self.name = ""
        # scales by name; requests may use the names as the model's
        self.adapters: dict[str, float] = {}
        self.adapter: str | None = None  # answers requests that name none; None: no adapter
        self.slots = Slots(0)  # for the loaded model

    def start(self) -> None:
        """Start loading, and watching for idleness."""
        self._begin()
        if self._idle is not None:
            self._watcher = asyncio.create_task(self._watch(self._idle))

    def _begin(self) -> None:
        self.state, self.done, self.total = "loading", 0, 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        future: Future[LLM] = Future()
        future.set_running_or_notify_cancel()  # a closed server does not cancel it

        def work() -> None:
            try:
                with progress.reported(self._report):
                    llm = self._load()
                llm.defaults.lift_limit()
                future.set_result(llm)
            except Exception as error:  # reported to clients and to the command
                future.set_exception(error)

        # A daemon: the process may exit while it reads a large model.
        threading.Thread(target=work, name="load", daemon=True).start()
        try:
            llm = await asyncio.wrap_future(future)
        except Exception as error:
            self.error = error
            if self.loads:  # loaded before: the next request retries
                self.state = "idle"
                return
            self.state = "failed"
            self._on_failure()
            return
        self.loads += 1
        self.error = None
        name = llm.checkpoint.name
        # Do not reveal the model's folder to clients.
        self.name = os.path.basename(name.rstrip("/\\")) if os.path.exists(name) else name
        self.adapters = {adapter.name: adapter.scale for adapter in llm.checkpoint.adapters}
        self.slots = Slots(llm.loop.max_rows)
        self.llm, self.state = llm, "ready"
        self._left = time.monotonic()
        llm.loop.start()

    def _report(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    @property
    def preemptions(self) -> int:
        """Number of requests set aside while memory was short, of all models so far."""
        return self._preemptions + (self.llm.loop.preemptions if self.llm else 0)

    def require(self) -> LLM:
        """Return the model. Raises Refusal if it is loading, unloaded or has failed, or if its file
        has changed.
        """
        if self.llm is not None:
            try:
                self.llm.engine.files.check()
            except LlamaError as error:
                raise Refusal(503, "model_changed", message=str(error)) from None
            return self.llm
        if self.error is not None:
            is_ours = isinstance(self.error, LlamaError)
            reason = plain(str(self.error)) if is_ours else type(self.error).__name__
            raise Refusal(503, "model_failed", message=f"the model could not be loaded: {reason}")
        if self.state == "closed":
            raise shutting_down()
        if self.state == "idle":
            text = "the model is unloaded; the next request for an answer reloads it"
            raise Refusal(503, "model_idle", message=text)
        raise unavailable("model_loading", "the model is loading: poll /ready", 1)

    async def enter(self) -> LLM:
        """Start using the model until `leave`. Reloads an unloaded model. Raises Refusal."""
        self._users += 1
        try:
            if self.state == "idle":
                self._begin()
            if self.llm is None and self.loads and self._task:  # loaded before: wait
                await asyncio.shield(self._task)
            return self.require()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Stop using the model."""
        self._users -= 1
        self._left = time.monotonic()

    async def _watch(self, idle: float) -> None:
        while True:
            await asyncio.sleep(min(1.0, idle / 4))
            if self.state == "ready" and not self._users and time.monotonic() - self._left >= idle:
                self._drop("idle")

    def _drop(self, state: State) -> None:
        llm, self.llm, self.slots = self.llm, None, Slots(0)
        if llm is not None:
            self.facts = self._describe_model(llm)
            llm.loop.close()
            self._preemptions += llm.loop.preemptions
            del llm
            gc.collect()
            machine.trim_memory()
        self.state = state  # last: memory is free when pollers see the state

    def describe(self) -> dict[str, Any]:
        """Return state and progress, for clients."""
        share = self.done / self.total if self.total else float(self.state == "ready")
        counts = {"done": self.done, "total": self.total, "progress": round(share, 4)}
        return {"state": self.state, **counts}

    def close(self) -> None:
        """Drop the model for good."""
        if self._idle is not None:
            self._watcher.cancel()
        if self._task is not None:
            self._task.cancel()
        self._drop("closed")
