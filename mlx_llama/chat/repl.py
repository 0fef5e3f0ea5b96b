"""python -m mlx_llama.chat: talk to a model. In a terminal it is a REPL, where /help lists
the commands; from a pipe it runs a script of one message or command per line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from mlx_llama import cli
from mlx_llama.cli import flags
from mlx_llama.core.options import validate

from .view import Plain

if TYPE_CHECKING:
    from mlx_llama.api.llm import LLM

    from .dialogue import Chat


EXAMPLES = """
--model smollm2
--model ~/models/Llama-3.2-1B-Instruct-Q4_K_M.gguf --temp 0.7 --ctx-size 8192
"""


def parser() -> flags.Parser:
    """The command line. Names follow mlx_lm.chat's."""
    result = flags.Parser("chat", __doc__, EXAMPLES)
    add = result.add_argument
    add(
        "--system-prompt",
        "-sys",
        metavar="SYSTEM_PROMPT",
        help="instructions before the conversation",
    )
    add("--prompt-cache", metavar="FILE", help=flags.PROMPT_CACHE)
    add("--stats", action="store_true", help="print speed and counts after each answer on stderr")
    flags.add_load_flags(result)
    flags.add_generation_flags(result)
    return result


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError."""
    args = parser().parse_args(arguments)
    options = flags.generation_options(args)
    validate(options)  # before loading the model

    from mlx_llama.api import llm as loading

    from .dialogue import Chat, describe_model

    is_typed = sys.stdin is not None and sys.stdin.isatty()
    streams = [stream for stream in (sys.stderr, sys.stdout) if stream is not None]
    screen = next((stream for stream in streams if stream.isatty()), None)
    if is_typed and screen and args.model:
        cli.say(f"loading {args.model} ...")

    load_options = flags.load_options(args)

    def load(**other: Any) -> LLM:
        with cli.Bar("loading"):
            llm = loading.load(**{**vars(load_options), **other})
        llm.defaults.lift_limit()
        llm.defaults.end_repetition()
        return llm

    def load_another(name: str) -> LLM:
        # Revision, template, draft model and adapters are the first model's.
        return load(model=name, revision=None, template=None, draft_model=None, adapters=None)

    if args.prompt_cache is not None:
        from mlx_llama.api.cache_file import check_folder

        check_folder(args.prompt_cache)
    llm = load()
    session = llm.chat(args.system_prompt, **options)
    chat = Chat(session, stats=args.stats, debug=args.debug, load=load_another)
    if args.prompt_cache is not None and os.path.lexists(os.path.expanduser(args.prompt_cache)):
        cli.say(f"({llm.load_cache(args.prompt_cache)} tokens from {args.prompt_cache})")
    greeting = describe_model(llm)
    del llm, session  # /model frees them
    code = _talk(chat, greeting, is_typed, screen)
    if args.prompt_cache is not None and chat.session.messages:
        _save_cache(chat, args.prompt_cache)
    return code


def _save_cache(chat: Chat, path: str) -> None:
    """Save the keys and values, unless /model chose a model that these flags would not load."""
    from mlx_llama.api.cache_file import write_cache

    session = chat.session
    if chat.has_switched or session.identify_cache is None:
        cli.say(f"({path} is not saved: /model chose another model)")
    else:
        state = session.loop.export(None, session.adapter)
        write_cache(path, state, session.identify_cache(session.adapter))


def _talk(chat: Chat, greeting: str, is_typed: bool, screen: TextIO | None) -> int:
    """Hold the conversation in a terminal or from a pipe; returns the exit code."""
    from .dialogue import run_script

    if is_typed and screen:
        from . import terminal

        terminal.say(f"{greeting}\n/help lists the commands, Ctrl-D leaves")
        return terminal.talk(chat, screen)
    if sys.stdout.isatty():
        chat.view = lambda: Plain(clean=True)
    return run_script(chat)
