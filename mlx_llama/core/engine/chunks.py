"""The size of a prompt's chunks while other requests wait for their next token."""

from __future__ import annotations

TILE = 32  # positions; the CPU's kernels take as long for fewer
STEPS = 4  # duration of a tick with a chunk, in steps, at most
WEIGHT = 0.25  # of a new measurement in the running average


class Chunks:
    """Chooses chunks by the measured speed of a model whose bits do not depend on them."""

    def __init__(self, maximum: int):
        self.maximum = maximum
        self.step_seconds: float | None = None  # averages
        self.token_seconds: float | None = None

    def note(self, seconds: float, tokens: int, is_stepping: bool) -> None:
        """Account for a tick. tokens: of prompts. is_stepping: it also computed a step."""
        if tokens == 0:
            self.step_seconds = _average(self.step_seconds, seconds)
        elif not is_stepping or self.step_seconds is not None:
            step = self.step_seconds if is_stepping and self.step_seconds else 0.0
            self.token_seconds = _average(self.token_seconds, max(seconds - step, 0.0) / tokens)

    def choose(self) -> int:
        """Positions of the next chunk, a multiple of TILE."""
        if not self.step_seconds or not self.token_seconds:
            return TILE
        fitting = int((STEPS - 1) * self.step_seconds / self.token_seconds)
        return max(TILE, min(self.maximum, fitting) // TILE * TILE)


def _average(known: float | None, new: float) -> float:
    return new if known is None else known + WEIGHT * (new - known)
