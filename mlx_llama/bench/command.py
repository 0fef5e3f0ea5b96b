"""python -m mlx_llama.bench: measure the speed and memory of a model on a backend.

Decoding a token reads every weight once and computes little, so memory bounds it: the bytes of a
token (weight matrices, one row of the embedding, the cache so far) over the bandwidth. For one
prompt and its answer the bandwidth is measured in the same run, between tokens where possible,
since it drifts on shared machines; the report gives the share of it that decoding reached. A prompt
reuses each weight for all its tokens, so arithmetic bounds it.

Several lengths or depths make a table with llama-bench's row names: pp512 is a prompt of 512
tokens, tg32 @ d1024 are 32 tokens decoded after 1024 others. With --rows the table is
llama-batched-bench's: B prompts of PP tokens and TG tokens decoded after each, one step for all
rows. With --profile it is the time of each operation of a decoded token, and with -p of a prompt
(profile.py).
"""

from __future__ import annotations

import argparse
import itertools
import re

import numpy as np

from cpu_fallback.kernels import find_target
from mlx_llama import cli
from mlx_llama.api.llm import context_size, single_adapter
from mlx_llama.cli import flags
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import BackendError, ContextError, OptionsError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import MOST_ROWS, LoadOptions
from mlx_llama.core.system import machine

from . import report
from .measure import Batch, Case, load, measure, measure_batches, measure_rows
from .profile import measure_host, measure_profiles

PLOT_DEPTHS = 9
PLOT_REACH = 4096  # maximum number of tokens on the axis of a plot without --depth


EXAMPLES = """
--model ~/models/Llama-3.2-1B-Instruct-Q4_K_M.gguf -p 128,512 -n 32
-b 1,2,4,8,16 -p 128 -n 64
"""


def parser() -> flags.Parser:
    """The command line, with llama-bench's flags and llama-batched-bench's."""
    result = flags.Parser("bench", __doc__.split("\n\n")[0], EXAMPLES)
    add = result.add_argument
    add(
        "--prompt-tokens",
        "-p",
        "-npp",
        metavar="N[,N...]",
        action="append",
        help="prompt lengths (default: 128)",
    )
    add(
        "--generate-tokens",
        "-n",
        "-ntg",
        metavar="N[,N...]",
        action="append",
        help="tokens to decode (default: 64)",
    )
    add(
        "--rows",
        "-b",
        "-npl",
        metavar="N[,N...]",
        action="append",
        help="decode this many prompts together and report the throughput",
    )
    add(
        "--depth",
        "-d",
        metavar="N[,N...]",
        action="append",
        help="tokens in the cache before measuring (default: 0)",
    )
    add(
        "--repetitions",
        "-r",
        metavar="N",
        default="3",
        help="number of timed runs; the median is printed with the slowest and the fastest "
        "(default: 3)",
    )
    add("--output", "-o", choices=report.FORMATS, help="format of the figures (default: text)")
    add("--json", action="store_true", help="same as -o json")
    add(
        "--plot",
        metavar="FILE",
        help="plot the decode time per token over the context, or with --rows the throughput over "
        "the rows (.png, .svg or .pdf; needs matplotlib)",
    )
    add(
        "--host",
        action="store_true",
        help="measure the host's time per token (with --rows: per step of the most rows), and on "
        "mlx the primitives of a step's graph",
    )
    add(
        "--profile",
        action="store_true",
        help="show time, bytes and bandwidth of each operation of a decoded token (of --rows rows "
        "at --depth), and with --prompt-tokens of a prompt",
    )
    add(
        "--kernels",
        action="store_true",
        help="measure candidate decode kernels of the cpu backend for all formats, without loading "
        "a model",
    )
    add(
        "--save",
        action="store_true",
        help="with --kernels: save the best for this processor in the package's table",
    )
    flags.add_load_flags(result, without=("cache_memory", "draft_model", "template", "max_rows"))
    return result


def parse_numbers(flag: str, value: str | list[str] | None, minimum: int) -> list[int] | None:
    """Parse the values of a flag, lists with commas, into distinct whole numbers in their order;
    None without the flag. Raises OptionsError that names it.
    """
    if value is None:
        return None
    numbers = []
    for text in ",".join([value] if isinstance(value, str) else value).split(","):
        if not re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text):
            raise OptionsError(
                f"{flag} {text.strip()!r:.40}: must be whole numbers, with commas between them"
            )
        if int(text) < minimum:
            raise OptionsError(f"{flag} {int(text)}: must be at least {minimum}")
        numbers.append(int(text))
    return list(dict.fromkeys(numbers))


def plan(
    prompts: list[int], generates: list[int], depths: list[int] | None, room: int | None = None
) -> list[Case]:
    """Rows of the table: at each depth every prompt, then every answer.

    Without depths prompts run at depth 0, and answers at depths up to `room` (None: at depth 0).
    """
    spread = depths
    if depths is None:
        depths = spread = [0]
        if room is not None:
            last = max(0, min(room, PLOT_REACH) - max(generates))
            spread = sorted(set(np.linspace(0, last, PLOT_DEPTHS).astype(int).tolist()))
    prefills = [Case("pp", length, depth) for depth in depths for length in prompts]
    return prefills + [Case("tg", length, depth) for depth in spread for length in generates]


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError."""
    args = parser().parse_args(arguments)
    prompts = parse_numbers("--prompt-tokens", args.prompt_tokens, 1) or [128]
    generates = parse_numbers("--generate-tokens", args.generate_tokens, 2) or [64]
    depths = parse_numbers("--depth", args.depth, 0)
    row_counts = parse_numbers("--rows", args.rows, 1)
    if row_counts and max(row_counts) > MOST_ROWS:
        raise OptionsError(f"--rows {max(row_counts)}: must be at most {MOST_ROWS}")
    if args.profile:
        _exclude(args, "profile", "plot", "host", "compile")
        if row_counts and args.prompt_tokens is not None:
            raise OptionsError(
                "--profile and --rows take no --prompt-tokens, since prompts run one after the "
                "other: name the depth of all rows with --depth"
            )
    elif row_counts and depths is not None:
        raise OptionsError(
            "--depth and --rows contradict each other: name the depth of all rows with "
            "--prompt-tokens"
        )
    [repetitions, *more] = parse_numbers("--repetitions", args.repetitions, 1)
    if more:
        raise OptionsError(f"--repetitions {args.repetitions}: must be one number")
    if args.json and args.output not in (None, "json"):
        raise OptionsError(
            f"--json and --output {args.output} contradict each other: leave one of them out"
        )
    output = "json" if args.json else args.output or "text"
    if args.kernels:
        return _run_kernels(args, output)
    if args.save:
        raise OptionsError("--save is for --kernels: leave it out")
    if args.plot is not None:
        report.check_plot(args.plot)
    backend = select(args.backend, args.device)
    if args.profile and backend.name != "cpu":
        args.compile = False  # a traced or captured step hides its operations
    options = backend.check(flags.load_options(args))
    checkpoint = open_checkpoint(options.model, options.revision, single_adapter(options))
    context = context_size(checkpoint, options.ctx_size, lambda notice: cli.say(f"({notice})"))
    has_one = len(prompts) == len(generates) == 1 and depths in (None, [0]) and row_counts is None
    is_table = args.plot or args.profile or output not in ("text", "json")
    is_single = has_one and not is_table
    if args.profile and args.prompt_tokens is None:
        prompts = []
    are_batches = row_counts is not None and not args.profile
    cases: list[Case] | list[Batch] = plan(
        prompts, generates, depths, context if args.plot else None
    )
    if are_batches:
        cases = list(itertools.starmap(Batch, itertools.product(prompts, generates, row_counts)))
    needs = [(case.name, case.positions) for case in cases]
    if is_single:
        name = f"a prompt of {prompts[0]} and {generates[0]} more tokens"
        needs = [(name, prompts[0] + generates[0])]
    for name, positions in needs:
        if positions > context:
            lower = " or --generate-tokens" if are_batches else ", --generate-tokens or --depth"
            remedy = "" if options.ctx_size is None else ", or raise --ctx-size"
            raise ContextError(
                f"{name} needs {positions} positions and the context of {checkpoint.name} has "
                f"{context}: lower --prompt-tokens{lower}{remedy}"
            )
    loaded = load(checkpoint, backend, options)
    host = {"host": measure_host(loaded, context, max(row_counts or [1]))} if args.host else {}
    advance = cli.announce("measuring")
    if is_single:
        figures = measure(loaded, prompts[0], generates[0], repetitions) | host
        print(report.as_json(figures) if output == "json" else report.single(figures))
        return 0
    if args.profile:
        rows = measure_profiles(loaded, cases, row_counts or [1], repetitions, advance)
    else:
        measure_cases = measure_batches if are_batches else measure_rows
        rows = measure_cases(loaded, cases, repetitions, advance)
    kind, render = ("profiles", report.profiles) if args.profile else ("rows", report.table)
    figures = loaded.facts(repetitions) | {kind: [row.figures() for row in rows]} | host
    print(render(figures, output))
    if args.plot:
        (report.draw_throughput if are_batches else report.draw)(figures, rows, args.plot)
        cli.say(f"wrote {args.plot}")
    return 0


def _run_kernels(args: argparse.Namespace, output: str) -> int:
    """Measure candidate decode kernels; returns the exit code. Raises LlamaError."""
    _exclude(args, "kernels", "profile", "host", "plot", "rows", "depth", "model", "adapters")
    _exclude(args, "kernels", "prompt_tokens", "generate_tokens")
    if output not in ("text", "json"):
        raise OptionsError(
            f"--kernels and --output {output} contradict each other: choose text or json"
        )
    backend = select(args.backend or "cpu", args.device)
    threads = backend.check(LoadOptions(dtype=args.dtype, threads=args.threads)).threads
    advance = cli.announce("measuring")
    if backend.name != "cpu":
        raise OptionsError(
            f"--kernels measures the cpu backend's kernels, and {backend.name} chooses its "
            "own: use --backend cpu"
        )
    target, reason = find_target()
    if target is None:
        raise BackendError(f"no compiled kernels to measure: {reason}")
    from . import candidates  # which needs llvmlite

    figures = candidates.measure(target, threads or machine.physical_cores(), advance)
    try:
        figures["saved"] = candidates.save(figures) if args.save else None
    except OSError as error:
        raise OptionsError(
            f"--save: {error.filename}: {error.strerror}: leave it out, or install the package "
            "where you may write"
        ) from None
    print(report.as_json(figures) if output == "json" else report.kernels(figures))
    return 0


def _exclude(args: argparse.Namespace, flag: str, *others: str) -> None:
    """Raise OptionsError for flags that contradict `flag`."""
    for other in others:
        if getattr(args, other):
            raise OptionsError(
                f"--{flag} and --{other.replace('_', '-')} contradict each other: leave one of "
                "them out"
            )
