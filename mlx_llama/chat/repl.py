"""python -m mlx_llama.chat: talk with a model. In a terminal a REPL, from a pipe a script of one message per line."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from mlx_llama import cli
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.generation import options

from .view import Plain, View


def parser() -> options.Parser:
    """The command line. Names follow mlx_lm.chat's."""
    result = options.Parser(prog="python -m mlx_llama.chat", description=__doc__, allow_abbrev=False)
    result.add_argument("--system-prompt", "-sys", default=None, help="instructions that stand before the conversation")
    result.add_argument("--stats", action="store_true", help="after each answer its speed, on stderr")
    result.add_argument("--debug", action="store_true", help="show tracebacks")
    options.add_load_flags(result)
    options.add_generation_flags(result)
    return result


class Interrupt:
    """Ctrl-C during an answer. Once text has come it asks to stop at the next piece, so that nothing is torn; before
    that, and when it is pressed again, it raises KeyboardInterrupt, since the next piece may be far away."""

    def __init__(self):
        self.asked = False
        self.at_once = True
        self.ending = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pressed(self, *_: object) -> None:
        now, self.asked = self.at_once or self.asked, True
        if now and not self.ending:
            self.ending = True
            raise KeyboardInterrupt


class Chat:
    """A session at this door: takes what the user writes and shows what comes of it."""

    def __init__(self, session: Any, view: Callable[[], View] = Plain, stats: bool = False, debug: bool = False):
        self.session = session
        self.view = view
        self.stats = stats
        self.debug = debug

    def take(self, text: str) -> None:
        """A message or a command. Raises LlamaError, with the conversation as it was, and commands.Leave."""
        from . import commands

        if commands.is_command(text):
            outcome = commands.run(self.session, text)
        else:
            outcome = self.session.stream(text.removeprefix("/") if text.startswith("//") else text)
        if isinstance(outcome, str):
            cli.say(outcome)
        else:
            self.show(outcome)

    def show(self, stream: Any) -> None:
        """An answer as it comes. After Ctrl-C what was shown stays in the conversation; raises KeyboardInterrupt."""
        completion = stream.completion
        for notice in completion.notices:
            cli.say(f"({notice})")
        stopped = False
        try:
            with Interrupt() as interrupt, self.view() as view:
                try:
                    for piece in stream:
                        interrupt.at_once = False
                        view.push(piece)
                        if interrupt.asked:
                            raise KeyboardInterrupt
                finally:
                    interrupt.ending = True
                    stream.close()
        except KeyboardInterrupt:
            stopped = True
        for remark in remarks(completion, self.session.engine):
            cli.say(f"({remark})")
        if self.stats:
            cli.say(completion.summary())
        if stopped:
            raise KeyboardInterrupt

    def complain(self, error: Exception, where: str = "") -> None:
        """One line for what went wrong; its traceback with --debug."""
        if self.debug:
            traceback.print_exception(error)
        unexpected = "" if isinstance(error, LlamaError) else f"{type(error).__name__} (--debug shows where): "
        cli.say(f"error: {where}{unexpected}{error}")


def remarks(completion: Any, engine: Any) -> Iterator[str]:
    """What a user should know about how an answer ended."""
    if completion.finish_reason == "interrupted":
        yield "stopped"
    elif completion.finish_reason == "length":
        yield f"cut off after {len(completion.tokens)} tokens: /set max_tokens allows more"
    elif completion.finish_reason == "context":
        yield f"cut off because the context of {engine.context} tokens is full: /clear begins anew{engine.more_context()}"
    elif not completion.text:
        yield "the model ended its answer without a text"


def script(chat: Chat) -> int:
    """Messages and commands from standard input, one per line. A line that fails does not stop the others, but the
    exit code says so. Raises LlamaError for bytes that are not UTF-8."""
    from .commands import Leave

    code = 0
    for number, text in script_lines():
        try:
            chat.take(text)
        except Leave:
            break
        except LlamaError as error:
            chat.complain(error, f"line {number}: ")
            code = 2
    return code


def script_lines() -> Iterator[tuple[int, str]]:
    """(line number, text) of each message; a backslash at its end continues a line. Raises LlamaError."""
    held: list[str] = []
    for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise LlamaError(f"standard input, line {number}: is not UTF-8 (byte {error.start}: {error.reason}): "
                             f"convert it, for example with iconv -t UTF-8") from None
        held.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            message, held = "\n".join(held), []
            if message.strip():
                yield number, message
    if "\n".join(held).strip():
        yield number, "\n".join(held)


def main(arguments: list[str]) -> int:
    """Run the door; returns the exit code. Raises LlamaError."""
    given = parser().parse_args(arguments)
    wanted = options.given_flags(given)
    options.validated(wanted)  # before the model is loaded

    from mlx_llama.core.generation.llm import load

    typed = sys.stdin is not None and sys.stdin.isatty()
    screen = next((stream for stream in (sys.stderr, sys.stdout) if stream is not None and stream.isatty()), None)
    if typed and screen and given.model:
        cli.say(f"loading {given.model} ...")
    with cli.Bar("loading"):
        llm = load(**options.load_arguments(given))
    chat = Chat(llm.chat(given.system_prompt, **wanted), stats=given.stats, debug=given.debug)
    if typed and screen:
        from . import terminal

        width = str(llm.model.dtype).split(".")[-1]
        cli.say(f"{llm.checkpoint.name} on {llm.backend.name} ({llm.backend.device_name}, {width}), "
                f"context {llm.engine.context} tokens\n/help lists the commands, Ctrl-D leaves")
        return terminal.talk(chat, screen)
    if sys.stdout.isatty():
        chat.view = lambda: Plain(clean=True)
    return script(chat)
