"""python -m mlx_llama.generate: one prompt, one answer. Only the answer goes to stdout."""

from __future__ import annotations

import json
import sys

from . import cli
from .core.generation import options


def parser() -> options.Parser:
    """The command line. Names follow mlx_lm.generate's."""
    result = options.Parser(prog="python -m mlx_llama.generate", description=__doc__, allow_abbrev=False)
    result.add_argument("--prompt", "-p", required=True, help="the prompt; - reads it from standard input")
    result.add_argument("--system-prompt", "-sys", default=None, help="instructions before the prompt")
    result.add_argument("--ignore-chat-template", action="store_true", help="continue the prompt as plain text")
    result.add_argument("--jsonl", action="store_true", help="print a JSON object per piece and a last one with the receipt")
    result.add_argument("--stats", action="store_true", help="speed and evaluations per token, on stderr")
    result.add_argument("--debug", action="store_true", help="show tracebacks")
    options.add_load_flags(result)
    options.add_generation_flags(result)
    return result


def main(arguments: list[str]) -> int:
    """Run the door; returns the exit code. Raises LlamaError."""
    given = parser().parse_args(arguments)
    wanted = options.given_flags(given)
    options.validate(wanted)  # before loading the model
    prompt = cli.read_text("-") if given.prompt == "-" else given.prompt

    from .core.errors import OptionsError
    from .core.generation.llm import load

    with cli.Bar("loading"):
        llm = load(**options.load_arguments(given))
    if llm.template is not None and not given.ignore_chat_template:
        system = [{"role": "system", "content": given.system_prompt}] if given.system_prompt else []
        prompt = [*system, {"role": "user", "content": prompt}]
    elif given.system_prompt is not None:
        raise OptionsError("--system-prompt needs a chat template: give one with --template, or leave it out "
                           "with --ignore-chat-template")
    elif llm.template is None and not given.ignore_chat_template:
        cli.say("(the model has no chat template: the prompt is continued as plain text; --template names one)")
    stream = llm.stream(prompt, **wanted)
    for notice in stream.completion.notices:
        cli.say(f"({notice})")
    code = 0
    try:
        for piece in stream:
            print(json.dumps({"text": piece}) if given.jsonl else piece, end="\n" if given.jsonl else "", flush=True)
    except KeyboardInterrupt:
        stream.close()
        code = 130
    if given.jsonl:
        print(json.dumps({"receipt": stream.completion.receipt()}), flush=True)
    elif sys.stdout.isatty():
        print()
    if given.stats:
        cli.say(stream.completion.summary())
    return code


if __name__ == "__main__":
    sys.exit(cli.run(main))
