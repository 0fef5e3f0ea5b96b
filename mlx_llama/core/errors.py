"""Errors for users. A message states the value found, the value expected and the remedy.

Messages name options by their flags, as in "--ctx-size 0: ...". `str` replaces flags by parameters, as in "ctx_size
0: ...", except inside `spelled_as_flags`, which commands use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

# Flags that are also parameters of Python functions
PARAMETERS = ("model", "backend", "device", "dtype", "revision", "ctx_size", "template", "threads", "activation_bits",
              "compile", "draft_model", "prefill_step_size", "max_tokens", "stop", "stride", "bits", "group_size",
              "cache_bits", "cache_memory", "max_rows", "batch_invariant", "adapters")
_PLURALS = {"adapter": "adapters"}  # of flags that are repeated
_FLAG = re.compile(rf"(?<![\w-])--(no-)?({'|'.join((*PARAMETERS, *_PLURALS)).replace('_', '-')})(?![\w-])"
                   r"( (?:auto|mlx|cpu|cuda|gpu|float32|float16|bfloat16)\b)?")
_as_flags: ContextVar[bool] = ContextVar("as_flags", default=False)


@contextmanager
def spelled_as_flags() -> Iterator[None]:
    """Context in which errors name options by their flags."""
    token = _as_flags.set(True)
    try:
        yield
    finally:
        _as_flags.reset(token)


def spell_parameters(text: str) -> str:
    """Replace flags by Python's spelling: "--ctx-size" by "ctx_size", "--device cpu" by "device='cpu'"."""

    def spell(found: re.Match[str]) -> str:
        no, name, value = found.groups()
        name = _PLURALS.get(name, name.replace("-", "_"))
        return f"{name}=False" if no else f"{name}={value.strip()!r}" if value else name

    return _FLAG.sub(spell, text)


class LlamaError(Exception):
    """Base of errors that a user can cause or fix. A command prints them in one line and exits with 2."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if _as_flags.get() else spell_parameters(text)


class ConfigError(LlamaError):
    """A config is missing, malformed or out of range, or needs an unsupported feature."""


class CheckpointError(LlamaError):
    """A weight file or index is missing, truncated, corrupt, or does not fit the config."""


class TokenizerError(LlamaError):
    """A tokenizer is missing, malformed, or disagrees with the model; or text cannot be encoded."""


class TemplateError(LlamaError):
    """A chat template is missing, refuses a conversation, or violates the sandbox's rules."""


class OptionsError(LlamaError):
    """One or more options are unknown or out of range; the message lists all of them."""


class BackendError(LlamaError):
    """A backend, device or dtype is not available on this machine."""


class OutOfMemoryError(BackendError):
    """The weights, or the numbers of a step, do not fit the memory of the device."""

    @classmethod
    def of(cls, needed: int, free: int | None = None, device: str = "this machine") -> OutOfMemoryError:
        """Make the error for weights of `needed` bytes on a device with `free` bytes of memory (None: unknown)."""
        has = "does not give that much memory" if free is None else f"has {free / 1e9:.2f} GB free"
        return cls(f"the weights take {needed / 1e9:.2f} GB, and {device} {has}: choose a smaller model, quantise this one "
                   "(python -m mlx_llama.quantize), or close other programs")


class NumericalError(LlamaError):
    """The model's logits are not finite: a damaged weight, or activations that overflow their dtype."""


class ContextError(LlamaError):
    """A prompt does not fit the context, is empty, or contains token ids outside the vocabulary."""


class SessionError(LlamaError):
    """A saved session is damaged or belongs to another model."""


class TraceError(LlamaError):
    """A golden trace is damaged, or belongs to another model."""


Report = Callable[[LlamaError], None]  # called with an error by checks that can go on


def refuse(error: LlamaError) -> NoReturn:
    """Raise the error: the `Report` of checks that stop at the first."""
    raise error


def show(value: object, limit: int = 80) -> str:
    """The repr of a value for a one-line error, cut to `limit` characters."""
    text = ascii(value) if isinstance(value, (str, bytes)) else repr(value).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 3] + "..."
