"""Tensor parallelism by mx.distributed: sums and gathers.

Collective operations are primitives of the lazy graph, so mx.compile traces them. All processes
build and launch the same graphs in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends import shards
from mlx_llama.core.backends.interface import Probe
from mlx_llama.core.errors import BackendError

JOIN_SECONDS = 60  # in which all processes must have started


class Ranks:
    """The processes of a run, as core.backends.shards has them."""

    def __init__(self, group: mx.distributed.Group):
        self.group, self.rank, self.size, self.sent = group, group.rank(), group.size(), 0
        self.stream: mx.Stream | None = None  # the last broadcast's

    def sum(self, x: mx.array) -> mx.array:
        self.sent += x.nbytes
        return mx.distributed.all_sum(x, group=self.group)

    def gather(self, x: mx.array) -> mx.array:
        self.sent += x.nbytes
        return mx.distributed.all_gather(x[None], group=self.group)

    def concatenate(self, x: mx.array, axis: int, widths: Sequence[int] | None = None) -> mx.array:
        if widths:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, max(widths) - x.shape[-1])])
        parts = list(self.gather(x))
        if widths:
            parts = [part[..., :width] for part, width in zip(parts, widths)]
        return mx.concatenate(parts, axis=axis)

    def select(self, condition: mx.array, x: mx.array) -> mx.array:
        return mx.where(condition, x, 0).astype(x.dtype)

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        stream = mx.default_stream(mx.cpu)
        if (
            self.stream is not None and self.stream != stream
        ):  # another thread's, whose operations come first
            mx.synchronize(self.stream)
        self.stream = stream
        own = data if self.rank == root else np.zeros_like(data)
        shared = mx.distributed.all_sum(mx.array(own), group=self.group)
        mx.async_eval(shared)
        if self.rank == root == 0:
            return data
        mx.eval(shared)  # raises if a rank is lost
        return np.array(shared)


def join() -> Ranks:
    """Connect with the other processes that mlx.launch started. Raises BackendError."""
    last = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return Ranks(mx.distributed.init(strict=True))
        except (RuntimeError, ValueError) as error:
            # The ring gives up after some seconds, and another process may take longer to start.
            if "connect" not in str(error) or time.monotonic() > last:
                raise BackendError(
                    f"the processes of mlx.launch cannot be connected: {error}: start them by "
                    "mlx.launch, or unset MLX_RANK"
                ) from None
            time.sleep(0.2)


class Vocabulary(shards.Vocabulary):
    """The vocabulary over all processes."""

    def gather_probes(self, probe: Probe) -> Probe:
        def evaluate(name: str, array: mx.array) -> None:
            mx.eval(array)  # one order on all processes
            probe(name, array)

        return super().gather_probes(evaluate)
