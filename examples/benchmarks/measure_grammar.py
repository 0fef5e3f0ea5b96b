"""The cost of grammars: decoding rows whose answers must match, against the same rows without.

    python examples/benchmarks/measure_grammar.py [--model FILE] [--rows 8] [--tokens 64] [--pairs
    3] [--kind schema] [--json]

Before each token of such a row, llguidance says which tokens may follow, and the sampling leaves
the others out. The schema is an object with two long free texts, the regular expression a free text
of letters, digits and punctuation; both leave thousands of tokens at every position, and force few.
The requests run together on the loop, which ticks inline; runs with and without the grammar
alternate. Compiling, prompts and the keys that a schema forces are left out. Figures: milliseconds
per step of all rows, the median over all runs, and the share that the grammar adds to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from mlx_llama import load

TEXT = {"type": "string", "minLength": 2000}
RULES = {
    "schema": {
        "schema": {
            "type": "object",
            "properties": {"story": TEXT, "moral": TEXT},
            "required": ["story", "moral"],
        }
    },
    "regex": {"regex": "[A-Za-z0-9 ,.;:!?'-]{2000,}"},
}
SETTLED = 12  # tokens until the schema's first key, which it forces, is behind
PROMPT = "Tell me a story about a llama, number {}: "


def run(llm, rows: int, tokens: int, rule: dict) -> list[float]:
    """Milliseconds of each of `tokens` ticks with all rows."""
    loop, never = llm.loop, dict.fromkeys(llm.engine.eos, -1e4)
    handles = [
        llm.submit(PROMPT.format(row), max_tokens=2**31, logit_bias=never, **rule)
        for row in range(rows)
    ]
    while min(len(handle.completion.tokens) for handle in handles) < SETTLED:
        loop.tick()
    launches, times = [handle.completion.launches for handle in handles], []
    for _ in range(tokens):
        started = time.perf_counter()
        loop.tick()
        times.append(1e3 * (time.perf_counter() - started))
    steps = [handle.completion.launches - before for handle, before in zip(handles, launches)]
    assert steps == [tokens] * rows, steps  # every tick was one step of all rows
    for handle in handles:
        handle.cancel()
    return times


def measure(llm, rows: int, tokens: int, pairs: int, kind: str) -> dict[str, object]:
    """Median milliseconds per step without and with the grammar, and the share that it adds."""
    free, bound = [], []
    for _ in range(pairs):
        free += run(llm, rows, tokens, {})
        bound += run(llm, rows, tokens, RULES[kind])
    medians = statistics.median(free), statistics.median(bound)
    return {
        "kind": kind,
        "rows": rows,
        "free": medians[0],
        "bound": medians[1],
        "share": medians[1] / medians[0] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder, .gguf or hub id (default: the guide)")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--rows", type=int, default=8, help="requests together")
    parser.add_argument("--tokens", type=int, default=64, help="steps to measure")
    parser.add_argument("--pairs", type=int, default=3, help="runs with and runs without")
    parser.add_argument("--kind", choices=RULES, default="schema")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    llm = load(args.model, backend=args.backend)
    run(llm, args.rows, 4, {})  # compiles the step
    run(llm, args.rows, 4, RULES[args.kind])  # and the grammar
    figures = measure(llm, args.rows, args.tokens, args.pairs, args.kind)
    if args.json:
        print(json.dumps(figures))
        return
    print(
        f"{figures['rows']} rows, {figures['kind']}: {figures['free']:.2f} ms a step without, "
        f"{figures['bound']:.2f} ms with: "
        f"{100 * figures['share']:+.1f} %"
    )


if __name__ == "__main__":
    main()
