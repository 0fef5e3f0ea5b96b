"""Findings of python -m mlx_llama.parity as tables, as a page and as JSON."""

from __future__ import annotations

import html
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.system.files import write_file, writing
from mlx_llama.parity.differences import TOP, Difference
from mlx_llama.parity.probes import IN_LAYER, LAST, Report

COLUMNS = 64  # maximum number of columns of a picture; more positions share them
Row = dict[str, Any]
Remark = Callable[[Row], str]
_FIGURES = ("max abs", "mean abs", "relative", "worst position", "cosine")


def group_by_kind(report: Report) -> dict[str, list[Difference]]:
    """Probes of all layers by kind, such as "attention", in the order of computation."""
    groups: dict[str, list[Difference]] = {}
    for difference in report.differences:
        groups.setdefault(difference.name.split(".")[-1], []).append(difference)
    order = ["embedding", *IN_LAYER, *LAST]
    return {name: groups[name] for name in order if name in groups}


def show(facts: dict[str, Any], reports: list[Report]) -> None:
    """Print a table for each backend: a line per kind of probe, with the worst of its layers."""
    from rich.table import Table

    console = make_console()
    console.print(
        f"{facts['model']}: {len(facts['tokens'])} tokens, the last {facts['decoded']} one by one, "
        f"against {facts['reference']}",
        soft_wrap=True,
    )
    for report in reports:
        title = f"{report.backend} ({report.device}, {report.dtype})"
        table = Table(title=title, title_justify="left")
        for name in ("probe", *_FIGURES, "where"):
            table.add_column(name, justify="left" if name in ("probe", "where") else "right")
        for kind, differences in group_by_kind(report).items():
            worst = max(differences, key=lambda difference: difference.peak)
            mark = "" if worst.peak <= report.tolerance else " !"
            table.add_row(
                kind + mark,
                f"{max(difference.max_abs for difference in differences):.2g}",
                f"{np.mean([difference.mean_abs for difference in differences]):.2g}",
                f"{max(difference.relative for difference in differences):.2g}",
                f"{worst.peak:.2g}",
                f"{min(difference.cosine for difference in differences):.8f}",
                f"{worst.name} at {worst.worst}",
            )
        console.print(table)
        for line in (*logits_lines(report), f"[bold]{report.verdict()}[/bold]"):
            console.print(line, soft_wrap=True)
        if report.missing:
            kinds = ", ".join(dict.fromkeys(name.split(".")[-1] for name in report.missing))
            console.print(
                f"not in the reference: {len(report.missing)} probes ({kinds})", soft_wrap=True
            )


def logits_lines(report: Report) -> list[str]:
    """Findings about the logits and the decoded tokens, one per line."""
    a, lines = report.agreement, []
    lines.append(
        f"logits: KL divergence {a.kl_mean:.2g} nats on average, {a.kl_max:.2g} at most; top-{TOP} "
        f"agreement {a.top5:.1%}"
    )
    if a.first_difference is None:
        lines.append("the most likely token is the same at every position")
    else:
        lines.append(
            f"the most likely token first differs at position {a.first_difference}: {a.choices[0]} (margin "
            f"{a.margins[0]:.3g}) in the reference, {a.choices[1]} (margin {a.margins[1]:.3g}) here"
        )
    if (d := report.decoded) is not None:
        if d.first_difference is None:
            lines.append(f"decoded by the engine: all {len(d.tokens)} greedy tokens are the same")
        else:
            lines.append(
                f"decoded by the engine: greedy tokens differ from token {d.first_difference} on, where the "
                f"margins are {d.margins[0]:.3g} and {d.margins[1]:.3g}: "
                + ("a near-tie that rounding turned" if d.near_tie else "no tie")
            )
    return lines


def describe_check(row: dict[str, Any]) -> str:
    """The result of a check against a trace, in a line."""
    place = f"greedy tokens differ from token {row['first_greedy_difference']} on"
    if row["first_bad"] is not None:
        text = f"OUTSIDE: first at probe {row['first_bad']}, worst at position {row['position']}"
    elif not row["near_tie"]:
        text = f"OUTSIDE: every probe agrees, but {place}: the decode step computes something else"
    elif row["first_greedy_difference"] is not None:
        text = f"within {row['tolerance']:g}; {place}, a near-tie that rounding turned"
    else:
        probes = row["probes"]
        text = f"within {row['tolerance']:g} at {probes} probes, and the same greedy tokens"
    return f"{row['backend']}: {text}"


def describe_way(row: dict[str, Any]) -> str:
    """A way of filling the cache that is outside the tolerance, in a line; "" for one within."""
    if row["within"]:
        return ""
    return (
        f"OUTSIDE: {row['backend']}, {row['way']}: relative error {row['relative']:.2g}, "
        f"allowed {row['tolerance']:g}"
    )


def describe_batch(row: dict[str, Any]) -> str:
    """A batch that broke its promise, in a line; "" for one that kept it."""
    if row["within"]:
        return ""
    promise = {
        "bits": "the same bits",
        "tokens": f"the same tokens, and numbers within {row['tolerance']:g},",
        "tolerance": f"numbers within {row['tolerance']:g}",
    }[row["promise"]]
    return (
        f"OUTSIDE: {row['backend']}, {row['rows']} rows, {row['start']}: {promise} are promised; "
        f"the same tokens in {row['same_tokens']}, the same bits in {row['same_bits']}, relative "
        f"difference {row['relative']:.2g}"
    )


def batch_verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each backend whose promises are all kept."""
    kept = {
        "bits": "a row's tokens and bits do not depend on the rest of the batch",
        "tokens": "a row's tokens do not depend on the rest of the batch",
        "tolerance": "a row's numbers stay within {:g} whatever else is in the batch, "
        "and its tokens are the same but for near-ties",
    }
    broken = {row["backend"] for row in rows if not row["within"]}
    verdicts = {
        row["backend"]: kept[row["promise"]].format(row["tolerance"])
        for row in rows
        if row["backend"] not in broken
    }
    return [f"{backend}: {verdict}" for backend, verdict in verdicts.items()]


def describe_repeat(row: dict[str, Any]) -> str:
    """The comparison of all runs, in a line."""
    if row["within"]:
        return (
            f"{row['backend']}: the same bits in {row['runs']} runs, half of them in fresh "
            "processes"
        )
    where = "a fresh process" if row["in_a_fresh_process"] else "this process"
    return (
        f"OUTSIDE: {row['backend']}: run {row['run']}, in {where}, differs first at "
        f"{row['first_difference']}"
    )


# The page


def write_page(path: str | os.PathLike, facts: dict[str, Any], reports: list[Report]) -> None:
    """Write one self-contained HTML file. Raises OptionsError."""
    parts = [
        f"<h1>{html.escape(facts['model'])}</h1>",
        f"<p>{len(facts['tokens'])} tokens, the last {facts['decoded']} one by one, against "
        f"{html.escape(facts['reference'])}. Errors are norms of differences over norms.</p>",
    ]
    for report in reports:
        parts.append(
            f"<h2>{html.escape(report.backend)} <small>{html.escape(report.device)}, "
            f"{report.dtype}</small></h2>"
            f'<p class="{"within" if report.is_within else "outside"}">'
            f"{html.escape(report.verdict())}</p>"
        )
        parts += [f"<p>{html.escape(line)}</p>" for line in logits_lines(report)]
        parts += [depth_picture(report), position_picture(report)]
        head = "".join(f"<th>{name}</th>" for name in ("probe", *_FIGURES, "at"))
        rows = "".join(
            f"<tr{'' if d.peak <= report.tolerance else ' class=outside'}><td>{d.name}</td>"
            f"<td>{d.max_abs:.3g}</td><td>{d.mean_abs:.3g}</td><td>{d.relative:.3g}</td>"
            f"<td>{d.peak:.3g}</td><td>{d.cosine:.9f}</td><td>{d.worst}</td></tr>"
            for d in report.differences
        )
        parts.append(
            f"<details><summary>every probe</summary><table><tr>{head}</tr>{rows}</table></details>"
        )
    title = html.escape(f"parity of {facts['model']}")
    page = _PAGE.replace("TITLE", title).replace("BODY", "\n".join(parts))
    with writing(f"--html {path}", OptionsError):
        write_file(os.path.expanduser(path), page.encode())


def depth_picture(report: Report) -> str:
    """The error of each kind of probe over the layers."""
    rows = {
        kind: np.array([difference.peak for difference in differences])
        for kind, differences in group_by_kind(report).items()
        if kind in IN_LAYER
    }
    return _heat_map(report, rows, "layer", "the worst position of each probe, over layers")


def position_picture(report: Report) -> str:
    """The error of each layer's worst probe over the positions."""
    rows: dict[str, np.ndarray] = {}
    for difference in report.differences:
        name = difference.name.partition(".")[0]
        rows[name] = np.maximum(rows.get(name, 0.0), difference.positions)
    return _heat_map(report, rows, "position", "the worst probe of each layer, over positions")


def _heat_map(report: Report, rows: dict[str, np.ndarray], axis: str, caption: str) -> str:
    """An SVG of errors, float64 [n] by name, on a logarithmic scale around the tolerance."""
    count = len(next(iter(rows.values())))
    edges = np.linspace(0, count, min(COLUMNS, count) + 1).astype(int)
    cell, line, left = 10, 14, 110
    low = math.log10(report.tolerance) - 4
    parts = []
    for number, (name, errors) in enumerate(rows.items()):
        parts.append(
            f'<text x="{left - 6}" y="{number * line + 11}" text-anchor="end">{name}</text>'
        )
        for column, (start, stop) in enumerate(itertools.pairwise(edges)):
            value = float(errors[start:stop].max())
            share = np.clip((math.log10(min(max(value, 1e-30), 1e30)) - low) / 5, 0, 1)
            is_within = value <= report.tolerance
            colour = f"hsl(215 60% {97 - 45 * share:.0f}%)" if is_within else "#c22"
            parts.append(
                f'<rect x="{left + column * cell}" y="{number * line}" width="{cell}" '
                f'height="{line}" fill="{colour}"><title>{name}, {axis} {start}: {value:.3g}'
                "</title></rect>"
            )
    width, height = left + cell * (len(edges) - 1) + 10, line * len(rows) + 24
    for column in range(0, len(edges) - 1, max(1, (len(edges) - 1) // 8)):
        parts.append(f'<text x="{left + column * cell}" y="{height - 8}">{edges[column]}</text>')
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" style="width: {width * 1.5:.0f}px" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#444"><title>error by {axis}'
        f"</title>{''.join(parts)}</svg><figcaption>{caption}: darker is a larger error, red is "
        "outside</figcaption></figure>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>TITLE</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222;
       background: #fff }
h2 small { font-weight: normal; color: #666 }
p { margin: .3rem 0 } p.within { color: #175 ; font-weight: 600 } p.outside { color: #c22; font-weight: 600 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th, td { padding: .1rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr.outside td { color: #c22 }
figure { margin: 1rem 0 } figcaption { color: #666 } svg { max-width: 100%; display: block }
</style></head><body>
BODY
</body></html>
"""


def make_console() -> Any:
    from rich.console import Console

    return Console(highlight=False, width=None if os.isatty(1) else 110)
