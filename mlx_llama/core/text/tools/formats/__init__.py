"""Formats of tool calls, like ones in a file. A new one is a class and an entry in `FORMATS`."""

from __future__ import annotations

from mlx_llama.core.text.tokenizer import Tokenizer

from .base import (
    JSON_OPTIONS as JSON_OPTIONS,
    UNENFORCED as UNENFORCED,
    ToolFormat as ToolFormat,
    spell_list as spell_list,
)
from .functionary import FUNCTIONARY_31, FUNCTIONARY_32
from .gemma4 import GEMMA_4
from .harmony import HARMONY
from .hermes import HERMES, SMOLLM2, SMOLLM3
from .in_system import BRIEF, IN_SYSTEM, IN_USER, UNKNOWN, UNKNOWN_IN_USER
from .lfm2 import LFM2
from .listed import APERTUS, APRIEL, FIREFUNCTION, FUNCTOOLS, GRANITE_3, NEMOTRON, PHI_4_MINI
from .llama3 import LLAMA3
from .mistral import MISTRAL, MISTRAL_HEADERS, MISTRAL_IDS
from .tagged import GLM, MINIMAX_M2, QWEN_CODER, SEED_OSS

# The first that matches a template is its format. Of the last two, one does.
FORMATS = (
    MISTRAL_IDS, MISTRAL_HEADERS, MISTRAL, SMOLLM3, SMOLLM2, QWEN_CODER, SEED_OSS, MINIMAX_M2, GLM,
    GEMMA_4, LFM2, GRANITE_3, APRIEL, APERTUS, NEMOTRON, HARMONY, FUNCTIONARY_32, FUNCTIONARY_31,
    PHI_4_MINI, FIREFUNCTION, FUNCTOOLS, HERMES, IN_SYSTEM, BRIEF, IN_USER, LLAMA3, UNKNOWN,
    UNKNOWN_IN_USER,
)  # fmt: skip


def find_format(source: str, tokenizer: Tokenizer) -> ToolFormat:
    """Recognise the format of tool calls by a template's source and by the vocabulary."""
    return next(form for form in FORMATS if form.matches(source, tokenizer))
