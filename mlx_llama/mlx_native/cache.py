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

    def reset(self, row: int | None = None) -> None:
        """Drop a row's positions, None for all rows', and free their storage."""
        if row is not None:
            self.check_row(row)
        for one in range(self.rows) if row is None else [row]:
            self.lengths[one] = self.allocated[one] = 0
            room = self._vacate(one)
            if room and row is not None:
                self._empty_if_wide(room)
        self._drop_tables()

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes of free memory on the device; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[mx.array]:
        """Arrays that the next call depends on, to launch after a chunk of the prompt."""
        rooms = {id(place[0]): place[0] for place in self._places if place}
        return [array for room in rooms.values() for array in room.arrays()]

    def view(self, tokens: mx.array, index_pos: int | Sequence[int], rows: Sequence[int] | None = None) -> View:
        """The view of one call over `tokens` int32 [B, T] from `index_pos` on, stored at once. Raises ContextError."""
        return View(self, tokens, index_pos, rows)

    def recent(self, window: int, rows: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> mx.array:
        """The last `window` of the first `lengths` tokens of each row (None: of all), int32 [B, window], -1 in front where
        there are fewer."""
        rows = range(self.rows) if rows is None else rows
        lengths = [self.lengths[row] for row in rows] if lengths is None else lengths
        found = []
        for row, length in zip(rows, lengths):
            count = min(window, length)
            if count == 0:
                found.append(mx.full((1, window), -1, mx.int32))
                continue
            room, slot = self._places[row]
            tokens = room.tokens[slot:slot + 1, length - count:length]
            found.append(mx.pad(tokens, ((0, 0), (window - count, 0)), constant_values=-1))
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def trim(self, length: int, row: int = 0) -> None:
        """Keep the first `length` positions of a row. Raises ContextError if there are fewer."""
        self.check_trim(length, row)
        self.lengths[row] = length

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to the empty row `target`. Raises ContextError."""
        self.check_copy(source, target, length)
        if length == 0:
            return
        with mx.stream(self.device):
            self.reset(target)
            self.reserve({target: length})
            room, own = self._places[source]
            self._places[target][0].copy(0, room, own, length)
            # A pending slice would hold the source's arrays, and its next step would copy them.
            mx.eval(self._places[target][0].arrays())
        self.lengths[target] = length

    def state(self, row: int = 0) -> dict[str, np.ndarray]:
        """All positions of a row as NumPy arrays: tokens int32 [n]; keys, values float32 [layers, G, n, D]. {}: none."""
        self.check_row(row)
        length = self.lengths[row]
        if length == 0:
            return {}
        room, slot = self._places[row]

        def numbers(parts: Parts) -> np.ndarray:
            return runtime.to_numpy(self.packing.unpack(tuple(part[slot, :, :length] for part in parts)))

        with mx.stream(self.device):
            return {"tokens": runtime.to_numpy(room.tokens[slot, :length]), "keys": np.stack([*map(numbers, room.keys)]),
                    "values": np.stack([*map(numbers, room.values)])}

    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None:
        """Load a row's `state` of any backend's cache. Raises ContextError when it does not fit this model."""
        self.check_state(state, row)
        self.reset(row)
        if not state:
            return
        length = len(state["tokens"])
        with mx.stream(self.device):
            self.reserve({row: length})
            room, _ = self._places[row]
            room.tokens[:, :length] = mx.array(state["tokens"])
            for stored, layers in ((room.keys, state["keys"]), (room.values, state["values"])):
                for parts, numbers in zip(stored, layers):
                    for part, new in zip(parts, self.packing.pack(mx.array(numbers).astype(self.dtype))):
                        part[:, :, :length] = new
            mx.eval(room.arrays())
        self.lengths[row] = length

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
        self._masks: dict[tuple[int, int], mx.array] = {}  # by start and window

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

    def mask(self, window: int | None = None) -> list[mx.array | str | None]:
        """Of each sequence, the `stored` positions that each query sees: bool [T, end - first_visible], "causal", or None
        for all."""
        return [self._mask(span, window) for span in self.spans]

    def _mask(self, span: Span, window: int | None) -> mx.array | str | None:
        if span.count == 1:
            return None
        if not window or window >= span.end:
            return "causal"
        if (span.start, window) not in self._masks:
            self._masks[span.start, window] = mx.array(span.visible(window))
        return self._masks[span.start, window]

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
