"""Differences between two runs' arrays, and between the tokens that their logits choose. All in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

TOP = 5  # likeliest tokens whose agreement is counted


@dataclass
class Difference:
    """One probe of a run against the reference's.

    max_abs, mean_abs: of the differences. relative: their norm over the reference's. cosine: of the two arrays.
    positions: relative error at each position, float64 [T]. worst: the position of the largest.
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
        """Relative error of the worst position: one wrong row counts among many right ones."""
        return float(self.positions[self.worst])

    def report(self) -> dict[str, Any]:
        return {"probe": self.name, "max_abs": self.max_abs, "mean_abs": self.mean_abs, "relative": self.relative,
                "cosine": self.cosine, "worst_position": self.worst, "worst_relative": self.peak,
                "positions": [round(float(value), 10) for value in self.positions]}


def measure_difference(name: str, found: np.ndarray, wanted: np.ndarray) -> Difference:
    """found, wanted: float32 [T, width]. NaN and infinity count as an infinite error."""
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    apart = np.abs(found - wanted)
    apart[~np.isfinite(apart)] = math.inf
    norms = np.linalg.norm(wanted, axis=1)
    positions = relative_errors(apart, clamp_norms(norms))
    whole, both = np.linalg.norm(norms), np.linalg.norm(found) * np.linalg.norm(wanted)
    cosine = float(np.vdot(found, wanted) / both) if 0 < both < math.inf else float(not apart.any())
    relative = float(np.linalg.norm(apart) / whole) if whole else float(apart.any())
    return Difference(name, float(apart.max()), float(apart.mean()), relative, cosine, positions, int(positions.argmax()))


def clamp_norms(norms: np.ndarray) -> np.ndarray:
    """Norms of rows [T], as divisors of errors: at least 1e-3 of their mean, since rounding fills rows that are almost 0."""
    return np.maximum(norms, 1e-3 * math.sqrt(np.mean(norms**2)) + 1e-30)


def relative_errors(apart: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Norm of each row of differences over the row's norm. apart: [T, n]; norms: [T]; returns [T]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        errors = np.linalg.norm(apart, axis=1) / norms
    return np.where(np.isnan(errors), math.inf, errors)


@dataclass
class Agreement:
    """The choices of a run's logits beside the reference's.

    kl_mean, kl_max: Kullback-Leibler divergence of the run's distribution from the reference's over positions, nats.
    top: share of the reference's TOP likeliest tokens that are among the run's. first: the first position whose
    likeliest token differs, None if none does. margins: there, the likeliest logit minus the second, in the reference and
    in the run. choices: the two tokens there.
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


def measure_agreement(found: np.ndarray, wanted: np.ndarray) -> Agreement:
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


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [..., V]."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def margin(logits: np.ndarray) -> float:
    """The likeliest logit minus the second. logits: [V]."""
    if len(logits) < 2:
        return math.inf
    second, first = np.partition(logits.astype(np.float64), -2)[-2:]
    return float(first - second)


def is_tie(logits: np.ndarray, first: int, second: int, tolerance: float) -> bool:
    """True if rounding may swap two tokens. logits: [V], each off by at most `tolerance` of their spread."""
    logits = logits.astype(np.float64)
    return bool(abs(logits[first] - logits[second]) <= 2 * tolerance * math.sqrt(np.mean(logits**2)))
