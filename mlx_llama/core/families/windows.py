"""Layers with a sliding window, in config.json and in GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.errors import show
from mlx_llama.core.models.reader import Reader

Layers = tuple[int, ...]
WindowLayers = tuple[int | None, Layers | None]  # a window, and layers with it, None for all
Rule = Callable[[Reader, dict[str, Any]], Layers]  # (file, LlamaConfig's fields) -> layers
_FULL = "full_attention"  # in config.json's `layer_types`
_FIRST = "attention"  # "full_attention" in Granite's files


@dataclass(frozen=True)
class Windows:
    """The rule of a family for its layers with a window."""

    default: int | None = None  # of `field`
    # those of config.json; None for all but each `pattern`-th
    layers: Rule | None = None
    is_absent: bool = False  # no layer has a window
    is_switched: bool = False  # config.json's `use_sliding_window`, false by default, turns them on
    is_free: bool = False  # `layer_types` may name other layers
    is_required: bool = False  # `sliding_window` may not be null
    # default in files, and llama.cpp's rule; 0: all have windows, and llama.cpp ignores them
    pattern: int = 0
    gguf_default: int | None = None  # llama.cpp's window where a file names none
    is_chunk: bool = False  # chunked attention, of `default` tokens in llama.cpp

    @property
    def field(self) -> str:
        """The window's field in config.json."""
        return "attention_chunk_size" if self.is_chunk else "sliding_window"

    @property
    def kind(self) -> str:
        """The name of layers with the window in config.json's `layer_types`."""
        return "chunked_attention" if self.is_chunk else "sliding_attention"

    def read(self, read: Reader, values: dict[str, Any]) -> WindowLayers:
        """Read (window, layers with it, None for all)."""
        count = values["num_hidden_layers"]
        if read.is_gguf:
            return self._read_gguf(read, count, values["max_position_embeddings"])
        window, sliding = None, None
        is_on = not self.is_switched or read.boolean("use_sliding_window", False)
        if is_on and not self.is_absent:
            window = read.integer(self.field, self.default, nullable=not self.is_required)
        if window and self.layers:
            sliding = self.layers(read, values)
        elif window and self.pattern:
            sliding = choose_layers(count, read.integer("sliding_window_pattern", self.pattern))
        kinds = read.get("layer_types", None)
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != count:
                read.fail("layer_types", kinds, f"a list of {count} names, one per layer")
            slides = range(count) if window and sliding is None else sliding or ()
            where = f" in layers {show(list(sliding))} alone" if sliding else ""
            reason = f", since {self.field} is {window or 'null'}{where}"
            kinds = [_FULL if kind == _FIRST else kind for kind in kinds]
            for i, kind in enumerate(kinds):
                wanted: tuple[str, ...] = (self.kind,) if i in slides else (_FULL,)
                if window and self.is_free:
                    wanted, reason = (_FULL, self.kind), ""
                if kind not in wanted:
                    read.fail(f"layer_types[{i}]", kind, " or ".join(map(repr, wanted)) + reason)
            if window and self.is_free:
                sliding = tuple(i for i, kind in enumerate(kinds) if kind == self.kind)
                if len(sliding) == count and not (self.layers or self.pattern):
                    sliding = None
        return (None, None) if sliding == () else (window, sliding)

    def _read_gguf(self, read: Reader, count: int, positions: int) -> WindowLayers:
        name = "attention.sliding_window"
        default = self.default if self.is_chunk else self.gguf_default
        window = read.integer(name, default, low=0) or None  # 0 means none
        if self.is_chunk and window not in (None, default):
            read.fail(name, window, f"0 or {default}, llama.cpp's chunk")
        if window and self.pattern:
            return window, _gguf_pattern(read, count, self.pattern)
        if window and self.is_switched:
            # llama.cpp ignores the window here, and the file does not list its layers
            if window < positions:
                read.fail(name, window, f"0 or at least {positions}, the context's length")
            return None, None
        return window, None

    def can_express(self, window: int | None, layers: Layers | None) -> bool:
        """Config.json has such windows."""
        if self.is_absent:
            return window is None
        in_all = layers is None and (window is not None or self.default is None)
        return self.is_free or self.is_switched or in_all

    def write(self, window: int | None, slides: list[bool]) -> dict[str, Any]:
        """Config.json's fields. slides: by layer."""
        fields: dict[str, Any] = {}
        if window is not None or not (self.is_switched or self.is_absent):
            fields[self.field] = window
        if self.is_switched:
            fields["use_sliding_window"] = window is not None
        if self.is_free:
            fields["layer_types"] = [self.kind if slide else _FULL for slide in slides]
        elif self.layers:
            fields["max_window_layers"] = slides.index(True) if True in slides else 0
        return fields


def choose_layers(count: int, every: int) -> Layers:
    """All layers but each `every`-th; all of them for 0."""
    return tuple(i for i in range(count) if not every or (i + 1) % every)


def _gguf_pattern(read: Reader, count: int, default: int) -> Layers:
    name = "attention.sliding_window_pattern"
    pattern = read.get(name, default)
    if isinstance(pattern, list) and len(pattern) == count:
        return tuple(i for i in range(count) if pattern[i])
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0:
        read.fail(name, pattern, f"a whole number from 0, or a list of {count}")
    return choose_layers(count, pattern)
