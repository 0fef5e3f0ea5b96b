"""Rank 0: a model and caches whose calls the other ranks repeat on their shares.

A call is sent to all ranks before it is made here, so that all launch the same collective
operations in the same order. It is checked and has storage before it is sent. Changes of a cache
need no other rank, and are sent once they have succeeded here.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partialmethod
from typing import Any

import numpy as np

from mlx_llama.core.backends.interface import Array, Cache, Masks, Model, Probe, SamplingBatch
from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.backends.shards import Ranks
from mlx_llama.core.errors import BackendError, LlamaError
from mlx_llama.core.files import hub
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.options import LoadOptions
from mlx_llama.core.system.interrupts import uninterrupted

from .world import Arrays, World

END_SECONDS = 5  # for the other ranks to hear of the end
# maximum duration of a call or a read: MLX's ring waits for a lost rank without end
PATIENCE = 600
# options that a SamplingBatch does not read
UNSENT = {"schema", "regex", "grammar", "stop", "stop_token_ids", "adapter"}


class Leader(World):
    """A run, seen from rank 0."""

    def __init__(self, backend: str, ranks: Ranks):
        super().__init__(backend, ranks)
        self._since: dict[int, float] = {}  # when a thread began to wait for other ranks
        threading.Thread(target=self._watch, name="mlx_llama ranks", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            if any(time.monotonic() - since > PATIENCE for since in list(self._since.values())):
                self.stop(f"another rank has not answered for {PATIENCE} s")

    @contextmanager
    def ending(self) -> Iterator[None]:
        """As World.ending, and after PATIENCE seconds."""
        thread = threading.get_ident()
        is_outermost = thread not in self._since
        self._since.setdefault(thread, time.monotonic())
        try:
            with super().ending():
                yield
        finally:
            if is_outermost:
                del self._since[thread]

    def load(
        self,
        backend: Any,
        checkpoint: Checkpoint,
        options: LoadOptions,
        build: Callable[[], Model],
    ) -> LeadingModel:
        """Load a share on each rank; `build` loads rank 0's. Raises LlamaError, naming the rank."""
        name = self.name()
        failed = "is interrupted"
        self.tell(
            "load",
            model=name,
            device="cpu" if "cpu" in str(backend.device).lower() else "gpu",
            checkpoint=checkpoint.name,
            revision=_find_revision(checkpoint),
            identity=identify(checkpoint),
            options=options.of_model(),
        )
        try:
            model = build()
            failed = ""
        except LlamaError as error:
            failed = str(error)
            raise
        finally:
            answers = self.exchange(failed=failed)
            if any(answer["failed"] for answer, _ in answers):
                self.dropped.append(name)
        for rank, (answer, _) in enumerate(answers):
            if answer["failed"]:
                raise BackendError(f"rank {rank}: {answer['failed']}")
        return LeadingModel(self, backend, model, checkpoint, name)

    def drop_with(self, owner: object, name: int) -> None:
        """Drop a name on all ranks once its object is gone. At exit all are: a thread may use one
        until then.
        """
        weakref.finalize(owner, self.dropped.append, name).atexit = False

    @contextmanager
    def together(self, do: str, arrays: Arrays | None = None, **fields: Any) -> Iterator[None]:
        """Make a call on all ranks; the block makes it on rank 0. Ctrl-C waits for its end."""
        with self.lock, uninterrupted(), self.ending():
            self.tell(do, arrays, **fields)
            yield

    def guard(self, runtime: Any) -> Any:
        """A backend's runtime that ends the run where a result of all ranks cannot be read."""
        return GuardedRuntime(self, runtime)

    def end(self) -> None:
        """Let the other ranks end. The launcher ends them if that fails."""
        timer = threading.Timer(END_SECONDS, os._exit, (2,))
        timer.daemon = True
        timer.start()
        with suppress(Exception), self.lock:
            self.send({"do": "end", "drop": []})
            self.exchange()
        timer.cancel()


class GuardedRuntime:
    """See Leader.guard."""

    def __init__(self, world: World, runtime: Any):
        self._world, self._runtime = world, runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def read(self, tokens: Sequence[Array]) -> list[int]:
        with self._world.ending():
            return self._runtime.read(tokens)

    def to_numpy(self, array: Array) -> np.ndarray:
        with self._world.ending():
            return self._runtime.to_numpy(array)


def launch(
    backend: Any,
    model: Model,
    method: str,
    first: tuple,
    cache: Cache,
    sampling: SamplingBatch | None,
    **options: Any,
) -> Array:
    """Make a call of the model on one rank and launch it. first: the arguments before the cache."""
    options = {name: value for name, value in options.items() if value}
    arguments = (*first, cache) if sampling is None else (*first, cache, sampling)
    result = getattr(model, method)(*arguments, **options)
    backend.runtime.launch([result, *(cache.arrays() if method == "forward" else ())])
    return result


def _find_revision(checkpoint: Checkpoint) -> str | None:
    """The commit of a hub id's files; None for a path."""
    if not (hub.is_hub_id(checkpoint.name) or hub.gguf_in_hub(checkpoint.name)):
        return None
    folders = (checkpoint.path, *checkpoint.path.parents)
    return next((path.name for path in folders if path.parent.name == "snapshots"), None)


def identify(checkpoint: Checkpoint) -> str:
    """Config, shapes and formats of a model, to compare it between machines."""
    shapes = sorted((name, *part.shape, part.nbytes) for name, part in checkpoint.tensors.items())
    return hashlib.sha256(repr((checkpoint.config, shapes)).encode()).hexdigest()


class LeadingModel:
    """A Model whose calls are made on all ranks; matrices and memory are of rank 0's share."""

    def __init__(
        self, world: Leader, backend: Any, model: Model, checkpoint: Checkpoint, name: int
    ):
        self._world, self._backend, self._model, self._name = world, backend, model, name
        self.config = checkpoint.config
        world.drop_with(self, name)

    def __getattr__(self, field: str) -> Any:
        return getattr(self._model, field)

    def make_cache(self, capacity: int, rows: int = 1) -> LeadingCache:
        """A Cache on all ranks. Raises ContextError below 1."""
        inner, name = self._model.make_cache(capacity, rows), self._world.name()
        self._world.tell("make_cache", model=self._name, cache=name, capacity=capacity, rows=rows)
        return LeadingCache(self._world, inner, name)

    def sample(
        self,
        logits: Array,
        cache: LeadingCache,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
    ) -> Array:
        """As Model.sample; sends the logits, so that all ranks have the tokens on their devices."""
        chosen = cache.inner.select_rows(len(logits), rows)
        known = logits if isinstance(logits, np.ndarray) else self._backend.runtime.to_numpy(logits)
        return self._call("sample", (known,), cache, chosen, sampling, masks, {"logits": known})

    def profile(self) -> Any:
        """Raises BackendError: the other ranks would wait."""
        raise BackendError(
            "a model over several processes cannot be profiled by operation: profile it in one "
            "process"
        )

    def _continue(
        self,
        method: str,
        tokens: Array,
        index_pos: int | Sequence[int],
        cache: LeadingCache,
        sampling: SamplingBatch | None = None,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
        **options: Any,
    ) -> Array:
        """Make a call, checked and with storage, so that it cannot fail on one rank alone."""
        tokens = checked_tokens(tokens, self.config.vocab_size)
        batch, count = tokens.shape
        chosen = cache.inner.select_rows(batch, rows)
        starts = np.broadcast_to(index_pos, batch).tolist()
        for row, start in zip(chosen, starts):
            cache.inner.check_continues(row, start, count)
        cache.reserve({row: start + count for row, start in zip(chosen, starts)})
        index = starts if np.iterable(index_pos) else starts[0]
        # None: what the last step over these rows drew
        known = tokens.tolist() if isinstance(tokens, np.ndarray) else None
        options |= {"tokens": known, "index_pos": index}
        return self._call(method, (tokens, index), cache, chosen, sampling, masks, **options)

    forward = partialmethod(_continue, "forward")
    step = partialmethod(_continue, "step")
    verify = partialmethod(_continue, "verify")

    def _call(
        self,
        method: str,
        first: tuple,
        cache: LeadingCache,
        rows: list[int],
        sampling: SamplingBatch | None,
        masks: Masks | None = None,
        arrays: Arrays | None = None,
        probe: Probe | None = None,
        all_positions: bool = False,
        **fields: Any,
    ) -> Array:
        """Make a call on all ranks; see `launch`. fields: its arguments, where others need them."""
        arrays = dict(arrays or {})
        options: dict[str, Any] = dict(rows=rows, all_positions=all_positions)
        fields |= options | {"method": method, "model": self._name, "cache": cache.name}
        fields["probe"] = bool(probe)
        fields["sampling"] = sampling and self._share_sampling(sampling)
        if masks:  # computed before the call is sent, since they may raise
            arrays["masks"] = words = masks()
            options["masks"] = lambda: words
        with self._world.together("call", arrays, **fields):
            return launch(
                self._backend,
                self._model,
                method,
                first,
                cache.inner,
                sampling,
                probe=probe,
                **options,
            )

    def _share_sampling(self, sampling: SamplingBatch) -> int:
        """The name of a SamplingBatch, which is sent once."""
        name = getattr(sampling, "_rank_name", None)
        if name is None:
            name = self._world.name()
            options = [o.model_dump(mode="json", exclude=UNSENT) for o in sampling.options]
            fields = {"model": self._name, "sampling": name, "options": options}
            self._world.tell("share_sampling", **fields)
            sampling._rank_name = name  # type: ignore[attr-defined]  # only this file's
            self._world.drop_with(sampling, name)
        return name


class LeadingCache:
    """A Cache on all ranks. Bytes are of rank 0's share."""

    def __init__(self, world: Leader, inner: Cache, name: int):
        self._world, self.inner, self.name = world, inner, name
        world.drop_with(self, name)

    def __getattr__(self, field: str) -> Any:
        return getattr(self.inner, field)

    def reserve(self, ends: Mapping[int, int]) -> None:
        grown = {int(row): int(end) for row, end in ends.items() if end > self.inner.allocated[row]}
        if grown:
            self._change("reserve", list(grown.items()))

    def _change(self, method: str, *arguments: Any) -> Any:
        with self._world.lock, uninterrupted():
            result = change_cache(self.inner, method, arguments)
            self._world.tell("change", cache=self.name, method=method, arguments=arguments)
        return result

    copy_prefix = partialmethod(_change, "copy_prefix")
    trim = partialmethod(_change, "trim")
    reset = partialmethod(_change, "reset")

    def state(self, row: int = 0, length: int | None = None) -> dict[str, np.ndarray]:
        """A row with the heads of all ranks; see Cache.state."""
        heads = self.inner.state(row, length)
        if heads:
            with self._world.together("state", cache=self.name, row=row, length=length):
                parts = [arrays for _, arrays in self._world.exchange(heads)]
            for name in ("keys", "values"):
                heads[name] = np.concatenate([part[name] for part in parts], axis=1)
        return heads

    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None:
        heads = take_heads(state, 0, self._world.size)
        arrays = {name: np.asarray(array) for name, array in state.items()}
        with self._world.lock, uninterrupted():
            self.inner.restore(heads, row)
            self._world.tell("restore", arrays, cache=self.name, row=row)


def change_cache(cache: Cache, method: str, arguments: Sequence[Any]) -> Any:
    """Make a change on one rank. A mapping comes as pairs, since JSON's keys are text."""
    return getattr(cache, method)(*(map(dict, arguments) if method == "reserve" else arguments))


def take_heads(state: Mapping[str, np.ndarray], rank: int, size: int) -> dict[str, np.ndarray]:
    """A rank's heads of a `state` of all."""
    taken = dict(state)
    for name in ("keys", "values") if state else ():
        count = state[name].shape[1] // size
        taken[name] = state[name][:, rank * count : (rank + 1) * count]
    return taken
