"""The REPL's terminal: line editing and history by prompt_toolkit, answers drawn by rich."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style
from rich.console import Console

from mlx_llama import cli
from mlx_llama.core.generation.options import FIELDS
from mlx_llama.core.generation.session import Session

from .commands import COMMANDS, Leave, option_name, option_value
from .dialogue import Chat
from .markdown import MarkdownView
from .view import Plain, View


def talk(chat: Chat, screen: TextIO) -> int:
    """Ask and answer until the user leaves. Errors do not end the conversation."""
    chat.view = _choose_view
    prompt = make_prompt(chat.session, screen)
    with _no_echo():
        while True:
            try:
                text = prompt.prompt().rstrip()
                if text.strip():
                    _take(chat, text)
                    print(file=screen, flush=True)
            except KeyboardInterrupt:
                cli.say("(Ctrl-D leaves)")
            except (EOFError, Leave):
                return 0


def _take(chat: Chat, text: str) -> None:
    try:
        chat.take(text)
    except KeyboardInterrupt:
        pass  # reported already
    except Leave:
        raise
    except Exception as error:  # a bug must not lose the conversation
        chat.complain(error)


def _choose_view() -> View:
    """Markdown where the terminal can draw it, else plain text."""
    terminal = sys.stdout.isatty()
    if terminal and os.environ.get("TERM") not in (None, "dumb", "unknown") and not os.environ.get("NO_COLOR"):
        return MarkdownView(Console(file=sys.stdout, highlight=False))
    return Plain(clean=terminal)


def make_prompt(session: Session, screen: TextIO) -> PromptSession[str]:
    """The line editor."""
    return PromptSession(
        [("class:prompt", ">>> ")], output=create_output(screen), history=History(history_path()), multiline=True,
        prompt_continuation="... ", key_bindings=_bind_keys(), completer=CommandCompleter(session),
        complete_while_typing=True, reserve_space_for_menu=6, enable_suspend=True, enable_open_in_editor=True,
        style=Style.from_dict({"prompt": "bold ansigreen"}))


def _bind_keys() -> KeyBindings:
    """Enter sends, Alt-Enter and a trailing backslash begin a line, Tab completes, Ctrl-C clears."""
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # accept the completion; the next Enter sends
        elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("tab", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        # prompt_toolkit loses its own Tab while it computes completions, as fast typists notice.
        buffer = event.current_buffer
        found = list(buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
        if buffer.complete_state:
            buffer.complete_next()
        elif len(found) == 1:
            buffer.apply_completion(found[0])
        else:
            buffer.start_completion(insert_common_part=True)

    @keys.add("escape", "enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


class CommandCompleter(Completer):
    """Completes commands, options and values after /set, files after /save, /load and /read."""

    def __init__(self, session: Session):
        self.session = session
        self.paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Completions at the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            yield from _matching(name, {command: about.help for command, about in COMMANDS.items()})
        elif name == "set":
            option, space, value = rest.lstrip().partition(" ")
            if not space:
                yield from _matching(option, {name: field.description for name, field in FIELDS.items()})
            elif (option := option_name(option)) in FIELDS:
                values = {option_value(self.session, option): "current value", "default": "reset the option"}
                yield from _matching(value, {word: about for word, about in values.items() if word})
        elif COMMANDS.get(name) and COMMANDS[name].argument.startswith("FILE"):
            yield from self.paths.get_completions(Document(rest.lstrip()), complete_event)


def _matching(start: str, words: dict[str, str]) -> Iterator[Completion]:
    for word, about in words.items():
        if word.startswith(start):
            yield Completion(word, start_position=-len(start), display_meta=about)


def history_path() -> Path:
    """The file with the lines of earlier runs; for a user without a home one that forgets them."""
    try:
        return user_state_path("mlx_llama", appauthor=False) / "history"
    except RuntimeError as error:
        cli.say(f"(the history is kept for this run only: {error})")
        return Path(os.devnull)


class History(FileHistory):
    """Lines in a file that only its owner can read. Without one: this run's lines, and one message to the user."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self.is_writable = True
        with self._report_once():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))

    def load_history_strings(self) -> Iterable[str]:
        """Newest first."""
        lines: list[str] = []
        with self._report_once():
            lines = list(super().load_history_strings())
        return lines

    def store_string(self, string: str) -> None:
        """Append a line to the file."""
        if self.is_writable:
            with self._report_once():
                super().store_string(string)

    @contextlib.contextmanager
    def _report_once(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            if self.is_writable:
                reason = getattr(error, "strerror", error)
                cli.say(f"(the history is kept for this run only: {self.filename}: {reason})")
            self.is_writable = False


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """Keep keys typed during an answer, unechoed, for the next prompt."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = list(before)
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
