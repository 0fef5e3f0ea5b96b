"""Compare every way of filling a cache with a single call over all tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_llama.api.llm import LLM
from mlx_llama.core import options
from mlx_llama.core.backends.interface import Cache
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request

from .differences import measure_difference, values_by_position
from .probes import run_logits

MIN_TOKENS = 8


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
    cache.trim(half)
    yield judge("after trim", run(cache, tokens[half:], [T - half]), cold[half:])

    cache = model.make_cache(room)
    # trim leaves these values, which the next call must overwrite
    run(cache, tokens[:half] + tokens[half - 1 :: -1], [half, half])
    cache.trim(half)
    yield judge(
        "over rows of another text", run(cache, tokens[half:], [1] * (T - half)), cold[half:]
    )

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
