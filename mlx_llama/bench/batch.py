"""Rows decoded together: llama-batched-bench's measurement.

B prompts of PP tokens are processed, then TG tokens of each are decoded, one step for all rows. A
step reads every weight once for all of them, so the tokens per second of all rows grow with B until
arithmetic bounds them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.proofs.decoding import decode, prefill

from .measure import Loaded, random_tokens


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together."""

    prompt: int  # tokens of each prompt
    generate: int  # tokens decoded after each prompt
    rows: int

    @property
    def name(self) -> str:
        return f"{self.rows} rows of {self.prompt} + {self.generate}"

    @property
    def positions(self) -> int:
        """Positions of one row at the end."""
        return self.prompt + self.generate


@dataclass(frozen=True)
class BatchRow:
    """A batch and its repetitions."""

    case: Batch
    seconds: list[tuple[float, float]]  # of all prompts and of all decoded tokens, per repetition

    def figures(self) -> dict[str, Any]:
        """Medians under the names of llama-batched-bench's JSON; speeds in tokens per second of all
        rows.
        """
        case, n_kv = self.case, self.case.rows * self.case.positions
        t_pp, t_tg = map(statistics.median, zip(*self.seconds))
        t = statistics.median(map(sum, self.seconds))
        speeds = [case.rows * case.generate / seconds for _, seconds in self.seconds]
        return {
            "pp": case.prompt,
            "tg": case.generate,
            "pl": case.rows,
            "n_kv": n_kv,
            "t_pp": t_pp,
            "speed_pp": case.rows * case.prompt / t_pp,
            "t_tg": t_tg,
            "speed_tg": case.rows * case.generate / t_tg,
            "t": t,
            "speed": n_kv / t,
            "speed_tg_min": min(speeds),
            "speed_tg_max": max(speeds),
        }


def measure_batches(
    loaded: Loaded,
    cases: list[Batch],
    repetitions: int,
    advance: Callable[[str], None] = lambda name: None,
) -> list[BatchRow]:
    """Measure each case, in order; calls advance(name) before each. An untimed first run allocates
    its storage.

    Raises ContextError where memory has no room for all rows.
    """
    measured, vocabulary = [], loaded.checkpoint.config.vocab_size
    for case in cases:
        advance(case.name)
        cache = loaded.model.make_cache(case.positions, rows=case.rows)
        # fail before minutes of prompts
        cache.check_memory(dict.fromkeys(range(case.rows), case.positions))
        tokens = random_tokens(case.rows * case.prompt, vocabulary)
        prompts = {
            row: tokens[row * case.prompt : (row + 1) * case.prompt] for row in range(case.rows)
        }
        runs = []
        for _ in range(1 + repetitions):
            for row in range(case.rows):
                cache.trim(0, row)
            runs.append(_run(loaded, cache, case, prompts))
        measured.append(BatchRow(case, runs[1:]))
    return measured


def _run(
    loaded: Loaded, cache: Any, case: Batch, prompts: dict[int, list[int]]
) -> tuple[float, float]:
    """Run a batch; returns the seconds of the prompts and of the decoded tokens."""
    started = time.perf_counter()
    tokens = prefill(loaded.backend, loaded.model, cache, prompts)
    between = time.perf_counter()
    for _ in decode(loaded.backend, loaded.model, cache, tokens, case.generate):
        pass
    return between - started, time.perf_counter() - between
