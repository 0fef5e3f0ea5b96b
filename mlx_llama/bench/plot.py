"""The bench's picture: decode time per token over the tokens in the cache."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import OptionsError

from .measure import Row

ENDINGS = (".png", ".svg", ".pdf")
POINTS = 40  # at most, along the axis; with fewer tokens per point the machine's noise shows


def check(file: str) -> None:
    """Raises OptionsError without matplotlib, for another ending of `file`, and for a folder that is missing."""
    path = Path(os.path.expanduser(file))
    if path.suffix.lower() not in ENDINGS:
        raise OptionsError(f"--plot {file}: the name must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if not path.parent.is_dir():
        raise OptionsError(f"--plot {file}: there is no folder {path.parent}: make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionsError(f"--plot {file}: cannot be written: choose another name")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionsError("--plot needs the package 'matplotlib', which is not installed: pip install matplotlib")


def curve(rows: list[Row]) -> np.ndarray:
    """Points [points, 4] of the decode rows: tokens in the cache; milliseconds per token: 10th percentile, median, 90th."""
    rows = [row for row in rows if row.case.kind == "tg"]
    span = max(row.case.positions for row in rows) - min(row.case.depth for row in rows)
    points = []
    for row in rows:
        count = max(1, round(POINTS * row.case.length / span))
        milliseconds = 1e3 * np.array(row.per_token)  # [repetitions, tokens]
        positions = row.case.depth + np.arange(row.case.length)
        for chosen in np.array_split(np.arange(row.case.length), min(count, row.case.length)):
            points.append((positions[chosen].mean(), *np.percentile(milliseconds[:, chosen], (10, 50, 90))))
    return np.array(sorted(points))


def draw(figures: dict[str, Any], rows: list[Row], file: str) -> None:
    """Write the picture to `file`, a .png of 1200 by 750 pixels. Raises OptionsError if that fails."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import MaxNLocator

    positions, low, median, high = curve(rows).T
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(positions, low, high, color="#2a6f97", alpha=0.18, linewidth=0, label="10th to 90th percentile")
    axes.plot(positions, median, color="#2a6f97", linewidth=1.8, marker="o", markersize=3.5, label="median")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.15 * high.max())
    axes.set_xlabel("context: tokens already in the cache")
    axes.set_ylabel("decode time per token (ms)")
    # Escape dollar signs, which begin a formula.
    axes.set_title(f"{os.path.basename(figures['model'])}, {figures['stored']} weights\n{figures['backend']}: "
                   f"{figures['device']}, {figures['dtype']}".replace("$", r"\$"), fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    try:
        figure.savefig(os.path.expanduser(file))
    except OSError as error:
        raise OptionsError(f"--plot {file}: cannot be written: {error.strerror}") from None
