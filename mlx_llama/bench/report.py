"""The bench's figures as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

FORMATS = ("text", "md", "csv", "json")
ROW = ("test", "n_prompt", "n_gen", "n_depth", "tps", "tps_min", "tps_max", "seconds")
FACTS = (
    "model",
    "backend",
    "device",
    "dtype",
    "cache_bits",
    "stored",
    "weights_bytes",
    "load_seconds",
    "repetitions",
    "peak_memory_bytes",
)
BATCH = (
    "pp",
    "tg",
    "pl",
    "n_kv",
    "t_pp",
    "speed_pp",
    "t_tg",
    "speed_tg",
    "t",
    "speed",
    "speed_tg_min",
    "speed_tg_max",
)
PROFILE = (
    "operation",
    "calls",
    "us",
    "share",
    "waiting_us",
    "nbytes",
    "bytes_per_second",
    "bandwidth_share",
    "flops_per_second",
)
HOST = ("rows", "step_us", "launch_us", "thread_us", "primitives")


def single(figures: dict[str, Any]) -> str:
    """Lines of text for one prompt and its answer (measure.measure)."""
    f = figures
    low, high = f["decode_tps_range"]
    return "\n".join(
        [
            _title(f),
            f"load                 {f['load_seconds']:8.2f} s",
            f"prompt, {f['prompt']:5} tokens {f['prompt_tps']:8.1f} tokens/s, first token after "
            f"{f['first_token_seconds']:.2f} s",
            f"decode, {f['generate']:5} tokens {f['decode_tps']:8.1f} tokens/s ({low:.1f} to "
            f"{high:.1f} over {f['repetitions']} runs)",
            f"evaluations          {f['evaluations_per_token']:8g} per token "
            f"({f['launches_per_token']:g} launched, "
            f"{f['evaluations_per_token']:g} waited for, {f['read_bytes_per_token']:g} bytes read)",
            f"bandwidth            {f['bandwidth'] / 1e9:8.1f} GB/s measured; decoding reads "
            f"{f['bytes_per_token'] / 1e9:.2f} GB per token, {f['bandwidth_share']:.0%} of the "
            "bound",
            f"peak memory          {f['peak_memory_bytes'] / 1e9:8.2f} GB, "
            f"{f['peak_memory_bytes'] / f['weights_bytes']:.2f} times the weights"
            if f["peak_memory_bytes"]
            else "peak memory           unknown on this system",
            *_remarks(f),
        ]
    )


def table(figures: dict[str, Any], kind: str) -> str:
    """The rows `figures["rows"]` and their common facts, in one of FORMATS."""
    return {"text": _text, "md": _markdown, "csv": _csv, "json": as_json}[kind](figures)


def profiles(figures: dict[str, Any], kind: str) -> str:
    """The profiles `figures["profiles"]` (profile.Profiled) and their common facts, in one of
    FORMATS.
    """
    if kind == "json":
        return as_json(figures)
    return (_profiles_csv if kind == "csv" else _profiles_tables)(figures, kind)


def as_json(figures: dict[str, Any]) -> str:
    """The figures as one JSON object."""
    return json.dumps(figures, indent=1)


def host_line(host: dict[str, Any]) -> str:
    """A line of text for the host's figures (host.measure_host)."""
    of = "token" if host["rows"] == 1 else f"step of {host['rows']} rows"
    if host["host_computes"]:
        return (
            f"host                 {host['step_us']:8.0f} us per {of}: the host computes the step "
            "itself"
        )
    graph = (
        "" if host["primitives"] is None else f"; {host['primitives']} primitives in a step's graph"
    )
    return (
        f"host                 {host['thread_us']:8.0f} us of processor time per {of}; by the "
        f"clock {host['step_us']:.0f} to build it, {host['launch_us']:.0f} to launch it{graph}"
    )


def _title(f: dict[str, Any]) -> str:
    cache = f", keys and values in {f['cache_bits']} bits" if f["cache_bits"] else ""
    return (
        f"{f['model']}: {f['weights_bytes'] / 1e9:.2f} GB of {f['stored']} weights on "
        f"{f['backend']} ({f['device']}, {f['dtype']}{cache})"
    )


def _remarks(f: dict[str, Any]) -> list[str]:
    return [
        *([host_line(f["host"])] if "host" in f else []),
        *(f"note: {notice}" for notice in f["notices"]),
    ]


def _cells(f: dict[str, Any]) -> list[tuple[str, ...]]:
    if "pl" in f["rows"][0]:
        return [
            ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"),
            *(
                (
                    *(str(row[name]) for name in BATCH[:4]),
                    *(
                        f"{row[name]:.2f}" if name.startswith("speed") else f"{row[name]:.3f}"
                        for name in BATCH[4:10]
                    ),
                )
                for row in f["rows"]
            ),
        ]
    spread = "min to max" if f["repetitions"] > 1 else "one run"
    return [
        ("test", "tokens/s", spread, "ms/token", "seconds"),
        *(
            (
                row["test"],
                f"{row['tps']:.2f}",
                f"{row['tps_min']:.2f} to {row['tps_max']:.2f}",
                f"{1e3 / row['tps']:.3f}",
                f"{row['seconds']:.3f}",
            )
            for row in f["rows"]
        ),
    ]


def _text(f: dict[str, Any]) -> str:
    cells = _cells(f)
    widths = [max(map(len, column)) for column in zip(*cells)]
    first = str.rjust if "pl" in f["rows"][0] else str.ljust
    lines = [
        "  ".join(
            [
                first(row[0], widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:])),
            ]
        )
        for row in cells
    ]
    summary = f"medians of {f['repetitions']} repetitions, loaded in {f['load_seconds']:.2f} s"
    return "\n".join([_title(f), *lines, summary, *_remarks(f)])


def _markdown(f: dict[str, Any]) -> str:
    header, *rows = _cells(f)
    # Escape bars, which separate columns; names may come from files.
    facts = [f[name].replace("|", "\\|") for name in ("model", "backend", "stored")]
    named = 3 if "pl" in f["rows"][0] else 4  # columns of words
    lines = [
        ("model", "backend", "weights", *header),
        ("---",) * named + ("---:",) * (3 + len(header) - named),
        *((*facts, *row) for row in rows),
    ]
    remarks = [f"{_title(f)}; medians of {f['repetitions']} repetitions", *_remarks(f)]
    return "\n".join(
        [
            *("| " + " | ".join(line) + " |" for line in lines),
            *("\n" + " ".join(remark.split()) for remark in remarks),
        ]
    )


def _csv(f: dict[str, Any]) -> str:
    text = io.StringIO()
    names = [
        *FACTS,
        *(BATCH if "pl" in f["rows"][0] else ROW),
        *(["host_" + name for name in HOST] if "host" in f else []),
        "notices",
    ]
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    host = {"host_" + name: f["host"][name] for name in HOST} if "host" in f else {}
    for row in f["rows"]:
        writer.writerow(f | row | host | {"notices": "; ".join(f["notices"])})
    return text.getvalue().rstrip("\n")


def kernels(f: dict[str, Any]) -> str:
    """Candidate kernels for decoding as text: GB/s of each format's product with each."""

    def name(candidate: list[list[int]]) -> str:
        return (
            " + ".join(
                f"{f'L{level}' if level else 'once'} {distance}" for level, distance in candidate
            )
            or "none"
        )

    cells = [
        ("GB/s by prefetch", *map(name, f["candidates"])),
        *(
            (formats, *(f"{rate / 1e9:.1f}" for rate in rates))
            for formats, rates in f["formats"].items()
        ),
        ("all", *(f"{rate / 1e9:.1f}" for rate in f["mean"])),
    ]

    def describe_choice(index: int, exceptions: dict[str, int]) -> str:
        return ", ".join(
            [
                name(f["candidates"][index]),
                *(
                    f"{name(f['candidates'][other])} for {formats}"
                    for formats, other in exceptions.items()
                ),
            ]
        )

    chosen = describe_choice(f["chosen"], f["chosen_own"])
    best = describe_choice(f["best"], f["best_own"])
    origin = "measured on it" if f["is_measured"] else "not measured on it before"
    lines = [
        f"products of one token on {f['processor']}, {f['target']}, {f['threads']} threads; "
        "prefetch: cache level, or for one use, and bytes ahead",
        *_align(cells, "text"),
        f"in use: {chosen} ({origin}); best here: {best}",
    ]
    if f["saved"]:
        lines.append(f"wrote {f['saved']}")
    return "\n".join(lines)


def _profiles_tables(f: dict[str, Any], kind: str) -> str:
    blocks, apart = [_title(f)], "\n" if kind == "text" else "\n\n"
    for profile in f["profiles"]:
        is_prompt = profile["n_prompt"] > 0
        subject = (
            "a prompt"
            if is_prompt
            else "a token"
            if profile["n_rows"] == 1
            else f"a step of {profile['n_rows']} rows"
        )
        title = (
            f"{profile['test']}: {subject} takes {profile['us'] / 1e3:.2f} ms and reads "
            f"{profile['nbytes'] / 1e9:.3f} GB at {profile['bytes_per_second'] / 1e9:.1f} GB/s, "
            f"{profile['bandwidth_share']:.0%} of the measured {profile['bandwidth'] / 1e9:.1f}"
        )
        rate = "Gflop/s" if is_prompt else "GB/s"
        cells = [
            ("operation", "calls", "us", "share", "waiting", "MB", rate, "bandwidth"),
            *(
                (
                    line["operation"],
                    _number(line.get("calls"), ".0f"),
                    f"{line['us']:.0f}",
                    f"{line['share']:.1%}",
                    _number(line.get("waiting_us"), ".0f"),
                    _number(line.get("nbytes"), ".1f", 1e6),
                    _number(
                        line.get("flops_per_second" if is_prompt else "bytes_per_second"),
                        ".1f",
                        1e9,
                    ),
                    _number(line.get("bandwidth_share"), ".0%"),
                )
                for line in (*profile["operations"], *profile["between"])
            ),
        ]
        waiting = (
            []
            if profile["slower_us"] is None
            else [
                f"waiting, in the above: {profile['slower_us']:.0f} us for slower threads, "
                f"{profile['barriers_us']:.0f} us for barriers"
            ]
        )
        blocks.append(
            apart.join([title, "\n".join(_align(cells, kind)), *waiting, profile["note"]])
        )
    summary = f"the repetition of the median time, of {f['repetitions']}"
    return "\n\n".join([*blocks, apart.join([summary, *_remarks(f)])])


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    """A figure, or "" where there is none."""
    return "" if value is None else format(value / unit, form)


def _align(cells: list[tuple[str, ...]], kind: str) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    if kind == "md":
        ruled = [cells[0], ("---", *("---:",) * (len(cells[0]) - 1)), *cells[1:]]
        return ["| " + " | ".join(row) + " |" for row in ruled]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:])),
            ]
        ).rstrip()
        for row in cells
    ]


def _profiles_csv(f: dict[str, Any], kind: str) -> str:
    text = io.StringIO()
    case = ("test", "n_prompt", "n_gen", "n_depth", "n_rows", "bandwidth")
    writer = csv.DictWriter(
        text, [*FACTS, *case, *PROFILE, "notices"], lineterminator="\n", extrasaction="ignore"
    )
    writer.writeheader()
    for profile in f["profiles"]:
        for line in (*profile["operations"], *profile["between"]):
            writer.writerow(
                f
                | {name: profile[name] for name in case}
                | line
                | {"notices": "; ".join(f["notices"])}
            )
    return text.getvalue().rstrip("\n")
