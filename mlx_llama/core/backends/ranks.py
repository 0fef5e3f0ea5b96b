"""One model over several processes: rank 0 leads, the others repeat its calls on their shares.

A call that reaches the device is sent to all ranks in one message, together with the changes of the
cache since the last one, and then made on rank 0's own share. So all ranks launch the same
collective operations in the same order.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, cast

import numpy as np

from mlx_llama.core.errors import BackendError, LlamaError
from mlx_llama.core.files import hub
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.system.interrupts import uninterrupted
from mlx_llama.core.system.launch import Launch

from .channel import Arrays, Channel, Message, Received, stop_process
from .interface import Array, Cache, Masks, Model, Probe, SamplingBatch
from .load_options import LoadOptions
from .positions import Positions, checked_tokens

JOIN_SECONDS = 120  # for all processes to start
FLUSH_SECONDS = 2
END_SECONDS = 5  # for another rank to end after rank 0
ANSWER_SECONDS = 8  # for the other ranks to fail where rank 0 failed
# options that a SamplingBatch does not read
UNSENT = {"schema", "regex", "grammar", "stop", "stop_token_ids", "adapter"}


class World:
    """The processes of a run, seen from one of them. launch: how they were started. ranks: the
    backend's collective operations."""

    def __init__(self, launch: Launch, ranks: Any):
        self.backend, self.ranks = launch.backend, ranks
        self.rank, self.size = ranks.rank, ranks.size
        # of other ranks, to make
        self.calls: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._channels: dict[int, Channel] = {}
        self._answers: dict[int, queue.SimpleQueue[Received]] = {}
        self._changes: deque[Message] = deque()  # of caches, to send with the next call
        self._numbers, self._names = itertools.count(1), itertools.count(1)
        self._finished = 0  # the last call that rank 0 has made
        self._failed: set[int] = set()  # calls that raised on rank 0
        self._lock = threading.RLock()
        self._progress = threading.Condition()
        self._connect(launch.host)

    def _connect(self, host: str) -> None:
        """Connect rank 0 with the others, which learn its port and a secret collectively."""
        words = [0] * 9
        listener = None
        try:
            if self.rank == 0:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, 0), family=family)
                words = [listener.getsockname()[1], *(secrets.randbits(16) for _ in range(8))]
            port, *key = self.ranks.sum_integers(words)
            key = np.array(key, np.uint16).tobytes()
            if self.rank:
                connection = socket.create_connection((host, port), JOIN_SECONDS)
                connection.sendall(key + bytes([self.rank]))
                self._channels[0] = Channel(
                    connection,
                    self._receive_call,
                    lambda reason: stop_process(f"rank 0 {reason}, so rank {self.rank} stops"),
                )
                return
            assert listener is not None
            listener.settimeout(JOIN_SECONDS)
            while len(self._channels) < self.size - 1:
                connection, _ = listener.accept()
                connection.settimeout(JOIN_SECONDS)
                greeting = connection.recv(len(key) + 1, socket.MSG_WAITALL)
                if len(greeting) == len(key) + 1 and hmac.compare_digest(greeting[:-1], key):
                    self._welcome(greeting[-1], connection)
                else:
                    connection.close()
        except OSError as error:
            raise BackendError(
                f"rank {self.rank} cannot be connected over {host}: {error}"
            ) from None
        finally:
            if listener:
                listener.close()
        threading.Thread(target=self._flush, name="mlx_llama ranks", daemon=True).start()

    def _welcome(self, rank: int, connection: socket.socket) -> None:
        answers = self._answers[rank] = queue.SimpleQueue()

        def receive(message: Message, arrays: dict[str, np.ndarray]) -> None:
            if "failed" in message and not message["answers"]:
                self._compare_failure(rank, message)
            answers.put((message, arrays))

        self._channels[rank] = Channel(
            connection, receive, lambda reason: self.stop(f"rank {rank} {reason}")
        )

    def _flush(self) -> None:
        """Send changes that no call follows soon, as when a model was dropped."""
        while True:
            time.sleep(FLUSH_SECONDS)
            if self._changes:
                self.tell("change")

    def _receive_call(self, message: Message, arrays: dict[str, np.ndarray]) -> None:
        self.calls.put((message, arrays))
        if message["do"] == "end":  # rank 0 may be gone first, which is no failure
            time.sleep(END_SECONDS)
            os._exit(0)  # this process waits for a device that never answers

    def _compare_failure(self, rank: int, message: Message) -> None:
        """Stop unless rank 0's own call failed, too."""
        number = message["number"]
        with self._progress:
            self._progress.wait_for(lambda: self._finished >= number, ANSWER_SECONDS)
        if number not in self._failed:
            self.stop(f"rank {rank}: {message['failed']}")

    def stop(self, text: str) -> None:
        """End all processes with an error. Called on rank 0, from any thread."""
        text += ": the run over several processes ends; start it again"
        for channel in list(self._channels.values()):
            channel.send({"do": "stop", "text": text})
        stop_process(text)

    # Rank 0

    def tell(self, do: str, arrays: Arrays | None = None, **fields: Any) -> int:
        """Send a call to all other ranks; returns its number."""
        with self._lock:
            number = next(self._numbers)
            changes = [self._changes.popleft() for _ in range(len(self._changes))]
            for channel in self._channels.values():
                channel.send({"do": do, "number": number, "changes": changes, **fields}, arrays)
            return number

    def change(self, do: str, **fields: Any) -> None:
        """Send a change with the next call."""
        self._changes.append({"do": do, **fields})

    def name(self) -> int:
        """A new name for an object that all ranks have."""
        return next(self._names)

    @contextmanager
    def together(self, do: str, arrays: Arrays | None = None, **fields: Any) -> Iterator[int]:
        """Make a call on all ranks; the block makes it on rank 0. Ctrl-C waits for its end."""
        with self._lock, uninterrupted():
            number = self.tell(do, arrays, **fields)
            try:
                yield number
            except Exception as error:
                self._failed.add(number)
                self._finish(number)
                for rank in self._answers:  # the others fail, too
                    try:
                        message, _ = self._take_answer(rank, number, ANSWER_SECONDS)
                    except queue.Empty:
                        message = {}
                    if "failed" not in message:
                        self.stop(f"rank 0: {error}")
                raise
            self._finish(number)

    def _finish(self, number: int) -> None:
        with self._progress:
            self._finished = number
            self._progress.notify_all()

    def answers(self, number: int) -> list[Received]:
        """Other ranks' answers to a call, in their order. Raises BackendError where one failed."""
        ranks = sorted(self._answers)
        answers = [self._take_answer(rank, number, None) for rank in ranks]
        for rank, (message, _) in zip(ranks, answers):
            if "failed" in message:
                raise BackendError(f"rank {rank}: {message['failed']}")
        return answers

    def _take_answer(self, rank: int, number: int, seconds: float | None) -> Received:
        while True:
            message, arrays = self._answers[rank].get(timeout=seconds)
            if message["number"] == number:
                return message, arrays

    def end(self) -> None:
        """Let the other ranks end."""
        for channel in self._channels.values():
            channel.send({"do": "end"})
            channel.close()
        self._channels = {}

    # Other ranks

    def answer(self, number: int, arrays: Arrays | None = None, **fields: Any) -> None:
        """Answer a call of rank 0."""
        self._channels[0].send({"number": number, **fields}, arrays)


_current: list[World] = []  # at most one: a process belongs to one run


def current() -> World | None:
    """The run that this process belongs to; None for a process alone."""
    return _current[0] if _current else None


def enter(world: World) -> None:
    """Belong to a run from now on."""
    _current[:] = [world]


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
    backend.runtime.launch(result, *(cache.arrays() if method == "forward" else ()))
    return result


# The model on rank 0


def load(
    world: World,
    backend: Any,
    checkpoint: Checkpoint,
    options: LoadOptions,
    build: Callable[[], Model],
) -> LeadingModel:
    """Load shares on all ranks; `build` loads rank 0's. Raises LlamaError, naming the rank."""
    name = world.name()
    fields: dict[str, Any] = dict(checkpoint=checkpoint.name, options=options.of_model())
    fields |= dict(revision=_find_revision(checkpoint), identity=identify(checkpoint))
    number = world.tell("load", model=name, device=backend.device_kind, **fields)
    error = model = None
    try:
        model = build()
    except LlamaError as ours:  # the others answer anyway
        error = ours
    try:
        world.answers(number)
    except BackendError as theirs:
        error = error or theirs
    if error:
        world.change("drop", name=name)
        raise error
    assert model is not None
    return LeadingModel(world, backend, model, checkpoint, name)


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

    def __init__(self, world: World, backend: Any, model: Model, checkpoint: Checkpoint, name: int):
        self._world, self._backend, self._model, self._name = world, backend, model, name
        self.config = checkpoint.config
        weakref.finalize(self, world.change, "drop", name=name)

    def __getattr__(self, field: str) -> Any:
        return getattr(self._model, field)

    def make_cache(self, capacity: int, rows: int = 1) -> LeadingCache:
        """A Cache on all ranks. Raises ContextError below 1."""
        inner = self._model.make_cache(capacity, rows)
        name = self._world.name()
        self._world.change("make_cache", model=self._name, cache=name, capacity=capacity, rows=rows)
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
        return self._call("sample", (known,), cache, chosen, sampling, {"logits": known}, masks)

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
        return self._call(method, (tokens, index), cache, chosen, sampling, **options)

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
        arrays: Arrays | None = None,
        masks: Masks | None = None,
        probe: Probe | None = None,
        all_positions: bool = False,
        **fields: Any,
    ) -> Array:
        """Make a call on all ranks; see `launch`. fields: its arguments, where others need them."""
        fields |= {"method": method, "model": self._name, "cache": cache.name, "rows": rows}
        fields |= {"masks": bool(masks), "probe": bool(probe), "all_positions": all_positions}
        fields["sampling"] = sampling and self._share_sampling(sampling)
        options: dict[str, Any] = dict(rows=rows, probe=probe, all_positions=all_positions)
        options["masks"] = masks and (lambda: self._share_masks(masks))
        calls = self._backend, self._model, method, first, cache.inner, sampling
        with self._world.together("call", arrays, **fields):
            return launch(*calls, **options)

    def _share_sampling(self, sampling: SamplingBatch) -> int:
        """The name of a SamplingBatch, which is sent once."""
        name = getattr(sampling, "_rank_name", None)
        if name is None:
            name = self._world.name()
            sampling._rank_name = name  # type: ignore[attr-defined]  # only this file's
            options = [o.model_dump(mode="json", exclude=UNSENT) for o in sampling.options]
            self._world.change("sampling", name=name, options=options)
            weakref.finalize(sampling, self._world.change, "drop", name=name)
        return name

    def _share_masks(self, masks: Masks) -> np.ndarray:
        try:
            words = masks()
        except Exception:
            self._world.tell("masks")  # without any: they fail, too
            raise
        self._world.tell("masks", {"words": words})
        return words


class LeadingCache:
    """A Cache on all ranks: others change with the next call. Bytes are of rank 0's share."""

    def __init__(self, world: World, inner: Cache, name: int):
        self._world, self.inner, self.name = world, inner, name
        self._free_memory = inner.free_memory
        ignore_memory(inner)
        weakref.finalize(self, world.change, "drop", name=name)

    def __getattr__(self, field: str) -> Any:
        return getattr(self.inner, field)

    def free_memory(self) -> int | None:
        return self._free_memory()

    def check_memory(self, ends: Mapping[int, int]) -> None:
        # The attributes that it reads are here, or __getattr__ finds them
        Positions.check_memory(cast(Positions, self), ends)

    def reserve(self, ends: Mapping[int, int]) -> None:
        grown = {int(row): int(end) for row, end in ends.items() if end > self.inner.allocated[row]}
        if grown:
            self.check_memory(grown)
            self._change("reserve", list(grown.items()))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        if length:
            self.inner.check_copy(source, target, length)
            self.check_memory({target: length})
        self._change("copy_prefix", source, target, length)

    def _change(self, method: str, *arguments: Any) -> None:
        with self._world._lock, uninterrupted():
            change_cache(self.inner, method, arguments)
            self._world.change("cache", cache=self.name, method=method, arguments=arguments)

    trim = partialmethod(_change, "trim")
    reset = partialmethod(_change, "reset")

    def state(self, row: int = 0) -> dict[str, np.ndarray]:
        """All positions of a row with the heads of all ranks; see Cache.state."""
        with self._world.together("state", cache=self.name, row=row) as number:
            heads = self.inner.state(row)
            if not heads:
                return heads
            parts = [heads, *(arrays for _, arrays in self._world.answers(number))]
        for name in ("keys", "values"):
            heads[name] = np.concatenate([part[name] for part in parts], axis=1)
        return heads

    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None:
        heads = take_heads(state, 0, self._world.size)
        self.inner.check_state(heads, row)
        self.check_memory({row: len(state["tokens"])} if state else {})
        arrays = {name: np.asarray(array) for name, array in state.items()}
        with self._world.together("restore", arrays, cache=self.name, row=row):
            self.inner.restore(heads, row)


def ignore_memory(cache: Cache) -> None:
    """Have a cache ignore free memory: all ranks decide alike, and rank 0 checks."""
    cache.free_memory = lambda: None  # type: ignore[method-assign]


def change_cache(cache: Cache, method: str, arguments: Sequence[Any]) -> None:
    """Make a change on one rank. A mapping comes as pairs, since JSON's keys are text."""
    getattr(cache, method)(*(map(dict, arguments) if method == "reserve" else arguments))


def take_heads(state: Mapping[str, np.ndarray], rank: int, size: int) -> dict[str, np.ndarray]:
    """A rank's heads of a `state` of all."""
    taken = dict(state)
    for name in ("keys", "values") if state else ():
        count = state[name].shape[1] // size
        taken[name] = state[name][:, rank * count : (rank + 1) * count]
    return taken
