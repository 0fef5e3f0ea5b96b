"""The cost of a tick without the model: scheduling, streaming decode of text and stop strings for
all rows.

    python examples/benchmarks/measure_ticks.py [--rows 1,8,32] [--ticks 2000] [--json]

The model is a stub that answers at once with tokens of the guide's vocabulary, so that the time of
a tick is the host's own. A step of a real model takes milliseconds; what the host needs beside it
bounds the tokens per second of small models on fast devices. Figures: median and 90th percentile of
a tick, in microseconds, with text and stop strings, and with token ids alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import numpy as np

from cpu_fallback.runtime import read
from mlx_llama.core.backends.positions import CallView, Positions
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import resolve

STOPS = ("\n\nQuestion:", "###", "</answer>")
PROMPT = 8


class StubCache(Positions):
    """Lengths without storage."""

    nbytes = 0

    def free_memory(self):
        return None

    def _grow(self, ends):
        for row, end in ends.items():
            self.allocated[row] = self.storage_for(end)

    def arrays(self):
        return []

    def trim(self, length, row=0):
        self.lengths[row] = length

    def reset(self, row=None):
        for cleared in range(self.rows) if row is None else [row]:
            self.lengths[cleared] = self.allocated[cleared] = 0


class StubModel:
    """The next tokens come from a list."""

    verify_width, prefill_width, prefill_chunk, notices = 8, 1 << 16, 512, ()
    dtype = dtype_name = "float32"
    cache_bits = None
    adapters, is_batch_invariant = (), False

    def __init__(self, config, rows: int):
        self.config = config
        self.drawn = np.random.default_rng(0).integers(300, 2000, (512, rows, 1)).astype(np.int32)
        self.count = 0

    def make_cache(self, capacity, rows=1):
        return StubCache(self.config, capacity, rows=rows)

    def forward(self, tokens, index_pos, cache, *, rows=None):
        with CallView(cache, *tokens.shape, index_pos, rows):
            pass

    def step(self, tokens, index_pos, cache, sampling, *, rows=None, masks=None):
        with CallView(cache, *tokens.shape, index_pos, rows):
            self.count += 1
        return self.drawn[self.count % 512, : len(tokens)]


def make_loop(rows: int, runs_ahead: bool, context: int) -> Loop:
    """A scheduler whose model costs nothing."""
    checkpoint = open_checkpoint()
    runtime = SimpleNamespace(
        free_memory=lambda device: None,
        is_out_of_memory=lambda error: False,
        launch=lambda arrays: None,
        read=read,
    )
    backend = SimpleNamespace(
        name="stub",
        device=None,
        device_name="stub",
        runtime=runtime,
        runs_ahead=runs_ahead,
        sampling_batch=tuple,
    )
    return Loop(
        backend,
        StubModel(checkpoint.config, rows),
        checkpoint.tokenizer,
        frozenset(),
        context,
        max_rows=rows,
    )


def measure(rows: int, ticks: int, wants_text: bool, runs_ahead: bool) -> dict[str, float]:
    """Microseconds per tick with `rows` running requests."""
    loop = make_loop(rows, runs_ahead, PROMPT + rows + ticks + 100)
    options = {"max_tokens": 2**31, "temperature": 0.0, **({"stop": STOPS} if wants_text else {})}
    handles = [
        loop.submit(Request([5 + row] * PROMPT, resolve(options), wants_text=wants_text))
        for row in range(rows)
    ]
    while len(loop.scheduler.running) < rows:
        assert loop.tick(), "requests ended before all of them ran"
    seconds = []
    for _ in range(ticks):
        started = time.perf_counter()
        loop.tick()
        seconds.append(time.perf_counter() - started)
    assert all(len(handle.completion.tokens) >= ticks for handle in handles)
    micro = sorted(1e6 * second for second in seconds)
    return {"median": statistics.median(micro), "90%": micro[int(0.9 * len(micro))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", default="1,8,32", help="running requests")
    parser.add_argument("--ticks", type=int, default=2000, help="ticks to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    lines = [
        {
            "rows": rows,
            "text": wants_text,
            "runs_ahead": runs_ahead,
            **measure(rows, args.ticks, wants_text, runs_ahead),
        }
        for rows in map(int, args.rows.split(","))
        for wants_text in (True, False)
        for runs_ahead in (False, True)
    ]
    if args.json:
        print(json.dumps(lines))
        return
    print("rows  text  runs ahead  median us  90% us")
    for line in lines:
        print(
            f"{line['rows']:4d}  {'yes' if line['text'] else 'no ':4s}  "
            f"{'yes' if line['runs_ahead'] else 'no ':10s}"
            f"  {line['median']:9.1f}  {line['90%']:6.1f}"
        )


if __name__ == "__main__":
    main()
