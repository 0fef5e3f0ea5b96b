"""The host's time per decoded token, which no faster device reduces.

The host builds a step's graph and launches it; the device idles unless the host is faster. The
measurement runs the real decode loop, with clocks around the two calls. Only running ahead is off,
since waiting for a full queue would count as work.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_llama.core import options
from mlx_llama.core.backends.interface import Model
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request

from .measure import Loaded, random_tokens

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
