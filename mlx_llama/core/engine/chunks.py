"""The size of a prompt's chunks while other requests wait for their next token."""

from __future__ import annotations

TILE = 32  # positions: fewer cost the CPU's kernels as much
STEPS = 4  # a tick with a chunk takes at most about as long as so many steps
WEIGHT = 0.25  # of a new measurement in an average


class Chunks:
    """Measures a model's pace, and chooses the size of the next chunk by it.

    For models whose bits do not depend on chunks: others would answer differently from run to run.
    """

    def __init__(self, maximum: int):
        self.maximum = maximum
        self.step_seconds: float | None = None  # averages
        self.token_seconds: float | None = None

    def note(self, seconds: float, tokens: int, is_stepping: bool) -> None:
        """Learn from a tick. tokens: of prompts; is_stepping: it computed a step of others as
        well.
        """
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
