"""Parity of two backends: the same tokens through both, compared at every probe of the model.

A model runs over tokens as a user's does: most of them as a prompt, the last ones one by one. A probe is an array that
model.forward names. The first one that is off, in the order of computation, is where to look.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_llama.core.backends.interface import Cache, Model, Probe
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request
from mlx_llama.core.errors import ContextError
from mlx_llama.core.generation import options
from mlx_llama.core.generation.llm import LLM
from mlx_llama.core.models.config import LlamaConfig

from .differences import Agreement, Difference, is_tie, margin, measure_agreement, measure_difference

IN_LAYER = ("attention_norm", "query", "key", "value", "query_rope", "key_rope", "attention", "ffn_norm", "ffn", "block")
LAST = ("norm", "logits")
# Relative errors allowed, by the dtype of the activations: norms of differences over norms. float32 differs between two
# libraries by about 1e-6; 16-bit activations are rounded some ten times per layer (8 and 11 bits of mantissa).
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# For keys and values of these bits: one position's attention, whose few large terms do not average out.
CACHE_TOLERANCE = {None: 0.0, 8: 5e-2, 16: 5e-3}
LOW_BIT_TOLERANCE = 2e-3  # for float32 activations rounded to 16-bit fixed point against low-bit weights


def probe_names(config: LlamaConfig) -> list[str]:
    """Names of all probes in the order of computation."""
    layers = (f"{i}.{name}" for i in range(config.num_hidden_layers) for name in IN_LAYER)
    return ["embedding", *layers, *LAST]


def dtype_of(llm: LLM) -> str:
    """The activations' dtype: "float32", "float16" or "bfloat16"."""
    return llm.backend.runtime.dtype_name(llm.model.dtype)


def tolerance_of(dtype: str, is_low_bit: bool, cache_bits: int | None = None) -> float:
    """The relative error allowed to activations of a dtype, against low-bit weights or others. cache_bits: of keys and
    values."""
    tolerance = max(TOLERANCE[dtype], LOW_BIT_TOLERANCE) if is_low_bit and dtype == "float32" else TOLERANCE[dtype]
    return max(tolerance, CACHE_TOLERANCE[cache_bits])


# Running


def run_logits(backend: Backend, model: Model, tokens: Several[int], cache: Cache, probe: Probe | None = None) -> np.ndarray:
    """Logits after each of `tokens`, which continue the cache: float32 [T, V]."""
    return backend.runtime.to_numpy(model.forward([list(tokens)], cache.length, cache, all_positions=True, probe=probe))[0]


def split_calls(tokens: Several[int], decoded: int) -> list[list[int]]:
    """The calls of a user's run: a prompt, and the last `decoded` tokens one by one. Raises ContextError."""
    if not 0 < decoded < len(tokens):
        raise ContextError(f"{len(tokens)} tokens with {decoded} of them one by one: at least one must be a prompt")
    return [list(tokens[:-decoded]), *([token] for token in tokens[-decoded:])]


def collect(backend: Backend, model: Model, tokens: Several[int], decoded: int) -> dict[str, np.ndarray]:
    """Every probe over `tokens`, the last `decoded` of them one by one: float32 [T, width] by name.

    Raises ContextError for fewer than two tokens, and if they do not fit.
    """
    parts: dict[str, list[np.ndarray]] = {}

    def keep(name: str, array: Any) -> None:
        values = backend.runtime.to_numpy(array)[0]  # [T, width], or [heads, T, width of a head]
        if values.ndim == 3:
            values = values.transpose(1, 0, 2).reshape(values.shape[1], -1)
        parts.setdefault(name, []).append(np.asarray(values, np.float32))

    cache = model.make_cache(len(tokens))
    for call in split_calls(tokens, decoded):
        run_logits(backend, model, call, cache, keep)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def greedy(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`, by the scheduler, past end tokens and from an empty cache."""
    loop = Loop(llm.backend, llm.model, None, frozenset(), llm.engine.context)
    resolved = options.resolve({"temperature": 0.0, "max_tokens": count, "seed": 0})
    return [int(token) for token in loop.submit(Request(prompt, resolved, wants_text=False)).tokens()]


def free(llm: LLM) -> None:
    """Release a model before the next one is loaded."""
    llm.model = llm.loop = None
    gc.collect()


# Comparing


@dataclass
class Decoded:
    """Greedy tokens of the engine, whose steps may be compiled or captured, beside the reference's.

    first: index of the first that differs, None if none does. margins: the two models' there (see Agreement). is_tie:
    rounding explains the difference.
    """

    tokens: list[int]
    first: int | None = None
    margins: tuple[float, float] | None = None
    is_tie: bool = False

    def report(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "first_difference": self.first, "margins": self.margins, "near_tie": self.is_tie}


@dataclass
class Report:
    """One backend against the reference. missing: probes that the reference does not have."""

    backend: str
    device: str
    dtype: str
    tolerance: float
    differences: list[Difference]
    agreement: Agreement
    decoded: Decoded | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def first_bad(self) -> Difference | None:
        """The first probe, in the order of computation, that is off at any position."""
        return next((one for one in self.differences if not one.peak <= self.tolerance), None)

    @property
    def decodes_otherwise(self) -> bool:
        """True if the greedy tokens differ beyond rounding."""
        return self.decoded is not None and self.decoded.first is not None and not self.decoded.is_tie

    @property
    def is_within(self) -> bool:
        return self.first_bad is None and not self.decodes_otherwise

    def verdict(self) -> str:
        """One line: within the tolerance, or the first probe outside."""
        bad = self.first_bad
        if bad is not None:
            places = np.flatnonzero(~(bad.positions <= self.tolerance))
            where = f"position {places[0]}" if len(places) == 1 else f"positions {places[0]} to {places[-1]} ({len(places)})"
            return (f"OUTSIDE: first at probe {bad.name}, {where}: relative error {bad.peak:.2g}, allowed "
                    f"{self.tolerance:g}")
        if self.decodes_otherwise:
            return (f"OUTSIDE: every probe agrees, but the decoded tokens differ from token {self.decoded.first} on, where "
                    f"the reference's margin is {self.decoded.margins[0]:.3g}: the decode step computes something else")
        return f"within {self.tolerance:g}"

    def report(self) -> dict[str, Any]:
        return {"backend": self.backend, "device": self.device, "dtype": self.dtype, "tolerance": self.tolerance,
                "within": self.is_within, "verdict": self.verdict(),
                "first_bad": self.first_bad.name if self.first_bad else None,
                "logits": self.agreement.report(), "decoded": self.decoded.report() if self.decoded else None,
                "not_compared": self.missing, "probes": [one.report() for one in self.differences]}


def compare(backend: str, device: str, dtype: str, tolerance: float, found: dict[str, np.ndarray],
            wanted: dict[str, np.ndarray], config: LlamaConfig) -> Report:
    """A run's probes (see collect) against the reference's."""
    names = [name for name in probe_names(config) if name in found]
    differences = [measure_difference(name, found[name], wanted[name]) for name in names if name in wanted]
    return Report(backend, device, dtype, tolerance, differences, measure_agreement(found[LAST[-1]], wanted["logits"]),
                  missing=[name for name in names if name not in wanted])


def compare_decoded(llm: LLM, prompt: list[int], wanted: list[int], tolerance: float,
                    reference: Callable[[list[int]], np.ndarray]) -> Decoded:
    """Greedy tokens after `prompt` against `wanted`. reference: the reference's logits [V] after given tokens."""
    tokens = greedy(llm, prompt, len(wanted))
    first = next((i for i, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]), None)
    if first is None:
        return Decoded(tokens)
    before = prompt + wanted[:first]
    right, ours = reference(before), llm.logits(before)[-1]
    return Decoded(tokens, first, (margin(right), margin(ours)), is_tie(right, wanted[first], tokens[first], tolerance))


# Determinism


def digest(llm: LLM, tokens: list[int], decoded: int) -> dict[str, str]:
    """Hashes of a run's bits: of every probe and of the greedy tokens."""
    probes = collect(llm.backend, llm.model, tokens, decoded)
    found = {name: _hash(probes[name]) for name in probe_names(llm.model.config)}
    found["decoded tokens"] = _hash(np.array(greedy(llm, tokens[:-decoded], decoded)))
    return found


def first_difference(runs: Several[dict[str, str]]) -> tuple[int, str] | None:
    """(run, name of the first operation) with other bits than the first run; None if all are the same."""
    for name in runs[0]:
        for number, run in enumerate(runs):
            if run[name] != runs[0][name]:
                return number, name
    return None


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
