"""Decoded tokens as one CUDA graph: captured once for each bucket of rows and kind of sampling, replayed for any cache.

The graph is the model's forward over a StateView, and the sampling. It knows no address of a cache: its kernels find keys,
values, tokens and tables of each row through the state, with its position, token and options, and its last kernel advances
them. So a step that goes on where the last one ended needs nothing from the host, a cache may grow, and rows may come and
go, without another capture. A bucket that has fewer rows is padded with rows that write to scratch memory.
The sessions of one model, on several threads, share its graphs in turn: a session that steps after another one sets the
state first. The first step of a kind runs uncaptured, which compiles its kernels; the second is captured.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mlx_llama.core.backends.positions import CallView, Span

from ..cache import Cache
from ..sampling import SamplingBatch
from . import first_line
from .draw import Kind, choose, gumbel_table, process
from .state import MAX_ROWS, StateView

KEPT = 24  # graphs per model, one for each bucket of rows and kind of sampling


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


class Step:
    """A step of a bucket of rows with one kind of sampling. view: with the state that its graph reads; run: the step,
    or its graph's replay."""

    def __init__(self, compute: Callable[..., torch.Tensor], view: StateView):
        self.compute, self.view = compute, view
        self.run: Callable[[], None] = self.work
        self.is_tried = self.is_captured = False

    def work(self) -> None:
        """Decode the view's tokens and advance its state, uncaptured."""
        view, kind = self.view, self.view.kind
        logits = self.compute(view.tokens, view, True)
        recent = view.recent(kind.window) if kind.window else None
        scores = process(kind, view.values, logits[:, -1].float(), recent)
        if kind.is_random:
            table = gumbel_table(scores.device)
            scores = view.kernels.add_noise(scores, table, view.next_positions, view.values.words)
        view.advance(choose(scores))


@dataclass(frozen=True)
class _Ready:
    """The call that a step's state is ready for: `tokens` at `spans` of a cache whose rows nothing has written to since."""

    step: Step
    cache: weakref.ref[Cache]
    versions: tuple[int, ...]
    spans: tuple[Span, ...]
    tokens: torch.Tensor
    sampling: SamplingBatch

    def is_for(self, cache: Cache, spans: tuple[Span, ...], tokens: object, sampling: SamplingBatch) -> bool:
        return (self.cache() is cache and self.tokens is tokens and self.spans == spans
                and self.versions == tuple(cache.versions[span.row] for span in spans)
                and (self.sampling is sampling or self.sampling.options == sampling.options))


class Runner:
    """Runs single tokens of rows through a model's forward by kernels, decode steps as graphs.

    compute: (tokens, view, all_positions, probe) -> logits, the model's forward. build_view: (rows, kind) -> StateView of
    its config and device. capture: None to run every step uncaptured. notices: about the captures so far.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], build_view: Callable[[int, Kind], StateView],
                 device: torch.device, capture: Callable[[Callable[[], None]], Callable[[], None]] | None):
        self.compute, self.build_view, self.device, self.capture = compute, build_view, device, capture
        self.notices: tuple[str, ...] = ()
        self._steps: OrderedDict[tuple, Step] = OrderedDict()  # by rows and kind of sampling, the last used last
        self._views: dict[int, StateView] = {}  # of `forward`, by rows
        self._lock = threading.Lock()
        self._ready: _Ready | None = None
        self._stream: torch.cuda.Stream | None = None

    def forward(self, tokens: torch.Tensor, index_pos: int | Sequence[int], cache: Cache, rows: Sequence[int] | None = None,
                probe=None) -> torch.Tensor:
        """Logits [B, 1, V] after `tokens` [B, 1], checked ids, uncaptured. Raises ContextError."""
        with self._lock:
            self._follow_streams()
            with CallView(cache, len(tokens), 1, index_pos, rows) as call:
                logits = []
                for at in range(0, len(tokens), MAX_ROWS):
                    spans, some = call.spans[at:at + MAX_ROWS], tokens[at:at + MAX_ROWS]
                    if len(spans) not in self._views:
                        self._views[len(spans)] = self.build_view(len(spans), Kind())
                    view = self._views[len(spans)]
                    _count_writes(cache, spans)
                    view.point(cache, some, spans)
                    logits.append(self.compute(view.tokens, view, True, probe))
                return logits[0] if len(logits) == 1 else torch.cat(logits)

    def step(self, tokens: torch.Tensor, call: CallView, sampling: SamplingBatch) -> torch.Tensor:
        """The next tokens, int32 [B, 1], of `tokens` [B, 1], checked ids, at the positions of `call`."""
        with self._lock:
            self._follow_streams()
            with call:
                if len(tokens) <= MAX_ROWS:
                    return self._step(tokens, call.spans, call.cache, sampling)
                drawn = []
                for at in range(0, len(tokens), MAX_ROWS):
                    some = SamplingBatch(sampling.options[at:at + MAX_ROWS], sampling.device)
                    drawn.append(self._step(tokens[at:at + MAX_ROWS], call.spans[at:at + MAX_ROWS], call.cache, some))
                return torch.cat(drawn)

    def _step(self, tokens: torch.Tensor, spans: tuple[Span, ...], cache: Cache, sampling: SamplingBatch) -> torch.Tensor:
        ready, self._ready = self._ready, None  # a step that is interrupted sets the state anew
        if ready and ready.is_for(cache, spans, tokens, sampling):
            step, sampling = ready.step, ready.sampling
            self._use(step)
        else:
            step = self._find_step(len(spans), sampling.kind)
            self._use(step)
            step.view.point(cache, tokens, spans, sampling)
        step.run()
        step.is_tried = True
        _count_writes(cache, spans)
        if len(spans) == 1:  # the row's own tokens keep it
            (span,) = spans
            drawn = cache._storage[span.row].tokens[span.end:span.end + 1].view(1, 1)
        else:
            drawn = step.view.tokens[:len(spans)].int()
        following = tuple(Span(span.row, span.end, 1) for span in spans)
        versions = tuple(cache.versions[span.row] for span in spans)
        self._ready = _Ready(step, weakref.ref(cache), versions, following, drawn, sampling)
        return drawn

    def _follow_streams(self) -> None:
        """Order this step behind the last one, which another thread may have queued on a stream of its own."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and current != self._stream:
            current.wait_stream(self._stream)
        self._stream = current

    def _find_step(self, rows: int, kind: Kind) -> Step:
        """The step of the least bucket for `rows`."""
        key = 1 << (rows - 1).bit_length(), kind
        if key not in self._steps:
            self._steps[key] = Step(self.compute, self.build_view(*key))
        self._steps.move_to_end(key)
        while len(self._steps) > KEPT:
            self._steps.popitem(last=False)
        return self._steps[key]

    def _use(self, step: Step) -> None:
        """Capture a step that has run once uncaptured, before its state is set."""
        if self.capture and not step.is_captured and step.is_tried:
            self._capture_step(step)

    def _capture_step(self, step: Step) -> None:
        started = time.perf_counter()
        try:
            step.run = self.capture(step.work)
            step.is_captured = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a driver or an operation that cannot be captured: steps run uncaptured
            self.capture = None
            while isinstance(error.__context__, Exception):  # torch's last error only says that there was another
                error = error.__context__
            self.notices = (f"decoding is not captured: {first_line(error)}",)
            return
        rows = f" of {step.view.rows} rows" if step.view.rows > 1 else ""
        self.notices = (f"a decoded token{rows} was captured as a CUDA graph in {time.perf_counter() - started:.2f} s",)


def _count_writes(cache: Cache, spans: Sequence[Span]) -> None:
    for span in spans:
        cache.versions[span.row] += 1
