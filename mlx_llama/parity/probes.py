"""Parity of two backends: run the same tokens through both, and compare every probe of the model.

As in use, most tokens are a prompt and the last ones are decoded one by one. A probe is a named
array of model.forward. The first probe that is off shows where to look.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mlx_llama.api.llm import LLM
from mlx_llama.core import options
from mlx_llama.core.backends.interface import Cache, Model, Probe
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.backends.shards import HEAD_PROBES
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig

from .differences import (
    Agreement,
    Difference,
    first_other,
    is_tie,
    log_softmax,
    margin,
    measure_agreement,
    measure_difference,
)

IN_LAYER = tuple(
    "attention_norm query key value query_rope key_rope state attention ffn_norm ffn block".split()
)
LAST = ("norm", "logits")
# Tolerated relative errors (norm of the difference over the norm) by dtype of the activations. In
# float32, libraries differ by about 1e-6; 16-bit activations are rounded about ten times per layer,
# to 8 or 11 bits of mantissa.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# By bits of keys and values: the few large terms of a position's attention do not average out.
CACHE_TOLERANCE = {None: 0.0, 8: 5e-2, 16: 5e-3}
# for float32 activations that are rounded to 16-bit fixed point with low-bit weights
LOW_BIT_TOLERANCE = 2e-3


def probe_names(config: LlamaConfig) -> list[str]:
    """Names of all probes, in the order of computation."""
    names = ["embedding"]
    for layer in config.layers:
        absent = {"state"} if layer.attention else {*HEAD_PROBES}
        absent |= {"attention_norm", "state", "attention"} if not layer.mixer else set()
        absent |= {"ffn_norm", "ffn"} if not layer.ffn else set()
        names += [f"{layer.index}.{name}" for name in IN_LAYER if name not in absent]
    return [*names, *LAST]


def tolerance_of(llm: LLM) -> float:
    """Tolerated relative error, by dtypes of the activations, weights, keys and values."""
    dtype = llm.model.dtype_name
    low_bit = LOW_BIT_TOLERANCE if llm.checkpoint.low_bit and dtype == "float32" else 0.0
    return max(TOLERANCE[dtype], low_bit, CACHE_TOLERANCE[llm.model.cache_bits])


# Running


def run_logits(
    backend: Backend, model: Model, tokens: Sequence[int], cache: Cache, probe: Probe | None = None
) -> np.ndarray:
    """Logits after each of `tokens`, which continue the cache: float32 [T, V]."""
    return backend.runtime.to_numpy(
        model.forward([list(tokens)], cache.length, cache, all_positions=True, probe=probe)
    )[0]


def split_calls(tokens: Sequence[int], decoded: int) -> list[list[int]]:
    """Split tokens into a prompt and the last `decoded` one by one. Raises ContextError."""
    if not 0 < decoded < len(tokens):
        raise ContextError(
            f"{len(tokens)} tokens, {decoded} of them decoded: the prompt needs at least one"
        )
    return [list(tokens[:-decoded]), *([token] for token in tokens[-decoded:])]


def collect(
    backend: Backend, model: Model, tokens: Sequence[int], decoded: int
) -> dict[str, np.ndarray]:
    """Collect every probe over `tokens`, the last `decoded` of them one by one: {name: float32 [T,
    width]}. A state is that after a call, at its last position; others have zeros. Raises
    ContextError.
    """
    probes: dict[str, np.ndarray] = {}
    cache, end = model.make_cache(len(tokens)), 0

    def keep(name: str, array: Any) -> None:
        values = backend.runtime.to_numpy(array)[0]  # [T, width], or [heads, T, width of a head]
        if values.ndim == 3:
            values = values.transpose(1, 0, 2).reshape(values.shape[1], -1)
        if name not in probes:
            probes[name] = np.zeros((len(tokens), values.shape[1]), np.float32)
        probes[name][end - len(values) : end] = values

    for call in split_calls(tokens, decoded):
        end += len(call)
        run_logits(backend, model, call, cache, keep)
    return probes


def greedy(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """Decode `count` greedy tokens after `prompt`, past end tokens, from an empty cache."""
    loop = Loop(llm.backend, llm.model, None, frozenset(), llm.engine.context)
    resolved = options.resolve({"temperature": 0.0, "max_tokens": count, "seed": 0})
    done = loop.submit(Request(prompt, resolved, wants_text=False)).finish()
    return list(map(int, done.tokens))


def free(llm: LLM) -> None:
    """Free a model before loading the next."""
    del llm.model, llm.loop
    gc.collect()


# Comparing


@dataclass
class Decoded:
    """The engine's greedy tokens, perhaps of compiled steps, beside the reference's."""

    tokens: list[int]
    first_difference: int | None = None  # index
    margins: tuple[float, float] | None = None  # there, see Agreement
    near_tie: bool = False  # rounding explains the difference


@dataclass
class Report:
    """A backend compared with the reference."""

    backend: str
    device: str
    dtype: str
    tolerance: float
    differences: list[Difference]
    agreement: Agreement
    decoded: Decoded | None = None
    missing: list[str] = field(default_factory=list)  # probes that the reference lacks

    @property
    def first_bad(self) -> Difference | None:
        """The first probe, in the order of computation, beyond the tolerance at a position."""
        return next((probe for probe in self.differences if not probe.peak <= self.tolerance), None)

    @property
    def decodes_otherwise(self) -> bool:
        """True if the greedy tokens differ beyond rounding."""
        decoded = self.decoded
        if decoded is None or decoded.first_difference is None:
            return False
        return not decoded.near_tie

    @property
    def is_within(self) -> bool:
        return self.first_bad is None and not self.decodes_otherwise

    def verdict(self) -> str:
        """A line: within the tolerance, or the first probe outside."""
        bad = self.first_bad
        if bad is not None:
            places = np.flatnonzero(~(bad.positions <= self.tolerance))
            where = f"position {places[0]}"
            if len(places) > 1:
                where = f"positions {places[0]} to {places[-1]} ({len(places)})"
            return (
                f"OUTSIDE: first at probe {bad.name}, {where}: relative error {bad.peak:.2g}, "
                f"allowed {self.tolerance:g}"
            )
        if self.decodes_otherwise:
            assert self.decoded is not None and self.decoded.margins is not None
            return (
                "OUTSIDE: every probe agrees, but the decoded tokens differ from token "
                f"{self.decoded.first_difference} on, where the reference's margin is "
                f"{self.decoded.margins[0]:.3g}: the decode step computes something else"
            )
        return f"within {self.tolerance:g}"

    def report(self) -> dict[str, Any]:
        run = {name: getattr(self, name) for name in ("backend", "device", "dtype", "tolerance")}
        bad = self.first_bad.name if self.first_bad else None
        verdict = {"within": self.is_within, "verdict": self.verdict(), "first_bad": bad}
        decoded, probes = self.decoded and asdict(self.decoded), self.differences
        tokens = {"logits": asdict(self.agreement), "decoded": decoded}
        compared = {"not_compared": self.missing, "probes": [probe.report() for probe in probes]}
        return run | verdict | tokens | compared


def compare(
    backend: str,
    device: str,
    dtype: str,
    tolerance: float,
    actual: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    config: LlamaConfig,
) -> Report:
    """Compare a run's probes (see collect) with the reference's."""
    names = [name for name in probe_names(config) if name in actual]
    differences = [
        measure_difference(name, actual[name], expected[name]) for name in names if name in expected
    ]
    agreement = measure_agreement(actual[LAST[-1]], expected["logits"])
    missing = [name for name in names if name not in expected]
    return Report(backend, device, dtype, tolerance, differences, agreement, missing=missing)


def compare_decoded(
    llm: LLM,
    prompt: list[int],
    expected: list[int],
    tolerance: float,
    reference: Callable[[list[int]], np.ndarray],
) -> Decoded:
    """Compare greedy tokens with `expected`. reference: its logits [V] after tokens."""
    tokens = greedy(llm, prompt, len(expected))
    first = first_other(tokens, expected)
    if first is None:
        return Decoded(tokens)
    before = prompt + expected[:first]
    right, ours = reference(before), llm.logits(before)[-1]
    near_tie = is_tie(right, expected[first], tokens[first], tolerance)
    return Decoded(tokens, first, (margin(right), margin(ours)), near_tie)


# Determinism


def digest(llm: LLM, tokens: list[int], decoded: int) -> dict[str, str]:
    """Hash the bits of every probe and of the greedy tokens."""
    probes = collect(llm.backend, llm.model, tokens, decoded)
    hashes = {name: _hash(probes[name]) for name in probe_names(llm.model.config)}
    hashes["decoded tokens"] = _hash(np.array(greedy(llm, tokens[:-decoded], decoded)))
    return hashes


def first_difference(runs: Sequence[dict[str, str]]) -> tuple[int, str] | None:
    """(run, first operation) whose bits differ from the first run's; None if all are equal."""
    for name in runs[0]:
        for number, run in enumerate(runs):
            if run[name] != runs[0][name]:
                return number, name
    return None


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


# Perplexity of a text over overlapping windows

CHUNK = 128  # positions whose logits are held in memory


@dataclass
class Perplexity:
    value: float  # exp(nll)
    nll: float  # mean negative log likelihood per token, nats
    count: int  # scored tokens


def measure_perplexity(llm: LLM, tokens: list[int], window: int, stride: int) -> Perplexity:
    """Measure perplexity over windows of `window` tokens, one every `stride` tokens. Each token but
    the first is scored once, with at least `window - stride` tokens of context if there are that
    many (as in transformers' guide to perplexity). Raises ContextError.
    """
    if len(tokens) < 2:
        raise ContextError(f"the text has {len(tokens)} tokens: a perplexity needs at least 2")
    if not 2 <= window <= llm.engine.context:
        raise ContextError(
            f"`ctx_size` {window}: a window has 2 to {llm.engine.context} tokens here"
        )
    if not 1 <= stride < window:
        raise ContextError(
            f"`stride` {stride}: must be 1 to {window - 1}, below the window of {window} tokens"
        )
    total, scored = 0.0, 1  # nothing predicts the first token
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        cache = llm.model.make_cache(end - begin)
        for start in range(begin, end, CHUNK):
            stop = min(start + CHUNK, end)
            logits = run_logits(llm.backend, llm.model, tokens[start:stop], cache)
            # The logits of position i score token i + 1.
            first, last = max(start, scored - 1), min(stop, end - 1)
            if first < last:
                rows = log_softmax(logits[first - start : last - start])
                total -= float(rows[np.arange(last - first), tokens[first + 1 : last + 1]].sum())
        scored = end
        if end == len(tokens):
            break
    count = len(tokens) - 1
    return Perplexity(math.exp(min(total / count, 700)), total / count, count)
