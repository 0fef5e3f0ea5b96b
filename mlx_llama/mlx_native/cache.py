"""Cache: the one owner of sequence state. View: the part of it that one forward sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import CallView, Span
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime
from .kernels.pace import Pace
from .kernels.rooms import Parts, Room, Rooms, make_angles, make_periods


class Cache(Rooms):
    """Keys and values of all layers and the tokens, by row; kernels/rooms.py stores them."""

    def __init__(self, config: LlamaConfig, capacity: int, dtype: mx.Dtype = mx.float32,
                 device: mx.Device = mx.Device(mx.cpu), rows: int = 1, bits: int | None = None):
        """bits: 8 to store keys and values as codes of a byte, 16 in two bytes, None for `dtype`."""
        super().__init__(config, capacity, dtype, device, rows, bits)
        self.pace: Pace | None = None  # of the model's long prompts

    def _free(self, rows: Sequence[int], is_all: bool) -> None:
        for row in rows:
            room = self._vacate(row)
            if room and not is_all:
                self._empty_if_wide(room)
        self._drop_tables()

    def free_memory(self) -> int | None:
        """Bytes of free memory on the device; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[mx.array]:
        """Arrays that the next call depends on, to launch after a chunk of the prompt."""
        rooms = {id(place[0]): place[0] for place in self._places if place}
        return [array for room in rooms.values() for array in room.arrays()]

    def view(self, tokens: mx.array, index_pos: int | Sequence[int], rows: Sequence[int] | None = None) -> View:
        return View(self, tokens, index_pos, rows)

    def _recent(self, window: int, parts: Sequence[tuple[int, int, int]]) -> mx.array:
        recent = []
        for row, start, end in parts:
            if start == end:
                recent.append(mx.full((1, window), -1, mx.int32))
                continue
            room, slot = self._places[row]
            recent.append(mx.pad(room.tokens[slot:slot + 1, start:end], ((0, 0), (window - end + start, 0)), constant_values=-1))
        return recent[0] if len(recent) == 1 else mx.concatenate(recent)

    def _copy(self, source: int, target: int, length: int) -> None:
        with mx.stream(self.device):
            self.reset(target)
            self.reserve({target: length})
            room, slot = self._places[source]
            self._places[target][0].copy(0, room, slot, length)
            # A pending slice would hold the source's arrays, and its next step would copy them.
            mx.eval(self._places[target][0].arrays())

    def _export(self, row: int, length: int) -> dict[str, np.ndarray]:
        room, slot = self._places[row]

        def numbers(parts: Parts) -> np.ndarray:
            return runtime.to_numpy(self.packing.unpack(tuple(part[slot, :, :length] for part in parts)))

        with mx.stream(self.device):
            return {"tokens": runtime.to_numpy(room.tokens[slot, :length]), "keys": np.stack([*map(numbers, room.keys)]),
                    "values": np.stack([*map(numbers, room.values)])}

    def _load(self, state: Mapping[str, np.ndarray], row: int, length: int) -> None:
        with mx.stream(self.device):
            room, _ = self._places[row]
            room.tokens[:, :length] = mx.array(state["tokens"])
            for stored, layers in ((room.keys, state["keys"]), (room.values, state["values"])):
                for parts, numbers in zip(stored, layers):
                    for part, new in zip(parts, self.packing.pack(mx.array(numbers).astype(self.dtype))):
                        part[:, :, :length] = new
            mx.eval(room.arrays())


class View(CallView):
    """One call on a cache: slices at positions that the host knows.

    tables: of the new positions, as ops.rope takes them. adapters: int32 [B], None where no row has one. flat: the stream x is [B, E], without an axis of positions.
    """

    flat = False

    def __init__(self, cache: Cache, tokens: mx.array, index_pos: int | Sequence[int], rows: Sequence[int] | None = None):
        super().__init__(cache, *tokens.shape, index_pos, rows)
        self.adapters = mx.array(self.adapters, mx.int32) if any(self.adapters) else None
        self.rooms = [cache.room_of(span.row, span.end) for span in self.spans]
        tables = [self._find_tables(span.start, span.end, room) for span, room in zip(self.spans, self.rooms)]
        self.tables = tables[0] if len(tables) == 1 else _stack_tables(tables)
        for i, (span, room) in enumerate(zip(self.spans, self.rooms)):
            room.tokens[:, span.start:span.end] = tokens[i:i + 1]

    def append(self, layer: int, key: mx.array, value: mx.array) -> None:
        """Store new rows [B, G, T, D] of a layer."""
        if self.count > 1 and self.cache.pace:
            self.cache.pace(key, self.batch * self.count)
        for name, new in (("keys", key), ("values", value)):
            for part, packed in enumerate(self.cache.packing.pack(new)):
                for i, (span, room) in enumerate(zip(self.spans, self.rooms)):
                    stored = getattr(room, name)[layer][part]
                    stored[:, :, span.start:span.end] = packed if self.batch == 1 else packed[i:i + 1]

    def stored(self, layer: int, window: int | None = None) -> list[tuple[Parts, Parts]]:
        """Of each sequence, a layer's keys and values that its new queries see: [1, G, end - first_visible, *] each, the
        new ones last."""
        found = []
        for span, room in zip(self.spans, self.rooms):
            seen = slice(span.first_visible(window), span.end)
            found.append(tuple(tuple(part[:, :, seen] for part in parts[layer]) for parts in (room.keys, room.values)))
        return found

    def new_keys(self, layer: int) -> mx.array:
        """Keys that this call stored in a layer, [B, G, T, D]."""
        keys = [self.cache.packing.unpack(tuple(part[:, :, span.start:span.end] for part in room.keys[layer]))
                for span, room in zip(self.spans, self.rooms)]
        return mx.concatenate(keys)

    def _make_mask(self, span: Span, window: int) -> mx.array:
        return mx.array(span.visible(window))

    def _find_tables(self, start: int, end: int, room: Room) -> tuple:
        dynamic = rope.length_dependent(self.config)
        if self.cache.tabulated:
            return (make_angles(self.config, start, self.count, end) if dynamic
                    else tuple(part[start:end] for part in self.cache.tables(room.length)))
        return (*(make_periods(self.config, end) if dynamic else self.cache.tables(room.length)), start)


def _stack_tables(tables: list[tuple]) -> tuple:
    """Tables of several sequences as one: cosines and sines [B, 1, T, 1 or 2, D/2]; or tables one by one for the kernel."""
    if len(tables[0]) == 2:
        return tuple(mx.stack(parts)[:, None] for parts in zip(*tables))
    return tuple(tables)
