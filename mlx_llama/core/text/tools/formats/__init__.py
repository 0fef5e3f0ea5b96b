"""Formats of tool calls, one file each. A new one is a file here and an entry in `FORMATS`."""

from __future__ import annotations

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.text.tokenizer import Tokenizer

from .base import JSON_OPTIONS, ToolFormat
from .hermes import HERMES
from .in_system import BRIEF, IN_SYSTEM
from .llama3 import LLAMA3
from .mistral import MISTRAL, MISTRAL_HEADERS
from .smollm import SMOLLM2, SMOLLM3

# The first that matches a template is its format.
FORMATS = (MISTRAL_HEADERS, MISTRAL, SMOLLM3, SMOLLM2, HERMES, IN_SYSTEM, BRIEF, LLAMA3)

__all__ = [
    "BRIEF",
    "FORMATS",
    "HERMES",
    "IN_SYSTEM",
    "JSON_OPTIONS",
    "LLAMA3",
    "MISTRAL",
    "MISTRAL_HEADERS",
    "SMOLLM2",
    "SMOLLM3",
    "ToolFormat",
    "find_format",
]


def find_format(source: str, tokenizer: Tokenizer) -> ToolFormat:
    """Recognise the format of tool calls by a template's source and by the vocabulary.

    Raises OptionsError for a template whose format is not supported.
    """
    for form in FORMATS:
        if form.matches(source, tokenizer):
            return form
    raise OptionsError(
        "tools: this model's template writes calls in a format that is not supported; supported "
        "are those of Llama 3, Mistral, Hermes, Qwen 2.5 and 3, and SmolLM: take another model, "
        "or ask without tools"
    )
