"""python -m mlx_llama.parity: does this machine compute what the others compute, and if not, where does it begin?

The same tokens run through several backends, most as a prompt, the last ones one by one, and are compared with a float32
NumPy run at every probe of the model. The exit code is 0 within the dtype's tolerance and 1 outside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_llama import cli
from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import BackendError, ContextError, OptionsError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.generation import options
from mlx_llama.core.generation.llm import LLM, context_size
from mlx_llama.core.proofs import parity, trace

from . import report

TOKENS = 64
DECODED = 16  # of the tokens, at most, one by one
STEPS = 24  # greedy tokens that are decoded
GUIDE_TRACE = str(Path(__file__).parent.parent / "guide" / "trace.json")
WINDOW = 512  # of a perplexity, where the context is longer
TEXT = ("The lighthouse keeper counted the ships that passed in the night, and wrote each one down: three from the north, two "
        "with red sails, and one that carried no light at all. In the morning he read the list aloud to his cat. ")


def parser() -> options.Parser:
    """The command line."""
    result = options.Parser(prog="python -m mlx_llama.parity", description=__doc__.splitlines()[0], allow_abbrev=False)
    what = result.add_argument_group("what to do, one of them (default: compare backends)").add_mutually_exclusive_group()
    what.add_argument("--record", metavar="FILE", help="write a golden trace of a float32 NumPy run")
    what.add_argument("--check", metavar="FILE", nargs="?", const=GUIDE_TRACE,
                      help="check the backends against a golden trace (default: the guide model's)")
    what.add_argument("--verify-cache", action="store_true", help="compare every way of filling the cache with a cold run")
    what.add_argument("--repeat", metavar="N", default=None, help="the same request N times here and N times in fresh "
                                                                  "processes must give the same bits")
    what.add_argument("--perplexity", metavar="FILE", help="perplexity of a text (- reads standard input) on each backend")
    result.add_argument("--prompt", "-p", default=None, help="the text to run (default: one that comes with it)")
    result.add_argument("--tokens", "-n", default=None, metavar="N", help=f"how many tokens to run (default: {TOKENS})")
    result.add_argument("--reference", choices=("numpy", "transformers"), default=None,
                        help="what to compare with: a float32 NumPy run (the default), or transformers at float32")
    result.add_argument("--html", metavar="FILE", default=None, help="write the comparison as a page with pictures")
    result.add_argument("--json", action="store_true", help="print everything as one JSON object")
    result.add_argument("--ctx-size", "-c", default=None, metavar="TOKENS", help="a perplexity's window (default: the "
                                                                                f"context, at most {WINDOW})")
    result.add_argument("--stride", default=None, metavar="TOKENS", help="how far windows are apart (default: half of one)")
    result.add_argument("--debug", action="store_true", help="show tracebacks")
    result.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    model = result.add_argument_group("model")
    model.add_argument("--model", metavar="MODEL", default=None, help="as in the other commands (default: the guide model)")
    model.add_argument("--revision", default=None, help="branch, tag or commit of a hub id")
    model.add_argument("--backends", default=None, metavar="LIST", help="some of mlx,cpu,cuda (default: those that are here)")
    model.add_argument("--device", default=None, metavar="{cpu,gpu}", help="of the mlx and cuda backends (default: the GPU "
                                                                          "where there is one)")
    model.add_argument("--dtype", default="auto", metavar="{auto,float32,float16,bfloat16}",
                       help="width of the activations (default: the checkpoint's)")
    model.add_argument("--compile", default=None, action=argparse.BooleanOptionalAction,
                       help="decode by compiled or captured steps, or not (default: as in the other commands)")
    return result


class Job:
    """What all modes share: the checkpoint, the tokens, the backends that are asked for."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.opened = chosen_backends(given.backends, given.device)
        for backend in self.opened:
            backend.load_options(given.dtype, None, None, given.compile)  # refused before any work
        self.checkpoint = open_checkpoint(given.model, given.revision)
        self.is_low_bit = any(isinstance(weight, AffineWeight) for weight in self.checkpoint.tensors.values())

    def load(self, backend: backends.Backend, dtype: str | None = None, compile: bool | None = None) -> LLM:
        """The model on a backend; `dtype` None is the command line's."""
        name = "NumPy at float32" if compile is False and dtype else f"{backend.name} ({backend.device_name})"
        cli.say(f"running {self.checkpoint.name} on {name}")
        how = backend.load_options(dtype or self.given.dtype, None, None, compile)
        model = backend.load(self.checkpoint, dtype or self.given.dtype, **how)
        return LLM(self.checkpoint, backend, model, self.checkpoint.template, context_size(self.checkpoint, None))

    def reference(self) -> LLM:
        """The float32 NumPy run that all are compared with."""
        return self.load(backends.select("cpu"), "float32", False)

    def tokens(self) -> tuple[list[int], int]:
        """(ids, how many of them run one by one). Raises OptionsError, ContextError."""
        given, tokenizer = self.given, self.checkpoint.tokenizer
        count = number("--tokens", given.tokens, 2, self.checkpoint.config.max_position_embeddings)
        if given.prompt is not None:
            tokens = tokenizer.encode(given.prompt, add_bos=True)
            if len(tokens) < 2:
                raise ContextError(f"--prompt: {len(tokens)} token is too few, at least 2 are compared: give a longer text")
            tokens = tokens[:count]
        else:
            count = count or min(TOKENS, self.checkpoint.config.max_position_embeddings)
            text = tokenizer.encode(TEXT, add_bos=True)
            tokens = (text * (count // len(text) + 1))[:count]
        if len(tokens) > self.checkpoint.config.max_position_embeddings:
            raise ContextError(f"--prompt: {len(tokens)} tokens do not fit the context of "
                               f"{self.checkpoint.config.max_position_embeddings}: give --tokens to run fewer")
        return tokens, min(DECODED, len(tokens) // 2)

    def tolerance(self, llm: LLM) -> float:
        return parity.tolerance_of(llm.model, self.is_low_bit)

    def facts(self, **more: Any) -> dict[str, Any]:
        return {"model": self.checkpoint.name, **more}


def number(flag: str, given: str | None, least: int, most: int) -> int | None:
    """A flag's whole number, None where it was not given. Raises OptionsError."""
    if given is None:
        return None
    if not given.isascii() or not given.isdigit() or not least <= int(given[:12]) <= most:
        raise OptionsError(f"{flag} {given!r:.40}: must be a whole number, {least} to {most}")
    return int(given)


def chosen_backends(names: str | None, device: str | None) -> list[backends.Backend]:
    """The backends of --backends, on their GPU where there is one. Raises BackendError, OptionsError."""
    def opened(name: str) -> backends.Backend:
        if name == "cpu" or device is not None:
            return backends.select(name, None if name == "cpu" else device)
        try:
            return backends.select(name, "gpu")
        except BackendError:
            return backends.select(name, "cpu")

    if names is not None:
        wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
        if not wanted or not set(wanted) <= set(backends.PACKAGES):
            raise OptionsError(f"--backends {names!r:.60}: must be some of {', '.join(backends.PACKAGES)}, with commas")
        if wanted == ["cpu"]:
            return [backends.select("cpu", device)]  # which refuses a device that it does not have
        return [opened(name) for name in wanted]
    found = []
    for name in backends.PACKAGES:
        try:
            found.append(opened(name))
        except BackendError as error:
            cli.say(f"({name} is left out: {error})")
    return found


def compare(job: Job) -> int:
    """Backends against the reference at every probe."""
    tokens, decoded = job.tokens()
    prompt, steps = tokens[:-decoded], min(STEPS, job.checkpoint.config.max_position_embeddings - len(tokens) + decoded)
    if job.given.reference == "transformers":
        from .peer import TransformersReference

        cli.say(f"running {job.checkpoint.name} on transformers")
        peer = TransformersReference(job.checkpoint)
        wanted, greedy, logits, name = peer.collect(tokens, decoded), peer.greedy(prompt, steps), peer.logits, peer.name
    else:
        llm = job.reference()
        wanted = parity.collect(llm.backend, llm.model, tokens, decoded)
        greedy = parity.greedy(llm, prompt, steps)
        logits, name = (lambda ids: llm.logits(ids)[-1]), "NumPy at float32"
    reports = []
    for backend in job.opened:
        run = job.load(backend, compile=job.given.compile)
        tolerance = job.tolerance(run)
        # Probes see plain steps; what the engine decodes sees the compiled ones.
        found = parity.collect(backend, run.model, tokens, decoded)
        report = parity.compare(backend.name, backend.device_name, parity.dtype_of(run.model), tolerance, found, wanted,
                                job.checkpoint.config)
        report.decoded = parity.compare_decoded(run, prompt, greedy, tolerance, logits)
        reports.append(report)
        parity.free(run)
    facts = job.facts(reference=name, tokens=tokens, decoded=decoded)
    if job.given.html:
        report.write_page(job.given.html, facts, reports, job.checkpoint.config)
        cli.say(f"wrote {job.given.html}")
    if job.given.json:
        print(json.dumps(facts | {"backends": [report.report() for report in reports]}))
    else:
        report.show(facts, reports, job.checkpoint.config)
    return 0 if all(report.is_within for report in reports) else 1


def record(job: Job) -> int:
    """A golden trace of the reference run."""
    tokens, decoded = job.tokens()
    llm = job.reference()
    steps = min(STEPS, job.checkpoint.config.max_position_embeddings - len(tokens) + decoded)
    made = trace.record(job.checkpoint, tokens, decoded, parity.collect(llm.backend, llm.model, tokens, decoded),
                        parity.greedy(llm, tokens[:-decoded], steps))
    made.save(job.given.record)
    print(f"{job.given.record}: {len(tokens)} tokens, {len(made.sketches)} probes, {Path(job.given.record).stat().st_size} "
          f"bytes")
    return 0


def check(job: Job) -> int:
    """Each backend against a golden trace."""
    held = trace.load(job.given.check)
    trace.require_same(held, job.checkpoint, job.given.check)
    rows = []
    for backend in job.opened:
        llm = job.load(backend, compile=job.given.compile)
        tolerance = job.tolerance(llm)
        probes = parity.collect(backend, llm.model, held.tokens, held.decoded)
        prompt = held.tokens[:-held.decoded]
        greedy = parity.greedy(llm, prompt, len(held.greedy)) if held.greedy else []
        found = trace.check(held, probes, greedy, tolerance, parity.probe_names(job.checkpoint.config))
        tie = True
        if found.first_greedy is not None:
            at = found.first_greedy
            tie = parity.is_tie(llm.logits(prompt + held.greedy[:at])[-1], held.greedy[at], greedy[at], tolerance)
        bad = found.first_bad
        rows.append({"backend": backend.name, "device": backend.device_name, "dtype": parity.dtype_of(llm.model),
                     "tolerance": tolerance, "worst": max(float(values.max()) for values in found.errors.values()),
                     "first_bad": bad, "position": None if bad is None else int(found.errors[bad].argmax()),
                     "first_greedy_difference": found.first_greedy, "near_tie": tie,
                     "within": bad is None and tie, "probes": len(found.errors)})
        parity.free(llm)
    facts = job.facts(trace=job.given.check, recorded_from=held.model, tokens=len(held.tokens))
    report.show_rows(job.given.json, facts, rows, ("backend", "device", "dtype", "worst", "tolerance"),
                            report.checked)
    return 0 if all(row["within"] for row in rows) else 1


def verify_cache(job: Job) -> int:
    """Every way of filling a cache against a cold run, on each backend."""
    tokens, _ = job.tokens()
    if len(tokens) < 8:
        raise OptionsError(f"--verify-cache needs at least 8 tokens, there are {len(tokens)}: give a longer --prompt")
    tokens = tokens[:job.checkpoint.config.max_position_embeddings - 8]
    rows = []
    for backend in job.opened:
        llm = job.load(backend, compile=job.given.compile)
        for way in parity.cache_ways(llm, tokens, job.tolerance(llm)):
            rows.append({"backend": backend.name, "dtype": parity.dtype_of(llm.model), **way.report(),
                         "tolerance": way.tolerance})
        parity.free(llm)
    report.show_rows(job.given.json, job.facts(tokens=len(tokens)), rows,
                            ("backend", "dtype", "way", "relative", "tolerance"), report.same_bits)
    return 0 if all(row["within"] for row in rows) else 1


def repeat(job: Job) -> int:
    """The same bits in every run, in this process and in fresh ones."""
    count = number("--repeat", job.given.repeat, 2, 1000)
    tokens, decoded = job.tokens()
    rows = []
    for backend in job.opened:
        llm = job.load(backend, compile=job.given.compile)
        runs = [parity.digest(llm, tokens, decoded) for _ in range(count)]
        dtype = parity.dtype_of(llm.model)
        parity.free(llm)
        runs += [fresh_digest(job, backend) for _ in range(count)]
        found = parity.first_difference(runs)
        rows.append({"backend": backend.name, "device": backend.device_name, "dtype": dtype, "runs": 2 * count,
                     "first_difference": None if found is None else found[1],
                     "run": None if found is None else found[0] + 1,
                     "in_a_fresh_process": None if found is None else found[0] >= count, "within": found is None})
    report.show_rows(job.given.json, job.facts(tokens=len(tokens)), rows, ("backend", "device", "dtype", "runs"),
                            report.repeated)
    return 0 if all(row["within"] for row in rows) else 1


def fresh_digest(job: Job, backend: backends.Backend) -> dict[str, str]:
    """The digest of a process of its own. Raises BackendError when it fails."""
    given = job.given
    command = [sys.executable, "-m", "mlx_llama.parity", "--digest", "--backends", backend.name, "--dtype", given.dtype]
    for flag, value in (("--model", given.model), ("--revision", given.revision), ("--prompt", given.prompt),
                        ("--tokens", given.tokens), ("--device", None if backend.name == "cpu" else given.device)):
        command += [f"{flag}={value}"] if value is not None else []
    command += [] if given.compile is None else ["--compile" if given.compile else "--no-compile"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise BackendError(f"--repeat: a fresh process failed: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def digest(job: Job) -> int:
    """For `fresh_digest`: a run's digest as JSON."""
    tokens, decoded = job.tokens()
    print(json.dumps(parity.digest(job.load(job.opened[0], compile=job.given.compile), tokens, decoded)))
    return 0


def perplexity(job: Job) -> int:
    """Of a text, on each backend."""
    text = cli.read_text(job.given.perplexity)
    tokens = job.checkpoint.tokenizer.encode(text, add_bos=True)
    made_for = job.checkpoint.config.max_position_embeddings
    window = number("--ctx-size", job.given.ctx_size, 2, made_for) or min(WINDOW, made_for)
    stride = number("--stride", job.given.stride, 1, max(1, window - 1)) or max(1, window // 2)
    if len(tokens) < 2:
        raise ContextError(f"{job.given.perplexity}: has {len(tokens)} tokens, a perplexity needs at least 2: give a longer "
                           "text")
    rows = []
    for backend in job.opened:
        llm = job.load(backend, compile=job.given.compile)
        found = parity.perplexity(llm, tokens, window, stride)
        rows.append({"backend": backend.name, "device": backend.device_name, "dtype": parity.dtype_of(llm.model),
                     "perplexity": found.value, "nll": found.nll, "within": True})
        parity.free(llm)
    facts = job.facts(text=job.given.perplexity, tokens=len(tokens), window=window, stride=stride,
                      stored=report.stored(job.checkpoint))
    report.show_rows(job.given.json, facts, rows, ("backend", "device", "dtype", "perplexity", "nll"), lambda row: "")
    return 0


ONLY_FOR = {  # flags that other modes would ignore
    "html": ("compare",), "reference": ("compare",), "ctx_size": ("perplexity",), "stride": ("perplexity",),
    "prompt": ("compare", "record", "verify_cache", "repeat", "digest"),
    "tokens": ("compare", "record", "verify_cache", "repeat", "digest"),
    "backends": ("compare", "check", "verify_cache", "repeat", "digest", "perplexity"),
    "compile": ("compare", "check", "verify_cache", "repeat", "digest", "perplexity"),
    "json": ("compare", "check", "verify_cache", "repeat", "perplexity"),
}
MODES: dict[str, Callable[[Job], int]] = {
    "record": record, "check": check, "verify_cache": verify_cache, "repeat": repeat, "perplexity": perplexity,
    "digest": digest, "compare": compare}


def main(arguments: list[str]) -> int:
    """Run the door; returns the exit code. Raises LlamaError."""
    given = parser().parse_args(arguments)
    mode = next((name for name in MODES if name != "compare" and getattr(given, name) not in (None, False)), "compare")
    for flag, modes in ONLY_FOR.items():
        if getattr(given, flag) not in (None, False) and mode not in modes:
            raise OptionsError(f"--{flag.replace('_', '-')} has no meaning with --{mode.replace('_', '-')}: leave it out"
                               if mode != "compare" else f"--{flag.replace('_', '-')} is for --perplexity: leave it out")
    if mode == "record" and given.dtype not in ("auto", "float32"):
        raise OptionsError(f"--dtype {given.dtype}: a trace is recorded at float32: leave it out")
    if mode == "record":
        given.backends = "cpu"
    return MODES[mode](Job(given))
