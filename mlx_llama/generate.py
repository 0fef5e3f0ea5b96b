"""python -m mlx_llama.generate: answer a prompt on stdout, or a file of prompts in another."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: interrupted, they would end in a traceback
    from mlx_llama.__main__ import start

    start("generate")

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from mlx_llama.cli.running import spell_flags

from . import cli
from .cli import flags
from .core.errors import OptionsError
from .core.options import validate
from .core.system.progress import moves_cursor
from .core.text.controls import show_controls
from .core.text.thoughts import Thought

if TYPE_CHECKING:
    from .api.jobs import Job
    from .api.llm import LLM
    from .core.engine.request import Answer

EXAMPLES = """
-p "Which backends are there?"
--prompts prompts.jsonl --output answers.jsonl --max-tokens 200
"""
Prompt = str | list[dict[str, str]]


def parser() -> flags.Parser:
    """The command line. Names follow mlx_lm.generate's."""
    result = flags.Parser("generate", __doc__, EXAMPLES)
    prompts = result.common.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", "-p", metavar="PROMPT", help="the prompt; - reads it from standard input"
    )
    prompts.add_argument("--file", "-f", metavar="FILE", help="file with the prompt")
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="a batch: a file with one JSON object per line, with prompt or messages, options by "
        "name and optionally an id; - reads standard input",
    )
    add = result.add_argument
    add(
        "--output",
        "-o",
        metavar="FILE",
        help="file for the results of --prompts, one JSON object per line as they finish; an "
        "existing file is continued",
    )
    add("--system-prompt", "-sys", metavar="SYSTEM_PROMPT", help="instructions before the prompt")
    add("--ignore-chat-template", action="store_true", help="continue the prompt as plain text")
    add("--prompt-cache", metavar="FILE", help=flags.PROMPT_CACHE)
    add(
        "--jsonl",
        action="store_true",
        help="print a JSON object per piece, then one with the receipt",
    )
    add("--stats", action="store_true", help="print speed and evaluations per token on stderr")
    flags.add_load_flags(result, without=())
    flags.add_generation_flags(result)
    return result


ONLY_FOR = {"output": "prompts", "max_rows": "prompts", "jsonl": "prompt", "prompt_cache": "prompt"}


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError."""
    args = parser().parse_args(arguments)
    mode = "prompt" if args.prompts is None else "prompts"
    for name, needed in ONLY_FOR.items():
        if needed != mode and getattr(args, name) not in (None, False):
            raise OptionsError(f"--{name.replace('_', '-')} is for --{needed}: leave it out")
    if args.ignore_chat_template:
        _refuse_system(args)
    options = flags.generation_options(args)
    validate(options)  # before loading the model
    return run_batch(args, options) if mode == "prompts" else run_prompt(args, options)


def load(args: argparse.Namespace) -> LLM:
    """The model. Raises LlamaError."""
    from .api import llm as loading

    with cli.Bar("loading"):
        llm = loading.load(**vars(flags.load_options(args)))
    llm.defaults.lift_limit()
    if args.ignore_chat_template:
        llm.tells_plain = False
    if llm.template is None and not args.ignore_chat_template:
        _refuse_system(args)
        cli.say(
            "(the model has no chat template: the prompt is continued as plain text; "
            "--template names one)"
        )
    return llm


def _refuse_system(args: argparse.Namespace) -> None:
    """Raise OptionsError for --system-prompt where no template is used."""
    if args.system_prompt is not None:
        raise OptionsError(
            "--system-prompt needs a chat template: give one with --template, or leave it out "
            "with --ignore-chat-template"
        )


def make_prompt(llm: LLM, prompt: Prompt, args: argparse.Namespace) -> Prompt:
    """The text or the messages to send to the model."""
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    if not isinstance(prompt, str):
        return prompt if prompt[0]["role"] == "system" else [*system, *prompt]
    if llm.template is None or args.ignore_chat_template:
        return prompt
    return [*system, {"role": "user", "content": prompt}]


# One prompt


def run_prompt(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Print the answer to one prompt; returns the exit code. options: by name."""
    source = "-" if args.prompt == "-" else args.file
    prompt = args.prompt if source is None else cli.read_text(source)
    if args.prompt_cache is not None:
        from .api.cache_file import check_folder

        check_folder(args.prompt_cache)
    llm = load(args)
    if args.prompt_cache is not None and os.path.lexists(os.path.expanduser(args.prompt_cache)):
        llm.load_cache(args.prompt_cache)
    stream = llm.stream(make_prompt(llm, prompt, args), **options)
    for notice in stream.completion.notices:
        cli.say(f"({notice})")
    code = 0
    # a model's text must not command the terminal
    show = show_controls if sys.stdout.isatty() else str
    is_thinking = False
    try:
        for piece in stream.pieces():
            is_thought = isinstance(piece, Thought)
            text = piece.text if isinstance(piece, Thought) else piece
            if args.jsonl:
                print(json.dumps({"reasoning" if is_thought else "text": text}), flush=True)
            elif is_thought:
                show_thought(text)
            else:
                if is_thinking:
                    show_thought("\n\n")
                print(show(text), end="", flush=True)
            is_thinking = is_thought
    except KeyboardInterrupt:
        stream.close()
        code = 130
    if args.jsonl:
        receipt = stream.completion.receipt()
        receipt["notices"] = list(map(spell_flags, receipt["notices"]))
        print(json.dumps({"receipt": receipt}), flush=True)
    else:
        print()
    if not args.jsonl and (notice := stream.completion.describe_repetition()):
        cli.say(f"({spell_flags(notice)})")
    if not args.jsonl and (logprobs := stream.completion.describe_logprobs(llm.tokenizer)):
        cli.show(logprobs)
    if args.stats:
        cli.say(stream.completion.summary())
    if args.prompt_cache is not None:
        llm.save_cache(args.prompt_cache)
    return code


def show_thought(text: str) -> None:
    """Print a piece of a thought on a terminal's stderr, dimmed where that is possible."""
    if sys.stderr is not None and sys.stderr.isatty():
        dim, end = ("\x1b[2m", "\x1b[0m") if moves_cursor(sys.stderr) else ("", "")
        print(f"{dim}{show_controls(text)}{end}", end="", file=sys.stderr, flush=True)


# A batch


def run_batch(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run a file's prompts that have no result yet; returns 1 if a request failed."""
    from .api.jobs import QUEUED, Results, parse_jobs, run_jobs
    from .core.system import progress

    if args.output is None:
        raise OptionsError("--prompts needs --output FILE for the results")
    name = "standard input" if args.prompts == "-" else args.prompts
    names = ("model", "revision", "template", "system_prompt", "ignore_chat_template")
    conditions = [getattr(args, name) for name in names]
    jobs = parse_jobs(cli.read_text(args.prompts), name, options, json.dumps(conditions))
    has_messages = any(not isinstance(job.prompt, str) for job in jobs)
    if has_messages and args.ignore_chat_template:
        raise OptionsError(
            f"--ignore-chat-template: {name} has messages, which need a chat template: leave it out"
        )
    results = Results(args.output, jobs)
    kept = len(results.done)
    if kept == len(jobs):
        cli.say(f"({args.output} has the results of all {kept} requests already)")
        return _report_failures(results.failed, args.output)
    if kept:
        cli.say(f"({args.output} has the results of {kept} of {len(jobs)} requests already)")
    llm = load(args)
    if has_messages:
        llm.require_template()

    def submit(job: Job) -> Answer[str]:
        return llm.submit(make_prompt(llm, job.prompt, args), **job.options)

    started = time.perf_counter()
    try:
        with results, progress.show_count("generating", len(jobs)) as advance:
            queued = QUEUED * llm.loop.max_rows
            run_jobs(jobs, results, submit, llm.loop.tick, queued, advance, spell_flags)
    except KeyboardInterrupt:
        cli.say(
            f"(stopped after {len(results.done)} of {len(jobs)} requests; run the same "
            "command again for the rest)"
        )
        return 130
    seconds = time.perf_counter() - started
    if args.stats:
        cli.say(
            f"{len(jobs) - kept} requests, {results.tokens} tokens in {seconds:.2f} s: "
            f"{results.tokens / seconds:.1f} tokens/s"
        )
    return _report_failures(results.failed, args.output)


def _report_failures(failed: int, output: str) -> int:
    if not failed:
        return 0
    requests = "1 request" if failed == 1 else f"{failed} requests"
    cli.say(f"error: {requests} failed: see the field error in {output}")
    return 1
