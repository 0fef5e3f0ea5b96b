"""The REPL's terminal: line editing and history by prompt_toolkit, answers drawn by rich."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mlx_llama import cli
from mlx_llama.core.options import FIELDS
from mlx_llama.core.text.controls import show_controls

from .commands import COMMANDS, Leave, option_name, option_value
from .dialogue import Chat
from .markdown import MarkdownView
from .view import Plain, View, is_dumb, rewraps_lines

PROMPT, EDIT = ">>> ", "edit> "
# Words that quit other programs or ask them for help, and our command for it.
HABITS = {
    **dict.fromkeys(("exit", "exit()", "quit", "quit()", "bye", "q", ":q"), "exit"),
    **dict.fromkeys(("help", "help()", "h", "?"), "help"),
    **dict.fromkeys(("clear", "reset", "r"), "clear"),
}


class Prompt(Protocol):
    """Asks for a text. Raises EOFError and KeyboardInterrupt."""

    def prompt(self, message: Any, *, default: str = "") -> str: ...


def talk(chat: Chat, screen: TextIO) -> int:
    """Ask and answer until the user leaves. Errors do not end the conversation."""
    chat.view, chat.say = _choose_view, say
    plain = is_dumb()
    prompt = LinePrompt(screen) if plain else make_prompt(chat, screen)
    chat.edit = lambda text: _edit(prompt, text)
    chat.recall = lambda question, answer: _recall(chat, question, answer)
    with contextlib.nullcontext() if plain else _no_echo():
        while True:
            try:
                text = prompt.prompt([("class:prompt", PROMPT)]).rstrip()
                name = HABITS.get(text.lower())
                if name == "exit":
                    raise Leave
                if name:
                    chat.say(
                        f"(/{name}: {COMMANDS[name].help}; a space before {text} sends it to "
                        "the model)"
                    )
                elif text.strip():
                    _take(chat, text)
                    print(file=screen, flush=True)
            except KeyboardInterrupt:
                chat.say("(Ctrl-D leaves)")
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


def _edit(prompt: Prompt, text: str) -> str | None:
    """The text as edited by the user; None if it is unchanged or empty, or at Ctrl-C or Ctrl-D."""
    try:
        edited = prompt.prompt([("class:prompt", EDIT)], default=text).rstrip()
    except (EOFError, KeyboardInterrupt):
        return None
    return edited if edited.strip() and edited != text else None


def _recall(chat: Chat, question: str, answer: str) -> None:
    """Show an exchange as it appeared on the screen; only on stderr if stdout is no terminal."""
    chat.say(PROMPT + show_controls(question))
    if not sys.stdout.isatty():
        chat.say(show_controls(answer))
        return
    with chat.view() as view:
        view.push(answer)


def say(text: str) -> None:
    """Print lines on stderr; on a terminal wrapped between words, columns of a list kept."""
    if sys.stderr is None or not sys.stderr.isatty():
        cli.show(text)
        return
    width = max(10, os.get_terminal_size(sys.stderr.fileno()).columns or 80)  # 0: unknown
    cli.show("\n".join(part for line in text.split("\n") for part in wrap(line, width)))


def wrap(line: str, width: int) -> list[str]:
    """Cut a line between words, each part at most `width` cells; later parts of an indented line
    line up with its last column, or with the line's own indent where that is too narrow.
    """
    if cell_len(line) <= width:
        return [line]
    margin = len(line) - len(line.lstrip())
    columns = re.match(r" +\S.*?  +(?=\S)", line)
    indent = len(columns[0]) if columns else margin
    if indent > width // 2:
        indent, line = margin + 2, " " * margin + re.sub("  +", "  ", line.strip())
    console = Console(width=width)
    first = Text(line).wrap(console, width)[0].plain
    rest = line[len(first) :].lstrip()
    later = Text(rest).wrap(console, width - indent) if rest else ()
    return [first.rstrip(), *(" " * indent + part.plain.rstrip() for part in later)]


class LinePrompt:
    """Reads lines from a terminal without escape sequences. A final backslash continues."""

    def __init__(self, screen: TextIO):
        self.screen = screen

    def prompt(self, message: Any, *, default: str = "") -> str:
        """Read a text. message: in prompt_toolkit's form. default: printed, not editable."""
        if default:
            say(f"(the message was: {default})")
        lines: list[str] = []
        while not lines or lines[-1].endswith("\\"):
            lines = [line.removesuffix("\\") for line in lines]
            start = "... " if lines else "".join(text for _, text in message)
            print(start, end="", file=self.screen, flush=True)
            line = sys.stdin.buffer.readline().decode("utf-8", "replace")
            if not line:
                raise EOFError
            lines.append(line.rstrip("\r\n"))
        return "\n".join(lines)


def _choose_view() -> View:
    """Markdown where the terminal can draw it, else plain text."""
    terminal = sys.stdout.isatty()
    if terminal and not is_dumb() and not os.environ.get("NO_COLOR"):
        return MarkdownView(Console(file=sys.stdout, highlight=False))
    return Plain(clean=terminal)


def make_prompt(chat: Chat, screen: TextIO) -> PromptSession[str]:
    prompt: PromptSession[str] = PromptSession(
        output=create_output(screen),
        history=History(history_path()),
        multiline=True,
        prompt_continuation=lambda width, number, is_wrapped: "" if is_wrapped else "... ",
        key_bindings=_bind_keys(),
        completer=CommandCompleter(chat),
        complete_while_typing=True,
        reserve_space_for_menu=6,
        enable_suspend=True,
        enable_open_in_editor=True,
        style=Style.from_dict({"prompt": "bold ansigreen"}),
    )
    if rewraps_lines():
        _follow_wrapping(prompt)
    return prompt


def _follow_wrapping(prompt: PromptSession[str]) -> None:
    """Erase the editor's rows as a narrower terminal rewrapped them, not as they were drawn."""
    app, renderer, erase = prompt.app, prompt.app.renderer, prompt.app.renderer.erase

    def erase_wrapped(leave_alternate_screen: bool = True) -> None:
        if shown := renderer.last_rendered_screen:
            width = renderer.output.get_size().columns
            cursor = shown.get_cursor_position(app.layout.current_window)
            lines = (shown.data_buffer[y].items() for y in range(cursor.y))
            inked = ((x for x, char in line if char.char.strip()) for line in lines)
            wraps = sum(max(columns, default=0) // width for columns in inked)
            renderer.output.cursor_up(wraps + max(0, cursor.x - 1) // width)
        erase(leave_alternate_screen)

    renderer.erase = erase_wrapped  # type: ignore[method-assign]


def _bind_keys() -> KeyBindings:
    """Enter sends, Alt-Enter and a final backslash begin a line, Tab completes, Ctrl-C clears."""
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
        # prompt_toolkit's own binding ignores Tab while it computes completions.
        buffer = event.current_buffer
        request = CompleteEvent(completion_requested=True)
        completions = list(buffer.completer.get_completions(buffer.document, request))
        if buffer.complete_state:
            buffer.complete_next()
        elif len(completions) == 1:
            buffer.apply_completion(completions[0])
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
    """Completes commands, options and values after /set, and names of files."""

    def __init__(self, chat: Chat):
        self.chat = chat
        self.paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            # A space before the argument, so that the next Tab completes it.
            words = {name + " " * bool(c.argument): c.help for name, c in COMMANDS.items()}
            yield from _matching(name, words)
        elif name == "set":
            option, space, value = rest.lstrip().partition(" ")
            if not space:
                words = {name + " ": field.description for name, field in FIELDS.items()}
                yield from _matching(option, words)
            elif (option := option_name(option)) in FIELDS:
                values = {
                    option_value(self.chat.session, option): "current value",
                    "default": "reset the option",
                }
                yield from _matching(value, {word: about for word, about in values.items() if word})
        elif COMMANDS.get(name) and COMMANDS[name].argument.startswith(("FILE", "[NAME")):
            yield from self.paths.get_completions(Document(rest.lstrip()), complete_event)


def _matching(start: str, words: dict[str, str]) -> Iterator[Completion]:
    for word, about in words.items():
        if word.startswith(start):
            yield Completion(
                word, start_position=-len(start), display=word.rstrip(), display_meta=about
            )


def history_path() -> Path:
    """The file with the lines of earlier runs; os.devnull for a user without a home."""
    try:
        return user_state_path("mlx_llama", appauthor=False) / "history"
    except RuntimeError as error:
        say(f"(the history is kept for this run only: {error})")
        return Path(os.devnull)


class History(FileHistory):
    """Lines in a file that only its owner can read. If it cannot be written, the user is told once
    and the lines last for this run.
    """

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
                say(f"(the history is kept for this run only: {self.filename}: {reason})")
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
