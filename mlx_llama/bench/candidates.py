"""Candidates for the cpu backend's decode kernels, measured on this machine (--kernels).

A decoded token reads every weight once, so the prefetches of its products decide what share of the
memory's bandwidth they get. The best distances differ between processors. Candidates give the same
bits. Each product runs over panels larger than the caches, on all threads, candidates in turn.
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

from cpu_fallback.kernels import layouts, products
from cpu_fallback.kernels.emit import Function, Module, kernel
from cpu_fallback.kernels.layouts import FloatLayout, Layout, LowBitLayout
from cpu_fallback.kernels.panels import Arena, allocate_arena, weight_layout
from cpu_fallback.kernels.target import (
    PREFETCHES,
    Prefetch,
    Target,
    compile_module,
    find_host,
    find_prefetches,
)
from cpu_fallback.pages import allocate
from mlx_llama.core.files.quantized import GGUF_FORMATS, GGUFWeight
from mlx_llama.core.system.files import write_file

COLUMNS = 2048  # in the measured matrices
NBYTES = 256 << 20  # all their panels
ROUNDS = 15
MARGIN = 1.03  # by which a candidate of a format must beat the general candidate
CANDIDATES: tuple[Prefetch, ...] = (
    (), ((1, 256),), ((1, 1024),), ((1, 4096),), ((2, 2048),), ((2, 4096),), ((0, 4096),),
    ((0, 6144),), ((1, 1024), (2, 3072)), ((1, 1024), (2, 4096)),
)  # fmt: skip


@kernel
def _sweep(
    f: Function, weights, x, out, panels, panel_bytes, blocks, *, target, layout, x_layout, at_once
) -> None:
    """Multiply `panels` panels with one token."""
    product = products.product(f.module, target, layout, x_layout, 1, at_once)
    with f.loop(panels // at_once) as i:
        f.call(product, weights + i * panel_bytes * at_once, x, out, 64, blocks, 0, 0)


def layouts_by_format() -> dict[str, Layout]:
    """The layout of each GGUF format and float dtype; names of the same layout are joined."""
    names: dict[Layout, list[str]] = {}
    for name, file in GGUF_FORMATS.items():
        row = np.zeros((1, COLUMNS // file.block_size * file.nbytes), np.uint8)
        names.setdefault(weight_layout(GGUFWeight(name, name, (1, COLUMNS), row)), []).append(name)
    for name, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")):
        names[FloatLayout(dtype)] = [name]
    return {", ".join(same): layout for layout, same in names.items()}


def measure(target: Target, threads: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Measure bytes per second of every format's product with every candidate (medians of ROUNDS).
    Choose the best candidate by the geometric mean over formats, and for each format a candidate
    that beats it by MARGIN.

    Candidates are compared within rounds, since the memory of a shared machine changes its speed
    between rounds. advance is called with each format.
    """
    arena = allocate_arena(NBYTES)
    arena.bytes[:] = 17
    processor = find_host().cpu
    chosen, is_measured = find_prefetches(processor, target.name)
    tried = list(dict.fromkeys((*CANDIDATES, *(prefetch for _, prefetch in chosen))))
    targets = [dataclasses.replace(target, prefetches=(("any", prefetch),)) for prefetch in tried]
    by_format = layouts_by_format()
    figures: dict[str, list[float]] = {}
    ratios: dict[str, np.ndarray] = {}  # [rounds, candidates], to the first candidate of a round
    with ThreadPoolExecutor(threads) as pool:
        for name, layout in by_format.items():
            advance(name)
            runs = [_Run(other, layout, arena, pool, threads) for other in targets]
            rates = np.array([[run() for run in runs] for _ in range(ROUNDS)])
            figures[name] = np.median(rates, axis=0).tolist()
            ratios[name] = rates / rates[:, :1]
    means = [statistics.geometric_mean(rates) for rates in zip(*figures.values())]
    best = int(np.prod([np.median(rounds, axis=0) for rounds in ratios.values()], axis=0).argmax())
    best_by_format = {}
    for name, rounds in ratios.items():
        gains = np.median(rounds / rounds[:, [best]], axis=0)
        if gains.max() >= MARGIN:
            best_by_format[name] = int(gains.argmax())
    in_use, chosen_own = dict(chosen), {}
    for name, layout in by_format.items():
        if layout.name in in_use:
            chosen_own[name] = tried.index(in_use[layout.name])
    run = {"processor": processor, "target": target.name, "threads": threads}
    run |= {"candidates": [list(map(list, prefetch)) for prefetch in tried], "formats": figures}
    run |= {"mean": means, "chosen": tried.index(in_use["any"]), "chosen_own": chosen_own}
    return run | {"best": best, "best_own": best_by_format, "is_measured": is_measured}


def save(figures: dict[str, Any]) -> str:
    """Enter the best of `measure` in the table that ships; returns its path. Raises OSError."""
    table, by_format = json.loads(PREFETCHES.read_text()), layouts_by_format()
    best = {"any": figures["best"]}
    best |= {by_format[name].name: index for name, index in figures["best_own"].items()}
    chosen = {name: figures["candidates"][index] for name, index in best.items()}
    table.setdefault(figures["processor"], {})[figures["target"]] = chosen
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(table[name])}" for name in table)
    write_file(PREFETCHES, f"{{\n{lines}\n}}\n".encode())
    return str(PREFETCHES)


class _Run:
    """A compiled product over all panels of an arena."""

    def __init__(
        self, target: Target, layout: Layout, arena: Arena, pool: ThreadPoolExecutor, threads: int
    ):
        self.arena, self.pool, self.threads = arena, pool, threads
        self.blocks = COLUMNS // layout.block
        self.panel_bytes = self.blocks * layout.block_bytes
        at_once = products.panels_at_once(target, layout, 1)
        # a thread's share
        self.panels = len(arena.bytes) // self.panel_bytes // threads // at_once * at_once
        x_layout = layouts.FLOAT
        if isinstance(layout, LowBitLayout):
            offset = products.dot_offset(target, layout)
            x_layout = layouts.activation_layout(16, target.dot, offset)
        self.x = allocate(x_layout.record(1) * (COLUMNS // (layouts.SPAN * layouts.GROUP)))
        self.out = np.zeros((threads, 4096), np.float32)
        module = Module()
        module.triple = target.triple
        name = _sweep(module, target, layout, x_layout, at_once, public=True).ir.name
        self.compiled = compile_module(target, name, [name], lambda: module)
        self.sweep = self.compiled.function(name, 6)

    def __call__(self) -> float:
        """Run it; returns bytes per second."""
        started = time.perf_counter()
        list(self.pool.map(self._run_part, range(self.threads)))
        return self.threads * self.panels * self.panel_bytes / (time.perf_counter() - started)

    def _run_part(self, part: int) -> None:
        weights = self.arena.address + part * self.panels * self.panel_bytes
        x, out = self.x.ctypes.data, self.out[part].ctypes.data
        self.sweep(weights, x, out, self.panels, self.panel_bytes, self.blocks)
