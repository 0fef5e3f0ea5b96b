"""Profile of a decoded token or a prompt by operation: time, bytes, share of the bandwidth, and the
time lost between operations.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_llama.core import options
from mlx_llama.core.backends.decoding import decode, prefill
from mlx_llama.core.backends.interface import Model
from mlx_llama.core.backends.profile import ATTENTION, Profile
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request

from .measure import Advance, Case, Loaded, random_tokens

SAMPLING, HOST = "sampling", "host: loop, bookkeeping"


@dataclass(frozen=True)
class Profiled:
    case: Case
    rows: int
    count: int  # steps, or prompts
    seconds: float  # for all of them
    bandwidth: float  # bytes per second, measured before and after
    profile: Profile
    kv_nbytes: int | None  # keys and values that attention read; None for a prompt

    def figures(self) -> dict[str, Any]:
        """Figures by name: microseconds, bytes per second, shares of the time."""
        operations, slower = [], self.profile.slower
        for name, spent in self.profile.operations.items():
            nbytes = self.kv_nbytes if name == ATTENTION else spent.nbytes
            line = self._line(name, spent.seconds) | {"calls": spent.calls / self.count}
            line["waiting_us"] = None if slower is None else spent.waiting / self.count * 1e6
            read, rate = (nbytes / self.count, nbytes / spent.seconds) if nbytes else (None, None)
            line |= {"nbytes": read, "bytes_per_second": rate}
            line["bandwidth_share"] = rate / self.bandwidth if nbytes else None
            line["flops_per_second"] = spent.flops / spent.seconds if spent.flops else None
            operations.append(line)
        nbytes = sum(operation["nbytes"] or 0 for operation in operations)
        rate = nbytes * self.count / self.seconds
        spent = self.profile.operations.values()
        waiting = sum(operation.waiting for operation in spent)
        lost = [self._line(reason, seconds) for reason, seconds in self.profile.lost.items()]
        known = sum(operation.seconds for operation in spent) + sum(self.profile.lost.values())
        lost.append(self._line(HOST, self.seconds - known))
        figures = self.case.facts() | {"n_rows": self.rows, "us": self.seconds / self.count * 1e6}
        figures |= {"bandwidth": self.bandwidth, "nbytes": nbytes, "bytes_per_second": rate}
        figures |= {"bandwidth_share": rate / self.bandwidth, "note": self.profile.note}
        waits = (None, None) if slower is None else (slower, waiting - slower)
        for name, seconds in zip(("slower_us", "barriers_us"), waits):
            figures[name] = None if seconds is None else seconds / self.count * 1e6
        return figures | {"operations": operations, "between": lost}

    def _line(self, name: str, seconds: float) -> dict[str, Any]:
        us = seconds / self.count * 1e6
        return {"operation": name, "us": us, "share": seconds / self.seconds}


def measure_profiles(
    loaded: Loaded,
    cases: list[Case],
    row_counts: list[int],
    repetitions: int,
    advance: Advance = lambda name: None,
) -> list[Profiled]:
    """Profile each case with each number of rows, all at the case's depth; calls advance(name)
    before each. Keeps the repetition of the median time; an extra first one is dropped.

    Raises ContextError without room for all rows, BackendError where the model has no profile.
    """
    probe, profiled = loaded.bandwidth_probe(), []
    for case in cases:
        for rows in row_counts:
            advance(case.name)
            cache = loaded.model.make_cache(case.positions, rows=rows)
            cache.check_memory(dict.fromkeys(range(rows), case.positions))
            runs = [_run(loaded, cache, case, rows, probe) for _ in range(1 + repetitions)][1:]
            profiled.append(sorted(runs, key=lambda run: run.seconds)[len(runs) // 2])
    return profiled


def _run(loaded: Loaded, cache: Any, case: Case, rows: int, probe: Callable[[], float]) -> Profiled:
    """Profile a case once, and leave the cache at its depth."""
    tokens = random_tokens(case.positions + 1, loaded.checkpoint.config.vocab_size)
    for row in range(rows):
        cache.trim(min(case.depth, cache.lengths[row]), row)
        if rest := tokens[cache.lengths[row] : case.depth]:
            prefill(loaded.backend, loaded.model, cache, {row: rest})
    before, sampled, make = probe(), [0.0], loaded.backend.arrays.SamplingBatch
    clocked = SimpleNamespace(
        SamplingBatch=lambda options, device: _ClockedSampling(make(options, device), sampled)
    )
    backend = dataclasses.replace(loaded.backend, arrays=clocked)
    with loaded.model.profile() as profile:
        started = time.perf_counter()
        if case.kind == "pp":
            prefill(backend, loaded.model, cache, {0: tokens[case.depth : case.positions]})
        else:
            for _ in decode(backend, loaded.model, cache, [tokens[case.depth]] * rows, case.length):
                pass
        seconds = time.perf_counter() - started
    if sampled[0] and not backend.runs_ahead:  # on an asynchronous device the call only queues work
        profile.lost[SAMPLING] = sampled[0]
    for row in range(rows):
        cache.trim(case.depth, row)
    count = 1 if case.kind == "pp" else case.length
    kv_nbytes = None
    if case.kind == "tg":
        kv_nbytes = rows * sum(_kv_nbytes(loaded, cache, case.depth + n + 1) for n in range(count))
    bandwidth = statistics.harmonic_mean([before, probe()])
    return Profiled(case, rows, count, seconds, bandwidth, profile, kv_nbytes)


def _kv_nbytes(loaded: Loaded, cache: Any, length: int) -> int:
    """Bytes of keys and values that a token at the end of `length` positions reads."""
    config, numbers = loaded.checkpoint.config, 0
    for mixer in (layer.attention for layer in config.layers if layer.attention):
        positions = min(length, mixer.window.size if mixer.window else length)
        numbers += positions * mixer.key_value_heads * mixer.head_dim
    stored = sum(mixer.key_value_heads * mixer.head_dim for mixer in config.attentions)
    return numbers * cache.position_nbytes // max(1, stored)


class _ClockedSampling:
    """Sampling that adds its seconds to `spent[0]`."""

    def __init__(self, sampling: Any, spent: list[float]):
        self._sampling, self._spent = sampling, spent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampling, name)

    def __call__(self, logits: Any, positions: Any, recent: Any, masks: Any, words: Any) -> Any:
        started = time.perf_counter()
        result = self._sampling(logits, positions, recent, masks, words)
        self._spent[0] += time.perf_counter() - started
        return result


# The host's time per decoded token, which no faster device reduces. The host builds a step's graph
# and launches it; the device idles unless the host is faster. The measurement runs the real decode
# loop, with clocks around the two calls. Only running ahead is off, since waiting for a full queue
# would count as work.

SKIPPED = 4  # first steps of all rows, during which steps are traced and storage grows
PROMPT = 2
TOKENS = 64  # measured tokens


class Clocked:
    """A model that records the host's time of the last step of all rows, for its launch."""

    def __init__(self, model: Model, rows: int):
        self._model = model
        self._rows = rows
        # seconds: wall time, processor time of this thread
        self.recorded: tuple[float, float] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, tokens: Any, index_pos: Any, cache: Any, sampling: Any, **named: Any) -> Any:
        started = time.perf_counter(), time.thread_time()
        result = self._model.step(tokens, index_pos, cache, sampling, **named)
        spent = time.perf_counter() - started[0], time.thread_time() - started[1]
        self.recorded = spent if tuple(np.shape(tokens)) == (self._rows, 1) else None
        return result


def measure_host(loaded: Loaded, context: int, rows: int = 1) -> dict[str, Any]:
    """Medians over the steps of `rows` rows after the first few, in microseconds. context:
    positions available.

    step_us, launch_us: wall time of Model.step and of the launch. thread_us: processor time of the
    calling thread in both, without waiting (on MLX's CPU device a launch waits for a place in the
    queue); None where the host computes the step itself, on several threads. host_computes: True
    there. primitives: operations in the graph of one step, None on a backend without graphs.
    """
    backend, model = loaded.backend, Clocked(loaded.model, rows)
    steps: list[tuple[float, float, float, float]] = []  # seconds of the step and of its launch
    counts: list[int | None] = []

    def launch(arrays: Sequence[Any]) -> None:
        if model.recorded is None:
            backend.runtime.launch(arrays)
            return
        recorded, model.recorded = model.recorded, None
        if len(steps) == SKIPPED:
            counts.append(backend.runtime.primitives(arrays))
        started = time.perf_counter(), time.thread_time()
        backend.runtime.launch(arrays)
        steps.append((*recorded, time.perf_counter() - started[0], time.thread_time() - started[1]))

    changed = {"launch": launch, "runs_ahead": lambda device: False}
    waiting = SimpleNamespace(**vars(backend.runtime) | changed)
    # Rows join one after the other, and the first token of each comes with its prompt.
    total = rows + SKIPPED + max(1, min(TOKENS, context - PROMPT - SKIPPED - rows))
    clocked = dataclasses.replace(backend, runtime=waiting)
    loop = Loop(clocked, model, None, frozenset(), PROMPT + total, max_rows=rows)
    resolved = options.resolve({"max_tokens": total, "temperature": 0.0})
    tokens = random_tokens(PROMPT * rows, loaded.checkpoint.config.vocab_size)
    prompts = (tokens[PROMPT * row : PROMPT * (row + 1)] for row in range(rows))
    requests = (Request(prompt, resolved, eos=frozenset(), wants_text=False) for prompt in prompts)
    for handle in list(map(loop.submit, requests)):
        for _ in handle.tokens():
            pass
    step, step_thread, launched, launched_thread = zip(*steps[SKIPPED : SKIPPED + TOKENS])
    is_graph = counts[0] is not None
    computes = not is_graph and not backend.runs_ahead
    both = [a + b for a, b in zip(step_thread, launched_thread)]
    clock = {"step_us": statistics.median(step), "launch_us": statistics.median(launched)}
    figures = {"rows": rows, "tokens": len(step), **{name: s * 1e6 for name, s in clock.items()}}
    figures["thread_us"] = None if computes else statistics.median(both) * 1e6
    return figures | {"host_computes": computes, "primitives": counts[0]}
