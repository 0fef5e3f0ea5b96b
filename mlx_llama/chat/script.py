"""A chat from a pipe: a script of messages and commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from mlx_llama.core.errors import LlamaError

from .commands import Leave
from .dialogue import Chat


def run(chat: Chat) -> int:
    """Run messages and commands from standard input, one per line; returns 2 if a line failed.
    Raises LlamaError for bytes that are not UTF-8.
    """
    code = 0
    for number, text in read_messages():
        try:
            chat.take(text)
        except Leave:
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
