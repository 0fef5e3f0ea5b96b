"""The processes of a run: messages of rank 0 to all, by the backend's collective operations.

All ranks make the same calls in one order. A rank that fails or loses another one ends its process
with a line; the launcher, or the lost connection, ends the others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from safetensors import numpy as safetensors

from mlx_llama.core.backends.shards import Ranks
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.system.interrupts import uninterrupted

FRAME = 512  # bytes of a message's first part, more than a step of some rows takes

Arrays = Mapping[str, np.ndarray]
Message = dict[str, Any]


class World:
    """A run, seen from one of its processes. backend: "mlx" or "cuda"."""

    def __init__(self, backend: str, ranks: Ranks):
        self.backend, self.ranks = backend, ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.lock = threading.RLock()
        self._named = 0
        # names of models, caches and samplings that rank 0 has dropped, perhaps in a finalizer
        self.dropped: deque[int] = deque()

    # Rank 0

    def name(self) -> int:
        """A new name for an object that all ranks have."""
        self._named += 1
        return self._named

    def tell(self, do: str, arrays: Arrays | None = None, **fields: Any) -> None:
        """Send a message to all other ranks. Ctrl-C waits for its end."""
        with self.lock, uninterrupted(), self.ending():
            drop = [self.dropped.popleft() for _ in range(len(self.dropped))]
            self.send({"do": do, "drop": drop, **fields}, arrays)

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message to all other ranks, without waiting for them."""
        self._broadcast(_pack(message, arrays))

    # All ranks

    def receive(self) -> tuple[Message, dict[str, np.ndarray]]:
        """Wait for the next message of rank 0."""
        with self.ending():
            return _unpack(self._broadcast(b""))

    def exchange(
        self, arrays: Arrays | None = None, **fields: Any
    ) -> list[tuple[Message, dict[str, np.ndarray]]]:
        """All ranks' fields and arrays, in their order."""
        data = _pack(fields, arrays)
        with self.lock:
            return [_unpack(self._broadcast(data, root)) for root in range(self.size)]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the process after an error, since this rank would be out of step with the others."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, LlamaError) else f"{type(error).__name__}: "
            self.stop(f"{kind}{error}")

    def stop(self, text: str) -> NoReturn:
        """Print an error and end the process, which may wait for a device that never answers."""
        line = " ".join(text.split())[:400]
        try:
            sys.stdout.flush()
            print(
                f"error: rank {self.rank}: {line}: the run over several processes ends; start it "
                "again",
                file=sys.stderr,
                flush=True,
            )
        finally:
            os._exit(2)

    def _broadcast(self, data: bytes, root: int = 0) -> bytes:
        """The data of rank `root`: its length and beginning in a frame, and the rest."""
        frame = np.zeros(FRAME, np.uint8)
        if self.rank == root:
            frame[:8] = np.frombuffer(len(data).to_bytes(8, "big"), np.uint8)
            frame[8 : 8 + len(data)] = np.frombuffer(data[: FRAME - 8], np.uint8)
        frame = self.ranks.broadcast(frame, root)
        length = int.from_bytes(frame[:8].tobytes(), "big")
        first = frame[8 : 8 + length].tobytes()
        if length == len(first):
            return first
        rest = np.zeros(length - len(first), np.uint8)
        if self.rank == root:
            rest = np.frombuffer(data[len(first) :], np.uint8)
        return first + self.ranks.broadcast(rest, root).tobytes()


def _pack(message: Message, arrays: Arrays | None = None) -> bytes:
    """A line of JSON, and the arrays as a file of safetensors."""
    text = json.dumps(message, separators=(",", ":")).encode()
    if not arrays:
        return text
    # Not NumPy's own archive, whose headers are Python text: see core/text/tools/calls.py
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return text + b"\n" + safetensors.save(whole)


def _unpack(data: bytes) -> tuple[Message, dict[str, np.ndarray]]:
    text, _, arrays = data.partition(b"\n")
    return json.loads(text), safetensors.load(arrays) if arrays else {}
