"""Reads `layer_types`, the kinds of a model's layers, and their window, for the families' `types`.
The names and defaults are transformers' (configuration_NAME.py), the rules of GGUF llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .fields import Reader
from .layers import FULL, SLIDING

_FIRST = "attention"  # "full_attention" in Granite's files

Types = dict[str, Any]  # the fields `sliding_window` and `layer_types`


def all_alike(read: Reader, values: dict[str, Any]) -> Types:
    """Layers of one kind, which have a window where a GGUF file says so."""
    window = read_window(read, None) if read.is_gguf else None
    return read_types(read, window, [True] * values["num_hidden_layers"], is_fixed=True)


def windows(
    default: int | None,
    every: int = 0,
    *,
    nullable: bool = True,
    gguf_default: int | None = None,
    is_fixed: bool = False,
) -> Callable[[Reader, dict[str, Any]], Types]:
    """Make `types` of a family with a window in all layers, or in all but each `every`-th.

    default, gguf_default: of the window in both kinds of files. nullable, is_fixed: config.json may
    have null for it; may not list other layers.
    """

    def types(read: Reader, values: dict[str, Any]) -> Types:
        window = read_window(read, default, gguf_default, nullable)
        count = values["num_hidden_layers"]
        slides = read_pattern(read, count, every) if window and every else [True] * count
        return read_types(read, window, slides, is_fixed)

    return types


def read_window(
    read: Reader,
    default: int | None,
    gguf_default: int | None = None,
    nullable: bool = True,
    name: str = "sliding_window",
) -> int | None:
    """The window; None for none, for which GGUF has 0."""
    if read.is_gguf:
        return read.integer("attention.sliding_window", gguf_default, low=0) or None
    return read.integer(name, default, nullable=nullable)


def read_switched(read: Reader, values: dict[str, Any], default: int | None) -> int | None:
    """The window of a family that is off by default. llama.cpp ignores it, and files of GGUF do not
    list its layers.
    """
    if not read.is_gguf:
        is_on = read.boolean("use_sliding_window", False)
        return read_window(read, default) if is_on else None
    window, positions = read_window(read, None), values["max_position_embeddings"]
    if window and window < positions:
        expected = f"0 or at least {positions}, the context's length"
        read.fail("attention.sliding_window", window, expected)
    return None


def read_pattern(read: Reader, count: int, default: int) -> list[bool]:
    """By layer, whether it has the window: all but each n-th, or a list of GGUF."""
    if not read.is_gguf:
        return all_but_each(read.integer("sliding_window_pattern", default), count)
    name = "attention.sliding_window_pattern"
    pattern = read.get(name, default)
    if isinstance(pattern, list) and len(pattern) == count:
        return list(map(bool, pattern))
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0:
        read.fail(name, pattern, f"a whole number from 0, or a list of {count}")
    return all_but_each(pattern, count)


def all_but_each(every: int, count: int) -> list[bool]:
    """By layer, whether it is not an `every`-th one; 0 for all."""
    return [not every or (i + 1) % every > 0 for i in range(count)]


def read_types(
    read: Reader,
    window: int | None,
    slides: Sequence[bool],
    is_fixed: bool = False,
    kind: str = SLIDING,
    field: str = "sliding_window",
) -> Types:
    """The fields of LlamaConfig. slides: by layer, where the file does not list the kinds. kind,
    field: the names of layers with a window, and of the window.
    """
    types = [kind if window and slide else FULL for slide in slides]
    listed = None if read.is_gguf else read.get("layer_types", None)
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != len(types):
            expected = f"a list of {len(types)} names, one per layer"
            read.fail("layer_types", listed, expected)
        listed = [FULL if name == _FIRST else name for name in listed]
        for i, (name, usual) in enumerate(zip(listed, types)):
            allowed, reason = [FULL, kind], ""
            if is_fixed or not window:
                allowed, reason = [usual], f", since {field} is {window or 'null'}"
            if name not in allowed:
                expected = " or ".join(map(repr, allowed)) + reason
                read.fail(f"layer_types[{i}]", name, expected)
        types = listed
    return {"sliding_window": window if kind in types else None, "layer_types": tuple(types)}
