"""Plots: decode time per token over the tokens in the cache, and throughput over the rows."""

from __future__ import annotations

import importlib.util
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.system.files import write_file, writing

from .measure import BatchRow, Row

COLOR = "#2a6f97"
ENDINGS = (".png", ".svg", ".pdf")
POINTS = 40  # at most, along the axis; fewer tokens per point are noisy


def check(file: str) -> None:
    """Raise OptionsError without matplotlib, for a wrong suffix, or for a missing folder."""
    path = Path(os.path.expanduser(file))
    if path.suffix.lower() not in ENDINGS:
        *others, last = ENDINGS
        raise OptionsError(f"--plot {file}: the name must end in {', '.join(others)} or {last}")
    if not path.parent.is_dir():
        raise OptionsError(f"--plot {file}: there is no folder {path.parent}: make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionsError(f"--plot {file}: cannot be written: choose another name")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionsError(
            "--plot needs the package 'matplotlib', which is not installed: pip install matplotlib"
        )


def curve(rows: list[Row]) -> np.ndarray:
    """Points [points, 4]: tokens in the cache; ms per token: 10th percentile, median, 90th."""
    rows = [row for row in rows if row.case.kind == "tg"]
    span = max(row.case.positions for row in rows) - min(row.case.depth for row in rows)
    points = []
    for row in rows:
        count = max(1, round(POINTS * row.case.length / span))
        milliseconds = 1e3 * np.array(row.per_token)  # [repetitions, tokens]
        positions = row.case.depth + np.arange(row.case.length)
        for chosen in np.array_split(np.arange(row.case.length), min(count, row.case.length)):
            percentiles = np.percentile(milliseconds[:, chosen], (10, 50, 90))
            points.append((positions[chosen].mean(), *percentiles))
    return np.array(sorted(points))


def draw(figures: dict[str, Any], rows: list[Row], file: str) -> None:
    """Plot decode times to `file`, 1200 by 750 pixels as .png. Raises OptionsError."""
    from matplotlib.ticker import MaxNLocator

    positions, low, median, high = curve(rows).T
    figure, axes = _canvas(figures)
    area = dict(color=COLOR, alpha=0.18, linewidth=0)
    axes.fill_between(positions, low, high, label="10th to 90th percentile", **area)
    line = dict(color=COLOR, linewidth=1.8, marker="o", markersize=3.5)
    axes.plot(positions, median, label="median", **line)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.15 * high.max())
    axes.set_xlabel("context: tokens already in the cache")
    axes.set_ylabel("decode time per token (ms)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right", frameon=False)
    _save(figure, file)


def draw_throughput(figures: dict[str, Any], rows: list[BatchRow], file: str) -> None:
    """Plot decoded tokens per second of all rows together over their number. As `draw`."""
    figure, axes = _canvas(figures)
    series: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row.case.rows):
        series.setdefault((row.case.prompt, row.case.generate), []).append(row.figures())
    for (prompt, generate), points in series.items():
        counts, slowest, speeds, fastest = (
            np.array([point[name] for point in points])
            for name in ("pl", "speed_tg_min", "speed_tg", "speed_tg_max")
        )
        label, color = f"{generate} tokens after {prompt}", COLOR if len(series) == 1 else None
        line = dict(linewidth=1.8, marker="o", markersize=4)
        [drawn] = axes.plot(counts, speeds, color=color, label=label, **line)
        color = drawn.get_color()
        axes.fill_between(counts, slowest, fastest, color=color, alpha=0.18, linewidth=0)
        line = dict(linewidth=1.2, linestyle=":", marker="o", markersize=2.5)
        axes.plot(counts, speeds / counts, color=color, label=f"{label}, each row", **line)
    ticks = sorted({row.case.rows for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("decoded tokens per second, all rows")
    axes.legend(loc="best", frameon=False)
    _save(figure, file)


def _canvas(figures: dict[str, Any]) -> tuple[Any, Any]:
    """A figure and its axes, with the run as title."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    # Escape dollar signs, which begin a formula.
    axes.set_title(
        f"{os.path.basename(figures['model'])}, {figures['stored']} weights\n{figures['backend']}: "
        f"{figures['device']}, {figures['dtype']}".replace("$", r"\$"),
        fontsize=11,
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, file: str) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(file).suffix[1:].lower())
    with writing(f"--plot {file}", OptionsError):
        write_file(os.path.expanduser(file), picture.getvalue())
