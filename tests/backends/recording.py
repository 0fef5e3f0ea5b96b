"""A substitute for CUDA graphs on the CPU: records the operations of a function once and repeats
them.

Like a graph it keeps the Python numbers, addresses and sizes of the recording. A step that takes
its position, token or cache from the host is thus wrong when replayed.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cuda_fallback.kernels import packed
from mlx_llama.core.backends.positions import Span


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    def __init__(self, done: list):
        super().__init__()
        self.done = done

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.done.append((function, args, kwargs or {}, result))
        return result


class Recording:
    """Substitute for cuda_graph.Capture, for the work of a Step.

    Records while the state points to another cache: a capture computes nothing, and must not keep
    addresses of a cache.

    launched: names of the kernels of the last recording, in order.
    """

    def __init__(self, model):
        self.model = model
        self.replays = 0
        self.recorded = 0
        self.launched: list[str] = []

    def __call__(self, function):
        view, done = function.__self__.view, []
        scratch, saved = self.model.make_cache(8, view.rows), view.state.clone()
        scratch.reserve(dict.fromkeys(range(view.rows), 1))
        view.point(scratch, [[1]] * view.rows, [Span(row, 0, 1) for row in range(view.rows)])
        launch = packed.run

        def run(kernel, grid, *arguments, **inputs):
            with _disable_current_modes():
                launch(kernel, grid, *arguments, **inputs)
            done.append((kernel, grid, arguments, inputs))

        packed.run = run
        try:
            with _Recorder(done):
                function()
        finally:
            packed.run = launch
        view.state.copy_(saved)
        self.recorded += 1
        self.launched = [
            leaf[0].__name__ for leaf in done if not isinstance(leaf[0], torch._ops.OpOverload)
        ]

        def replay():
            self.replays += 1
            for called, first, second, named in done:
                if not isinstance(called, torch._ops.OpOverload):
                    launch(called, first, *second, **named)
                    continue
                if called._schema.is_mutable:
                    called(*first, **second)
                elif called.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.empty_like):
                    inputs = {
                        place(leaf)
                        for leaf in tree_leaves((first, second))
                        if isinstance(leaf, torch.Tensor)
                    }
                    # others are views
                    kept = [leaf for leaf in tree_leaves(named) if place(leaf) not in inputs]
                    if kept:
                        fresh = tree_leaves(called(*first, **second))
                        assert len(fresh) == len(kept)
                        for old, new in zip(kept, fresh):
                            old.copy_(new)

        return replay
