"""Batch invariance: a row's results do not depend on the rest of the batch.

Each prompt runs alone, then in batches of different sizes and orders: all at once, staggered, and
from a prefix in another row. Tokens, last logits, and keys and values of all layers are compared
with the run alone; keys and values carry the bits of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlx_llama.core.backends.decoding import GREEDY, prefill
from mlx_llama.core.backends.interface import Model
from mlx_llama.core.backends.selection import Backend

from .differences import first_other, measure_difference, values_by_position

SIZES = (2, 3, 8, 32)  # rows of a batch
STEPS = 8  # tokens decoded after each prompt and its first token
MIN_TOKENS = 8  # to make prompts of
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
    start: str  # of STARTS
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
        relative = max(relative, *(measure_difference("row", *pair).peak for pair in parts))
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
            for row, token in zip(running, backend.runtime.read(sampled)):
                tokens[row].append(token)
    last = np.array([[tokens[row][-1]] for row in order], np.int32)
    starts = [cache.lengths[row] for row in order]
    logits = backend.runtime.to_numpy(model.forward(last, starts, cache, rows=order))
    logits = logits.reshape(count, -1)
    return [
        Run(tokens[row], logits[[order.index(row)]], values_by_position(cache.state(row)))
        for row in range(count)
    ]
