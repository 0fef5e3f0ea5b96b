"""Run the lines of a user or a script in a session: show each answer, stop it at Ctrl-C."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_llama import cli
from mlx_llama.api.session import Session
from mlx_llama.core.answers.completion import Completion
from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.engine.request import Answer
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.text.thoughts import Thought

from . import commands
from .view import Plain, View

if TYPE_CHECKING:
    from mlx_llama.api.llm import LLM

PROGRESS_SECONDS = 0.25  # between updates of a prompt's progress


class Interrupt:
    """Ctrl-C during an answer, which stops at the next piece. Before the first one, and at a second
    Ctrl-C, KeyboardInterrupt is raised: the next piece may be far away.
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


@contextmanager
def show_progress(stream: Answer[str], view: View) -> Iterator[Callable[[], None]]:
    """Show the progress of a prompt in a view, on a separate thread; yields a function that stops
    it, to be called at the first piece.
    """
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(PROGRESS_SECONDS):
            done, total = stream.progress
            if total:
                view.wait(done, total)

    def stop() -> None:
        is_over.set()
        thread.join()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop()


@dataclass(eq=False)
class Chat:
    """Takes the user's lines and shows the answers of a session."""

    session: Session
    view: Callable[[], View] = Plain
    stats: bool = False
    debug: bool = False
    load: Callable[[str], LLM] | None = None  # a model by its name, for /model; None: it is fixed
    has_switched: bool = False  # /model chose another model
    say: Callable[[str], None] = cli.show  # prints a line for the user
    # lets the user edit a text, returns None if it is unchanged; None without an editor
    edit: Callable[[str], str | None] | None = None
    # shows the question and the answer of a loaded conversation; None: they are not shown
    recall: Callable[[str, str], None] | None = None

    def take(self, text: str) -> None:
        """Handle a message or a command. Raises commands.Leave, or LlamaError without a change."""
        outcome: commands.Outcome
        if text.startswith("//"):  # a message that begins with one slash
            outcome = self.session.stream(text[1:])
        elif text.startswith("/"):
            outcome = commands.run(self.session, text)
        else:
            outcome = self.session.stream(text)
        if isinstance(outcome, str):
            self.say(outcome)
        elif isinstance(outcome, Answer):
            self.show(outcome)
        else:
            outcome(self)

    def let_edit(self, text: str) -> None:
        """Let the user edit the last question, and show the answer."""
        if self.edit is None:
            raise commands.CommandError("/edit needs the new text here: /edit TEXT")
        edited = self.edit(text)
        if edited is None:
            self.say("(the message stays as it was)")
        else:
            self.show(self.session.edit(edited))

    def switch(self, name: str) -> None:
        """Load a model and continue with it; the old one stays meanwhile, or if that fails."""
        if self.load is None:
            raise commands.CommandError("/model: this chat cannot change its model")
        try:
            llm = self.load(name)
        except KeyboardInterrupt:
            self.say(f"(stopped: the model is still {self.session.model})")
            raise
        session = llm.chat(self.session.system, **self.session.options)
        session.messages, self.session, self.has_switched = self.session.messages, session, True
        gc.collect()  # reference cycles would keep the old model in memory
        self.say(f"{describe_model(llm)}\n({len(session.messages)} messages are kept)")

    def show(self, stream: Answer[str]) -> None:
        """Show an answer as it comes. Ctrl-C keeps its text and raises KeyboardInterrupt."""
        completion = stream.completion
        for notice in completion.notices:
            self.say(f"({commands.spell(notice)})")
        for aside in completion.asides:
            if aside.is_first:
                self.say(f"{aside.text}\n")
        is_stopped = is_thinking = False
        try:
            with Interrupt() as interrupt, self.view() as view:
                view.begin(completion.text)
                try:
                    with show_progress(stream, view) as stop_progress:
                        for piece in stream.pieces():
                            interrupt.is_immediate = False
                            stop_progress()
                            if isinstance(piece, Thought):
                                is_thinking = True
                                view.think(piece.text)
                            else:
                                if is_thinking:
                                    view.fold(describe_thought(stream.completion))
                                is_thinking = False
                                view.push(piece)
                            if interrupt.is_asked:
                                raise KeyboardInterrupt
                finally:
                    interrupt.is_ending = True
                    if is_thinking:
                        view.fold(describe_thought(stream.completion))
                    stream.close()
        except KeyboardInterrupt:
            is_stopped = True
        if logprobs := completion.describe_logprobs(self.session.tokenizer):
            self.say(logprobs)
        for remark in describe_end(completion, self.session.engine):
            self.say(f"({commands.spell(remark)})")
        for aside in completion.asides:
            if not aside.is_first:
                self.say(aside.text)
        if self.stats:
            self.say(commands.spell(completion.summary()))
        if is_stopped or interrupt.is_asked:  # Ctrl-C during the last step stopped nothing
            raise KeyboardInterrupt

    def complain(self, error: Exception, place: str = "") -> None:
        """Print one line about an error, after `place`; with --debug its traceback."""
        if self.debug:
            traceback.print_exception(error)
        name, is_known = type(error).__name__, isinstance(error, LlamaError)
        unexpected = "" if is_known else f"{name} (--debug shows the traceback): "
        self.say(f"error: {place}{unexpected}{commands.spell(str(error))}")


def describe_model(llm: LLM) -> str:
    """Model, backend and context in a line."""
    backend, width = llm.backend, llm.model.dtype_name
    device = f"{backend.name} ({backend.device_name}, {width})"
    return f"{llm.checkpoint.name} on {device}, context {llm.engine.context} tokens"


def describe_thought(completion: Completion) -> str:
    """The line that replaces a thought on the screen."""
    return f"thought for {completion.reasoning_tokens} tokens: /show thoughts"


def describe_end(completion: Completion, engine: RequestBuilder) -> Iterator[str]:
    """Remarks on how an answer ended."""
    if completion.finish_reason == "interrupted":
        yield "stopped"
    elif completion.repeated:
        yield (
            f"stopped after {len(completion.tokens)} tokens because the answer repeats itself: "
            "/resume continues it, /set repetition_limit 0 lets all answers go on"
        )
    elif completion.finish_reason == "length":
        yield (
            f"cut off after {len(completion.tokens)} tokens: /resume continues it, /set max_tokens "
            "allows more"
        )
    elif completion.finish_reason == "context":
        yield (
            f"cut off because the context of {engine.context} tokens is full: /resume continues "
            "without the oldest messages, /clear starts a new "
            f"conversation{engine.suggest_context()}"
        )
    elif not completion.text:
        yield "the model ended its answer without any text"


# A script from a pipe


def run_script(chat: Chat) -> int:
    """Run messages and commands from standard input, one per line; returns 2 if a line failed.
    Raises LlamaError for bytes that are not UTF-8.
    """
    code = 0
    for number, text in read_messages():
        try:
            chat.take(text)
        except commands.Leave:
            break
        except LlamaError as error:
            chat.complain(error, f"line {number}: ")
            code = 2
    return code


def read_messages() -> Iterator[tuple[int, str]]:
    """(line number, text) of each message; a final backslash continues it. Raises LlamaError."""
    parts: list[str] = []
    for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise LlamaError(
                f"standard input, line {number}: is not UTF-8 (byte {error.start}: "
                f"{error.reason}): convert it, for example with iconv -t UTF-8"
            ) from None
        parts.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            message, parts = "\n".join(parts), []
            if message.strip():
                yield number, message
    if "\n".join(parts).strip():
        yield number, "\n".join(parts)
