"""Tensor parallelism by torch.distributed: sums and gathers.

On a GPU they are NCCL's operations, which a CUDA graph captures; on the CPU device gloo's. All
processes queue the same operations in the same order.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mlx_llama.core.errors import BackendError

# timeout of a collective operation on the CPU device, far more than a forward's share takes
_SECONDS = 60


class Ranks:
    """The processes of a run, as core.backends.shards has them."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        messages: dist.ProcessGroup | None = None,  # on the CPU, for `broadcast`
    ):
        self.group, self.messages, self.sent = group, messages, 0
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, x: Tensor) -> Tensor:
        self.sent += x.nbytes
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        self.sent += x.nbytes
        parts = x.new_empty((self.size, *x.shape))
        if x.is_cuda:
            dist.all_gather_into_tensor(parts, x.contiguous(), group=self.group)
        else:
            dist.all_gather(list(parts), x.contiguous(), group=self.group)
        return parts

    def concatenate(self, x: Tensor, axis: int, widths: Sequence[int] | None = None) -> Tensor:
        if widths:
            x = torch.nn.functional.pad(x, (0, max(widths) - x.shape[-1]))
        parts = list(self.gather(x))
        if widths:
            parts = [part[..., :width] for part, width in zip(parts, widths)]
        return torch.cat(parts, dim=axis)

    def select(self, condition: Tensor, x: Tensor) -> Tensor:
        return torch.where(condition, x, 0)

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        shared = torch.from_numpy(np.array(data))
        dist.broadcast(shared, root, group=self.messages)
        return shared.numpy()


def join() -> Ranks:
    """Connect with the other processes that torchrun started. Raises BackendError."""
    has_gpu = torch.cuda.is_available()
    kinds = "cpu:gloo,cuda:nccl" if has_gpu and dist.is_nccl_available() else "gloo"
    if has_gpu:
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        torch.cuda.set_device(local % count)
    try:
        dist.init_process_group(kinds, timeout=datetime.timedelta(seconds=_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"the processes of torchrun cannot be connected: {error}") from None
    # gloo's threads may abort a process that ends without it
    atexit.register(dist.destroy_process_group)
    # rank 0 may be idle for days
    return Ranks(None, dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365)))
