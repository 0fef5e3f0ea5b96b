"""Decoded tokens as one CUDA graph: captured once for each bucket of rows and kind of sampling, replayed for any cache.

The graph is the model's forward over a StateView, and the sampling. It knows no address of a cache: its kernels find keys,
values, tokens and tables of each row through the state, with its position, token and options, and its last kernel advances
them. So a step that goes on where the last one ended needs nothing from the host, a cache may grow, and rows may come and
go, without another capture. A bucket that has fewer rows is padded with rows that write to scratch memory.
With grammars, forward and sampling are two graphs: the host computes the masks while the device runs the first.
Without sampling the graph is the forward alone. Consecutive tokens of a prompt are rows of it that share one row of a cache.
The sessions of one model, on several threads, share its graphs in turn: a session that steps after another one sets the
state first. The first step of a kind runs uncaptured, which compiles its kernels; the second is captured.
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

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.positions import CallView, Span
from mlx_llama.core.generation.sampling import Kind

from ..cache import Cache
from ..ranks import Vocabulary
from ..sampling import SamplingBatch
from . import first_line
from .draw import choose, gumbel_table, mask, pack_logprobs, process
from .state import MAX_ROWS, StateView

KEPT = 24  # graphs per model, one for each bucket of rows and kind of sampling


class Capture:
    """CUDA graphs of functions that take and return nothing. They share one pool for their intermediate results.

    A replay may overwrite results of other graphs: queue their use before it.
    """

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
    """A step of a bucket of rows with one kind of sampling, or the forward alone.

    view: with the state that its graphs read. parts: its work in order, or their graphs' replays; masks come between two.
    logits: [B, 1, V], of a forward that is a part. drawn: int32 [B, 1], tokens, or [B, C] with log-probabilities.
    vocabulary: over several processes, each of which has the logits of a share.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], view: StateView, draws: bool = True,
                 vocabulary: Vocabulary | None = None):
        self.compute, self.view, self.draws, self.vocabulary = compute, view, draws, vocabulary
        self.parts: list[Callable[[], None]] = [self.work]
        if view.kind.has_masks or not draws:
            self.parts = [self.forward, self.draw] if draws else [self.forward]
        self.logits: torch.Tensor | None = None
        self.drawn: torch.Tensor | None = None
        self.is_tried = self.is_captured = False

    def run(self, masks: Masks | None = None) -> None:
        """Do the work. masks: called once the forward is queued, if the view's kind has them."""
        for i, part in enumerate(self.parts):
            if i and masks:
                self.view.allow(masks())
            part()
        self.is_tried = True

    def work(self) -> None:
        """Decode the view's tokens and advance its state, uncaptured."""
        self.forward()
        self.draw()
        self.logits = None  # give the graph's memory to others

    def forward(self) -> None:
        """Compute the logits of the view's tokens, uncaptured."""
        self.logits = self.compute(self.view.tokens, self.view, True)

    def draw(self) -> None:
        """Draw the next tokens from the logits and advance the view's state, uncaptured."""
        view, kind, logits = self.view, self.view.kind, self.logits[:, -1].float()
        shares = self.vocabulary if self.vocabulary and kind.needs_best else None
        if self.vocabulary and not shares:
            logits = self.vocabulary.gather(logits)
        recent = view.recent(kind.window) if kind.window else None
        scores = process(kind, view.values, mask(logits, view.masks) if kind.has_masks else logits, recent)
        if kind.is_random:
            table = gumbel_table(scores.device)
            first = shares.first if shares else 0
            scores = view.kernels.add_noise(scores, table, view.next_positions, view.values.words, first)
        tokens = shares.choose(scores) if shares else choose(scores)
        self.drawn = tokens if kind.logprobs is None else pack_logprobs(tokens, logits, kind.logprobs)
        view.advance(tokens)


@dataclass(frozen=True)
class _Ready:
    """The call that a step's state is ready for: `tokens` at `spans` of a cache whose rows nothing has written to since."""

    step: Step
    cache: weakref.ref[Cache]
    versions: tuple[int, ...]
    spans: tuple[Span, ...]
    adapters: tuple[int, ...]
    tokens: torch.Tensor
    sampling: SamplingBatch

    def is_for(self, cache: Cache, spans: tuple[Span, ...], tokens: object, sampling: SamplingBatch, kind: Kind) -> bool:
        is_same = isinstance(tokens, torch.Tensor) and tokens.device == self.tokens.device and self.tokens.is_set_to(tokens)
        return (is_same and self.cache() is cache and self.spans == spans and self.versions == tuple(cache.versions[span.row] for span in spans)
                and self.adapters == tuple(cache.adapters[span.row] for span in spans) and self.step.view.kind == kind and (self.sampling is sampling or self.sampling.options == sampling.options))


class Runner:
    """Runs tokens as rows through a model's forward by kernels, as graphs.

    compute: (tokens, view, all_positions) -> logits, the model's decoder. build_view: (rows, kind) -> StateView of
    its config and device. capture: None to run every step uncaptured. vocabulary: of `Step`. notices: about the captures so
    far.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], build_view: Callable[[int, Kind], StateView],
                 device: torch.device, capture: Callable[[Callable[[], None]], Callable[[], None]] | None,
                 vocabulary: Vocabulary | None = None):
        self.compute, self.build_view, self.device, self.capture = compute, build_view, device, capture
        self.vocabulary = vocabulary
        self.notices: tuple[str, ...] = ()
        self._steps: OrderedDict[tuple, Step] = OrderedDict()  # by rows and kind of sampling (None), the last used last
        self._lock = threading.Lock()
        self._ready: _Ready | None = None
        self._stream: torch.cuda.Stream | None = None

    def forward(self, tokens: torch.Tensor, index_pos: int | Sequence[int], cache: Cache, rows: Sequence[int] | None = None,
                all_positions: bool = False, probe=None) -> torch.Tensor:
        """Logits [B, 1, V] after `tokens` [B, T], checked ids, or with `all_positions` [B, T, V].

        Up to MAX_ROWS tokens are rows of one forward, so a position has the bits that a decoded token has there. probe: as
        in the model's forward; called at the end. Raises ContextError.
        """
        B, T = tokens.shape
        logits: list[torch.Tensor] = []
        probed: dict[str, list[torch.Tensor]] = {}
        with self._lock:
            self._follow_streams()
            with CallView(cache, B, T, index_pos, rows) as call:
                spans = [Span(span.row, position, 1) for span in call.spans for position in range(span.start, span.end)]
                apart = 1 if all_positions else T  # positions from one whose logits are wanted to the next
                for at in range(0, B * T, MAX_ROWS):
                    some = spans[at:at + MAX_ROWS]
                    step = self._find_step(len(some), None)
                    if not probe:
                        self._use(step)
                    _count_writes(cache, some)
                    step.view.point(cache, tokens.reshape(-1, 1)[at:at + MAX_ROWS], some)
                    if probe:
                        seen: dict[str, torch.Tensor] = {}
                        step.view.listener = seen.__setitem__
                        try:
                            found = self.compute(step.view.tokens, step.view, True)
                        finally:
                            step.view.listener = None
                        for name, array in seen.items():
                            probed.setdefault(name, []).append(array[:len(some)])
                    else:
                        step.run()
                        found = step.logits
                    logits.append(found[(apart - 1 - at) % apart:len(some):apart].clone())
                for name, parts in probed.items():
                    probe(name, _by_sequence(torch.cat(parts), B, T))
                return torch.cat(logits).view(B, T // apart, -1)

    def step(self, tokens: torch.Tensor, call: CallView, sampling: SamplingBatch, masks: Masks | None = None) -> torch.Tensor:
        """The next tokens of `tokens` [B, 1], checked ids, at the positions of `call`: as the model's step."""
        kind = sampling.kind._replace(has_masks=masks is not None)
        with self._lock:
            self._follow_streams()
            with call:
                if len(tokens) <= MAX_ROWS:
                    return self._step(tokens, call.spans, call.cache, sampling, kind, masks)
                drawn, once = [], masks and functools.cache(masks)
                for at in range(0, len(tokens), MAX_ROWS):
                    here = slice(at, at + MAX_ROWS)
                    some = SamplingBatch(sampling.options[here], sampling.device)
                    allowed = once and (lambda here=here: once()[here])
                    drawn.append(self._step(tokens[here], call.spans[here], call.cache, some, kind, allowed))
                return torch.cat(drawn)

    def _step(self, tokens: torch.Tensor, spans: tuple[Span, ...], cache: Cache, sampling: SamplingBatch, kind: Kind,
              masks: Masks | None) -> torch.Tensor:
        ready, self._ready = self._ready, None  # a step that is interrupted sets the state anew
        if ready and ready.is_for(cache, spans, tokens, sampling, kind):
            step, sampling = ready.step, ready.sampling
            self._use(step)
        else:
            step = self._find_step(len(spans), kind)
            self._use(step)
            step.view.point(cache, tokens, spans, sampling)
        step.run(masks)
        _count_writes(cache, spans)
        if len(spans) == 1 and kind.logprobs is None:  # the row's own tokens keep it
            (span,) = spans
            drawn = cache._storage[span.row].tokens[span.end:span.end + 1].view(1, 1)
        else:
            drawn = step.drawn[:len(spans)].clone()
        following = tuple(Span(span.row, span.end, 1) for span in spans)
        versions = tuple(cache.versions[span.row] for span in spans)
        adapters = tuple(cache.adapters[span.row] for span in spans)
        self._ready = _Ready(step, weakref.ref(cache), versions, following, adapters, drawn[:, :1], sampling)
        return drawn

    def _follow_streams(self) -> None:
        """Order this step behind the last one, which another thread may have queued on a stream of its own."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and current != self._stream:
            current.wait_stream(self._stream)
        self._stream = current

    def _find_step(self, rows: int, kind: Kind | None) -> Step:
        """The step of the least bucket for `rows`. kind: None for the forward alone."""
        bucket = 1 << (rows - 1).bit_length()
        key = bucket, kind
        if key not in self._steps:
            self._steps[key] = Step(self.compute, self.build_view(bucket, kind or Kind()), kind is not None, self.vocabulary)
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
            step.parts = [self.capture(part) for part in step.parts]
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
        what = "a decoded token" if step.draws else "a forward"
        self.notices = (f"{what}{rows} was captured as a CUDA graph in {time.perf_counter() - started:.2f} s",)


def _by_sequence(array: torch.Tensor, B: int, T: int) -> torch.Tensor:
    """Reshape for a probe: [B T, 1, E] as [B, T, E], or [B T, H, 1, D] as [B, H, T, D]."""
    array = array.unflatten(0, (B, T))
    return array.squeeze(2) if array.ndim == 4 else array.squeeze(3).transpose(1, 2)


def _count_writes(cache: Cache, spans: Sequence[Span]) -> None:
    for span in spans:
        cache.versions[span.row] += 1
