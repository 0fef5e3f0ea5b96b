"""Candidates for the kernels of decoding, measured on this machine.

A decoded token reads every weight once, so the prefetches of its products decide what share of the memory's bandwidth they
get; the best distances differ from processor to processor. Candidates give the same bits. Each product runs over panels
far larger than the caches, on all threads, candidates in turn.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mlx_llama.core.files.quantized import GGUF_FORMATS, GGUFWeight
from mlx_llama.core.system.files import write_file

from . import layouts, products
from .emit import Function, Module, i64
from .layouts import FloatLayout, Layout, LowBitLayout
from .panels import Arena, weight_layout
from .target import PREFETCHES, Prefetch, Target, compile_module, find_host, find_prefetches

COLUMNS = 2048  # of the measured matrices
NBYTES = 256 << 20  # of their panels
ROUNDS = 15
MARGIN = 1.03  # by which a format's own candidate must beat the one for all
CANDIDATES: tuple[Prefetch, ...] = ((), ((1, 256),), ((1, 1024),), ((1, 4096),), ((2, 2048),), ((2, 4096),), ((0, 4096),),
                                    ((0, 6144),), ((1, 1024), (2, 3072)), ((1, 1024), (2, 4096)))
_SWEEP = {"weights": i64, "x": i64, "out": i64, "panels": i64, "panel_bytes": i64, "blocks": i64}


def layouts_by_format() -> dict[str, Layout]:
    """The layout of each GGUF format and float dtype; formats with the same layout share an entry."""
    found: dict[Layout, list[str]] = {}
    for name, one in GGUF_FORMATS.items():
        row = np.zeros((1, COLUMNS // one.block_size * one.nbytes), np.uint8)
        found.setdefault(weight_layout(GGUFWeight(name, name, (1, COLUMNS), row)), []).append(name)
    for name, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")):
        found[FloatLayout(dtype)] = [name]
    return {", ".join(names): layout for layout, names in found.items()}


def measure(target: Target, threads: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Bytes per second of every format's product with every candidate (medians of ROUNDS), the best by their geometric mean
    over the formats, and by format those that beat it by MARGIN.

    Candidates are compared within rounds, since a shared machine's memory changes its speed between them. advance: is told
    each format.
    """
    arena = Arena(NBYTES)
    arena.bytes[:] = 17
    processor = find_host().cpu
    chosen, is_measured = find_prefetches(processor, target.name)
    tried = list(dict.fromkeys((*CANDIDATES, *(prefetch for _, prefetch in chosen))))
    found = layouts_by_format()
    figures: dict[str, list[float]] = {}
    ratios: dict[str, np.ndarray] = {}  # [rounds, candidates], to the first candidate of a round
    with ThreadPoolExecutor(threads) as pool:
        for name, layout in found.items():
            advance(name)
            runs = [_Run(dataclasses.replace(target, prefetches=(("any", prefetch),)), layout, arena, pool, threads)
                    for prefetch in tried]
            rates = np.array([[run() for run in runs] for _ in range(ROUNDS)])
            figures[name] = np.median(rates, axis=0).tolist()
            ratios[name] = rates / rates[:, :1]
    means = [statistics.geometric_mean(rates) for rates in zip(*figures.values())]
    best = int(np.prod([np.median(one, axis=0) for one in ratios.values()], axis=0).argmax())
    own = {}
    for name, one in ratios.items():
        gains = np.median(one / one[:, [best]], axis=0)
        if gains.max() >= MARGIN:
            own[name] = int(gains.argmax())
    in_use = dict(chosen)
    return {"processor": processor, "target": target.name, "threads": threads, "candidates": [list(map(list, one)) for one in tried],
            "formats": figures, "mean": means, "chosen": tried.index(in_use["any"]),
            "chosen_own": {name: tried.index(in_use[layout.name]) for name, layout in found.items() if layout.name in in_use},
            "best": best, "best_own": own, "is_measured": is_measured}


def save(figures: dict[str, Any]) -> str:
    """Enter the best candidates of `measure` in the table that ships; returns its path. Raises OSError."""
    table, found = json.loads(PREFETCHES.read_text()), layouts_by_format()
    best = {"any": figures["best"]} | {found[name].name: index for name, index in figures["best_own"].items()}
    table.setdefault(figures["processor"], {})[figures["target"]] = {name: figures["candidates"][best[name]] for name in best}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(table[name])}" for name in table)
    write_file(PREFETCHES, f"{{\n{lines}\n}}\n".encode())
    return str(PREFETCHES)


class _Run:
    """Calls one compiled product for all panels in an arena; returns the rate."""

    def __init__(self, target: Target, layout: Layout, arena: Arena, pool: ThreadPoolExecutor, threads: int):
        self.arena, self.pool, self.threads = arena, pool, threads
        self.blocks = COLUMNS // layout.block
        self.panel_bytes = self.blocks * layout.block_bytes
        together = products.panels_at_once(target, layout, 1)
        self.panels = len(arena.bytes) // self.panel_bytes // threads // together * together  # of a thread
        x_layout = layouts.FLOAT
        if isinstance(layout, LowBitLayout):
            x_layout = layouts.activation_layout(16, target.dot, products.dot_offset(target, layout))
        self.x = Arena(x_layout.record(1) * (COLUMNS // (layouts.SPAN * layouts.GROUP)))
        self.out = np.zeros((threads, 4096), np.float32)
        module = Module()
        module.triple = target.triple
        product = products.product(module, target, layout, x_layout, 1, together)
        f = Function(module, "sweep", _SWEEP, public=True)
        with f.loop(f.panels // together) as i:
            f.call(product, f.weights + i * f.panel_bytes * together, f.x, f.out, 64, f.blocks, 0, 0)
        f.finish()
        self.compiled = compile_module(target, f"sweep {layout.name}", ["sweep"], lambda: module)
        self.sweep = self.compiled.function("sweep", len(_SWEEP))

    def __call__(self) -> float:
        started = time.perf_counter()
        list(self.pool.map(self._run_part, range(self.threads)))
        return self.threads * self.panels * self.panel_bytes / (time.perf_counter() - started)

    def _run_part(self, part: int) -> None:
        self.sweep(self.arena.address + part * self.panels * self.panel_bytes, self.x.address,
                   self.out[part].ctypes.data, self.panels, self.panel_bytes, self.blocks)
