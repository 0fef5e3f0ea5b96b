"""python -m mlx_llama.chat: talk with a model. A REPL in a terminal; from a pipe a script of one message per line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from mlx_llama import cli
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.generation import options

from .view import Plain

if TYPE_CHECKING:
    from mlx_llama.core.generation.llm import LLM

    from .dialogue import Chat


def parser() -> options.Parser:
    """The command line. Names follow mlx_lm.chat's."""
    result = options.Parser(prog="python -m mlx_llama.chat", description=__doc__, allow_abbrev=False)
    result.add_argument("--system-prompt", "-sys", default=None, help="instructions before the conversation")
    result.add_argument("--prompt-cache", metavar="FILE", default=None,
                        help="start from the keys and values in this file if it exists, and save them to it at the end")
    result.add_argument("--stats", action="store_true", help="print speed and counts after each answer, on stderr")
    result.add_argument("--debug", action="store_true", help="show tracebacks")
    options.add_load_flags(result)
    options.add_generation_flags(result)
    return result


def main(arguments: list[str]) -> int:
    """Run the door; returns the exit code. Raises LlamaError."""
    given = parser().parse_args(arguments)
    wanted = options.given_flags(given)
    options.validate(wanted)  # before loading the model
    if "logprobs" in wanted:
        raise OptionsError("--logprobs: a conversation does not show them: ask python -m mlx_llama.generate")

    from mlx_llama.core.generation.llm import load

    from .dialogue import Chat

    is_typed = sys.stdin is not None and sys.stdin.isatty()
    screen = next((stream for stream in (sys.stderr, sys.stdout) if stream is not None and stream.isatty()), None)
    if is_typed and screen and given.model:
        cli.say(f"loading {given.model} ...")
    with cli.Bar("loading"):
        llm = load(**options.load_arguments(given))
    chat = Chat(llm.chat(given.system_prompt, **wanted), stats=given.stats, debug=given.debug)
    if given.prompt_cache is not None and os.path.lexists(os.path.expanduser(given.prompt_cache)):
        cli.say(f"({llm.load_cache(given.prompt_cache)} tokens from {given.prompt_cache})")
    code = _talk(chat, llm, is_typed, screen)
    if given.prompt_cache is not None and chat.session.messages:
        llm.save_cache(given.prompt_cache)
    return code


def _talk(chat: Chat, llm: LLM, is_typed: bool, screen: TextIO | None) -> int:
    """Hold the conversation in a terminal or from a pipe; returns the exit code."""
    from . import script

    if is_typed and screen:
        from . import terminal

        width = llm.backend.runtime.dtype_name(llm.model.dtype)
        cli.say(f"{llm.checkpoint.name} on {llm.backend.name} ({llm.backend.device_name}, {width}), "
                f"context {llm.engine.context} tokens\n/help lists the commands, Ctrl-D leaves")
        return terminal.talk(chat, screen)
    if sys.stdout.isatty():
        chat.view = lambda: Plain(clean=True)
    return script.run(chat)
