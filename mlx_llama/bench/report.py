"""The bench's figures as text, Markdown, CSV, JSON and plots."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.system.files import write_file, writing

from .measure import BatchRow, Row

FORMATS = ("text", "md", "csv", "json")
# names of figures, as columns
FACTS = (
    "model backend device dtype cache_bits stored weights_bytes load_seconds repetitions "
    "peak_memory_bytes"
).split()
CASE = ["test", "n_prompt", "n_gen", "n_depth"]
ROW = [*CASE, "tps", "tps_min", "tps_max", "seconds"]
BATCH = ("pp tg pl n_kv t_pp speed_pp t_tg speed_tg t speed speed_tg_min speed_tg_max").split()
PROFILE = (
    "operation calls us share waiting_us nbytes bytes_per_second bandwidth_share flops_per_second"
).split()
HOST = ("rows", "step_us", "launch_us", "thread_us", "primitives")

Cells = list[tuple[str, ...]]  # a table's lines, the header first


def single(figures: dict[str, Any]) -> str:
    """Lines of text for one prompt and its answer (measure.measure)."""
    f = figures
    low, high = f["decode_tps_range"]
    memory = "peak memory           unknown on this system"
    if f["peak_memory_bytes"]:
        ratio = f["peak_memory_bytes"] / f["weights_bytes"]
        memory = (
            f"peak memory          {f['peak_memory_bytes'] / 1e9:8.2f} GB, {ratio:.2f} times the "
            "weights"
        )
    lines = [
        _title(f),
        f"load                 {f['load_seconds']:8.2f} s",
        f"prompt, {f['prompt']:5} tokens {f['prompt_tps']:8.1f} tokens/s, first token after "
        f"{f['first_token_seconds']:.2f} s",
        f"decode, {f['generate']:5} tokens {f['decode_tps']:8.1f} tokens/s ({low:.1f} to "
        f"{high:.1f} over {f['repetitions']} runs)",
        f"evaluations          {f['evaluations_per_token']:8g} per token "
        f"({f['launches_per_token']:g} launched, {f['evaluations_per_token']:g} waited for, "
        f"{f['read_bytes_per_token']:g} bytes read)",
        f"bandwidth            {f['bandwidth'] / 1e9:8.1f} GB/s measured; decoding reads "
        f"{f['bytes_per_token'] / 1e9:.2f} GB per token, {f['bandwidth_share']:.0%} of the bound",
        memory,
    ]
    return "\n".join([*lines, *_remarks(f)])


def table(f: dict[str, Any], kind: str) -> str:
    """The rows f["rows"] and their common facts, in one of FORMATS."""
    if kind == "json":
        return as_json(f)
    are_batches = "pl" in f["rows"][0]
    if kind == "csv":
        host = {"host_" + name: f["host"][name] for name in HOST} if "host" in f else {}
        columns = [*(BATCH if are_batches else ROW), *host]
        return _csv(f, columns, (row | host for row in f["rows"]))
    header, *rows = _batch_cells(f) if are_batches else _row_cells(f)
    words = 0 if are_batches else 1  # columns of words
    if kind == "text":
        summary = f"medians of {f['repetitions']} repetitions, loaded in {f['load_seconds']:.2f} s"
        return "\n".join([_title(f), *_align([header, *rows], kind, words), summary, *_remarks(f)])
    # Escape bars, which separate columns; names may come from files.
    facts = [f[name].replace("|", "\\|") for name in ("model", "backend", "stored")]
    cells = [("model", "backend", "weights", *header), *((*facts, *row) for row in rows)]
    remarks = [f"{_title(f)}; medians of {f['repetitions']} repetitions", *_remarks(f)]
    return "\n".join(
        [*_align(cells, kind, 3 + words), *("\n" + " ".join(text.split()) for text in remarks)]
    )


def profiles(f: dict[str, Any], kind: str) -> str:
    """The profiles f["profiles"] (profile.Profiled) and their common facts, in one of FORMATS."""
    if kind == "json":
        return as_json(f)
    if kind == "csv":
        case = [*CASE, "n_rows", "bandwidth"]
        lines = (
            {name: profile[name] for name in case} | line
            for profile in f["profiles"]
            for line in (*profile["operations"], *profile["between"])
        )
        return _csv(f, [*case, *PROFILE], lines)
    apart = "\n" if kind == "text" else "\n\n"
    summary = f"the repetition of the median time, of {f['repetitions']}"
    blocks = (apart.join(_profile_block(profile, kind)) for profile in f["profiles"])
    return "\n\n".join([_title(f), *blocks, apart.join([summary, *_remarks(f)])])


def as_json(figures: dict[str, Any]) -> str:
    return json.dumps(figures, indent=1)


def host_line(host: dict[str, Any]) -> str:
    """A line of text for the host's figures (profile.measure_host)."""
    of = "token" if host["rows"] == 1 else f"step of {host['rows']} rows"
    if host["host_computes"]:
        return (
            f"host                 {host['step_us']:8.0f} us per {of}: the host computes the step "
            "itself"
        )
    count = host["primitives"]
    graph = "" if count is None else f"; {count} primitives in a step's graph"
    return (
        f"host                 {host['thread_us']:8.0f} us of processor time per {of}; by the "
        f"clock {host['step_us']:.0f} to build it, {host['launch_us']:.0f} to launch it{graph}"
    )


def kernels(f: dict[str, Any]) -> str:
    """Candidate kernels for decoding as text: GB/s of each format's product with each."""

    def name(candidate: list[list[int]]) -> str:
        levels = (f"{f'L{level}' if level else 'once'} {distance}" for level, distance in candidate)
        return " + ".join(levels) or "none"

    def line(formats: str, rates: list[float]) -> tuple[str, ...]:
        return formats, *(f"{rate / 1e9:.1f}" for rate in rates)

    def describe_choice(index: int, exceptions: dict[str, int]) -> str:
        names = [name(candidate) for candidate in f["candidates"]]
        others = (f"{names[other]} for {formats}" for formats, other in exceptions.items())
        return ", ".join([names[index], *others])

    cells = [
        ("GB/s by prefetch", *map(name, f["candidates"])),
        *(line(formats, rates) for formats, rates in f["formats"].items()),
        line("all", f["mean"]),
    ]
    chosen = describe_choice(f["chosen"], f["chosen_own"])
    best = describe_choice(f["best"], f["best_own"])
    origin = "measured on it" if f["is_measured"] else "not measured on it before"
    lines = [
        f"products of one token on {f['processor']}, {f['target']}, {f['threads']} threads; "
        "prefetch: cache level, or for one use, and bytes ahead",
        *_align(cells, "text", 1),
        f"in use: {chosen} ({origin}); best here: {best}",
    ]
    return "\n".join([*lines, *([f"wrote {f['saved']}"] if f["saved"] else [])])


def _title(f: dict[str, Any]) -> str:
    cache = f", keys and values in {f['cache_bits']} bits" if f["cache_bits"] else ""
    return (
        f"{f['model']}: {f['weights_bytes'] / 1e9:.2f} GB of {f['stored']} weights on "
        f"{f['backend']} ({f['device']}, {f['dtype']}{cache})"
    )


def _remarks(f: dict[str, Any]) -> list[str]:
    host = [host_line(f["host"])] if "host" in f else []
    return [*host, *(f"note: {notice}" for notice in f["notices"])]


def _row_cells(f: dict[str, Any]) -> Cells:
    spread = "min to max" if f["repetitions"] > 1 else "one run"
    cells: Cells = [("test", "tokens/s", spread, "ms/token", "seconds")]
    for row in f["rows"]:
        range = f"{row['tps_min']:.2f} to {row['tps_max']:.2f}"
        figures = f"{row['tps']:.2f}", range, f"{1e3 / row['tps']:.3f}", f"{row['seconds']:.3f}"
        cells.append((row["test"], *figures))
    return cells


def _batch_cells(f: dict[str, Any]) -> Cells:
    """The columns of llama-batched-bench."""

    def cell(name: str, value: float) -> str:
        return str(value) if name in BATCH[:4] else f"{value:.{2 if 'speed' in name else 3}f}"

    header = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")
    return [header, *(tuple(cell(name, row[name]) for name in BATCH[:10]) for row in f["rows"])]


def _profile_block(profile: dict[str, Any], kind: str) -> list[str]:
    """A profile's title, its table and remarks."""
    is_prompt, rows = profile["n_prompt"] > 0, profile["n_rows"]
    subject = "a token" if rows == 1 else f"a step of {rows} rows"
    title = (
        f"{profile['test']}: {'a prompt' if is_prompt else subject} takes "
        f"{profile['us'] / 1e3:.2f} ms and reads "
        f"{profile['nbytes'] / 1e9:.3f} GB at {profile['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{profile['bandwidth_share']:.0%} of the measured {profile['bandwidth'] / 1e9:.1f}"
    )
    rate = ("Gflop/s", "flops_per_second") if is_prompt else ("GB/s", "bytes_per_second")
    columns = {  # header: (figure, form, unit)
        **{name: (name, ".0f", 1) for name in ("calls", "us")},
        "share": ("share", ".1%", 1),
        "waiting": ("waiting_us", ".0f", 1),
        "MB": ("nbytes", ".1f", 1e6),
        rate[0]: (rate[1], ".1f", 1e9),
        "bandwidth": ("bandwidth_share", ".0%", 1),
    }
    cells: Cells = [("operation", *columns)]
    for line in (*profile["operations"], *profile["between"]):
        figures = (
            "" if line.get(name) is None else format(line[name] / unit, form)
            for name, form, unit in columns.values()
        )
        cells.append((line["operation"], *figures))
    waiting = []
    if profile["slower_us"] is not None:
        waiting = [
            f"waiting, in the above: {profile['slower_us']:.0f} us for slower threads, "
            f"{profile['barriers_us']:.0f} us for barriers"
        ]
    return [title, "\n".join(_align(cells, kind, 1)), *waiting, profile["note"]]


def _align(cells: Cells, kind: str, words: int) -> list[str]:
    """Align a table's lines as "text" or "md": the first `words` columns to the left."""
    if kind == "md":
        rule = ("---",) * words + ("---:",) * (len(cells[0]) - words)
        return ["| " + " | ".join(row) + " |" for row in (cells[0], rule, *cells[1:])]
    widths = [max(map(len, column)) for column in zip(*cells)]
    sides = [str.ljust] * words + [str.rjust] * (len(widths) - words)
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip()
        for row in cells
    ]


def _csv(f: dict[str, Any], columns: list[str], lines: Iterable[dict[str, Any]]) -> str:
    """Lines with the common facts beside each."""
    text, notices = io.StringIO(), {"notices": "; ".join(f["notices"])}
    names = [*FACTS, *columns, "notices"]
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(f | line | notices for line in lines)
    return text.getvalue().rstrip("\n")


# Plots

COLOR = "#2a6f97"
ENDINGS = (".png", ".svg", ".pdf")
POINTS = 40  # at most, along the axis; fewer tokens per point are noisy


def check_plot(file: str) -> None:
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
