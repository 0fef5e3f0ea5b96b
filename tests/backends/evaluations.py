"""Count launches and waits at the framework's own entry points."""

from __future__ import annotations

import contextlib
from collections import Counter


def watch_events(backend, monkeypatch) -> list[str]:
    """A list to which each later launch and read of the backend adds its name."""
    events: list[str] = []
    for name in ("launch", "read"):
        original = getattr(backend.runtime, name)
        monkeypatch.setattr(
            backend.runtime,
            name,
            lambda arrays, name=name, original=original: (events.append(name), original(arrays))[1],
        )
    return events


@contextlib.contextmanager
def counted(backend, monkeypatch):
    """Yield a Counter of "launch", "wait" and the "bytes" of the arrays waited for while the block
    runs.
    """
    count: Counter = Counter()

    def counting(kind, owner, name, waits=lambda argument: True):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            if waits(args[0] if args else None):
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
        for name in (
            "item tolist __array__ __bool__ __int__ __float__ __index__ __buffer__ __dlpack__"
        ).split():
            if hasattr(mx.array, name):
                counting("wait", mx.array, name)
        yield count
        return
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Watch(TorchDispatchMode):
        # Operations wait implicitly if the size of their result depends on the data.
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            masked = function.overloadpacket in (
                aten.index,
                aten.index_put,
                aten.index_put_,
            ) and any(index is not None and index.dtype == torch.bool for index in args[1])
            if masked or function.overloadpacket in (
                aten.nonzero,
                aten.masked_select,
                aten._unique2,
                aten.equal,
            ):
                count["wait"] += 1
            if function.overloadpacket is aten.copy_ and args[1].is_cuda and not args[0].is_cuda:
                count["bytes"] += args[1].nbytes  # asynchronous; an event marks its end
                count["wait"] += not (
                    args[0].is_pinned() and (*args[2:], *(kwargs or {}).values()) == (True,)
                )
            return function(*args, **(kwargs or {}))

    on_gpu = backend.device.type == "cuda"
    for name in "item tolist numpy cpu __array__ __bool__ __int__ __float__ __index__".split():
        # Data in host memory needs no second wait.
        counting("wait", torch.Tensor, name, lambda tensor: tensor.is_cuda or not on_gpu)
    if on_gpu:
        from cuda_fallback.kernels.cuda_graph import Capture

        capture = Capture.__call__

        def uncounted(*args):  # runs once for many tokens, and waits for the device first
            before = Counter(count)
            result = capture(*args)
            count.clear()
            count.update(before)
            return result

        monkeypatch.setattr(Capture, "__call__", uncounted)
        counting("wait", torch.cuda, "synchronize")
        for owner in (torch.cuda.Event, torch.cuda.Stream):
            counting("wait", owner, "synchronize")
    with Watch():
        yield count
