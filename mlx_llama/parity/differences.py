"""Differences between arrays of two runs, and between the tokens they choose, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOP = 5  # number of most likely tokens to compare


@dataclass
class Difference:
    """A probe of a run compared with the reference's."""

    name: str
    max_abs: float
    mean_abs: float
    relative: float  # norm of the difference over the reference's norm
    cosine: float
    positions: np.ndarray  # relative error at each position, float64 [T]
    worst: int  # position of the largest error

    @property
    def peak(self) -> float:
        """Relative error of the worst position, so that a single wrong row counts."""
        return float(self.positions[self.worst])

    def report(self) -> dict[str, Any]:
        errors = {
            name: getattr(self, name) for name in ("max_abs", "mean_abs", "relative", "cosine")
        }
        worst = {"worst_position": self.worst, "worst_relative": self.peak}
        positions = [round(float(value), 10) for value in self.positions]
        return {"probe": self.name, **errors, **worst, "positions": positions}


def measure_difference(name: str, actual: np.ndarray, expected: np.ndarray) -> Difference:
    """Compare float32 [T, width] arrays. NaN and infinity count as an infinite error."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    apart = np.abs(actual - expected)
    apart[~np.isfinite(apart)] = math.inf
    norms = np.linalg.norm(expected, axis=1)
    positions = relative_errors(apart, clamp_norms(norms))
    whole, both = np.linalg.norm(norms), np.linalg.norm(actual) * np.linalg.norm(expected)
    cosine = (
        float(np.vdot(actual, expected) / both) if 0 < both < math.inf else float(not apart.any())
    )
    relative = float(np.linalg.norm(apart) / whole) if whole else float(apart.any())
    largest, mean, worst = float(apart.max()), float(apart.mean()), int(positions.argmax())
    return Difference(name, largest, mean, relative, cosine, positions, worst)


def clamp_norms(norms: np.ndarray) -> np.ndarray:
    """Clamp norms [T] to at least 1e-3 of their mean: rows close to 0 are all rounding errors."""
    return np.maximum(norms, 1e-3 * math.sqrt(np.mean(norms**2)) + 1e-30)


def relative_errors(apart: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Relative error [T] of each row of differences `apart` [T, n], given the rows' norms [T]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        errors = np.linalg.norm(apart, axis=1) / norms
    return np.where(np.isnan(errors), math.inf, errors)


@dataclass
class Agreement:
    """Choices of a run's logits compared with the reference's."""

    # Kullback-Leibler divergence from the reference's distribution over positions, nats
    kl_mean: float
    kl_max: float
    top5: float  # share of the reference's five most likely tokens that are among the run's
    first_difference: int | None  # first position whose most likely token differs
    # there, most likely logit minus the second: of the reference, of the run
    margins: tuple[float, float] | None
    choices: tuple[int, int] | None  # there, the two tokens


def measure_agreement(actual: np.ndarray, expected: np.ndarray) -> Agreement:
    """Compare logits, float32 [T, V]."""
    ours, theirs = log_softmax(actual), log_softmax(expected)
    kl = np.maximum((np.exp(theirs) * (theirs - ours)).sum(axis=-1), 0)
    kl = np.where(np.isnan(kl), math.inf, kl)
    k = min(TOP, expected.shape[1])
    tops = [np.argsort(-logits, axis=-1, kind="stable")[:, :k] for logits in (expected, actual)]
    shared = np.mean([len(set(a) & set(b)) / k for a, b in zip(tops[0], tops[1])])
    chosen = [logits.argmax(axis=-1) for logits in (expected, actual)]
    at = margins = choices = None
    if len(differ := np.flatnonzero(chosen[0] != chosen[1])):
        at = int(differ[0])
        margins = margin(expected[at]), margin(actual[at])
        choices = int(chosen[0][at]), int(chosen[1][at])
    return Agreement(float(kl.mean()), float(kl.max()), float(shared), at, margins, choices)


def first_other(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs."""
    return next((i for i, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]), None)


def values_by_position(state: dict[str, np.ndarray]) -> np.ndarray:
    """Keys and values of all layers of a cache's state, by position: [T, n]."""
    parts = [state[name] for name in state if name.startswith(("keys", "values"))]
    rows = [np.moveaxis(part, 2, 0).reshape(part.shape[2], -1) for part in parts]
    return np.concatenate(rows, axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log softmax over the last axis, in float64."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def margin(logits: np.ndarray) -> float:
    """Largest logit minus the second largest. logits: [V]."""
    if len(logits) < 2:
        return math.inf
    second, first = np.partition(logits.astype(np.float64), -2)[-2:]
    return float(first - second)


def is_tie(logits: np.ndarray, first: int, second: int, tolerance: float) -> bool:
    """True if rounding may swap two tokens. logits: [V]; tolerance: error over spread."""
    logits = logits.astype(np.float64)
    spread = math.sqrt(np.mean(logits**2))
    return bool(abs(logits[first] - logits[second]) <= 2 * tolerance * spread)
