"""The bench's figures as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

FORMATS = ("text", "md", "csv", "json")
ROW = ("test", "n_prompt", "n_gen", "n_depth", "tps", "tps_min", "tps_max", "seconds")
FACTS = ("model", "backend", "device", "dtype", "cache_bits", "stored", "weights_bytes", "load_seconds", "repetitions",
         "peak_memory_bytes")
BATCH = ("pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed", "speed_tg_min", "speed_tg_max")
HOST = ("rows", "step_us", "launch_us", "thread_us", "primitives")


def single(figures: dict[str, Any]) -> str:
    """Lines of text for one prompt and its answer (measure.measure)."""
    f = figures
    low, high = f["decode_tps_range"]
    return "\n".join([
        _title(f),
        f"load                 {f['load_seconds']:8.2f} s",
        f"prompt, {f['prompt']:5} tokens {f['prompt_tps']:8.1f} tokens/s, first token after "
        f"{f['first_token_seconds']:.2f} s",
        f"decode, {f['generate']:5} tokens {f['decode_tps']:8.1f} tokens/s ({low:.1f} to {high:.1f} over "
        f"{f['repetitions']} runs)",
        f"evaluations          {f['evaluations_per_token']:8g} per token ({f['launches_per_token']:g} launched, "
        f"{f['evaluations_per_token']:g} waited for, {f['read_bytes_per_token']:g} bytes read)",
        f"bandwidth            {f['bandwidth'] / 1e9:8.1f} GB/s measured; decoding reads "
        f"{f['bytes_per_token'] / 1e9:.2f} GB per token, {f['bandwidth_share']:.0%} of the bound",
        f"peak memory          {f['peak_memory_bytes'] / 1e9:8.2f} GB, "
        f"{f['peak_memory_bytes'] / f['weights_bytes']:.2f} times the weights" if f["peak_memory_bytes"]
        else "peak memory           unknown on this system",
        *_remarks(f),
    ])


def table(figures: dict[str, Any], kind: str) -> str:
    """The rows `figures["rows"]` and their common facts, in one of FORMATS."""
    return {"text": _text, "md": _markdown, "csv": _csv, "json": as_json}[kind](figures)


def as_json(figures: dict[str, Any]) -> str:
    """The figures as one JSON object."""
    return json.dumps(figures, indent=1)


def host_line(host: dict[str, Any]) -> str:
    """A line of text for the host's figures (host.measure_host)."""
    of = "token" if host["rows"] == 1 else f"step of {host['rows']} rows"
    if host["host_computes"]:
        return f"host                 {host['step_us']:8.0f} us per {of}: the host computes the step itself"
    graph = "" if host["primitives"] is None else f"; {host['primitives']} primitives in a step's graph"
    return (f"host                 {host['thread_us']:8.0f} us of processor time per {of}; by the clock "
            f"{host['step_us']:.0f} to build it, {host['launch_us']:.0f} to launch it{graph}")


def _title(f: dict[str, Any]) -> str:
    cache = f", keys and values in {f['cache_bits']} bits" if f["cache_bits"] else ""
    return (f"{f['model']}: {f['weights_bytes'] / 1e9:.2f} GB of {f['stored']} weights on {f['backend']} "
            f"({f['device']}, {f['dtype']}{cache})")


def _remarks(f: dict[str, Any]) -> list[str]:
    return [*([host_line(f["host"])] if "host" in f else []), *(f"note: {notice}" for notice in f["notices"])]


def _cells(f: dict[str, Any]) -> list[tuple[str, ...]]:
    if "pl" in f["rows"][0]:
        return [("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"), *(
            (*(str(row[name]) for name in BATCH[:4]),
             *(f"{row[name]:.2f}" if name.startswith("speed") else f"{row[name]:.3f}" for name in BATCH[4:10]))
            for row in f["rows"])]
    spread = "min to max" if f["repetitions"] > 1 else "one run"
    return [("test", "tokens/s", spread, "ms/token", "seconds"), *(
        (row["test"], f"{row['tps']:.2f}", f"{row['tps_min']:.2f} to {row['tps_max']:.2f}", f"{1e3 / row['tps']:.3f}",
         f"{row['seconds']:.3f}") for row in f["rows"])]


def _text(f: dict[str, Any]) -> str:
    cells = _cells(f)
    widths = [max(map(len, column)) for column in zip(*cells)]
    first = str.rjust if "pl" in f["rows"][0] else str.ljust
    lines = ["  ".join([first(row[0], widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
             for row in cells]
    how = f"medians of {f['repetitions']} repetitions, loaded in {f['load_seconds']:.2f} s"
    return "\n".join([_title(f), *lines, how, *_remarks(f)])


def _markdown(f: dict[str, Any]) -> str:
    header, *rows = _cells(f)
    # Escape bars, which begin a column; a name may come from a file.
    facts = [f[name].replace("|", "\\|") for name in ("model", "backend", "stored")]
    named = 3 if "pl" in f["rows"][0] else 4  # columns of words
    lines = [("model", "backend", "weights", *header), ("---",) * named + ("---:",) * (3 + len(header) - named),
             *((*facts, *row) for row in rows)]
    remarks = [f"{_title(f)}; medians of {f['repetitions']} repetitions", *_remarks(f)]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines),
                      *("\n" + " ".join(remark.split()) for remark in remarks)])


def _csv(f: dict[str, Any]) -> str:
    text = io.StringIO()
    names = [*FACTS, *(BATCH if "pl" in f["rows"][0] else ROW), *(["host_" + name for name in HOST] if "host" in f else []), "notices"]
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    host = {"host_" + name: f["host"][name] for name in HOST} if "host" in f else {}
    for row in f["rows"]:
        writer.writerow(f | row | host | {"notices": "; ".join(f["notices"])})
    return text.getvalue().rstrip("\n")
