"""Compare mlx_llama and its peers in alternating runs over the same files: the cpu backend and
llama.cpp over a GGUF file (its llama-bench if that is on the search path, else llama-cpp-python),
the mlx backend and mlx-lm, the cuda backend and transformers over a checkpoint folder.

    pip install -e ".[peers]"
    python examples/benchmarks/make_random_gguf.py tinyllama /tmp/models Q4_0
    python examples/benchmarks/compare_peers.py /tmp/models/tinyllama-Q4_0.gguf --accuracy
    python examples/benchmarks/compare_peers.py /tmp/models/tinyllama-Q4_0.gguf --depth 4000 --cache-bits 8 --busy 1
    pip install -e ".[test]"
    python examples/benchmarks/compare_peers.py                        # a random checkpoint of 22 layers, made for the run
    python examples/benchmarks/compare_peers.py FOLDER --device gpu

Decoding is bound by memory bandwidth, which varies between minutes on a shared machine. So each
program stays loaded in a process of its own, and the two answer in turn, one asleep while the other
works. A probe measures the bandwidth before and after each answer. Ratios are of neighbouring
answers, by state of the memory where it has two. Both programs run greedily from the same tokens;
llama.cpp, torch and the cpu backend on the same number of threads; peers with their defaults.
llama.cpp's logits stay in its memory. Both warm up untimed. llama-bench is a new process for each
answer, decodes given tokens and samples none, where mlx_llama's time includes sampling and its
scheduler; it runs with flash attention or without, whichever it is faster with. A share of the
bandwidth counts the file's weights but the embedding, and the program's own keys and values up to
the depth. peers_gguf.py has the programs for GGUF files, peers_checkpoint.py those for folders.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from peers_checkpoint import PAIRS, PROGRAMS, agreement, pairs_here, prompt_tokens
from peers_gguf import (
    CACHE_BITS,
    LLAMA_BENCH,
    Busy,
    LlamaBench,
    Ours,
    Peer,
    reference_logits,
    token_bytes,
)
from peers_rows import MlxLmRows, OursRows

NAMES = {"ours": "mlx_llama", "peer": "llama.cpp"}
DEEP_RUNS = 3  # of each program in turn: llama-bench computes the depth anew in each process
STEADY = 1.25  # largest ratio of bandwidths within one state of the memory


def peak_memory() -> int:
    """Peak resident bytes of this process since exec."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux's ru_maxrss includes the parent's peak
        return next(
            int(line.split()[1]) * 1024
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    from mlx_llama.core.system import machine

    return machine.peak_memory()


def serve(program: str, path: str, capacity: int, threads: int, setting: Any) -> int:
    """Run a program's process: load the model, print "loaded", answer each request [method,
    arguments] by one JSON line.
    """
    programs = {
        "ours": Ours,
        "peer": Peer,
        "mlx-rows ours": OursRows,
        "mlx-rows peer": MlxLmRows,
    } | PROGRAMS
    answers = programs[program](path, capacity, threads, setting)
    print(json.dumps("loaded"), flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        value = peak_memory() if method == "peak" else getattr(answers, method)(*arguments)
        print(json.dumps(value), flush=True)
    return 0


class Program:
    """Handle of a program's process, asleep between requests. setting: the last argument of the
    program's class.
    """

    def __init__(self, name: str, path: str, capacity: int, threads: int, setting: Any):
        settings = json.dumps([name, path, capacity, threads, setting])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", settings],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.label = f"{name} on {path}"
        self._answer()  # loaded

    def warm(self, method: str, *arguments: Any) -> None:
        """Answer a request untimed: page faults, cold caches."""
        self.ask(method, *arguments)

    def ask(self, method: str, *arguments: Any, repeat: int = 1) -> Any:
        """The answer to one request, of several the median. Exits if the process has ended."""
        if repeat > 1:
            return statistics.median(self.ask(method, *arguments) for _ in range(repeat))
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        code = self.process.wait()
        # A process that exits has printed its reason on stderr, which both share.
        sys.exit(code if code > 0 else f"error: {self.label} was ended by signal {-code}")

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        if error[0]:
            self.process.kill()
        self.process.wait()


class Comparison:
    """Asks two programs in turn; for each figure, keeps pairs of answers with the bandwidths around
    them.
    """

    def __init__(self) -> None:
        from mlx_llama.bench.measure import HostMemory

        self.memory = HostMemory()
        self.bandwidths: list[float] = []  # every probe of the run
        self.probe()

    def probe(self) -> float:
        """Memory bandwidth now, in bytes per second."""
        bandwidth = self.memory.bandwidth()
        time.sleep(0.05)  # let the probe's threads stop spinning
        self.bandwidths.append(bandwidth)
        return bandwidth

    def alternate(self, asks: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
        """[{"ours": value, "peer": value, "bandwidth": [before, between, after]}, ...], one per
        round.
        """
        pairs, before = [], self.probe()
        for _ in range(rounds):
            pair: dict[str, Any] = {"bandwidth": [before]}
            for name, ask in asks.items():
                pair[name] = ask()
                pair["bandwidth"].append(self.probe())
            before = pair["bandwidth"][-1]
            pairs.append(pair)
        return pairs

    def states(self) -> dict[str, tuple[float, float]]:
        """{name of the memory's state in this run: (lowest, highest bandwidth)}: one state, or fast
        and slow.
        """
        low, high = np.percentile(self.bandwidths, [10, 90])
        if high / low < STEADY:
            return {"steady": (0.0, math.inf)}
        middle = math.sqrt(low * high)
        return {"fast": (middle, math.inf), "slow": (0.0, middle)}


def measure(path: str, args: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """All pairs of one file, by figure: rates in tokens per second, start in seconds, peak in bytes
    per byte of file.

    The peer of the rates is llama-bench if given.llama_bench names it, else llama-cpp-python, the
    one of all others.
    """
    size, setting = os.path.getsize(path), [args.activation_bits, args.cache_bits, args.flash_attn]
    capacity = max(*args.depth, args.prompt) + args.generate + 2
    figures: dict[str, Any] = {"file": os.path.basename(path), "bytes": size}

    def program(name: str, capacity: int) -> Program:
        return Program(name, path, capacity, args.threads, setting)

    if args.llama_bench:
        figures["names"] = NAMES | {"peer": LLAMA_BENCH}
    both: dict[str, Any] = {"ours": program("ours", capacity)}
    both["peer"] = (
        LlamaBench(args.llama_bench, path, args.threads, *setting[1:])
        if args.llama_bench
        else program("peer", capacity)
    )
    with both["ours"], both["peer"]:
        weights, numbers = token_bytes(path)
        position = {
            "ours": both["ours"].ask("position_bytes"),
            "peer": numbers * CACHE_BITS[args.cache_bits] / 8,
        }

        def decode(depth: int, repeat: int = 1) -> list[dict[str, Any]]:
            pairs = rates(
                both,
                args.rounds,
                comparison,
                args.generate,
                "decode",
                depth,
                args.generate,
                repeat=repeat,
            )
            for pair in pairs:
                before, between, after = pair["bandwidth"]
                for name, probes in {"ours": (before, between), "peer": (between, after)}.items():
                    nbytes = weights + position[name] * (depth + args.generate / 2)
                    pair[f"{name}_share"] = pair[name] * nbytes / statistics.harmonic_mean(probes)
            return pairs

        figures["prompt"] = rates(both, args.rounds, comparison, args.prompt, "prompt", args.prompt)
        figures["decode"] = decode(args.prompt)
        for depth in filter(None, args.depth):
            figures[f"deep {depth}"] = decode(depth, DEEP_RUNS)
    if args.accuracy:
        count = args.accuracy
        with program("ours", count + 2) as ours, program("peer", count + 2) as peer:
            figures["error"] = [errors(path, {"ours": ours, "peer": peer}, count)]
    if args.starts:
        peaks: dict[str, list[float]] = {name: [] for name in NAMES}

        def start(name: str) -> float:
            started = time.perf_counter()
            with program(name, args.prompt + args.generate + 2) as running:
                running.ask("prompt", args.prompt)
                seconds = time.perf_counter() - started
                running.ask("decode", args.prompt, args.generate)
                peaks[name].append(running.ask("peak") / size)
            return seconds

        figures["start"] = comparison.alternate(
            {name: lambda name=name: start(name) for name in NAMES}, args.starts
        )
        figures["peak"] = [dict(zip(NAMES, pair)) for pair in zip(*peaks.values())]
    return figures


def rates(
    asked: dict[str, Any],
    rounds: int,
    comparison: Comparison,
    count: int,
    method: str,
    *arguments: int,
    repeat: int = 1,
) -> list[dict[str, Any]]:
    """Pairs of rates: `count` divided by a method's seconds, the median of `repeat`. asked:
    Programs, or a LlamaBench.
    """
    for program in asked.values():
        program.warm(method, *arguments)
    return comparison.alternate(
        {
            name: lambda program=program: count / program.ask(method, *arguments, repeat=repeat)
            for name, program in asked.items()
        },
        rounds,
    )


def measure_folder(
    path: str, framework: str, args: argparse.Namespace, comparison: Comparison
) -> dict[str, Any]:
    """All pairs of one checkpoint and framework, by figure, as `measure`; build and host in
    microseconds per step.

    mlx-rows decodes `given.rows` sequences in each step, and its rates are of all of them together.
    """
    has_rows = framework == "mlx-rows"
    rows = args.rows if has_rows else 1
    # a step ahead, and those of `host`
    capacity = max(*args.depth, args.prompt) + args.generate + (64 if has_rows else 3)
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    figures: dict[str, Any] = {
        "file": os.path.basename(os.path.abspath(path)),
        "bytes": size,
        "names": PAIRS[framework][0],
    }
    setting = [
        args.device,
        None if framework == "cuda" else args.compile,
        *([rows] if has_rows else []),
    ]
    both = {
        name: Program(f"{framework} {name}", path, capacity, args.threads, setting)
        for name in NAMES
    }
    with both["ours"], both["peer"]:
        figures["about"] = both["ours"].ask("about")
        decoded = (args.rounds, comparison, args.generate * rows, "decode")
        if not has_rows:
            figures["prompt"] = rates(
                both, args.rounds, comparison, args.prompt, "prompt", args.prompt
            )
        figures["decode"] = rates(both, *decoded, args.prompt, args.generate)
        for depth in filter(None, [] if has_rows else args.depth):
            figures[f"deep {depth}"] = rates(both, *decoded, depth, args.generate)
        answers = [program.ask("tokens", args.prompt, args.generate) for program in both.values()]
        figures["same_tokens"] = (
            min(agreement(*pair) for pair in zip(*answers)) if has_rows else agreement(*answers)
        )
        if framework != "cuda":
            pairs = comparison.alternate(
                {
                    name: lambda program=program: program.ask("host")
                    for name, program in both.items()
                },
                min(args.rounds, 3),
            )
            for key in ("build", "host", "primitives"):
                figures[key] = [{name: pair[name][key] for name in NAMES} for pair in pairs]
    return figures


def errors(path: str, both: dict[str, Program], count: int) -> dict[str, float]:
    """Relative RMS error of each program's logits over a prompt of `count` tokens, against the
    float64 reference.
    """
    saved = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in both.items():
            file = os.path.join(folder, f"{name}.npy")
            program.ask("logits", count, file)
            saved[name] = np.load(file)
    expected = reference_logits(path, prompt_tokens(count, saved["peer"].shape[1]))
    return {
        name: float(np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean()))
        for name, logits in saved.items()
    }


def summary(
    pairs: list[dict[str, Any]], low: float = 0.0, high: float = math.inf
) -> dict[str, float] | None:
    """Medians over pairs whose probes lie between two bandwidths: ours, peer, paired ratio, bytes
    per second, count.
    """
    pairs = [
        pair
        for pair in pairs
        if all(low <= bandwidth <= high for bandwidth in pair.get("bandwidth", ()))
    ]
    if not pairs:
        return None
    names = [name for name in (*NAMES, *(f"{name}_share" for name in NAMES)) if name in pairs[0]]
    result = {name: statistics.median(pair[name] for pair in pairs) for name in names}
    result["ratio"] = statistics.median(pair["ours"] / pair["peer"] for pair in pairs)
    probes = [bandwidth for pair in pairs for bandwidth in pair.get("bandwidth", ())]
    return result | {"bandwidth": statistics.median(probes) if probes else 0.0, "pairs": len(pairs)}


def report(
    figures: dict[str, Any], args: argparse.Namespace, states: dict[str, tuple[float, float]]
) -> str:
    """One file's figures as a table."""
    rows = {
        "decode": f"decode after {args.prompt}, tokens/s",
        "prompt": f"prompt of {args.prompt}, tokens/s",
        **{f"deep {depth}": f"decode after {depth}, tokens/s" for depth in args.depth},
        "start": f"start to 1st token of {args.prompt}, s",
        "peak": "peak memory / file",
        "error": "relative error of logits",
        "build": "build a step, us",
        "host": "build and launch, CPU us",
        "primitives": "primitives per step",
    }
    names = figures.get("names", NAMES)
    bits = "" if args.activation_bits is None else f", activations of {args.activation_bits} bits"
    bits += "" if args.cache_bits is None else f", keys and values of {args.cache_bits} bits"
    busy = f", beside {args.busy} busy process{'es' if args.busy > 1 else ''}" if args.busy else ""
    how = (figures.get("about") or f"{args.threads} threads each{bits}") + busy
    wide = max(10, *(len(name) + 2 for name in names.values()))
    lines = [
        f"{figures['file']}: {figures['bytes'] / 1e9:.2f} GB, {how}",
        f"{'':30}{names['ours']:>{wide}}{names['peer']:>{wide}}{'ratio':>9}{'GB/s':>6}{'pairs':>6}"
        f"{'share of GB/s' if 'ours_share' in figures['decode'][0] else '':>16}",
    ]

    def line(title: str, medians: dict[str, float]) -> str:
        digits = ".1e" if title == rows["error"] else ".2f" if medians["peer"] < 20 else ".1f"
        bandwidth = f"{medians['bandwidth'] / 1e9:6.0f}" if medians["bandwidth"] else " " * 6
        both = "".join(f"{medians[name]:{wide}{digits}}" for name in NAMES)
        shares = (
            " / ".join(f"{medians[f'{name}_share']:.0%}" for name in NAMES)
            if "ours_share" in medians
            else ""
        )
        return f"{title:30}{both}{medians['ratio']:8.3g}x{bandwidth}{medians['pairs']:6}{shares:>16}".rstrip()  # noqa: E501

    for key, title in rows.items():
        if key not in figures:
            continue
        lines.append(line(title, summary(figures[key])))
        if len(states) > 1 and (key in ("decode", "prompt") or key.startswith("deep")):
            for state, between in states.items():
                if medians := summary(figures[key], *between):
                    lines.append(line(f"  memory {state}", medians))
    if "same_tokens" in figures:
        lines.append(
            f"the first {figures['same_tokens']} of {args.generate + 1} decoded tokens are the same"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    result = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    result.add_argument(
        "files",
        nargs="*",
        metavar="FILE.gguf or FOLDER",
        help="default: a random checkpoint of 22 layers, made for the run",
    )
    result.add_argument(
        "--threads",
        type=int,
        default=cores,
        help=f"of each program; MLX chooses its own (default here: {cores})",
    )
    result.add_argument(
        "--pairs",
        nargs="+",
        choices=PAIRS,
        default=list(PAIRS),
        metavar="BACKEND",
        help="for folders: mlx (against mlx-lm), cuda (against transformers), mlx-rows (several "
        "sequences in "
        "each step, against mlx-lm's batched generator); default: all",
    )
    result.add_argument(
        "--rows", type=int, default=8, help="sequences of mlx-rows, 1 to 32 (default: 8)"
    )
    result.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default=None,
        help="for folders (default: a GPU if there is one)",
    )
    result.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="for folders: trace mlx_llama's step on mlx as one graph, or do not",
    )
    result.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of the random checkpoint (default: float32; bfloat16 rounds so much that tokens "
        "differ)",
    )
    result.add_argument(
        "--rounds",
        type=int,
        default=None,
        help="pairs per figure (default: 7, and 3 of the random checkpoint)",
    )
    result.add_argument(
        "--prompt", type=int, default=128, help="tokens of the prompt (default: 128)"
    )
    result.add_argument(
        "--generate", type=int, default=32, help="tokens decoded per answer (default: 32)"
    )
    result.add_argument(
        "--depth",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="decode at these depths too, such as 4000",
    )
    result.add_argument(
        "--cache-bits",
        type=int,
        choices=[bits for bits in CACHE_BITS if bits],
        help="of keys and values in both programs; for GGUF files (default: the programs' own)",
    )
    result.add_argument(
        "--llama-bench",
        metavar="PATH",
        default=None,
        help=f"llama.cpp's program as the peer of GGUF files (default: {LLAMA_BENCH} on the search "
        "path, "
        "without one llama-cpp-python; none: llama-cpp-python)",
    )
    result.add_argument(
        "--flash-attn",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="of llama.cpp (default: the faster with llama-bench, llama-cpp-python's own choice; "
        "on "
        "with "
        "--cache-bits 8, which needs it)",
    )
    result.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="run N processes beside both that never pause",
    )
    result.add_argument(
        "--starts",
        type=int,
        default=3,
        metavar="N",
        help="pairs of fresh processes for start and peak memory; 0 leaves them out (default: 3)",
    )
    result.add_argument(
        "--accuracy",
        type=int,
        nargs="?",
        const=16,
        default=0,
        metavar="TOKENS",
        help="compare the logits of a prompt (of 16 tokens) with the float64 product",
    )
    result.add_argument(
        "--activation-bits", type=int, choices=(8, 16, 32), default=None, help="of mlx_llama"
    )
    result.add_argument("--json", action="store_true", help="print every pair as JSON")
    result.add_argument("--serve", help=argparse.SUPPRESS)
    return result


def find_peers(args: argparse.Namespace) -> None:
    """Set given.llama_bench to the program's path, or None for llama-cpp-python. Leaves out figures
    whose package is missing, with a line on stderr. Exits if there is no peer."""
    asked, args.llama_bench = args.llama_bench, None
    if asked != "none":
        args.llama_bench = shutil.which(asked or LLAMA_BENCH)
        if asked and not args.llama_bench:
            sys.exit(
                f"error: {asked}: there is no such program: build {LLAMA_BENCH} from "
                "llama.cpp's sources, or leave out "
                "--llama-bench"
            )
    needs = {
        "llama_cpp": args.starts or args.accuracy or not args.llama_bench,
        "gguf": args.accuracy,
    }
    for package in (
        name for name, needed in needs.items() if needed and importlib.util.find_spec(name) is None
    ):
        if args.accuracy or not args.llama_bench:
            sys.exit(f'error: {package} is not installed: pip install -e ".[peers]"')
        print(
            "left out: start and peak memory (llama_cpp is not installed: pip install -e "
            '".[peers]")',
            file=sys.stderr,
        )
        args.starts = 0


def main(arguments: list[str]) -> int:
    """Run the comparison; returns the exit code."""
    arguments_parser = parser()
    args = arguments_parser.parse_args(arguments)
    if args.serve:
        return serve(*json.loads(args.serve))
    if args.rounds is None:
        args.rounds = 7 if args.files else 3
    if not 1 <= args.rows <= 32:
        arguments_parser.error("--rows must be between 1 and 32")
    if (
        min(args.threads, args.rounds, args.prompt, args.generate) < 1
        or min(*args.depth, args.starts, args.busy) < 0
    ):
        arguments_parser.error(
            "--threads, --rounds, --prompt and --generate must be at least 1, no number negative"
        )
    folders = [path for path in args.files if os.path.isdir(path)]
    files = [path for path in args.files if path not in folders]
    if args.cache_bits == 8 and args.flash_attn is False:
        arguments_parser.error(
            "--cache-bits 8 needs flash attention in llama.cpp: leave out --no-flash-attn"
        )
    args.flash_attn = True if args.cache_bits == 8 else args.flash_attn
    if folders and args.cache_bits:
        arguments_parser.error("--cache-bits is for GGUF files: leave it out, or the folders")
    if files:
        find_peers(args)
    for path in files:
        if not os.path.isfile(path):
            sys.exit(f"error: {path}: there is no such file")
    frameworks: list[str] = []
    if folders or not files:
        frameworks, reasons = pairs_here(args.pairs)
        for reason in reasons:
            print(reason, file=sys.stderr, flush=True)
        if not frameworks:
            sys.exit("error: no peer is installed: pip install mlx-lm transformers")
    with Busy(args.busy), tempfile.TemporaryDirectory() as made:
        comparison, results = Comparison(), []
        if not args.files:
            from make_random_checkpoint import write

            folders = [os.path.join(made, "deep")]
            write(Path(folders[0]), "deep", args.dtype, 0)
        for path in files:
            results.append(measure(path, args, comparison))
            print(f"{path}: measured", file=sys.stderr, flush=True)
        for path in folders:
            for framework in frameworks:
                results.append(measure_folder(path, framework, args, comparison))
                print(f"{path}: measured on {framework}", file=sys.stderr, flush=True)
    # States need the probes of the whole run.
    states = comparison.states()
    if args.json:
        for result in results:
            for key, pairs in list(result.items()):
                if isinstance(pairs, list):
                    by_state = {
                        state: summary(pairs, *between) for state, between in states.items()
                    }
                    result[key] = {"all": summary(pairs), "states": by_state, "pairs": pairs}
        facts = {
            name: getattr(args, name)
            for name in (
                "threads",
                "activation_bits",
                "cache_bits",
                "prompt",
                "generate",
                "depth",
                "busy",
            )
        }
        print(json.dumps(facts | {"results": results}, indent=1))
    else:
        print("\n\n".join(report(result, args, states) for result in results))
    return 0


if __name__ == "__main__":
    # Print mlx_llama's errors in one line, as its commands do.
    from mlx_llama import cli

    sys.exit(cli.run(main))
