"""A decoded token as one CUDA graph: captured once for each kind of sampling, replayed for every token of any cache.

The graph is the model's forward over a StateView, and the sampling. It knows no address of a cache: its kernels find keys,
values, tokens and tables through the state, with the position, the token and the seed, and its last kernel advances them.
So a step that goes on where the last one ended needs nothing from the host, and a cache may grow without another capture.
The sessions of one model, on several threads, share its graphs in turn: a session that steps after another one sets the
state first. The first step of a kind runs uncaptured, which compiles its kernels; the second is captured.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mlx_llama.core.backends.positions import CallView
from mlx_llama.core.generation.options import sampling_key

from ..cache import Cache
from ..sampling import Sampler
from . import first_line
from .state import StateView

KEPT = 8  # graphs per model, one for each kind of sampling


class Capture:
    """CUDA graphs of functions that take and return nothing. They share one pool for their intermediate results."""

    _one_at_a_time = threading.Lock()  # of all models: a capture begins by a wait for the device, which ends another one

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = self._stream = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture the work of `function` without doing it; returns the replay."""
        with self._one_at_a_time:
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            gc.collect()
            collects = gc.isenabled()
            gc.disable()  # a dead model's graphs must not be destroyed during a capture
            try:
                # thread_local: other threads may use the device meanwhile
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    function()
            finally:
                torch.cuda.set_stream(current)  # torch does not go back to it when a capture fails
                if collects:
                    gc.enable()
            return graph.replay


@dataclass
class _Step:
    """A step for one kind of sampling. function: the step uncaptured, which holds all tensors that its graph reads; run:
    the function, or its graph's replay."""

    function: Callable[[], None]
    run: Callable[[], None]
    is_tried: bool = False
    is_captured: bool = False


@dataclass(frozen=True)
class _Ready:
    """The call that the state is ready for: `token` at `index_pos` of a cache that nothing has written to since."""

    cache: weakref.ref[Cache]
    version: int
    index_pos: int
    token: torch.Tensor
    seed: int


class Runner:
    """Runs single tokens through a model's forward by kernels, decode steps as graphs.

    compute: (tokens, view, all_positions, probe) -> logits, the model's forward. view: of its config and device.
    capture: None to run every step uncaptured. notices: about the captures so far.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], view: StateView,
                 capture: Callable[[Callable[[], None]], Callable[[], None]] | None):
        self.compute, self.view, self.capture = compute, view, capture
        self.notices: tuple[str, ...] = ()
        self.device = view.state.device
        self._steps: OrderedDict[tuple, _Step] = OrderedDict()  # by kind of sampling, the last used last
        self._lock = threading.Lock()
        self._ready: _Ready | None = None
        self._stream: torch.cuda.Stream | None = None

    def forward(self, token: torch.Tensor, index_pos: int, cache: Cache, probe=None) -> torch.Tensor:
        """Logits [1, 1, V] after `token` [1, 1], uncaptured. Raises ContextError."""
        with self._lock:
            self._follow_streams()
            with CallView(cache, 1, 1, index_pos):
                self._ready = None
                cache.version += 1
                self.view.point(cache, token, index_pos, 0)
                return self.compute(self.view.tokens, self.view, True, probe)

    def step(self, token: torch.Tensor, index_pos: int, cache: Cache, sampler: Sampler) -> torch.Tensor:
        """The next token, int32 [1, 1]: a view of the cache's tokens. Raises ContextError."""
        with self._lock:
            self._follow_streams()
            with CallView(cache, 1, 1, index_pos):
                ready, self._ready = self._ready, None  # a step that is interrupted sets the state anew
                seed = sampler.options.seed
                if not (ready and ready.cache() is cache and ready.version == cache.version and ready.token is token
                        and ready.index_pos == index_pos and ready.seed == seed):
                    self.view.point(cache, token, index_pos, seed)
                step = self._find_step(sampler)
                step.run()
                step.is_tried = True
            cache.version += 1
            following = cache._token_after(index_pos)
            self._ready = _Ready(weakref.ref(cache), cache.version, index_pos + 1, following, seed)
            return following

    def _follow_streams(self) -> None:
        """Order this step behind the last one, which another thread may have queued on a stream of its own."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and current != self._stream:
            current.wait_stream(self._stream)
        self._stream = current

    def _find_step(self, sampler: Sampler) -> _Step:
        key = sampling_key(sampler.options)
        step = self._steps.pop(key, None)
        if step is None:
            step = self._build_step(sampler)
        elif self.capture and not step.is_captured and step.is_tried:
            self._capture_step(step)
        self._steps[key] = step
        while len(self._steps) > KEPT:
            self._steps.popitem(last=False)
        return step

    def _build_step(self, sampler: Sampler) -> _Step:
        view = self.view

        def function() -> None:
            logits = self.compute(view.tokens, view, True)
            recent = view.recent(sampler.window) if sampler.window else None
            view.advance(sampler.draw(logits[:, -1], view.next_position, recent, view.seed))

        return _Step(function, function)

    def _capture_step(self, step: _Step) -> None:
        started = time.perf_counter()
        try:
            step.run = self.capture(step.function)
            step.is_captured = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a driver or an operation that cannot be captured: steps run uncaptured
            self.capture = None
            while isinstance(error.__context__, Exception):  # torch's last error only says that there was another
                error = error.__context__
            self.notices = (f"decoding is not captured: {first_line(error)}",)
            return
        self.notices = (f"a decoded token was captured as a CUDA graph in {time.perf_counter() - started:.2f} s",)
