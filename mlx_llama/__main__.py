"""mlx_llama COMMAND ...: run a command, or list them; as python -m mlx_llama.COMMAND ..."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

COMMANDS = {
    "chat": "talk to a model in the terminal",
    "generate": "one prompt, one answer on stdout",
    "server": "a model over HTTP, for clients of OpenAI, Anthropic and "
    "llama-server, and in the browser",
    "bench": "speed and memory of a model on a backend",
    "quantize": "quantize a model",
    "doctor": "show what this machine can run, and what is wrong with a model",
    "models": "list, fetch and remove models of the hub's cache",
    "parity": "check that the backends agree, and find where they differ",
}
PACKAGES = "server", "bench", "quantize", "doctor", "parity"
HOMES = {"chat": "chat.repl"} | {name: f"{name}.command" for name in PACKAGES}
# Names of ollama and llama.cpp
_OTHER_NAMES = {"run": "chat", "list": "models", "pull": "models pull", "rm": "models rm"}
_OTHER_NAMES |= {"convert": "quantize", "perplexity": "parity --perplexity"}


def overview() -> str:
    """The list of commands, one per line."""
    lines = [f"  mlx_llama {name:<10}{purpose}" for name, purpose in COMMANDS.items()]
    end = "Each takes --help. Without --model they use the small guide model in this package."
    return "\n".join(["mlx_llama runs Llama-family models. Commands:\n", *lines, "", end])


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` begin with (None: sys.argv); returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        return _print(overview())
    if name == "--version":
        from . import __version__

        return _print(f"mlx_llama {__version__}")
    if name not in COMMANDS:
        import difflib

        near = [command for command in COMMANDS if command.startswith(name or " ")]
        near += [_OTHER_NAMES[name]] if name in _OTHER_NAMES else []
        near += difflib.get_close_matches(name, COMMANDS, 1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        from .cli import say

        say(f"error: there is no command {name!r}: {remedy}")
        return 2
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        # An import would print a traceback, or swallow the interrupt.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        from . import cli
        from .core.system.forks import find_launcher

        command = importlib.import_module(f"mlx_llama.{HOMES.get(name, name)}").main
    finally:
        signal.signal(signal.SIGINT, before)

    def run(arguments: list[str]) -> int | None:
        if launcher := find_launcher():
            from .distributed.following import follow_leader

            if follow_leader(launcher):
                return 0
        return command(arguments)

    return cli.run(run, arguments[1:])


def _print(text: str) -> int:
    from . import cli

    return cli.run(lambda _: print(text), [])


def start(name: str) -> NoReturn:
    """Run a command as a script."""
    sys.exit(main([name, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
