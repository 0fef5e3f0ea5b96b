"""Tensor parallelism by torch.distributed: sums and gathers between processes, and the layers that need them.

On a GPU they are NCCL's operations, which a CUDA graph captures; on the CPU device gloo's. All processes queue the same
operations in the same order.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mlx_llama.core.backends.interface import Masks, Probe
from mlx_llama.core.backends.shards import HEAD_PROBES, Span
from mlx_llama.core.errors import BackendError
from mlx_llama.core.llama import Embedding

from . import runtime
from .kernels.draw import IS_RANDOM, SEED_HIGH, SEED_LOW, Kind, gumbel, gumbel_table, process, to_signed
from .sampling import SamplingBatch

_SECONDS = 60  # of a collective operation on the CPU device, far more than a forward's share takes


class Ranks:
    """The processes of a run. rank: of this one; size: their number. sent: bytes of arrays that were summed or gathered, as
    this process gave them; of a captured step counted once, when it is captured."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group, self.rank, self.size, self.sent = group, dist.get_rank(group), dist.get_world_size(group), 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' x, of any shape. x is overwritten."""
        self.sent += x.nbytes
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All processes' x, which have one shape, in the order of ranks: [size, *x.shape]."""
        self.sent += x.nbytes
        parts = x.new_empty((self.size, *x.shape))
        if x.is_cuda:
            dist.all_gather_into_tensor(parts, x.contiguous(), group=self.group)
        else:
            dist.all_gather(list(parts), x.contiguous(), group=self.group)
        return parts

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Sum int32 numbers over all processes, and wait."""
        total = torch.tensor(list(values), dtype=torch.int32)
        dist.all_reduce(total, group=self.group)
        return total.tolist()


def join() -> Ranks:
    """Connect with the other processes that torchrun started. Raises BackendError."""
    kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if torch.cuda.is_available():
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        torch.cuda.set_device(local % count)
    try:
        dist.init_process_group(kinds, timeout=datetime.timedelta(seconds=_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"the processes of torchrun cannot be connected: {error}") from None
    atexit.register(dist.destroy_process_group)  # gloo's threads may abort a process that ends without it
    return Ranks()


@dataclass(frozen=True)
class ShareEmbedding(Embedding):
    """An Embedding with the rows of the tokens `words`, first and last + 1; weight: [last - first + 1, E]."""

    words: Span
    ranks: Ranks

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        first, last = self.words
        own = tokens - first
        is_here = (own >= 0) & (own < last - first)
        rows = super().__call__(torch.where(is_here, own, 0))
        return self.ranks.sum(torch.where(is_here[..., None], rows, 0))


class Vocabulary:
    """The vocabulary over all processes. spans: the tokens of each, first and last + 1. first: this process's."""

    def __init__(self, ranks: Ranks, spans: Sequence[Span]):
        self.ranks, self.spans = ranks, tuple(spans)
        self.first = self.spans[ranks.rank][0]

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of this process's [..., V']."""
        widths = [last - first for first, last in self.spans]
        parts = self.ranks.gather(torch.nn.functional.pad(logits, (0, max(widths) - logits.shape[-1])))
        return torch.cat([part[..., :width] for part, width in zip(parts, widths)], dim=-1)

    @staticmethod
    def has_best(kind: Kind) -> bool:
        """True if each process's best score decides: greedy or plainly sampled rows. Filters, penalties, biases, grammars and
        log-probabilities need all logits."""
        return kind == Kind(is_random=kind.is_random)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The token of the largest score in all processes, the first of equals: int32 [B, 1]. scores: float32 [B, V']."""
        score, best = scores.max(dim=-1, keepdim=True)
        pairs = self.ranks.gather(torch.cat([score.view(torch.int32), best.int() + self.first], dim=1))
        winner = pairs[..., :1].contiguous().view(torch.float32).argmax(dim=0, keepdim=True)
        return pairs[..., 1:].gather(0, winner)[0]

    def draw_rows(self, sampling: SamplingBatch, logits: torch.Tensor, positions: Sequence[int],
                  recent: torch.Tensor | None, masks: Masks | None) -> torch.Tensor:
        """`sampling` of this process's logits [B, V']."""
        if masks is not None or not self.has_best(sampling.kind):
            return sampling(self.gather(logits), positions, recent, masks)
        values = sampling._on_device()
        scores = process(sampling.kind, values, logits.float(), None)
        if sampling.kind.is_random:
            indices = torch.arange(self.first, self.first + scores.shape[1], dtype=torch.int32, device=scores.device)
            following = runtime._sent(np.array([to_signed(int(one)) for one in positions], np.int32), scores.device)[:, None]
            seeds = tuple(values.integer(field).int() for field in (SEED_LOW, SEED_HIGH))
            noise = gumbel(seeds, following, gumbel_table(scores.device), indices)
            scores = torch.where(values.integer(IS_RANDOM) > 0, scores + noise, scores)
        return self.choose(scores)

    def gather_probes(self, probe: Probe) -> Callable[[str, torch.Tensor], None]:
        """`probe` with the heads and logits of all processes."""

        def whole(name: str, array: torch.Tensor) -> None:
            if name == "logits":
                array = self.gather(array)
            elif name.rpartition(".")[2] in HEAD_PROBES:
                array = torch.cat(list(self.ranks.gather(array)), dim=1)
            probe(name, array)

        return whole
