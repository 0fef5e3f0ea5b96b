"""python -m mlx_llama.generate: one prompt, one answer, or a file of prompts. Only the answer goes
to stdout.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: interrupted, they would end in a traceback
    import sys

    from mlx_llama.__main__ import main as run

    sys.exit(run(["generate", *sys.argv[1:]]))

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from . import cli
from .cli import flags
from .cli.spelling import spell_flags
from .core.errors import OptionsError
from .core.generation.options import validate
from .core.text.controls import show_controls

if TYPE_CHECKING:
    from .core.generation.llm import LLM

Prompt = str | list[dict[str, str]]


def parser() -> flags.Parser:
    """The command line. Names follow mlx_lm.generate's."""
    result = flags.Parser("generate", __doc__)
    prompt = result.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", "-p", default=None, help="the prompt; - reads it from standard input"
    )
    prompt.add_argument(
        "--prompts",
        metavar="FILE",
        default=None,
        help="a batch: a file with one JSON object per line, with prompt or messages, options by "
        "name and "
        "optionally an id; - reads standard input",
    )
    result.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        default=None,
        help="file for the results of --prompts, one JSON object per line as they finish; an "
        "existing file is "
        "continued",
    )
    result.add_argument(
        "--system-prompt", "-sys", default=None, help="instructions before the prompt"
    )
    result.add_argument(
        "--ignore-chat-template", action="store_true", help="continue the prompt as plain text"
    )
    result.add_argument(
        "--prompt-cache",
        metavar="FILE",
        default=None,
        help="start from the keys and values in this file if it exists, and save them to it at the "
        "end",
    )
    result.add_argument(
        "--jsonl",
        action="store_true",
        help="print a JSON object per piece, then one with the receipt",
    )
    result.add_argument(
        "--stats", action="store_true", help="print speed and evaluations per token on stderr"
    )
    flags.add_load_flags(result, without=())
    flags.add_generation_flags(result)
    return result


ONLY_FOR = {"output": "prompts", "max_rows": "prompts", "jsonl": "prompt", "prompt_cache": "prompt"}


def main(arguments: list[str]) -> int:
    """Run the door; returns the exit code. Raises LlamaError."""
    given = parser().parse_args(arguments)
    mode = "prompt" if given.prompts is None else "prompts"
    for name, wanted in ONLY_FOR.items():
        if wanted != mode and getattr(given, name) not in (None, False):
            raise OptionsError(f"--{name.replace('_', '-')} is for --{wanted}: leave it out")
    wanted = flags.given_flags(given)
    validate(wanted)  # before loading the model
    return run_batch(given, wanted) if mode == "prompts" else run_prompt(given, wanted)


def load(given: argparse.Namespace) -> LLM:
    """The model. Raises LlamaError."""
    from .core.generation.llm import load_model

    with cli.Bar("loading"):
        llm = load_model(flags.load_options(given))
    if llm.template is None and not given.ignore_chat_template:
        if given.system_prompt is not None:
            raise OptionsError(_SYSTEM_NEEDS_TEMPLATE)
        cli.say(
            "(the model has no chat template: the prompt is continued as plain text; "
            "--template names one)"
        )
    return llm


_SYSTEM_NEEDS_TEMPLATE = (
    "--system-prompt needs a chat template: give one with --template, or leave it out "
    "with --ignore-chat-template"
)


def make_prompt(llm: LLM, prompt: Prompt, given: argparse.Namespace) -> Prompt:
    """The text or the messages that the model gets."""
    system = [{"role": "system", "content": given.system_prompt}] if given.system_prompt else []
    if not isinstance(prompt, str):
        return prompt if prompt[0]["role"] == "system" else [*system, *prompt]
    if llm.template is None or given.ignore_chat_template:
        return prompt
    return [*system, {"role": "user", "content": prompt}]


# One prompt


def run_prompt(given: argparse.Namespace, wanted: dict[str, Any]) -> int:
    """Print the answer to one prompt; returns the exit code. wanted: options by name."""
    prompt = cli.read_text("-") if given.prompt == "-" else given.prompt
    if given.ignore_chat_template and given.system_prompt is not None:
        raise OptionsError(_SYSTEM_NEEDS_TEMPLATE)
    llm = load(given)
    if given.prompt_cache is not None and os.path.lexists(os.path.expanduser(given.prompt_cache)):
        llm.load_cache(given.prompt_cache)
    stream = llm.stream(make_prompt(llm, prompt, given), **wanted)
    for notice in stream.completion.notices:
        cli.say(f"({notice})")
    code = 0
    # a model's text must not command the terminal
    show = show_controls if sys.stdout.isatty() else str
    try:
        for piece in stream:
            print(
                json.dumps({"text": piece}) if given.jsonl else show(piece),
                end="\n" if given.jsonl else "",
                flush=True,
            )
    except KeyboardInterrupt:
        stream.close()
        code = 130
    if given.jsonl:
        receipt = stream.completion.receipt()
        receipt["notices"] = list(map(spell_flags, receipt["notices"]))
        print(json.dumps({"receipt": receipt}), flush=True)
    elif sys.stdout.isatty():
        print()
    if (
        not given.jsonl
        and llm.tokenizer is not None
        and (logprobs := stream.completion.describe_logprobs(llm.tokenizer))
    ):
        cli.show(logprobs)
    if given.stats:
        cli.say(stream.completion.summary())
    if given.prompt_cache is not None:
        llm.save_cache(given.prompt_cache)
    return code


# A batch


def run_batch(given: argparse.Namespace, wanted: dict[str, Any]) -> int:
    """Run a file of prompts, those without a result yet; returns the exit code: 1 if a request
    failed.
    """
    from .core.generation.jobs import QUEUED, Results, parse_jobs, run_jobs
    from .core.system import progress

    if given.output is None:
        raise OptionsError("--prompts needs --output FILE for the results")
    if given.ignore_chat_template and given.system_prompt is not None:
        raise OptionsError(_SYSTEM_NEEDS_TEMPLATE)
    name = "standard input" if given.prompts == "-" else given.prompts
    asked = [
        given.model,
        given.revision,
        given.template,
        given.system_prompt,
        given.ignore_chat_template,
    ]
    jobs = parse_jobs(cli.read_text(given.prompts), name, wanted, json.dumps(asked))
    has_messages = any(not isinstance(job.prompt, str) for job in jobs)
    if has_messages and given.ignore_chat_template:
        raise OptionsError(
            f"--ignore-chat-template: {name} has messages, which need a chat template: leave it out"
        )
    results = Results(given.output, jobs)
    kept = len(results.done)
    if kept == len(jobs):
        cli.say(f"({given.output} has the results of all {kept} requests already)")
        return _report_failures(results.failed, given.output)
    if kept:
        cli.say(f"({given.output} has the results of {kept} of {len(jobs)} requests already)")
    llm = load(given)
    if has_messages:
        llm.require_template()
    started = time.perf_counter()
    try:
        with results, progress.show_count("generating", len(jobs)) as advance:
            run_jobs(
                jobs,
                results,
                lambda job: llm.submit(make_prompt(llm, job.prompt, given), **job.options),
                llm.loop.tick,
                QUEUED * llm.loop.max_rows,
                advance,
                spell_flags,
            )
    except KeyboardInterrupt:
        cli.say(
            f"(stopped after {len(results.done)} of {len(jobs)} requests; the same command "
            "does the rest)"
        )
        return 130
    seconds = time.perf_counter() - started
    if given.stats:
        cli.say(
            f"{len(jobs) - kept} requests, {results.tokens} tokens in {seconds:.2f} s: "
            f"{results.tokens / seconds:.1f} "
            "tokens/s"
        )
    return _report_failures(results.failed, given.output)


def _report_failures(failed: int, output: str) -> int:
    if not failed:
        return 0
    cli.say(
        f"error: {failed} request{'s' if failed > 1 else ''} failed: see the field error in "
        f"{output}"
    )
    return 1
