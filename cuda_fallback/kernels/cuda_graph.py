"""Decoded tokens as a CUDA graph, captured once for each bucket of rows and kind of sampling, and
replayed for any cache.

The graph is the model's forward over a StateView, and the sampling. It has no address of a cache:
its kernels read each row's position, token, options and addresses of keys, values and tables from
the state, and the last kernel advances them. So the next step needs nothing from the host, and a
cache may grow and rows may change without another capture. A bucket with fewer rows is padded with
rows that write to scratch memory. With grammars, forward and sampling are two graphs: the host
computes the masks while the device runs the first. Without sampling the graph is the forward alone.
Consecutive tokens of a prompt are rows that share a row of a cache. The sessions of a model, on
several threads, share its graphs in turn: a session that follows another sets the state first. The
first step of a kind runs uncaptured, which compiles its kernels; the second is captured.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.positions import Span
from mlx_llama.core.backends.shards import Vocabulary
from mlx_llama.core.sample import SamplingFeatures, sample

from ..arrays import SamplingBatch
from ..cache import Cache, Call
from . import first_line
from .state import MAX_ROWS, StateView

KEPT = 24  # graphs per model


class Capture:
    """CUDA graphs of functions that take and return nothing, with a common pool of memory.

    A replay may overwrite results of other graphs: queue their use before it.
    """

    # shared by all models: a capture starts by waiting for the device, which ends any other capture
    _lock = threading.Lock()

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = self._stream = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture the work of `function` without running it; returns the replay."""
        with self._lock:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream(self.device)
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            gc.collect()
            collects = gc.isenabled()
            gc.disable()  # a dead model's graphs must not be destroyed during a capture
            try:
                # thread_local: other threads may use the device meanwhile
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    function()
            finally:
                torch.cuda.set_stream(current)  # torch does not go back to it when a capture fails
                if collects:
                    gc.enable()
            return graph.replay


class Step:
    """A step of a bucket of rows with a kind of sampling, or the forward alone.

    view: has the state that the graphs read. vocabulary: shared by several processes, which compute
    a share of the logits each.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        view: StateView,
        draws: bool = True,
        vocabulary: Vocabulary | None = None,
    ):
        self.compute, self.view, self.draws, self.vocabulary = compute, view, draws, vocabulary
        # or their graphs' replays; the host computes masks between two
        self.parts: list[Callable[[], None]] = [self.work]
        if view.features.has_masks or not draws:
            self.parts = [self.forward, self.draw] if draws else [self.forward]
        self.logits: Tensor | None = None  # [B, 1, V]
        # tokens int32 [B, 1], or [B, C] with log-probabilities
        self.drawn: Tensor | None = None
        self.is_tried = self.is_captured = False

    def run(self, masks: Masks | None = None) -> None:
        """Run the parts. masks: called when the forward is queued, if there are any."""
        for i, part in enumerate(self.parts):
            if i and masks:
                self.view.allow(masks())
            part()
        self.is_tried = True

    def work(self) -> None:
        """Decode the view's tokens and advance its state, uncaptured."""
        self.forward()
        self.draw()
        self.logits = None  # other graphs may use the memory

    def forward(self) -> None:
        """Compute the logits of the view's tokens, uncaptured."""
        self.logits = self.compute(self.view.tokens, self.view, True)

    def draw(self) -> None:
        """Draw the next tokens from the logits and advance the view's state, uncaptured."""
        view, features, positions = self.view, self.view.features, self.view.next_positions[:, None]
        recent = view.recent(features.window) if features.window else None
        self.drawn = sample(
            view.kernels.words,
            features,
            self.logits[:, -1],
            positions,
            recent,
            view.values,
            view.masks,
            self.vocabulary,
        )
        view.advance(self.drawn[:, :1].contiguous())


@dataclass(frozen=True)
class _Ready:
    """The call that a step's state is ready for."""

    step: Step
    cache: weakref.ref[Cache]
    rows: list[tuple[Span, int, int]]  # from _describe_rows
    tokens: Tensor
    sampling: SamplingBatch

    def is_for(
        self,
        cache: Cache,
        spans: Sequence[Span],
        tokens: object,
        sampling: SamplingBatch,
        features: SamplingFeatures,
    ) -> bool:
        return (
            isinstance(tokens, Tensor)
            and tokens.device == self.tokens.device
            and self.tokens.is_set_to(tokens)
            and self.cache() is cache
            and self.step.view.features == features
            and self.rows == _describe_rows(cache, spans)
            and (self.sampling is sampling or self.sampling.options == sampling.options)
        )


class Runner:
    """Runs tokens as rows of a model's forward by kernels, as graphs.

    compute: (tokens, view, all_positions) -> logits, the model's decoder. build_view: (rows,
    features) -> StateView. capture: None to run steps uncaptured. vocabulary: as in `Step`.
    notices: about the captures so far.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        build_view: Callable[[int, SamplingFeatures], StateView],
        device: torch.device,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None,
        vocabulary: Vocabulary | None = None,
    ):
        self.compute, self.build_view, self.device = compute, build_view, device
        self.capture, self.vocabulary = capture, vocabulary
        self.notices: tuple[str, ...] = ()
        # by (rows, features), least recently used first
        self._steps: OrderedDict[tuple, Step] = OrderedDict()
        self._lock = threading.Lock()
        self.ready: _Ready | None = None
        self._stream: torch.cuda.Stream | None = None

    def forward(
        self,
        tokens: Tensor,
        index_pos: int | Sequence[int],
        cache: Cache,
        rows: Sequence[int] | None = None,
        all_positions: bool = False,
        probe=None,
    ) -> Tensor:
        """Logits [B, 1, V] after `tokens` [B, T], checked ids, or with `all_positions` [B, T, V].

        Up to MAX_ROWS tokens are rows of a forward, so a position has the bits of a decoded token.
        probe: as in the model's forward; called at the end. Raises ContextError.
        """
        B, T = tokens.shape
        logits: list[Tensor] = []
        probed: dict[str, list[Tensor]] = {}
        with self._lock:
            self._follow_streams()
            with Call(cache, B, T, index_pos, rows) as call:
                spans = [
                    Span(span.row, position, 1)
                    for span in call.spans
                    for position in range(span.start, span.end)
                ]
                if T > 1 and B * T > MAX_ROWS:
                    cache.keep_states(call.spans)
                stride = 1 if all_positions else T  # between positions whose logits are returned
                for at in range(0, B * T, MAX_ROWS):
                    part = spans[at : at + MAX_ROWS]
                    step = self._find_step(len(part), None)
                    if not probe:
                        self._use(step)
                    _count_writes(cache, part)
                    step.view.point(cache, tokens.reshape(-1, 1)[at : at + MAX_ROWS], part)
                    if probe:
                        seen: dict[str, Tensor] = {}
                        step.view.listener = seen.__setitem__
                        try:
                            result = self.compute(step.view.tokens, step.view, True)
                        finally:
                            step.view.listener = None
                        for name, array in seen.items():
                            probed.setdefault(name, []).append(array[: len(part)])
                    else:
                        step.run()
                        result = step.logits
                    cache.swap_states(part)
                    logits.append(result[(stride - 1 - at) % stride : len(part) : stride].clone())
                call.listener = probe  # of the states, when the call ends
                for name, parts in probed.items():
                    probe(name, _by_sequence(torch.cat(parts), B, T))
                return torch.cat(logits).view(B, T // stride, -1)

    def step(
        self, tokens: Tensor, call: Call, sampling: SamplingBatch, masks: Masks | None = None
    ) -> Tensor:
        """As the model's step, for `tokens` [B, 1], checked ids, at the positions of `call`."""
        features = sampling.features._replace(has_masks=masks is not None)
        with self._lock:
            self._follow_streams()
            with call:
                if len(tokens) <= MAX_ROWS:
                    return self._step(tokens, call.spans, call.cache, sampling, features, masks)
                drawn, once = [], masks and functools.cache(masks)
                for at in range(0, len(tokens), MAX_ROWS):
                    here = slice(at, at + MAX_ROWS)
                    part = SamplingBatch(sampling.options[here], sampling.device)
                    allowed = once and (lambda here=here: once()[here])
                    drawn.append(
                        self._step(
                            tokens[here], call.spans[here], call.cache, part, features, allowed
                        )
                    )
                return torch.cat(drawn)

    def _step(
        self,
        tokens: Tensor,
        spans: tuple[Span, ...],
        cache: Cache,
        sampling: SamplingBatch,
        features: SamplingFeatures,
        masks: Masks | None,
    ) -> Tensor:
        ready, self.ready = self.ready, None  # the call after an interrupted step sets the state
        if ready and ready.is_for(cache, spans, tokens, sampling, features):
            step, sampling = ready.step, ready.sampling
            self._use(step)
        else:
            step = self._find_step(len(spans), features)
            self._use(step)
            step.view.point(cache, tokens, spans, sampling)
        step.run(masks)
        _count_writes(cache, spans)
        cache.swap_states(spans)
        if len(spans) == 1 and features.logprobs is None:  # the cache keeps it
            (span,) = spans
            drawn = cache.row_storage[span.row].tokens[span.end : span.end + 1].view(1, 1)
        else:
            drawn = step.drawn[: len(spans)].clone()
        rows = _describe_rows(cache, [Span(span.row, span.end, 1) for span in spans])
        self.ready = _Ready(step, weakref.ref(cache), rows, drawn[:, :1], sampling)
        return drawn

    def _follow_streams(self) -> None:
        """Order this step behind the last, which may be on another thread's stream."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and current != self._stream:
            current.wait_stream(self._stream)
        self._stream = current

    def _find_step(self, rows: int, features: SamplingFeatures | None) -> Step:
        """The step of the smallest bucket for `rows`. features: None for the forward alone."""
        bucket = 1 << (rows - 1).bit_length()
        key = bucket, features
        if key not in self._steps:
            view = self.build_view(bucket, features or SamplingFeatures())
            self._steps[key] = Step(self.compute, view, features is not None, self.vocabulary)
        self._steps.move_to_end(key)
        while len(self._steps) > KEPT:
            self._steps.popitem(last=False)
        return self._steps[key]

    def _use(self, step: Step) -> None:
        """Capture a step after its first run. Call it before setting the state."""
        if self.capture and not step.is_captured and step.is_tried:
            self._capture_step(step)

    def _capture_step(self, step: Step) -> None:
        started = time.perf_counter()
        try:
            step.parts = [self.capture(part) for part in step.parts]
            step.is_captured = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a driver or an operation without capture
            self.capture = None
            while isinstance(error.__context__, Exception):  # the first error has the reason
                error = error.__context__
            self.notices = (f"decoding is not captured: {first_line(error)}",)
            return
        rows = f" of {step.view.rows} rows" if step.view.rows > 1 else ""
        what = "a decoded token" if step.draws else "a forward"
        self.notices = (
            f"{what}{rows} was captured as a CUDA graph in {time.perf_counter() - started:.2f} s",
        )


def _by_sequence(array: Tensor, B: int, T: int) -> Tensor:
    """Reshape for a probe: [B T, 1, E] to [B, T, E], [B T, H, 1, D] to [B, H, T, D]."""
    array = array.unflatten(0, (B, T))
    return array.squeeze(2) if array.ndim == 4 else array.squeeze(3).transpose(1, 2)


def _describe_rows(cache: Cache, spans: Sequence[Span]) -> list[tuple[Span, int, int]]:
    """New positions of rows, counts of writes to them, and numbers of their adapters."""
    return [(span, cache.versions[span.row], cache.adapters[span.row]) for span in spans]


def _count_writes(cache: Cache, spans: Sequence[Span]) -> None:
    for span in spans:
        cache.versions[span.row] += 1
