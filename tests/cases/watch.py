"""Operations of torch, and those that no CUDA graph can contain."""

from __future__ import annotations

import collections

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

torch = pytest.importorskip("torch")


# On the meta device these compute nothing, so that they do not fail by themselves.
WAITS = set(
    "_local_scalar_dense item equal is_nonzero _assert_async nonzero bincount masked_select "
    "_unique2 unique_dim unique_consecutive pin_memory _pin_memory record_stream".split()
)


class Watch(TorchDispatchMode):
    """Counts operations, and those that no graph can contain."""

    def __init__(self):
        super().__init__()
        self.operations, self.views, self.faults = 0, 0, collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in WAITS:
            self.faults[f"{name} waits"] += 1
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        self.views += function.is_view
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.faults[f"{name} on {tensor.device.type}"] += 1
        return result
