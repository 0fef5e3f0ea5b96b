"""Errors for users. A message states the value, the expected value and the remedy.

Messages name options in backticks, as in Python: "`ctx_size` 0: ...", "choose `device='cpu'`".
Commands spell them as flags (cli.running).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

_NAME = re.compile(r"`([a-z][a-z_]*(?:=[^`]*)?)`")


def plain(text: str) -> str:
    """The text of an error or a notice without backticks, where options are fields."""
    return _NAME.sub(r"\1", text)


class LlamaError(Exception):
    """Base of errors that users can cause or fix. Commands print one line and exit with 2."""


class ConfigError(LlamaError):
    """A config is missing, malformed or out of range, or needs an unsupported feature."""


class CheckpointError(LlamaError):
    """A weight file or index is missing, truncated, corrupt, or does not fit the config."""


class TokenizerError(LlamaError):
    """A tokenizer is missing, malformed, or disagrees with the model; or text cannot be encoded."""


class TemplateError(LlamaError):
    """A chat template is missing, refuses a conversation, or violates the sandbox's rules."""


class OptionsError(LlamaError):
    """Options are unknown or out of range; the message lists all of them."""


class BackendError(LlamaError):
    """A backend, device or dtype is not available on this machine."""


class OutOfMemoryError(BackendError):
    """The weights or the arrays of a step exceed the memory of the device."""

    @classmethod
    def of(
        cls, needed: int, free: int | None = None, device: str = "this machine"
    ) -> OutOfMemoryError:
        """The error of weights of `needed` bytes where `free` are free (None: unknown)."""
        has = "does not give that much memory" if free is None else f"has {free / 1e9:.2f} GB free"
        return cls(
            f"the weights take {needed / 1e9:.2f} GB, and {device} {has}: choose a smaller model, "
            "quantize it (python -m mlx_llama.quantize), or close other programs"
        )


class NumericalError(LlamaError):
    """The logits are not finite: a damaged weight, or activations that overflow their dtype."""


class ContextError(LlamaError):
    """A prompt does not fit the context, is empty, or contains token ids outside the vocabulary."""


class IncompleteAnswerError(LlamaError):
    """An answer was cut before it satisfied its schema."""


class SessionError(LlamaError):
    """A saved session is damaged or belongs to another model."""


class TraceError(LlamaError):
    """A golden trace is damaged, or belongs to another model."""


Report = Callable[[LlamaError], None]  # receives the errors of checks that go on after an error


def refuse(error: LlamaError) -> NoReturn:
    """Raise the error: the `Report` of checks that stop at the first error."""
    raise error


def show(value: object, limit: int = 80) -> str:
    """The repr of a value for an error, in one line of at most `limit` characters."""
    return shorten(repr(value).replace("\n", " "), limit)


def shorten(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters, with three dots at the end."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
