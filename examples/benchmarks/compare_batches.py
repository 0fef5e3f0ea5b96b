"""Compare the decoding of many rows at once: the cpu backend and llama.cpp's llama-batched-bench,
in alternating runs.

    cmake -B build -DGGML_NATIVE=ON && cmake --build build --target llama-batched-bench     # in llama.cpp's sources
    python examples/benchmarks/make_random_gguf.py tinyllama /tmp/models Q4_0 Q8_0 Q4_K_M F16
    python examples/benchmarks/compare_batches.py /tmp/models/tinyllama-*.gguf --llama-batched-bench build/bin/llama-batched-bench

A decoding step reads every weight once, however many rows it serves. One row is bound by memory
bandwidth. More rows share that read until arithmetic is the bound; from there on, tokens per second
no longer grow with the rows. This measures tokens per second of all rows together, prompts of
`--prompt` tokens, `--generate` steps. Both programs use the same file and number of threads.
Prompts are not timed. mlx_llama's steps include greedy sampling; llama-batched-bench decodes fixed
tokens and samples none. It is started anew for each run, while mlx_llama keeps its model loaded and
sleeps. Both warm up untimed. Speed on a shared machine varies, so the programs take turns, and a
ratio is that of the medians over all rounds.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from peers_checkpoint import prompt_tokens

BINARY = "llama-batched-bench"
ATTEMPTS = 20  # a run of milliseconds may end before its log thread has printed the result
PADDING = 256  # llama.cpp pads the context of a sequence to a multiple of this


class Ours:
    """mlx_llama's cpu backend with one file. threads, bits: as the options of load."""

    def __init__(self, path: str, threads: int, bits: int | None):
        from mlx_llama.core.backends.selection import select
        from mlx_llama.core.files.checkpoint import open_checkpoint

        self.backend = select("cpu")
        self.model = self.backend.load(open_checkpoint(path), threads=threads, activation_bits=bits)

    def rate(self, rows: int, prompt: int, count: int) -> float:
        """Tokens per second of `rows` rows that decode `count` tokens each after prompts of
        `prompt`.
        """
        from mlx_llama.core.options import GenerationOptions

        vocabulary = self.model.config.vocab_size
        ids = prompt_tokens(rows * prompt, vocabulary)
        cache = self.model.make_cache(prompt + count + 1, rows)
        logits = self.model.forward(np.array(ids, np.int32).reshape(rows, prompt), 0, cache)
        tokens = np.asarray(logits).argmax(axis=-1).astype(np.int32)[:, None]
        sampling = self.backend.sampling_batch([GenerationOptions()] * rows)
        tokens = self.model.step(tokens, prompt, cache, sampling)  # untimed: pages, buffers
        started = time.perf_counter()
        for i in range(1, count + 1):
            tokens = self.model.step(tokens, prompt + i, cache, sampling)
            self.backend.runtime.read([tokens])
        return rows * count / (time.perf_counter() - started)


def peer_rate(
    binary: str, path: str, threads: int, rows: int, prompt: int, count: int, *options: Any
) -> float:
    """The same of a new process of llama-batched-bench, with more `options`. Exits if it fails."""
    context = rows * -(-(prompt + count) // PADDING) * PADDING
    command = [
        binary,
        "-m",
        path,
        "-c",
        context,
        "-npp",
        prompt,
        "-ntg",
        count,
        "-npl",
        rows,
        "-t",
        threads,
        "-tb",
        threads,
        "--output-format",
        "jsonl",
        *options,
    ]
    for _ in range(ATTEMPTS):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        for line in done.stdout.splitlines():
            if line.startswith("{") and json.loads(line).get("pl") == rows:
                return json.loads(line)["speed_tg"]
        if done.returncode:
            break
    reason = done.stderr.strip().splitlines()[-1:] or [
        f"it ended with {done.returncode} and printed no result"
    ]
    sys.exit(f"error: {binary} on {path} with {rows} rows: {reason[0]}")


def measure(path: str, binary: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record of each number of rows: every run's tokens per second, their medians and the
    ratio.
    """
    ours, records = Ours(path, args.threads, args.activation_bits), []
    for rows in args.rows:
        asks = {
            "ours": lambda: ours.rate(rows, args.prompt, args.generate),
            "peer": lambda: peer_rate(binary, path, args.threads, rows, args.prompt, args.generate),
        }
        runs: dict[str, list[float]] = {name: [] for name in asks}
        for _ in range(args.rounds):
            for name, ask in asks.items():
                runs[name].append(ask())
        medians = {name: statistics.median(rates) for name, rates in runs.items()}
        records.append(
            {
                "file": os.path.basename(path),
                "rows": rows,
                **medians,
                "ratio": medians["ours"] / medians["peer"],
                "runs": runs,
            }
        )
        print(f"{path}: {rows} rows measured", file=sys.stderr, flush=True)
    return records


def report(records: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """All records as a table."""
    wide = max(len(record["file"]) for record in records)
    lines = [
        f"tokens/s of all rows together: prompts of {args.prompt}, {args.generate} steps, "
        f"{args.threads} threads each, "
        f"medians of {args.rounds}",
        f"{'':{wide}}  rows  mlx_llama  llama.cpp    ratio",
    ]
    lines += [
        f"{line['file']:{wide}}{line['rows']:6}{line['ours']:11.1f}{line['peer']:11.1f}{line['ratio']:8.2f}x"
        for line in records
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    result = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    result.add_argument("files", nargs="+", metavar="FILE.gguf")
    result.add_argument(
        "--llama-batched-bench",
        metavar="PATH",
        default=BINARY,
        help=f"llama.cpp's program (default: {BINARY} on the search path)",
    )
    result.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        metavar="N",
        help="(default: 1 2 4 8 16)",
    )
    result.add_argument(
        "--threads", type=int, default=cores, help=f"of each program (default here: {cores})"
    )
    result.add_argument("--rounds", type=int, default=5, help="runs of each program (default: 5)")
    result.add_argument(
        "--prompt", type=int, default=128, help="tokens of each row's prompt (default: 128)"
    )
    result.add_argument("--generate", type=int, default=32, help="steps of a run (default: 32)")
    result.add_argument(
        "--activation-bits", type=int, choices=(8, 16, 32), default=None, help="of mlx_llama"
    )
    result.add_argument("--json", action="store_true", help="print every run as JSON")
    return result


def main(arguments: list[str]) -> int:
    """Run the comparison; returns the exit code."""
    arguments_parser = parser()
    args = arguments_parser.parse_args(arguments)
    if min(args.threads, args.rounds, args.prompt, args.generate, *args.rows) < 1:
        arguments_parser.error(
            "--rows, --threads, --rounds, --prompt and --generate must be at least 1"
        )
    binary = shutil.which(args.llama_batched_bench)
    if binary is None:
        sys.exit(
            f"error: {args.llama_batched_bench}: there is no such program: build {BINARY} "
            "from llama.cpp's sources "
            "and give its path by --llama-batched-bench"
        )
    for path in args.files:
        if not os.path.isfile(path):
            sys.exit(f"error: {path}: there is no such file")
    records = [record for path in args.files for record in measure(path, binary, args)]
    if args.json:
        print(
            json.dumps(
                {
                    "threads": args.threads,
                    "activation_bits": args.activation_bits,
                    "prompt": args.prompt,
                    "generate": args.generate,
                    "results": records,
                },
                indent=1,
            )
        )
    else:
        print(report(records, args))
    return 0


if __name__ == "__main__":
    # Print mlx_llama's errors in one line, as its commands do.
    from mlx_llama import cli

    sys.exit(cli.run(main))
