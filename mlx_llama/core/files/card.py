"""Model cards: README.md beside the weights, as on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlx_llama.core.system.files import read_text

MAX_BYTES = 1 << 20
MAX_EXAMPLES = 4
MAX_CHARACTERS = 200  # of an example


def read_examples(path: Path) -> list[str]:
    """Read the questions to try from the card's field `widget`; [] without a card or that field.
    path: the model's folder or file. An entry has `text`, or `messages` that end with the question.
    """
    try:
        folder = path if path.is_dir() else path.parent
        text = read_text(folder / "README.md", MAX_BYTES)
    except (OSError, ValueError):
        return []
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if not head or "widget:" not in head[1]:
        return []
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface_hub

    try:
        fields: Any = yaml.safe_load(head[1])
        entries = [read_entry(entry) for entry in fields["widget"]]
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    return [entry for entry in entries if entry and len(entry) <= MAX_CHARACTERS][:MAX_EXAMPLES]


def read_entry(entry: Any) -> str:
    """Read the question of an entry of `widget`; "" for an entry of another kind of model."""
    text = entry["messages"][-1]["content"] if "messages" in entry else entry.get("text")
    return text.strip() if isinstance(text, str) else ""
