"""A model that thinks before it answers."""

from __future__ import annotations

from pathlib import Path

from server.conftest import Scripted

from cases.texts import THOUGHT_TEMPLATES

THOUGHT, TEXT = "They greet me.\nI greet them.", "Hello, and <think> well.</think>"


ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}"


def make_thinker(template: str, folder: Path, **settings) -> Scripted:
    """A server of a scripted model whose template thinks."""
    return Scripted(THOUGHT_TEMPLATES[template], folder, **settings)
