"""Run a command: errors in one line, exit codes, robust standard streams. Options in core's
messages, which it writes in backticks as in Python (`ctx_size`, `compile=False`), become flags.

Exit codes: 0 done, 2 a user error (one line on stderr), 130 interrupted, 143 terminated, else 1.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from mlx_llama.core.errors import LlamaError, shorten
from mlx_llama.core.system import progress
from mlx_llama.core.text.controls import show_controls

# Options whose flag is not their name with dashes.
FLAGS = {"adapter": "--use-adapter", "schema": "--json-schema", "temperature": "--temp"}
_NAME = re.compile(r"`([a-z][a-z_]*)(?:=([^`]*))?`")


def flag_of(name: str) -> str:
    """The preferred flag of an option."""
    return FLAGS.get(name) or "--" + name.replace("_", "-")


def spell_flags(text: str) -> str:
    """Replace names of options by flags: "`device='cpu'`" by "--device cpu", "`compile=False`" by
    "--no-compile".
    """

    def spell(match: re.Match[str]) -> str:
        flag, value = flag_of(match[1]), match[2]
        if value is None or value == "True":
            return flag
        return f"--no-{flag[2:]}" if value == "False" else f"{flag} " + value.strip("'\"")

    return _NAME.sub(spell, text)


def spell_options(options: Mapping[str, Any]) -> list[str]:
    """Options by name as words of a command line; None is omitted, a tuple repeats its flag."""
    words: list[str] = []
    for name, value in options.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
            continue
        for part in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            words += [f"{flag}={part}"] if str(part).startswith("-") else [flag, str(part)]
    return words


def spell_command(command: str, words: Sequence[str], options: Mapping[str, Any]) -> str:
    """A command line for a shell; options as for `spell_options`."""
    return " ".join(
        ["python -m mlx_llama." + command, *map(shlex.quote, [*words, *spell_options(options)])]
    )


MAX_CHARACTERS = 1 << 28  # characters of a file


def run(main: Callable[[list[str]], int | None], arguments: list[str] | None = None) -> int:
    """Call a command's `main`; turns errors into a line, or with --debug a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        # A model may write any character: UTF-8 in a file or pipe, escapes in a terminal.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace", **({} if stream.isatty() else {"encoding": "utf-8"})
            )
    if sys.stdout is None:
        say("error: standard output is closed: open it to receive the answer")
        return 2
    code = 0
    try:
        try:
            code = _call(main, arguments)
        finally:  # also when --help ends by SystemExit
            # At exit a reader that left would be a message and code 120.
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        _discard(sys.stdout)
    except OSError as error:
        if "--debug" in arguments or error.errno != errno.ENOSPC:
            raise
        say(f"error: the output cannot be written: {error.strerror}")
        _discard(sys.stdout)
        return 1
    return code


def _call(main: Callable[[list[str]], int | None], arguments: list[str]) -> int:
    try:
        return main(arguments) or 0
    except LlamaError as error:
        if "--debug" in arguments:
            raise
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


def _discard(stream: TextIO) -> None:
    """Send what is left in a stream's buffer, and what follows, to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str) -> None:
    """Print a message on stderr, with options spelled as flags."""
    show(spell_flags(text))


def show(text: str) -> None:
    """Print a text on stderr without control characters; an error becomes one short line.

    A terminal gets lines that break between words.
    """
    if sys.stderr is not None:
        text = shorten(" ".join(text.split("\n")), 4000) if text.startswith("error: ") else text
        text = show_controls(text)
        if sys.stderr.isatty():
            width = max(20, shutil.get_terminal_size().columns)
            wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
            text = "\n".join(map(wrapper.fill, text.split("\n")))
        try:
            print(text, file=sys.stderr, flush=True)
        except BrokenPipeError:  # the messages' reader left, the answer's may be there
            _discard(sys.stderr)


def announce(doing: str) -> Callable[[str], None]:
    """A function that says on a terminal what begins: announce("measuring")("tg64")."""
    is_watched = sys.stderr is not None and sys.stderr.isatty()
    return lambda name: say(f"{doing} {name}") if is_watched else None


@contextmanager
def Bar(label: str, patience: float = 1.0) -> Iterator[None]:
    """Show the progress of the work in the block (core.system.progress), after `patience` seconds,
    on a terminal's stderr. Disappears when the work is done.
    """
    due, show = time.monotonic() + patience, None
    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            nonlocal due, show
            if time.monotonic() >= due:
                if show is None:
                    from rich.progress import DownloadColumn

                    show = stack.enter_context(progress.draw(label, total, DownloadColumn(), False))
                show(done)
                due = time.monotonic() + 0.1

        if progress.moves_cursor(sys.stderr):
            stack.enter_context(progress.reported(report))
        yield


@contextmanager
def clean_up_when_terminated() -> Iterator[None]:
    """Make SIGTERM raise SystemExit(143) in the block, which then removes its partial files."""

    def exit_on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise SystemExit(128 + number)

    # only the main thread may set signal handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def read_text(path: str) -> str:
    """The text of a file, or of standard input for "-". Raises LlamaError."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise LlamaError("standard input is closed: there is no text to read")
            return sys.stdin.buffer.read().decode("utf-8-sig")
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)  # a device may be endless
        if len(text) > MAX_CHARACTERS:
            raise LlamaError(
                f"{path}: is longer than {MAX_CHARACTERS} characters: use a shorter text"
            )
        return text
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise LlamaError(
            f"{name}: is not UTF-8 (byte {error.start}: {error.reason}): convert it, for example "
            "with iconv -t UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise LlamaError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
