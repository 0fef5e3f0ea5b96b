"""Under mlx.launch and torchrun, rank 0 runs the command; the other ranks repeat its calls here."""

from __future__ import annotations

import atexit
import gc
import signal
from typing import Any

import numpy as np

from mlx_llama.core.backends import selection
from mlx_llama.core.errors import BackendError, LlamaError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import GenerationOptions, LoadOptions
from mlx_llama.core.system import machine

from . import leading
from .world import Arrays, Message, World


def follow_leader(backend: str) -> bool:
    """Join the processes that the launcher of `backend` started, once. On rank 0 and alone: False
    at once. On others: repeat rank 0's calls until it ends, then True. Raises BackendError."""
    if selection.world is not None:
        return False
    if reason := selection.missing(backend):
        raise BackendError(reason)
    ranks = selection.import_file(backend, "ranks").join()
    if ranks.size == 1:
        return False
    if ranks.rank == 0:
        selection.world = leader = leading.Leader(backend, ranks)
        atexit.register(leader.end)
        return False
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    Follower(World(backend, ranks)).run()
    return True


class Follower:
    """Objects of a rank by name, and the calls on them."""

    def __init__(self, world: World):
        self.world = world
        self._named: dict[int, Any] = {}
        self._backends: dict[int, selection.Backend] = {}  # by name of a model
        self._drawn: dict[tuple, Any] = {}  # the last tokens on the device, by cache and rows

    def run(self) -> None:
        """Make rank 0's calls until it ends."""
        while True:
            message, arrays = self.world.receive()
            with self.world.ending():
                self._drop(set(message["drop"]))
                if message["do"] == "end":
                    self.world.exchange()
                    return
                getattr(self, f"_{message['do']}")(message, arrays)

    def _drop(self, names: set[int]) -> None:
        for name in names:
            self._named.pop(name, None)
        self._drawn = {key: drawn for key, drawn in self._drawn.items() if key[0] not in names}
        if names & self._backends.keys():  # a model
            self._backends = {n: each for n, each in self._backends.items() if n not in names}
            gc.collect()
            machine.trim_memory()

    def _load(self, message: Message, arrays: Arrays) -> None:
        failed = ""
        try:
            checkpoint = open_checkpoint(message["checkpoint"], message["revision"])
            if leading.identify(checkpoint) != message["identity"]:
                raise BackendError(
                    f"{checkpoint.name} is another model here than on rank 0: copy it to every "
                    "machine"
                )
            backend = selection.select(self.world.backend, message["device"])
            model = backend.model.Llama.load(
                checkpoint,
                LoadOptions(**message["options"]),
                backend.device,
                ranks=self.world.ranks,
            )
            self._named[message["model"]], self._backends[message["model"]] = model, backend
        except LlamaError as error:
            failed = str(error)
        self.world.exchange(failed=failed)

    def _make_cache(self, message: Message, arrays: Arrays) -> None:
        cache = self._named[message["model"]].make_cache(message["capacity"], message["rows"])
        cache.free_memory = lambda: None  # rank 0 decides
        self._named[message["cache"]] = cache

    def _share_sampling(self, message: Message, arrays: Arrays) -> None:
        options = [GenerationOptions(**each) for each in message["options"]]
        self._named[message["sampling"]] = self._backends[message["model"]].sampling_batch(options)

    def _change(self, message: Message, arrays: Arrays) -> None:
        leading.change_cache(self._named[message["cache"]], message["method"], message["arguments"])

    def _call(self, message: Message, arrays: Arrays) -> None:
        method, key = message["method"], (message["cache"], tuple(message["rows"]))
        if method == "sample":
            first: tuple = (arrays["logits"],)
        elif message["tokens"] is None:
            drawn = self._drawn[key]
            first = drawn if drawn.shape[1] == 1 else drawn[:, :1], message["index_pos"]
        else:
            first = np.array(message["tokens"], np.int32), message["index_pos"]
        options: dict[str, Any] = {name: message[name] for name in ("rows", "all_positions")}
        options["masks"] = (lambda: arrays["masks"]) if "masks" in arrays else None
        options["probe"] = (lambda name, array: None) if message["probe"] else None
        result = leading.launch(
            self._backends[message["model"]],
            self._named[message["model"]],
            method,
            first,
            self._named[message["cache"]],
            self._named.get(message["sampling"]),
            **options,
        )
        if method in ("step", "sample"):
            self._drawn[key] = result

    def _state(self, message: Message, arrays: Arrays) -> None:
        self.world.exchange(self._named[message["cache"]].state(message["row"]))

    def _restore(self, message: Message, arrays: Arrays) -> None:
        heads = leading.take_heads(arrays, self.world.rank, self.world.size)
        self._named[message["cache"]].restore(heads, message["row"])
