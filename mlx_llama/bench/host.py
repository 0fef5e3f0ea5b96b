"""The host's time per decoded token, which no faster device reduces.

The host builds a token's graph and launches it; the device waits unless that is faster than its computing. The decode
loop is measured itself, with clocks around the two calls. Only running ahead is off, since waiting for a full queue
would count as work.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from types import SimpleNamespace
from typing import Any

from mlx_llama.core.backends.interface import Model
from mlx_llama.core.generation import options
from mlx_llama.core.generation.completion import Completion
from mlx_llama.core.generation.engine import Engine

from .measure import Loaded, random_tokens

SKIPPED = 4  # first tokens, during which steps are traced and storage grows
PROMPT = 2
TOKENS = 64  # measured tokens


class Clocked:
    """A model that records the host's time of each step."""

    def __init__(self, model: Model):
        self._model = model
        self.steps: list[tuple[float, float]] = []  # seconds: wall, this thread's processor time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, *arguments: Any) -> Any:
        started = time.perf_counter(), time.thread_time()
        result = self._model.step(*arguments)
        self.steps.append((time.perf_counter() - started[0], time.thread_time() - started[1]))
        return result


def measure_host(loaded: Loaded, context: int) -> dict[str, Any]:
    """Medians over the tokens after the first few, in microseconds. context: positions available.

    step_us, launch_us: wall time of Model.step and of the launch. thread_us: processor time of the calling thread in
    both, without waiting (on MLX's CPU device a launch waits for a place in the queue); None where the host computes
    the step itself, on several threads. host_computes: True there. primitives: operations in the graph of one step,
    None on a backend without graphs.
    """
    backend, model = loaded.backend, Clocked(loaded.model)
    launches: list[tuple[float, float]] = []
    counts: list[int | None] = []

    def launch(*arrays: Any) -> None:
        if len(model.steps) == SKIPPED:
            counts.append(backend.runtime.primitives(*arrays))
        started = time.perf_counter(), time.thread_time()
        backend.launch(*arrays)
        launches.append((time.perf_counter() - started[0], time.thread_time() - started[1]))

    waiting = SimpleNamespace(**vars(backend.runtime) | {"launch": launch, "runs_ahead": lambda device: False})
    total = SKIPPED + max(1, min(TOKENS, context - PROMPT - SKIPPED))
    engine = Engine(dataclasses.replace(backend, runtime=waiting), model, None, frozenset(), PROMPT + total)
    resolved = options.resolve({"max_tokens": total, "temperature": 0.0})
    prompt = random_tokens(PROMPT, loaded.checkpoint.config.vocab_size)
    for _ in engine.tokens(prompt, model.make_cache(PROMPT + total), resolved, Completion()):
        pass
    (step, step_thread), (launched, launched_thread) = (
        zip(*clocks[SKIPPED:]) for clocks in (model.steps, launches[-len(model.steps):]))
    is_graph = counts[0] is not None
    computes = not is_graph and not backend.runs_ahead
    micro = lambda values: statistics.median(values) * 1e6  # noqa: E731
    return {
        "tokens": len(step), "step_us": micro(step), "launch_us": micro(launched),
        "thread_us": None if computes else micro([a + b for a, b in zip(step_thread, launched_thread)]),
        "host_computes": computes, "primitives": counts[0],
    }
