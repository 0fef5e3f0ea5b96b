"""python -m mlx_llama.parity: check that the backends agree, and find where they differ.

The same tokens run through several backends, most as a prompt, the last ones one by one, and are
compared with a float32 NumPy run at every probe of the model. The exit code is 0 within the dtype's
tolerance and 1 outside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_llama import cli
from mlx_llama.api.llm import LLM, single_adapter
from mlx_llama.cli import flags
from mlx_llama.cli.flags import parse_number
from mlx_llama.cli.running import spell_options
from mlx_llama.core.backends import selection
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.errors import BackendError, ContextError, OptionsError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import LoadOptions, full_dtype
from mlx_llama.parity import batches, probes as parity, trace
from mlx_llama.parity.batches import SIZES
from mlx_llama.parity.differences import is_tie
from mlx_llama.parity.probes import measure_perplexity

from . import report

MAX_ROWS = 256  # largest batch
WINDOW = 512  # perplexity's window in a longer context
TOKENS = 64
DECODED = 16  # maximum number of tokens that run one by one
STEPS = 24  # greedy tokens to decode
TEXT = (
    "The lighthouse keeper counted the ships that passed in the night, and wrote each one down: "
    "three from the north, two with red sails, and one that carried no light at all. In the "
    "morning he read the list aloud to his cat. "
)


class Job:
    """The parts that all modes share. Raises LlamaError for bad ones before a model is loaded."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.opened = open_backends(args.backends, args.device)
        self.options = flags.load_options(args)
        for backend in self.opened:
            backend.check(self.options)
        self.checkpoint = open_checkpoint(args.model, args.revision, single_adapter(self.options))
        self.config = self.checkpoint.config
        self.made_for = self.config.max_position_embeddings

    def load(self, backend: Backend) -> LLM:
        """Load the model on a backend, with the options of the command line."""
        return self._load(backend, f"{backend.name} ({backend.device_name})", self.options)

    def runs(self) -> Iterator[tuple[LLM, dict[str, Any]]]:
        """(the model, first columns of its rows in a table) on each backend in turn."""
        for backend in self.opened:
            llm = self.load(backend)
            names = {"backend": backend.name, "device": backend.device_name}
            yield (
                llm,
                names | {"dtype": llm.model.dtype_name, "tolerance": parity.tolerance_of(llm)},
            )
            parity.free(llm)

    def load_reference(self) -> LLM:
        """Load the float32 NumPy model that the others are compared with."""
        options = LoadOptions(dtype="float32", compile=False)
        return self._load(selection.select("cpu"), "NumPy at float32", options, is_whole=True)

    def _load(
        self, backend: Backend, name: str, options: LoadOptions, is_whole: bool = False
    ) -> LLM:
        cli.say(f"running {self.checkpoint.name} on {name}")
        checkpoint = self.checkpoint
        model = backend.build(checkpoint, backend.check(options), is_whole)
        return LLM(checkpoint, backend, model, checkpoint.template, self.made_for)

    def tokens(self) -> tuple[list[int], int]:
        """(ids, number of the last ones that run one by one). Raises OptionsError, ContextError."""
        args, tokenizer = self.args, self.checkpoint.tokenizer
        count = parse_number("--tokens", args.tokens, 2, self.made_for)
        if args.prompt is not None:
            tokens = tokenizer.encode(args.prompt, add_bos=True)
            if len(tokens) < 2:
                raise ContextError(
                    f"--prompt: {len(tokens)} token is too few, at least 2 are needed: give "
                    "a longer text"
                )
            tokens = tokens[:count]
        else:
            count = count or min(TOKENS, self.made_for)
            text = tokenizer.encode(TEXT, add_bos=True)
            tokens = (text * (count // len(text) + 1))[:count]
        if len(tokens) > self.made_for:
            raise ContextError(
                f"--prompt: {len(tokens)} tokens do not fit the context of {self.made_for}: give "
                "--tokens to run fewer"
            )
        return tokens, min(DECODED, len(tokens) // 2)

    def steps(self, prompt: list[int]) -> int:
        return min(STEPS, self.made_for - len(prompt))


def open_backends(names: str | None, device: str | None) -> list[Backend]:
    """The backends of --backends, or all that are installed, on a GPU if there is one. In processes
    of a launcher: the launcher's backend.

    Raises BackendError, OptionsError.
    """
    if names is not None:
        requested = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
        if not requested or not set(requested) <= set(selection.PACKAGES):
            raise OptionsError(
                f"--backends {names!r:.60}: must be some of {', '.join(selection.PACKAGES)}, "
                "with commas"
            )
        if requested == ["cpu"]:
            return [selection.select("cpu", device)]  # refuses a GPU
        return [_open(name, device) for name in requested]
    if selection.world:
        return [_open(selection.world.backend, device)]
    opened = []
    for name in selection.PACKAGES:
        try:
            opened.append(_open(name, device))
        except BackendError as error:
            cli.say(f"({name} is left out: {error})")
    return opened


def _open(name: str, device: str | None) -> Backend:
    """Open a backend. --device does not apply to the cpu backend."""
    if name == "cpu" or device is not None:
        return selection.select(name, None if name == "cpu" else device)
    try:
        return selection.select(name, "gpu")
    except BackendError:
        return selection.select(name, "cpu")


def show_rows(
    job: Job,
    facts: dict[str, Any],
    rows: list[report.Row],
    columns: str,
    remark: report.Remark = lambda row: "",
) -> int:
    """Print a table with a line for each row, or one JSON object. Returns the exit code."""
    facts = {"model": job.checkpoint.name, **facts}
    code = 0 if all(row["within"] for row in rows) else 1
    if job.args.json:
        print(json.dumps(facts | {"rows": rows}))
        return code
    from rich.table import Table

    console = report.make_console()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), soft_wrap=True)
    table = Table()
    names = columns.split()
    for name in names:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(
            *(
                f"{row[name]:.6g}" if isinstance(row[name], float) else str(row[name])
                for name in names
            )
        )
    console.print(table)
    for row in rows:
        if text := remark(row):
            console.print(text, soft_wrap=True)
    return code


def compare(job: Job) -> int:
    """Compare backends with the reference at every probe."""
    tokens, decoded = job.tokens()
    prompt = tokens[:-decoded]
    if job.args.reference == "transformers":
        from .peer import TransformersReference

        cli.say(f"running {job.checkpoint.name} on transformers")
        peer = TransformersReference(job.checkpoint)
        expected, greedy = peer.collect(tokens, decoded), peer.greedy(prompt, job.steps(prompt))
        logits, name = peer.logits, peer.name
    else:
        llm = job.load_reference()
        expected = parity.collect(llm.backend, llm.model, tokens, decoded)
        greedy = parity.greedy(llm, prompt, job.steps(prompt))
        logits, name = (lambda ids: llm.logits(ids)[-1]), "NumPy at float32"
    comparisons = []
    for run, columns in job.runs():
        actual = parity.collect(run.backend, run.model, tokens, decoded)
        comparison = parity.compare(**columns, actual=actual, expected=expected, config=job.config)
        comparison.decoded = parity.compare_decoded(
            run, prompt, greedy, comparison.tolerance, logits
        )
        comparisons.append(comparison)
    facts = {"model": job.checkpoint.name, "reference": name, "tokens": tokens, "decoded": decoded}
    if job.args.html:
        report.write_page(job.args.html, facts, comparisons)
        cli.say(f"wrote {job.args.html}")
    if job.args.json:
        print(json.dumps(facts | {"backends": [comparison.report() for comparison in comparisons]}))
    else:
        report.show(facts, comparisons)
    return 0 if all(comparison.is_within for comparison in comparisons) else 1


def record(job: Job) -> int:
    """Write a golden trace of the reference run."""
    tokens, decoded = job.tokens()
    prompt, llm = tokens[:-decoded], job.load_reference()
    probes = parity.collect(llm.backend, llm.model, tokens, decoded)
    greedy = parity.greedy(llm, prompt, job.steps(prompt))
    golden = trace.record(job.checkpoint, tokens, decoded, probes, greedy)
    golden.save(job.args.record)
    print(
        f"{job.args.record}: {len(tokens)} tokens, {len(golden.sketches)} probes, "
        f"{Path(job.args.record).stat().st_size} bytes"
    )
    return 0


def check(job: Job) -> int:
    """Check each backend against a golden trace."""
    golden = trace.load(job.args.check)
    trace.require_same(golden, job.checkpoint, job.args.check)
    prompt, rows = golden.tokens[: -golden.decoded], []
    names = parity.probe_names(job.config)
    for llm, columns in job.runs():
        probes = parity.collect(llm.backend, llm.model, golden.tokens, golden.decoded)
        greedy = parity.greedy(llm, prompt, len(golden.greedy)) if golden.greedy else []
        result = trace.check(golden, probes, greedy, columns["tolerance"], names)
        near_tie, at, bad = True, result.first_greedy, result.first_bad
        if at is not None:
            logits = llm.logits(prompt + golden.greedy[:at])[-1]
            near_tie = is_tie(logits, golden.greedy[at], greedy[at], columns["tolerance"])
        worst = max(float(values.max()) for values in result.errors.values())
        position = None if bad is None else int(result.errors[bad].argmax())
        probes = {"worst": worst, "first_bad": bad, "position": position}
        tokens = {"first_greedy_difference": at, "near_tie": near_tie}
        within = {"within": bad is None and near_tie, "probes": len(result.errors)}
        rows.append(columns | probes | tokens | within)
    facts = {"trace": job.args.check, "recorded_from": golden.model, "tokens": len(golden.tokens)}
    columns = "backend device dtype worst tolerance"
    return show_rows(job, facts, rows, columns, report.describe_check)


def verify_cache(job: Job) -> int:
    """Compare every way of filling a cache with a cold run, on each backend."""
    tokens, _ = job.tokens()
    if len(tokens) < batches.MIN_TOKENS:
        raise OptionsError(
            f"--verify-cache needs at least {batches.MIN_TOKENS} tokens, there are "
            f"{len(tokens)}: give a longer --prompt"
        )
    tokens = tokens[: job.made_for - 8]
    rows = [
        columns | asdict(way)
        for llm, columns in job.runs()
        for way in batches.compare_ways(llm, tokens, columns["tolerance"])
    ]
    columns = "backend dtype way relative tolerance"
    return show_rows(job, {"tokens": len(tokens)}, rows, columns, report.describe_way)


def batch(job: Job) -> int:
    """Compare rows computed alone with the same rows in batches, on each backend."""
    sizes = parse_sizes(job.args.batch)
    tokens, _ = job.tokens()
    if min(len(tokens), job.made_for - batches.STEPS - 1) < batches.MIN_TOKENS:
        raise OptionsError(
            f"--batch needs at least {batches.MIN_TOKENS} tokens and room for {batches.STEPS + 1} "
            "more: give a longer --prompt, or a model with a larger context"
        )
    prompts, rows = batches.make_prompts(tokens, max(sizes), job.made_for), []
    for llm, columns in job.runs():
        promise = batches.promise_of(llm.model, columns["dtype"])
        results = batches.compare_batches(
            llm.backend,
            llm.model,
            prompts,
            promise,
            columns["tolerance"],
            sizes,
            advance=cli.announce("comparing"),
        )
        rows += [columns | result.report() for result in results]
    lengths = [len(prompt) for prompt in prompts]
    facts = {"prompts": len(prompts), "prompt_tokens": f"{min(lengths)} to {max(lengths)}"}
    facts["decoded"] = batches.STEPS + 1
    columns = "backend dtype rows start same_tokens same_bits relative promise"
    code = show_rows(job, facts, rows, columns, report.describe_batch)
    if not job.args.json:
        for line in report.batch_verdicts(rows):
            print(line)
    return code


def parse_sizes(text: str) -> list[int]:
    """The numbers of rows of --batch, lists with commas. Raises OptionsError."""
    sizes = [parse_number("--batch", word.strip(), 2, MAX_ROWS) for word in text.split(",")]
    return sorted({size for size in sizes if size is not None})


def repeat(job: Job) -> int:
    """Compare the bits of runs in this process and in fresh ones."""
    count = parse_number("--repeat", job.args.repeat, 2, 1000)
    if selection.world:
        raise OptionsError(
            "--repeat starts new processes, which mlx.launch and torchrun do not connect: start "
            "without the launcher"
        )
    tokens, decoded = job.tokens()
    rows = []
    for llm, columns in job.runs():
        runs = [parity.digest(llm, tokens, decoded) for _ in range(count)]
        runs += [fresh_digest(job, llm.backend) for _ in range(count)]
        at, name = parity.first_difference(runs) or (None, None)
        row = columns | {"runs": 2 * count, "first_difference": name, "within": at is None}
        row["run"] = None if at is None else at + 1
        row["in_a_fresh_process"] = None if at is None else at >= count
        rows.append(row)
    columns = "backend device dtype runs"
    return show_rows(job, {"tokens": len(tokens)}, rows, columns, report.describe_repeat)


def fresh_digest(job: Job, backend: Backend) -> dict[str, str]:
    """The digest of a run in a new process. Raises BackendError if it fails."""
    names = "model revision prompt tokens dtype cache_bits batch_invariant adapters compile device"
    options = {name: getattr(job.args, name) for name in names.split()}
    if backend.name == "cpu":
        del options["device"]
    command = [sys.executable, "-m", "mlx_llama.parity", "--digest", "--backends", backend.name]
    done = subprocess.run([*command, *spell_options(options)], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise BackendError(f"--repeat: a fresh process failed: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def digest(job: Job) -> int:
    """For `fresh_digest`: a run's digest as JSON."""
    tokens, decoded = job.tokens()
    print(json.dumps(parity.digest(job.load(job.opened[0]), tokens, decoded)))
    return 0


def perplexity(job: Job) -> int:
    """Measure the perplexity of a text on each backend."""
    tokens = job.checkpoint.tokenizer.encode(cli.read_text(job.args.perplexity), add_bos=True)
    usual = min(WINDOW, job.made_for)
    window = parse_number("--ctx-size", job.args.ctx_size, 2, job.made_for) or usual
    stride = parse_number("--stride", job.args.stride, 1, max(1, window - 1)) or max(1, window // 2)
    if len(tokens) < 2:
        raise ContextError(
            f"{job.args.perplexity}: has {len(tokens)} tokens, a perplexity needs at least 2: give "
            "a longer text"
        )
    rows = []
    for llm, columns in job.runs():
        result = measure_perplexity(llm, tokens, window, stride)
        rows.append(columns | {"perplexity": result.value, "nll": result.nll, "within": True})
    facts = {"text": job.args.perplexity, "tokens": len(tokens), "window": window}
    facts |= {"stride": stride, "stored": job.checkpoint.formats}
    return show_rows(job, facts, rows, "backend device dtype perplexity nll")


# by name
MODES: dict[str, Callable[[Job], int]] = {
    mode.__name__: mode
    for mode in (record, check, verify_cache, batch, repeat, perplexity, digest, compare)
}


EXAMPLES = """
--check
--model HuggingFaceTB/SmolLM2-360M-Instruct --backends cpu,mlx
"""
GUIDE_TRACE = str(Path(__file__).parent.parent / "guide" / "trace.json")


def parser() -> flags.Parser:
    result = flags.Parser("parity", __doc__.split("\n\n")[0], EXAMPLES)
    modes = result.add_argument_group("mode (at most one; default: compare backends)")
    mode, add = modes.add_mutually_exclusive_group(), result.add_argument
    sizes = ",".join(map(str, SIZES))
    mode.add_argument(
        "--record", metavar="FILE", help="write a golden trace of a float32 NumPy run"
    )
    mode.add_argument(
        "--check",
        metavar="FILE",
        nargs="?",
        const=GUIDE_TRACE,
        help="check the backends against a golden trace (default: the guide model's)",
    )
    mode.add_argument(
        "--verify-cache",
        action="store_true",
        help="compare every way of filling the cache with a cold run",
    )
    mode.add_argument(
        "--batch",
        metavar="ROWS",
        nargs="?",
        const=sizes,
        help="compare rows computed alone with the same rows in batches of these sizes (default: "
        f"{sizes})",
    )
    mode.add_argument(
        "--repeat",
        metavar="N",
        help="run the same request N times in this process and N times in fresh ones, and compare "
        "the bits",
    )
    mode.add_argument(
        "--perplexity",
        metavar="FILE",
        help="measure the perplexity of a text (- reads standard input) on each backend",
    )
    add("--prompt", "-p", metavar="PROMPT", help="text to run (default: two sentences)")
    add("--tokens", "-n", metavar="N", help=f"number of tokens to run (default: {TOKENS})")
    add(
        "--reference",
        choices=("numpy", "transformers"),
        help="reference: NumPy at float32 (the default) or transformers at float32",
    )
    add("--html", metavar="FILE", help="write the comparison as an HTML page with plots")
    add("--json", action="store_true", help="print everything as one JSON object")
    add(
        "--ctx-size",
        "-c",
        metavar="TOKENS",
        help=f"window of a perplexity (default: the context, at most {WINDOW})",
    )
    add("--stride", metavar="TOKENS", help="distance between windows (default: half a window)")
    add("--digest", action="store_true", help=argparse.SUPPRESS)
    add(
        "--backends",
        metavar="LIST",
        help="backends to run, of mlx,cpu,cuda (default: all that are installed)",
    )
    shared = "model revision device dtype compile cache_bits batch_invariant adapters"
    flags.add_load_flags(result, only=shared.split())
    return result


# the modes that accept a flag
_OF_A_TEXT = ("compare", "verify_cache", "batch", "repeat", "digest")
_ON_BACKENDS = (*_OF_A_TEXT, "check", "perplexity")
ONLY_FOR = {
    **dict.fromkeys(("html", "reference"), ("compare",)),
    **dict.fromkeys(("ctx_size", "stride"), ("perplexity",)),
    **dict.fromkeys(("prompt", "tokens"), (*_OF_A_TEXT, "record")),
    **dict.fromkeys(("backends", "compile", "cache_bits", "batch_invariant"), _ON_BACKENDS),
    "adapters": (*_OF_A_TEXT, "perplexity"),
    "json": ("compare", "check", "verify_cache", "batch", "repeat", "perplexity"),
}


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError."""
    args = parser().parse_args(arguments)
    mode = next(
        (name for name in MODES if name != "compare" and getattr(args, name) not in (None, False)),
        "compare",
    )
    for name, modes in ONLY_FOR.items():
        if getattr(args, name) not in (None, False) and mode not in modes:
            raise OptionsError(
                f"`{name}` has no meaning with `{mode}`: leave it out"
                if mode != "compare"
                else f"`{name}` is for `perplexity`: leave it out"
            )
    if mode == "record" and full_dtype(args.dtype) not in ("auto", "float32"):
        raise OptionsError(f"--dtype {args.dtype}: a trace is recorded at float32: leave it out")
    if mode == "record":
        args.backends = "cpu"
    return MODES[mode](Job(args))
