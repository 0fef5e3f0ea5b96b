"""Formats of thoughts, one file each. A new one is a file here and an entry in `FORMATS`."""

from __future__ import annotations

from .base import State, Thought, ThoughtFormat, ThoughtParser
from .gemma4 import Gemma4
from .harmony import HARMONY
from .marks import Marks

# The first that matches a template is its format.
FORMATS: tuple[ThoughtFormat, ...] = (
    HARMONY,
    # Granite 3.3 writes marks around its answer, too
    Marks("<think>", "</think>", tail="\n<response>", answer=("<response>", "</response>")),
    # Qwen3, SmolLM3, R1, LFM2.5
    Marks("<think>", "</think>", lead="\n", tail="\n\n"),
    Marks("[THINK]", "[/THINK]"),  # Ministral, Magistral
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Gemma4(),
)

__all__ = [
    "FORMATS", "Marks", "State", "Thought", "ThoughtFormat", "ThoughtParser", "find_thoughts",
]  # fmt: skip


def find_thoughts(source: str) -> ThoughtFormat | None:
    """The format of a chat template; None for a model without thoughts."""
    return next((form for form in FORMATS if form.matches(source)), None)
