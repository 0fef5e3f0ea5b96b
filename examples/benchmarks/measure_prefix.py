"""First token after a known prefix, and memory after many requests, on one loaded model.

    python examples/benchmarks/measure_prefix.py --model FILE [--backend cpu] [--prefix 1000]
    [--requests 1000]

A prompt whose first tokens some row holds copies or shares their keys and values, so its first
token should cost little more than that of a prompt of one token: the rest is a step that attends to
the prefix. Both are timed in turns, each with other tokens at the end; the ratio is that of the
medians. Then requests of mixed lengths pass through the same loop, and the bytes of keys and values
and the process's resident memory after the first ten stand beside those after the last.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import psutil

from mlx_llama import load
from mlx_llama.core import options
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    llm = load(arguments.model, backend=arguments.backend)
    vocabulary, random = llm.model.config.vocab_size, np.random.default_rng(0)
    loop = Loop(llm.backend, llm.model, None, frozenset(), arguments.prefix + 100)

    def run(prompt: list[int], count: int):
        resolved = options.resolve({"max_tokens": count, "temperature": 0.0})
        return loop.submit(Request(prompt, resolved, wants_text=False)).finish()

    prefix = random.integers(3, vocabulary, arguments.prefix).tolist()
    seconds: dict[str, list[float]] = {"hit": [], "one": []}
    run(prefix, 1)
    for _ in range(arguments.rounds):
        hit = run([*prefix, int(random.integers(3, vocabulary))], 2)
        done = run([int(random.integers(3, vocabulary))], 2)
        assert hit.reused_tokens == arguments.prefix, hit.reused_tokens
        seconds["hit"].append(hit.prefill_seconds)
        seconds["one"].append(done.prefill_seconds)
    hit_ms, one_ms = (1e3 * statistics.median(seconds[name]) for name in ("hit", "one"))
    print(
        f"first token after a known prefix of {arguments.prefix}: {hit_ms:.2f} ms, after a "
        f"prompt of 1: {one_ms:.2f} ms, "
        f"ratio {hit_ms / one_ms:.2f}"
    )

    process = psutil.Process()

    def report(count: int) -> None:
        print(
            f"after {count} requests: {loop.scheduler.cache.nbytes / 1e6:.1f} MB of keys and "
            "values, "
            f"{process.memory_info().rss / 1e6:.0f} MB resident"
        )

    for number in range(1, arguments.requests + 1):
        run(
            random.integers(3, vocabulary, int(random.integers(2, 60))).tolist(),
            int(random.integers(1, 4)),
        )
        if number in (10, arguments.requests):
            report(number)


if __name__ == "__main__":
    main()
