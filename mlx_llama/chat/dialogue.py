"""A session at the REPL's door: takes a line of the user, shows the answer, stops it at Ctrl-C."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator

from mlx_llama import cli
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.generation.completion import Completion
from mlx_llama.core.generation.engine import Engine
from mlx_llama.core.generation.session import Session, Stream

from . import commands
from .view import Plain, View


class Interrupt:
    """Ctrl-C during an answer.

    After the first piece it asks to stop at the next piece, so that no step is cut short. Before it, and at a second
    Ctrl-C, it raises KeyboardInterrupt, since the next piece may take long.
    """

    def __init__(self):
        self.is_asked = False
        self.is_immediate = True
        self.is_ending = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, *_: object) -> None:
        is_immediate, self.is_asked = self.is_immediate or self.is_asked, True
        if is_immediate and not self.is_ending:
            self.is_ending = True
            raise KeyboardInterrupt


class Chat:
    """Takes the user's lines and shows the answers of a session."""

    def __init__(self, session: Session, view: Callable[[], View] = Plain, stats: bool = False, debug: bool = False):
        self.session = session
        self.view = view
        self.stats = stats
        self.debug = debug

    def take(self, text: str) -> None:
        """Handle a message or a command. Raises LlamaError, with the conversation unchanged, and commands.Leave."""
        outcome: commands.Outcome
        if commands.is_command(text):
            outcome = commands.run(self.session, text)
        else:
            outcome = self.session.stream(text.removeprefix("/") if text.startswith("//") else text)
        if isinstance(outcome, str):
            cli.say(outcome)
        else:
            self.show(outcome)

    def show(self, stream: Stream) -> None:
        """Show an answer as it comes. Ctrl-C keeps the shown text in the conversation and raises KeyboardInterrupt."""
        completion = stream.completion
        for notice in completion.notices:
            cli.say(f"({notice})")
        is_stopped = False
        try:
            with Interrupt() as interrupt, self.view() as view:
                try:
                    for piece in stream:
                        interrupt.is_immediate = False
                        view.push(piece)
                        if interrupt.is_asked:
                            raise KeyboardInterrupt
                finally:
                    interrupt.is_ending = True
                    stream.close()
        except KeyboardInterrupt:
            is_stopped = True
        for remark in describe_end(completion, self.session.engine):
            cli.say(f"({remark})")
        if self.stats:
            cli.say(completion.summary())
        if is_stopped:
            raise KeyboardInterrupt

    def complain(self, error: Exception, place: str = "") -> None:
        """Print one line about an error, after `place`; with --debug its traceback."""
        if self.debug:
            traceback.print_exception(error)
        unexpected = "" if isinstance(error, LlamaError) else f"{type(error).__name__} (--debug shows the traceback): "
        cli.say(f"error: {place}{unexpected}{error}")


def describe_end(completion: Completion, engine: Engine) -> Iterator[str]:
    """Remarks on how an answer ended."""
    if completion.finish_reason == "interrupted":
        yield "stopped"
    elif completion.finish_reason == "length":
        yield f"cut off after {len(completion.tokens)} tokens: /set max_tokens allows more"
    elif completion.finish_reason == "context":
        yield (f"cut off because the context of {engine.context} tokens is full: /clear begins a new conversation"
               f"{engine.suggest_context()}")
    elif not completion.text:
        yield "the model ended its answer without a text"
