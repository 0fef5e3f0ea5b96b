"""Counts launches and waits at the framework's own entry points, not by our bookkeeping."""

from __future__ import annotations

import contextlib
from collections import Counter


@contextlib.contextmanager
def counted(backend, monkeypatch):
    """Yields a Counter of "launch", "wait" and the "bytes" of the arrays waited for while the block runs."""
    count: Counter = Counter()

    def counting(kind, owner, name):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            count[kind] += 1
            if kind == "wait":
                count["bytes"] += sum(getattr(argument, "nbytes", 0) for argument in args)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    if backend.name == "mlx":
        import mlx.core as mx

        counting("launch", mx, "async_eval")
        for name in ("eval", "synchronize"):
            counting("wait", mx, name)
        for name in ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__", "__buffer__",
                     "__dlpack__"):
            if hasattr(mx.array, name):
                counting("wait", mx.array, name)
        yield count
        return
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Watch(TorchDispatchMode):
        # Operations whose result's size depends on the data wait for the device in secret.
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            masked = function.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
                index is not None and index.dtype == torch.bool for index in args[1])
            if masked or function.overloadpacket in (aten.nonzero, aten.masked_select, aten._unique2, aten.equal):
                count["wait"] += 1
            return function(*args, **(kwargs or {}))

    for name in ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__"):
        counting("wait", torch.Tensor, name)
    with Watch():
        yield count
