"""Do two backends compute the same? The arithmetic of python -m mlx_llama.parity.

A model is run over tokens as a user's is: most of them as a prompt, the last ones one by one. At every probe (the names
that model.forward knows) the arrays of two runs are compared; the first that is off, in the order in which they are
computed, is where to look. Everything here is float64 over float32 copies.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_llama.core.backends.selection import Backend, Model
from mlx_llama.core.errors import ContextError
from mlx_llama.core.generation import options
from mlx_llama.core.generation.engine import Completion, Engine
from mlx_llama.core.generation.llm import LLM
from mlx_llama.core.generation.session import Sequence
from mlx_llama.core.models.config import LlamaConfig

IN_LAYER = ("attention_norm", "query", "key", "value", "query_rope", "key_rope", "attention", "ffn_norm", "ffn", "block")
# Relative errors allowed, by the dtype of the activations: norms of differences over norms. float32 differs between two
# libraries by about 1e-6; 16-bit activations are rounded some ten times per layer (8 and 11 bits of mantissa).
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
LOW_BIT_TOLERANCE = 2e-3  # where float32 activations are rounded to 16-bit fixed point against low-bit weights
AS_RUN = "logits as run"  # without probes, which the CPU's and GPUs' fused kernels do not know
TOP = 5  # most likely tokens whose agreement is counted
CHUNK = 128  # positions whose logits are in memory at once for a perplexity


def probe_names(config: LlamaConfig) -> list[str]:
    """Every probe's name, in the order in which a model computes them, and AS_RUN."""
    layers = (f"{i}.{name}" for i in range(config.num_hidden_layers) for name in IN_LAYER)
    return ["embedding", *layers, "norm", "logits", AS_RUN]


def dtype_of(model: Model) -> str:
    """ "float32", "float16" or "bfloat16"."""
    return str(model.dtype).split(".")[-1]


def collect(backend: Backend, model: Model, tokens: Several[int], decoded: int) -> dict[str, np.ndarray]:
    """Every probe over `tokens`, the last `decoded` of them one by one: float32 [T, width] by name. AS_RUN are the logits
    of the same calls without probes, as a user's run makes them.

    Raises ContextError for fewer than two tokens, and when they do not fit.
    """
    if not 0 < decoded < len(tokens):
        raise ContextError(f"{len(tokens)} tokens with {decoded} of them one by one: at least one must be a prompt")
    parts: dict[str, list[np.ndarray]] = {}

    def probe(name: str, array: Any) -> None:
        values = backend.runtime.to_numpy(array)[0]  # [T, width], or [heads, T, width of a head]
        if values.ndim == 3:
            values = values.transpose(1, 0, 2).reshape(values.shape[1], -1)
        parts.setdefault(name, []).append(np.asarray(values, np.float32))

    start = len(tokens) - decoded
    cache, other = model.make_cache(len(tokens)), model.make_cache(len(tokens))
    for at, end in ((0, start), *((i, i + 1) for i in range(start, len(tokens)))):
        model.forward([list(tokens[at:end])], at, cache, all_positions=True, probe=probe)
        probe(AS_RUN, model.forward([list(tokens[at:end])], at, other, all_positions=True))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


@dataclass
class Difference:
    """One probe of a run against the reference's.

    max_abs, mean_abs: of the differences. relative: their norm over the reference's. cosine: of the two arrays.
    positions: relative error at each position, float64 [T]; worst: the position where it is largest.
    """

    name: str
    max_abs: float
    mean_abs: float
    relative: float
    cosine: float
    positions: np.ndarray
    worst: int

    @property
    def peak(self) -> float:
        """Relative error of the worst position: a single wrong row must not drown in many right ones."""
        return float(self.positions[self.worst])

    def report(self) -> dict[str, Any]:
        return {"probe": self.name, "max_abs": self.max_abs, "mean_abs": self.mean_abs, "relative": self.relative,
                "cosine": self.cosine, "worst_position": self.worst, "worst_relative": self.peak,
                "positions": [round(float(value), 10) for value in self.positions]}


def difference(name: str, found: np.ndarray, wanted: np.ndarray) -> Difference:
    """found, wanted: float32 [T, width]. What is not a number counts as an infinite error."""
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    apart = np.abs(found - wanted)
    apart[~np.isfinite(apart)] = math.inf
    norms = np.linalg.norm(wanted, axis=1)
    positions = relative_errors(apart, floored(norms))
    whole, both = np.linalg.norm(norms), np.linalg.norm(found) * np.linalg.norm(wanted)
    cosine = float(np.vdot(found, wanted) / both) if 0 < both < math.inf else float(not apart.any())
    relative = float(np.linalg.norm(apart) / whole) if whole else float(apart.any())
    return Difference(name, float(apart.max()), float(apart.mean()), relative, cosine, positions, int(positions.argmax()))


def floored(norms: np.ndarray) -> np.ndarray:
    """What errors of rows are divided by: a row that is almost zero beside the others has no relative error of its own."""
    return np.maximum(norms, 1e-3 * math.sqrt(np.mean(norms**2)) + 1e-30)


def is_tie(logits: np.ndarray, first: int, second: int, tolerance: float) -> bool:
    """Whether rounding may turn the choice between two tokens: both logits [V] may be off by the tolerance, as a share
    of what logits spread."""
    logits = logits.astype(np.float64)
    return bool(abs(logits[first] - logits[second]) <= 2 * tolerance * math.sqrt(np.mean(logits**2)))


def relative_errors(apart: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Norm of each row of differences over the row's norm. apart: [T, n]; norms: [T]; returns [T]."""
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.linalg.norm(apart, axis=1) / norms
    return np.where(np.isnan(errors), math.inf, errors)


@dataclass
class Agreement:
    """What the logits of a run choose, beside the reference's.

    kl: Kullback-Leibler divergence of the run's distribution from the reference's, nats: mean and largest over positions.
    top: share of the reference's TOP likeliest tokens that are among the run's. first: the first position whose
    likeliest token differs, None where none does; margins: there, how far the likeliest logit is above the second, in the
    reference and in the run; choices: the two tokens.
    """

    kl_mean: float
    kl_max: float
    top: float
    first: int | None
    margins: tuple[float, float] | None
    choices: tuple[int, int] | None

    def report(self) -> dict[str, Any]:
        return {"kl_mean": self.kl_mean, "kl_max": self.kl_max, f"top{TOP}": self.top, "first_difference": self.first,
                "margins": self.margins, "choices": self.choices}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [..., V]."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def agreement(found: np.ndarray, wanted: np.ndarray) -> Agreement:
    """found, wanted: logits, float32 [T, V]."""
    ours, theirs = log_softmax(found), log_softmax(wanted)
    kl = np.maximum((np.exp(theirs) * (theirs - ours)).sum(axis=-1), 0)
    kl = np.where(np.isnan(kl), math.inf, kl)
    k = min(TOP, wanted.shape[1])
    tops = [np.argsort(-logits, axis=-1, kind="stable")[:, :k] for logits in (wanted, found)]
    shared = np.mean([len(set(a) & set(b)) / k for a, b in zip(*tops)])
    chosen = [logits.argmax(axis=-1) for logits in (wanted, found)]
    differ = np.flatnonzero(chosen[0] != chosen[1])
    if not len(differ):
        return Agreement(float(kl.mean()), float(kl.max()), float(shared), None, None, None)
    at = int(differ[0])
    return Agreement(float(kl.mean()), float(kl.max()), float(shared), at, (margin(wanted[at]), margin(found[at])),
                     (int(chosen[0][at]), int(chosen[1][at])))


def margin(logits: np.ndarray) -> float:
    """How far the likeliest logit is above the second. logits: [V]."""
    if len(logits) < 2:
        return math.inf
    second, first = np.partition(logits.astype(np.float64), -2)[-2:]
    return float(first - second)


@dataclass
class Decoded:
    """Greedy tokens as the engine decodes them, with compiled or captured steps, beside the reference's.

    first: the first that differs, None where none does; margins: the two models' there (see Agreement); is_tie: whether
    the reference's margin is within what rounding may turn.
    """

    tokens: list[int]
    first: int | None = None
    margins: tuple[float, float] | None = None
    is_tie: bool = False

    def report(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "first_difference": self.first, "margins": self.margins, "near_tie": self.is_tie}


@dataclass
class Report:
    """One backend against the reference."""

    backend: str
    device: str
    dtype: str
    tolerance: float
    differences: list[Difference]
    agreement: Agreement
    decoded: Decoded | None = None
    missing: list[str] = field(default_factory=list)  # probes that the reference does not have

    @property
    def first_bad(self) -> Difference | None:
        """The first probe, in the order of computation, that is off at some position."""
        return next((one for one in self.differences if not one.peak <= self.tolerance), None)

    @property
    def decodes_otherwise(self) -> bool:
        """Whether the greedy tokens differ where no rounding explains it."""
        return self.decoded is not None and self.decoded.first is not None and not self.decoded.is_tie

    @property
    def is_within(self) -> bool:
        return self.first_bad is None and not self.decodes_otherwise

    def verdict(self) -> str:
        """One line: within the tolerance, or where it begins to be off."""
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


def tolerance_of(model: Model, is_low_bit: bool) -> float:
    """The relative error allowed to this model's activations."""
    kept = TOLERANCE[dtype_of(model)]
    return max(kept, LOW_BIT_TOLERANCE) if is_low_bit and dtype_of(model) == "float32" else kept


def compare(backend: str, device: str, dtype: str, tolerance: float, found: dict[str, np.ndarray],
            wanted: dict[str, np.ndarray], config: LlamaConfig) -> Report:
    """A run's probes (see collect) against the reference's, whose AS_RUN is not needed."""
    names = [name for name in probe_names(config) if name in found]
    wanted = {**wanted, AS_RUN: wanted["logits"]}
    shared = [name for name in names if name in wanted]
    return Report(backend, device, dtype, tolerance, [difference(name, found[name], wanted[name]) for name in shared],
                  agreement(found[AS_RUN], wanted["logits"]), missing=[name for name in names if name not in wanted])


def greedy(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`, by the engine, past end tokens."""
    engine = Engine(llm.backend, llm.model, llm.tokenizer, frozenset(), llm.engine.context)
    resolved = options.resolve({"temperature": 0.0, "max_tokens": count, "seed": 0})
    return list(engine.tokens(prompt, llm.model.make_cache(min(len(prompt) + count, engine.context)), resolved, Completion()))


def compare_decoded(llm: LLM, prompt: list[int], wanted: list[int], tolerance: float,
                    reference: Callable[[list[int]], np.ndarray]) -> Decoded:
    """Greedy tokens after `prompt` against `wanted`. reference: logits [V] of the reference after some tokens."""
    tokens = greedy(llm, prompt, len(wanted))
    first = next((i for i, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]), None)
    if first is None:
        return Decoded(tokens)
    before = prompt + wanted[:first]
    right, ours = reference(before), llm.logits(before)[-1]
    return Decoded(tokens, first, (margin(right), margin(ours)), is_tie(right, wanted[first], tokens[first], tolerance))


# The cache


@dataclass
class Way:
    """Logits (or keys and values) after some way of filling the cache, beside a cold run's."""

    name: str
    relative: float
    is_same_bits: bool
    tolerance: float

    @property
    def is_within(self) -> bool:
        return self.relative <= self.tolerance

    def report(self) -> dict[str, Any]:
        return {"way": self.name, "relative": self.relative, "same_bits": self.is_same_bits, "within": self.is_within}


def cache_ways(llm: LLM, tokens: list[int], tolerance: float) -> Iterator[Way]:
    """Every way in which a cache comes to hold `tokens`, at least 8, compared with one call over all of them."""
    backend, model, T = llm.backend, llm.model, len(tokens)
    half, room = T // 2, min(2 * T, llm.engine.context)
    numpy = backend.runtime.to_numpy

    def run(cache: Any, ids: list[int], sizes: Several[int]) -> np.ndarray:
        parts, at = [], 0
        for size in sizes:
            parts.append(numpy(model.forward([ids[at:at + size]], cache.length, cache, all_positions=True))[0])
            at += size
        return np.concatenate(parts)

    def judged(name: str, found: np.ndarray, wanted: np.ndarray) -> Way:
        worst = difference(name, found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)).peak
        return Way(name, worst, found.tobytes() == wanted.tobytes(), tolerance)

    cold = run(model.make_cache(T), tokens, [T])
    size = max(2, T // 5)
    sizes = [*[size] * (T // size), *([T % size] if T % size else [])]
    yield judged(f"in chunks of {size}", run(model.make_cache(T), tokens, sizes), cold)
    yield judged("token by token", run(model.make_cache(T), tokens, [1] * T), cold)

    cache = model.make_cache(room)
    run(cache, tokens, [T])
    cache.trim(half)
    yield judged("after trim", run(cache, tokens[half:], [T - half]), cold[half:])

    cache = model.make_cache(room)
    run(cache, tokens[:half] + tokens[half - 1::-1], [half, half])  # other rows where the right ones will be
    cache.trim(half)
    yield judged("over rows of another text", run(cache, tokens[half:], [1] * (T - half)), cold[half:])

    cache, other = model.make_cache(room), model.make_cache(room)
    run(cache, tokens[:half], [half])
    other.restore(cache.state())
    yield judged("after save and load", run(other, tokens[half:], [T - half]), cold[half:])

    def rows(state: dict[str, np.ndarray]) -> np.ndarray:  # [positions, all layers' keys and values]
        both = np.stack([state["keys"], state["values"]])[:, :, 0]  # [2, layers, G, length, D]
        return np.moveaxis(both, 3, 0).reshape(both.shape[3], -1)

    # As a conversation does it: an answer decoded, old turns dropped, the rest found in the cache or computed anew.
    resolved = options.resolve({"temperature": 0.0, "max_tokens": 4, "seed": 0})
    for name, first, second in (("decoded by steps", tokens[:half], None),
                                ("after dropping old turns", tokens, tokens[:2] + tokens[half:])):
        sequence = Sequence(Engine(backend, model, llm.tokenizer, frozenset(), min(2 * T + 8, llm.engine.context)))
        for prompt in filter(None, (first, second)):
            for _ in sequence.pieces(prompt, resolved, Completion()):
                pass
        alone = model.make_cache(len(sequence.held))
        run(alone, sequence.held, [len(sequence.held)])
        yield judged(name, rows(sequence.cache.state()), rows(alone.state()))


# Determinism


def digest(llm: LLM, tokens: list[int], decoded: int) -> dict[str, str]:
    """What a run gave, to the bit: a hash of every probe, of the logits without probes and of the greedy tokens."""
    probes = collect(llm.backend, llm.model, tokens, decoded)
    found = {name: _hash(probes[name]) for name in probe_names(llm.model.config)}
    found["decoded tokens"] = _hash(np.array(greedy(llm, tokens[:-decoded], decoded)))
    return found


def first_difference(runs: Several[dict[str, str]]) -> tuple[int, str] | None:
    """(run, name of the first operation) whose bits are not those of the first run; None where all are the same."""
    for name in runs[0]:
        for number, run in enumerate(runs):
            if run[name] != runs[0][name]:
                return number, name
    return None


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


# Perplexity


@dataclass
class Perplexity:
    """exp of the mean negative log likelihood of `count` tokens, in nats."""

    value: float
    nll: float
    count: int


def perplexity(llm: LLM, tokens: list[int], window: int, stride: int,
               progress: Callable[[int, int], None] = lambda done, total: None) -> Perplexity:
    """Of a text, by windows of `window` tokens that begin every `stride` tokens; each token is scored once, with at
    least `window - stride` tokens before it where there are so many (as in transformers' guide to perplexity).

    Raises ContextError for fewer than two tokens and for windows that do not fit.
    """
    if len(tokens) < 2:
        raise ContextError(f"the text has {len(tokens)} tokens: a perplexity needs at least 2")
    if not 2 <= window <= llm.engine.context:
        raise ContextError(f"--ctx-size {window}: a window has 2 to {llm.engine.context} tokens here")
    if not 1 <= stride < window:
        raise ContextError(f"--stride {stride}: must be 1 to {window - 1}, below the window of {window} tokens")
    total, scored = 0.0, 1  # the first token has nothing before it
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        cache = llm.model.make_cache(end - begin)
        for start in range(begin, end, CHUNK):
            stop = min(start + CHUNK, end)
            logits = llm.model.forward([tokens[start:stop]], start - begin, cache, all_positions=True)
            # logits of position i score token i + 1
            first, last = max(start, scored - 1), min(stop, end - 1)
            if first < last:
                rows = log_softmax(llm.backend.runtime.to_numpy(logits)[0, first - start:last - start])
                total -= float(rows[np.arange(last - first), tokens[first + 1:last + 1]].sum())
        scored = end
        progress(end, len(tokens))
        if end == len(tokens):
            break
    count = len(tokens) - 1
    return Perplexity(math.exp(min(total / count, 700)), total / count, count)


def free(llm: LLM) -> None:
    """Let go of a model before the next one is loaded."""
    llm.model = llm.engine.model = None
    gc.collect()
