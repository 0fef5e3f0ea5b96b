"""Batch invariance: a row's results do not depend on the rest of the batch, nor on the way in which
its cache was filled.

Each prompt runs alone, then in batches of different sizes and orders: all at once, staggered, and
from a prefix in another row. Tokens, last logits, and keys and values of all layers are compared
with the run alone; keys and values carry the bits of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlx_llama.api.llm import LLM
from mlx_llama.core import options
from mlx_llama.core.backends.decoding import GREEDY, prefill
from mlx_llama.core.backends.interface import Cache, Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request

from .differences import first_other, measure_difference, values_by_position
from .probes import run_logits

SIZES = (2, 3, 8, 32)  # rows of a batch
STEPS = 8  # tokens decoded after each prompt and its first token
MIN_TOKENS = 8  # to make prompts of, and to fill a cache in every way
CHUNK = 5  # prompt tokens per evaluation in a batch; alone, a prompt is a single evaluation
STARTS = ("at once", "reversed", "staggered", "from a prefix")
COUNTS = ("same_tokens", "same_bits")  # fields of BatchResult


@dataclass
class Run:
    """Results of a row."""

    tokens: list[int]
    logits: np.ndarray  # after the last token, float32 [1, V]
    stored: np.ndarray  # keys and values by position, float32 [T, n]


@dataclass
class BatchResult:
    """Rows of a batch compared with the same rows alone."""

    rows: int
    start: str  # one of STARTS
    same_tokens: int  # number of rows
    same_bits: int  # number of rows
    # largest difference at a position of keys, values and logits, up to the first other token
    relative: float
    promise: str  # "bits" (and tokens), "tokens" (and the tolerance), or "tolerance"
    tolerance: float

    @property
    def is_kept(self) -> bool:
        if self.promise == "bits":
            return self.same_bits == self.rows
        return (
            self.promise != "tokens" or self.same_tokens == self.rows
        ) and self.relative <= self.tolerance

    def report(self) -> dict[str, Any]:
        counts = {name: f"{getattr(self, name)} of {self.rows}" for name in COUNTS}
        return asdict(self) | counts | {"within": self.is_kept}


def promise_of(model: Model, dtype: str) -> str:
    """The promise for a model, see BatchResult. dtype: name of the activations' dtype."""
    return "bits" if model.is_batch_invariant else "tokens" if dtype == "float32" else "tolerance"


def make_prompts(tokens: Sequence[int], count: int, room: int) -> list[list[int]]:
    """Make `count` prompts that share half of `tokens`. room: positions of a row, with answer."""
    longest = max(2, min(len(tokens), room - STEPS - 1))
    shared = list(tokens[: longest // 2])
    prompts = []
    for i in range(count):
        length = 1 + (7 * i + 3) % (longest - len(shared))
        first = (5 * i) % len(tokens)
        prompts.append(shared + [tokens[(first + j) % len(tokens)] for j in range(length)])
    return prompts


def compare_batches(
    backend: Backend,
    model: Model,
    prompts: list[list[int]],
    promise: str,
    tolerance: float,
    sizes: Sequence[int] = SIZES,
    advance: Callable[[str], None] = lambda name: None,
) -> Iterator[BatchResult]:
    """Compare every size and start. prompts: at least max(sizes), see make_prompts."""
    advance("each row alone")
    alone = [_run(backend, model, [prompt], "alone")[0] for prompt in prompts[: max(sizes)]]
    for rows in sizes:
        for start in STARTS:
            advance(f"{rows} rows, {start}")
            batch = _run(backend, model, prompts[:rows], start)
            yield _compare(batch, alone[:rows], start, promise, tolerance)


def _compare(
    batch: list[Run], alone: list[Run], start: str, promise: str, tolerance: float
) -> BatchResult:
    same_tokens = same_bits = 0
    relative = 0.0
    for run, single in zip(batch, alone):
        if (first := first_other(run.tokens, single.tokens)) is not None:
            common = len(run.stored) - len(run.tokens) + first
            parts = [(run.stored[:common], single.stored[:common])]
        else:
            same_tokens += 1
            parts = [(run.stored, single.stored), (run.logits, single.logits)]
            same_bits += all(ours.tobytes() == theirs.tobytes() for ours, theirs in parts)
        peaks = (measure_difference("row", ours, theirs).peak for ours, theirs in parts)
        relative = max(relative, max(peaks))
    return BatchResult(
        len(batch), start, same_tokens, same_bits, float(relative), promise, tolerance
    )


def _run(backend: Backend, model: Model, prompts: list[list[int]], start: str) -> list[Run]:
    """Decode STEPS tokens of each prompt, in separate rows of a cache."""
    count, room = len(prompts), max(map(len, prompts)) + STEPS + 1
    cache = model.make_cache(room, rows=count + 1)  # the last row holds the prefix
    order = list(range(count))[::-1] if start == "reversed" else list(range(count))
    shared = 0
    if start == "from a prefix":
        shortest, common = min(map(len, prompts)), first_other(min(prompts), max(prompts))
        shared = shortest - 1 if common is None else min(common, shortest - 1)
        if shared:
            model.forward([prompts[0][:shared]], 0, cache, rows=[count])
    tokens: list[list[int]] = [[] for _ in prompts]
    waiting = list(order)
    running: list[int] = []
    while waiting or running:
        joining = waiting[: max(1, count // 4)] if start == "staggered" else list(waiting)
        for row in joining:
            waiting.remove(row)
            if shared:
                cache.copy_prefix(count, row, shared)
            rest = prompts[row][shared:]
            chunk = len(rest) if start == "alone" else CHUNK
            tokens[row] += prefill(backend, model, cache, {row: rest}, chunk)
            running.append(row)
        running = [row for row in running if len(tokens[row]) <= STEPS]
        if running:
            last = np.array([[tokens[row][-1]] for row in running], np.int32)
            starts = [cache.lengths[row] for row in running]
            sampling = backend.sampling_batch([GREEDY] * len(running))
            sampled = model.step(last, starts, cache, sampling, rows=running)
            for row, token in zip(running, backend.runtime.read([sampled])):
                tokens[row].append(token)
    last = np.array([[tokens[row][-1]] for row in order], np.int32)
    starts = [cache.lengths[row] for row in order]
    logits = backend.runtime.to_numpy(model.forward(last, starts, cache, rows=order))
    logits = logits.reshape(count, -1)
    return [
        Run(tokens[row], logits[[order.index(row)]], values_by_position(cache.state(row)))
        for row in range(count)
    ]


# Every way of filling a cache, compared with a single call over all tokens


@dataclass
class Way:
    """A way of filling the cache: its logits, or keys and values, compared with a cold run's."""

    way: str
    relative: float
    same_bits: bool
    within: bool  # `tolerance`
    tolerance: float


def compare_ways(llm: LLM, tokens: list[int], tolerance: float) -> Iterator[Way]:
    """Fill a cache with `tokens`, at least MIN_TOKENS, in every way."""
    model, T = llm.model, len(tokens)
    half, room = T // 2, min(2 * T, llm.engine.context)

    def run(cache: Cache, ids: list[int], sizes: Sequence[int]) -> np.ndarray:
        parts, at = [], 0
        for size in sizes:
            parts.append(run_logits(llm.backend, model, ids[at : at + size], cache))
            at += size
        return np.concatenate(parts)

    def judge(name: str, actual: np.ndarray, expected: np.ndarray) -> Way:
        worst = measure_difference(
            name, actual.reshape(len(actual), -1), expected.reshape(len(expected), -1)
        ).peak
        same_bits = actual.tobytes() == expected.tobytes()
        return Way(name, worst, same_bits, worst <= tolerance, tolerance)

    cold = run(model.make_cache(T), tokens, [T])
    size = max(2, T // 5)
    sizes = [*[size] * (T // size), *([T % size] if T % size else [])]
    yield judge(f"in chunks of {size}", run(model.make_cache(T), tokens, sizes), cold)
    yield judge("token by token", run(model.make_cache(T), tokens, [1] * T), cold)

    cache = model.make_cache(room)
    run(cache, tokens, [T])
    cut = cache.trim(half)  # less where a recurrent state has no checkpoint
    yield judge("after trim", run(cache, tokens[cut:], [T - cut]), cold[cut:])

    cache = model.make_cache(room)
    # trim leaves these values, which the next call must overwrite
    run(cache, tokens[:half] + tokens[half - 1 :: -1], [half, half])
    cut = cache.trim(half)
    yield judge("over rows of another text", run(cache, tokens[cut:], [1] * (T - cut)), cold[cut:])

    cache, other = model.make_cache(room), model.make_cache(room)
    run(cache, tokens[:half], [half])
    other.restore(cache.state())
    yield judge("after save and load", run(other, tokens[half:], [T - half]), cold[half:])

    # As in a conversation: decode an answer, drop old turns, reuse or recompute the rest.
    resolved = options.resolve({"temperature": 0.0, "max_tokens": 4, "seed": 0})
    for name, first, second in (
        ("decoded by steps", tokens[:half], None),
        ("after dropping old turns", tokens, tokens[:2] + tokens[half:]),
    ):
        loop = Loop(llm.backend, model, None, frozenset(), min(2 * T + 8, llm.engine.context))
        for prompt in filter(None, (first, second)):
            loop.submit(Request(prompt, resolved, wants_text=False)).finish()
        state = loop.export(None, loop.engine.default_adapter)
        cached = state["tokens"].tolist()
        alone = model.make_cache(len(cached))
        run(alone, cached, [len(cached)])
        yield judge(name, values_by_position(state), values_by_position(alone.state()))
        if "recurrent" in state:
            expected = alone.state()["recurrent"][None]
            yield judge(f"{name}: recurrent states", state["recurrent"][None], expected)
