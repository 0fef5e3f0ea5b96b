"""Errors that a user can cause or mend. Every message says what was found, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class LlamaError(Exception):
    """Base of every error that a user can cause or mend; a door prints it in one line and exits with 2."""


class ConfigError(LlamaError):
    """config.json is missing, malformed, absurd, or names something that is not supported."""


class CheckpointError(LlamaError):
    """A weight file or index is missing, truncated, corrupt, or does not fit the config."""


class TokenizerError(LlamaError):
    """A tokenizer is missing, malformed, or disagrees with the model; or text cannot be encoded."""


class TemplateError(LlamaError):
    """A chat template is missing, refused a conversation, or tried what the sandbox forbids."""


class OptionsError(LlamaError):
    """One or more options are unknown or out of range; the message lists all of them."""


class BackendError(LlamaError):
    """A backend, device or dtype is not available on this machine."""


class OutOfMemoryError(BackendError):
    """The weights do not fit the memory of the device."""

    @classmethod
    def of(cls, needed: int, free: int | None = None, device: str = "this machine") -> OutOfMemoryError:
        """The error for weights of `needed` bytes on a device with `free` bytes left (None: unknown)."""
        has = "does not give that much memory" if free is None else f"has {free / 1e9:.2f} GB free"
        return cls(f"the weights take {needed / 1e9:.2f} GB, and {device} {has}: choose a smaller model, quantise this one "
                   "(python -m mlx_llama.quantize), or close other programs")


class ContextError(LlamaError):
    """A prompt does not fit the context, is empty, or holds token ids outside the vocabulary."""


class SessionError(LlamaError):
    """A saved session is damaged or belongs to another model."""


class TraceError(LlamaError):
    """A golden trace is damaged, or belongs to another model."""


Report = Callable[[LlamaError], None]  # takes an error where a check can go on without what is wrong


def refuse(error: LlamaError) -> NoReturn:
    """The `Report` that stops at the first error: it raises it."""
    raise error
