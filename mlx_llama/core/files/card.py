"""The card of a model: README.md beside its weights, as on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlx_llama.core.system.files import read_file

MAX_BYTES = 1 << 20
MAX_EXAMPLES = 4
MAX_CHARACTERS = 200  # of an example


def read_examples(path: Path) -> list[str]:
    """Questions to try, from the card's field `widget`; [] without a card or such a field.

    path: the model's folder or file.

    An entry has `text`, or `messages` of which the last is the question.
    """
    try:
        folder = path if path.is_dir() else path.parent
        text = read_file(folder / "README.md", MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError):
        return []
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if not head or "widget:" not in head[1]:
        return []
    import yaml  # type: ignore[import-untyped]  # of huggingface_hub

    try:
        fields: Any = yaml.safe_load(head[1])
        entries = [read_entry(entry) for entry in fields["widget"]]
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    return [entry for entry in entries if entry and len(entry) <= MAX_CHARACTERS][:MAX_EXAMPLES]


def read_entry(entry: Any) -> str:
    """The question of an entry of `widget`; "" for one of another kind of model."""
    text = entry["messages"][-1]["content"] if "messages" in entry else entry.get("text")
    return text.strip() if isinstance(text, str) else ""
