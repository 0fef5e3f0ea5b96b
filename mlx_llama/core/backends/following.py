"""Under mlx.launch and torchrun, rank 0 runs the command; the other ranks repeat its calls here."""

from __future__ import annotations

import atexit
import gc
import signal
from collections import deque
from typing import Any

import numpy as np

from mlx_llama.core.errors import BackendError, LlamaError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.system import machine
from mlx_llama.core.system.launch import find_launch

from . import ranks, selection
from .channel import Message, stop_process
from .load_options import LoadOptions
from .ranks import World

IN_FLIGHT = 2  # launched steps, the oldest of which is awaited before another one is launched


def join() -> World | None:
    """Connect the processes of a launcher, once; None for a process alone. Raises BackendError."""
    if world := ranks.current():
        return world
    launch = find_launch()
    if launch is None:
        return None
    if reason := selection.missing(launch.backend):
        raise BackendError(reason)
    collective = selection.import_file(launch.backend, "ranks").join()
    if collective.size == 1:
        return None
    world = World(launch, collective)
    ranks.enter(world)
    if world.rank == 0:
        atexit.register(world.end)
    return world


def follow_leader() -> bool:
    """Join the launcher's processes. On rank 0 and alone: False at once. On others: repeat rank 0's
    calls until it ends, then True. Raises BackendError."""
    world = join()
    if world is None or world.rank == 0:
        return False
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    Follower(world).run()
    return True


class Follower:
    """Objects of a rank by name, and the calls on them."""

    def __init__(self, world: World):
        self.world = world
        self._named: dict[int, Any] = {}
        self._backends: dict[int, selection.Backend] = {}  # by name of a model
        self._drawn: dict[tuple, Any] = {}  # the last tokens on the device, by cache and rows
        self._launched: deque[tuple[selection.Backend, Any]] = deque()

    def run(self) -> None:
        """Make rank 0's calls until it ends."""
        while True:
            message, arrays = self.world.calls.get()
            do = message["do"]
            if do == "end":
                return
            if do == "stop":
                stop_process(message["text"])
            number = message["number"]
            answers = do in ("load", "state")
            try:
                for change in message["changes"]:
                    self._change(change)
                answer = None if do == "change" else getattr(self, f"_{do}")(message, arrays)
            except Exception as error:  # rank 0 compares it with its own
                kind = "" if isinstance(error, LlamaError) else f"{type(error).__name__}: "
                text = f"{kind}{error}"
                self.world.answer(number, failed=text, answers=answers)
            else:
                if answers:
                    self.world.answer(number, answer)

    def _change(self, change: Message) -> None:
        do = change["do"]
        if do == "drop":
            self._named.pop(change["name"], None)
            if self._backends.pop(change["name"], None):  # a model
                self._launched.clear()
                gc.collect()
                machine.trim_memory()
            self._drawn = {
                key: tokens for key, tokens in self._drawn.items() if key[0] != change["name"]
            }
        elif do == "make_cache":
            cache = self._named[change["model"]].make_cache(change["capacity"], change["rows"])
            ranks.ignore_memory(cache)
            self._named[change["cache"]] = cache
        elif do == "sampling":
            self._named[change["name"]] = [GenerationOptions(**o) for o in change["options"]]
        else:
            cache = self._named[change["cache"]]
            ranks.change_cache(cache, change["method"], change["arguments"])

    def _load(self, message: Message, arrays: dict) -> None:
        checkpoint = open_checkpoint(message["checkpoint"], message["revision"])
        if ranks.identify(checkpoint) != message["identity"]:
            raise BackendError(
                f"{checkpoint.name} is another model here than on rank 0: copy it to every machine"
            )
        backend = selection.select(self.world.backend, message["device"])
        model = backend.model.Llama.load(
            checkpoint, LoadOptions(**message["options"]), backend.device, ranks=self.world.ranks
        )
        self._named[message["model"]], self._backends[message["model"]] = model, backend

    def _call(self, message: Message, arrays: dict) -> None:
        backend, method = self._backends[message["model"]], message["method"]
        key = message["cache"], tuple(message["rows"])
        if method == "sample":
            first: tuple = (arrays["logits"],)
        elif message["tokens"] is None:
            drawn = self._drawn[key]
            first = drawn if drawn.shape[1] == 1 else drawn[:, :1], message["index_pos"]
        else:
            first = np.array(message["tokens"], np.int32), message["index_pos"]
        options: dict[str, Any] = {name: message[name] for name in ("rows", "all_positions")}
        options["masks"] = self._await_masks if message["masks"] else None
        options["probe"] = (lambda name, array: None) if message["probe"] else None
        model, cache = self._named[message["model"]], self._named[message["cache"]]
        sampling = self._find_sampling(backend, message["sampling"])
        result = ranks.launch(backend, model, method, first, cache, sampling, **options)
        if method in ("step", "sample"):
            self._drawn[key] = result
        if method != "forward":
            self._pace(backend, result)

    def _state(self, message: Message, arrays: dict) -> dict[str, np.ndarray]:
        return self._named[message["cache"]].state(message["row"])

    def _restore(self, message: Message, arrays: dict) -> None:
        heads = ranks.take_heads(arrays, self.world.rank, self.world.size)
        self._named[message["cache"]].restore(heads, message["row"])

    def _find_sampling(self, backend: selection.Backend, name: int | None) -> Any:
        """A SamplingBatch, made at its first use."""
        if name is not None and isinstance(self._named[name], list):
            self._named[name] = backend.sampling_batch(self._named[name])
        return None if name is None else self._named[name]

    def _await_masks(self) -> np.ndarray:
        message, arrays = self.world.calls.get()
        if message["do"] == "stop":
            stop_process(message["text"])
        for change in message["changes"]:
            self._change(change)
        if "words" not in arrays:
            raise BackendError("rank 0 has no masks")
        return arrays["words"]

    def _pace(self, backend: selection.Backend, sampled: Any) -> None:
        """Wait for an earlier step, so that a follower runs no further ahead than rank 0."""
        self._launched.append((backend, sampled))
        if len(self._launched) > IN_FLIGHT:
            earlier, tokens = self._launched.popleft()
            earlier.runtime.read(tokens)
