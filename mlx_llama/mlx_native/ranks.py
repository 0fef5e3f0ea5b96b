"""Tensor parallelism by mx.distributed: sums and gathers between processes, and the layers that need them.

Collective operations are primitives of the lazy graph, so mx.compile traces them. All processes build and launch the same
graphs in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.interface import Masks, Probe
from mlx_llama.core.backends.shards import HEAD_PROBES, Span
from mlx_llama.core.errors import BackendError
from mlx_llama.core.llama import Embedding

from .kernels.draw import Kind, choose_winner, draw_share, sample
from .sampling import SamplingBatch

JOIN_SECONDS = 60  # for all processes to start


class Ranks:
    """The processes of a run."""

    def __init__(self, group: mx.distributed.Group):
        self.group = group
        self.rank, self.size = group.rank(), group.size()  # of this process; number of processes
        self.sent = 0  # bytes of this process's arrays that were summed or gathered; a traced step counts when it is traced

    def sum(self, x: mx.array) -> mx.array:
        """The sum of all processes' x, of any shape."""
        self.sent += x.nbytes
        return mx.distributed.all_sum(x, group=self.group)

    def gather(self, x: mx.array) -> mx.array:
        """Stack all processes' x, of the same shape, by rank: [size, *x.shape]."""
        self.sent += x.nbytes
        return mx.distributed.all_gather(x[None], group=self.group)

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sum int32 numbers over all processes, and wait."""
        with mx.stream(mx.cpu):
            return mx.distributed.all_sum(mx.array(list(values), mx.int32), group=self.group).tolist()


def join() -> Ranks:
    """Connect with the other processes that mlx.launch started. Raises BackendError."""
    last = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return Ranks(mx.distributed.init(strict=True))
        except (RuntimeError, ValueError) as error:
            # The ring gives up after some seconds; another process may take longer to start.
            if "connect" not in str(error) or time.monotonic() > last:
                raise BackendError(f"the processes of mlx.launch cannot be connected: {error}") from None
            time.sleep(0.2)


@dataclass(frozen=True)
class ShareEmbedding(Embedding):
    """An Embedding with the rows of the tokens `words`, first and last + 1; weight: [last - first + 1, E]."""

    words: Span
    ranks: Ranks

    def __call__(self, tokens: mx.array) -> mx.array:
        first, last = self.words
        own = tokens - first
        is_here = (own >= 0) & (own < last - first)
        rows = super().__call__(mx.where(is_here, own, 0))
        return self.ranks.sum(mx.where(is_here[..., None], rows, 0).astype(rows.dtype))


class Vocabulary:
    """The vocabulary over all processes. spans: the tokens of each, first and last + 1."""

    def __init__(self, ranks: Ranks, spans: Sequence[Span]):
        self.ranks, self.spans = ranks, tuple(spans)

    def gather(self, logits: mx.array) -> mx.array:
        """Logits [..., V] of this process's [..., V']."""
        widths = [last - first for first, last in self.spans]
        padded = mx.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, max(widths) - logits.shape[-1])])
        parts = self.ranks.gather(padded)
        return mx.concatenate([part[..., :width] for part, width in zip(parts, widths)], axis=-1)

    def sample(self, kind: Kind, count: int | None, logits: mx.array, positions: mx.array, recent: mx.array | None,
               values: dict[str, mx.array], words: mx.array | None = None) -> mx.array:
        """draw.sample of this process's logits [S, V'].

        A greedy or plainly sampled row needs the best score of each process; filters, penalties, biases, grammars and
        log-probabilities need all logits.
        """
        if words is None and count is None and kind == Kind(kind.random, 0, False, False, 0, 0):
            first, _ = self.spans[self.ranks.rank]
            return choose_winner(self.ranks.gather(draw_share(kind, logits, first, positions, values)))
        return sample(kind, count, self.gather(logits), positions, recent, values, words)

    def draw_rows(self, sampling: SamplingBatch, logits: mx.array, positions: Sequence[int], recent: mx.array | None,
                  masks: Masks | None) -> mx.array:
        """`sampling` of this process's logits [B, V']."""
        if masks is not None:
            return sampling(self.gather(logits), positions, recent, masks)
        following = mx.array(np.array(positions, np.int64).astype(np.uint32))
        return self.sample(sampling.kind, sampling.logprobs, logits, following, recent, sampling.arrange(range(len(positions))))

    def gather_probes(self, probe: Probe) -> Callable[[str, mx.array], None]:
        """`probe` with the heads and logits of all processes."""

        def whole(name: str, array: mx.array) -> None:
            if name == "logits":
                array = self.gather(array)
            elif name.rpartition(".")[2] in HEAD_PROBES:
                array = mx.concatenate(list(self.ranks.gather(array)), axis=1)
            mx.eval(array)  # one order on all processes
            probe(name, array)

        return whole
