"""Cache: the one owner of sequence state. View: the part of it that one forward sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import CallView, Span
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime
from .kernels.buffers import Buffer, Buffers, make_angles, make_periods
from .kernels.pace import Pace
from .kernels.packing import Parts


class Cache(Buffers):
    """Keys and values of all layers and the tokens, by row; kernels/buffers.py decides where a row lies."""

    def __init__(self, config: LlamaConfig, capacity: int, dtype: mx.Dtype = mx.float32,
                 device: mx.Device = mx.Device(mx.cpu), rows: int = 1, bits: int | None = None):
        """bits: 8 to store keys and values as codes of a byte, 16 in two bytes, None for `dtype`."""
        super().__init__(config, capacity, dtype, device, rows, bits)
        self.pace: Pace | None = None  # of long prompts

    def reset(self, row: int | None = None) -> None:
        """Empty a row and free its storage; None: all rows."""
        if row is None:
            for number in range(self.rows):
                self.lengths[number] = self.allocated[number] = 0
                self.release(number)
        else:
            self.check_row(row)
            self.lengths[row] = self.allocated[row] = 0
            if buffer := self.release(row):
                self.isolate_last(buffer)
        self.drop_tables()

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes of free memory on the device; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[mx.array]:
        """Arrays that the next call depends on, to launch after a chunk of the prompt."""
        return [array for buffer in self.buffers() for array in buffer.arrays()]

    def view(self, tokens: mx.array, index_pos: int | Sequence[int], rows: Sequence[int] | None = None) -> View:
        """The view of one call over `tokens` int32 [B, T] from `index_pos` on, stored at once. Raises ContextError."""
        return View(self, tokens, index_pos, rows)

    def recent(self, window: int, rows: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> mx.array:
        """The last `window` tokens of `rows` (None: all), int32 [B, window], padded with -1 in front.

        lengths: count the first tokens alone, by row; None: the rows' lengths.
        """
        rows = range(self.rows) if rows is None else rows
        lengths = [self.lengths[row] for row in rows] if lengths is None else lengths
        parts = []
        for row, length in zip(rows, lengths):
            count = min(window, length)
            if count == 0:
                parts.append(mx.full((1, window), -1, mx.int32))
                continue
            buffer, number = self.slots[row]
            tokens = buffer.tokens[number:number + 1, length - count:length]
            parts.append(mx.pad(tokens, ((0, 0), (window - count, 0)), constant_values=-1))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def trim(self, length: int, row: int = 0) -> None:
        """Keep the first `length` positions of a row. Raises ContextError if there are fewer."""
        self.check_trim(length, row)
        self.lengths[row] = length

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to the empty row `target`.

        Raises ContextError if the source is shorter or the target not empty.
        """
        self.check_copy(source, target, length)
        if length == 0:
            return
        with mx.stream(self.device):
            self.reset(target)
            self.reserve({target: length})
            buffer = self.slots[target].buffer
            buffer.copy(0, self.slots[source], length)
            # A pending slice would hold the source's arrays, and its next step would copy them.
            mx.eval(buffer.arrays())
        self.lengths[target] = length

    def state(self, row: int = 0) -> dict[str, np.ndarray]:
        """Copy a row to NumPy: tokens int32 [length]; keys, values float32 [layers, G, length, D]; {} if empty."""
        self.check_row(row)
        length = self.lengths[row]
        if length == 0:
            return {}
        buffer, number = self.slots[row]

        def unpack(parts: Parts) -> np.ndarray:
            return runtime.to_numpy(self.packing.unpack(tuple(part[number, :, :length] for part in parts)))

        with mx.stream(self.device):
            return {"tokens": runtime.to_numpy(buffer.tokens[number, :length]),
                    "keys": np.stack([*map(unpack, buffer.keys)]), "values": np.stack([*map(unpack, buffer.values)])}

    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None:
        """Load the `state` of a row of any backend's cache. Raises ContextError if it does not fit this model."""
        self.check_state(state, row)
        self.reset(row)
        if not state:
            return
        length = len(state["tokens"])
        with mx.stream(self.device):
            self.reserve({row: length})
            buffer = self.slots[row].buffer
            buffer.tokens[:, :length] = mx.array(state["tokens"])
            for stored, layers in ((buffer.keys, state["keys"]), (buffer.values, state["values"])):
                for parts, numbers in zip(stored, layers):
                    for part, new in zip(parts, self.packing.pack(mx.array(numbers).astype(self.dtype))):
                        part[:, :, :length] = new
            mx.eval(buffer.arrays())
        self.lengths[row] = length


class View(CallView):
    """Access to a cache by one forward: slices at positions that the host knows."""

    flat = False  # x is [B, T, E], with an axis of positions

    def __init__(self, cache: Cache, tokens: mx.array, index_pos: int | Sequence[int], rows: Sequence[int] | None = None):
        super().__init__(cache, *tokens.shape, index_pos, rows)
        self.adapters = mx.array(self.adapters, mx.int32) if any(self.adapters) else None  # [B]; None: no row has one
        self.buffers = [cache.buffer_of(span.row, span.end) for span in self.spans]
        tables = [self._find_tables(span.start, span.end, buffer) for span, buffer in zip(self.spans, self.buffers)]
        self.tables = tables[0] if len(tables) == 1 else _stack_tables(tables)  # of the new positions, for ops.rope
        for i, (span, buffer) in enumerate(zip(self.spans, self.buffers)):
            buffer.tokens[:, span.start:span.end] = tokens[i:i + 1]
        self._masks: dict[tuple[int, int], mx.array] = {}  # by start and window

    def append(self, layer: int, key: mx.array, value: mx.array) -> None:
        """Store new rows [B, G, T, D] of a layer."""
        if self.count > 1 and self.cache.pace:
            self.cache.pace(key, self.batch * self.count)
        for name, new in (("keys", key), ("values", value)):
            for part, packed in enumerate(self.cache.packing.pack(new)):
                for i, (span, buffer) in enumerate(zip(self.spans, self.buffers)):
                    stored = getattr(buffer, name)[layer][part]
                    stored[:, :, span.start:span.end] = packed if self.batch == 1 else packed[i:i + 1]

    def stored(self, layer: int, window: int | None = None) -> list[tuple[Parts, Parts]]:
        """By sequence, the keys and values that new queries of a layer see, [1, G, end - first_visible, *]; new rows last."""
        visible = [slice(span.first_visible(window), span.end) for span in self.spans]
        return [tuple(tuple(part[:, :, seen] for part in parts[layer]) for parts in (buffer.keys, buffer.values))
                for seen, buffer in zip(visible, self.buffers)]

    def new_keys(self, layer: int) -> mx.array:
        """A layer's keys stored by this call, [B, G, T, D]."""
        keys = [self.cache.packing.unpack(tuple(part[:, :, span.start:span.end] for part in buffer.keys[layer]))
                for span, buffer in zip(self.spans, self.buffers)]
        return mx.concatenate(keys)

    def mask(self, window: int | None = None) -> list[mx.array | str | None]:
        """By sequence, the mask over `stored` rows: bool [T, end - first_visible], "causal", or None: all are visible."""
        return [self._mask(span, window) for span in self.spans]

    def _mask(self, span: Span, window: int | None) -> mx.array | str | None:
        if span.count == 1:
            return None
        if not window or window >= span.end:
            return "causal"
        if (span.start, window) not in self._masks:
            self._masks[span.start, window] = mx.array(span.visible(window))
        return self._masks[span.start, window]

    def _find_tables(self, start: int, end: int, buffer: Buffer) -> tuple:
        dynamic = rope.length_dependent(self.config)
        if self.cache.tabulated:
            return (make_angles(self.config, start, self.count, end) if dynamic
                    else tuple(part[start:end] for part in self.cache.tables(buffer.length)))
        return (*(make_periods(self.config, end) if dynamic else self.cache.tables(buffer.length)), start)


def _stack_tables(tables: list[tuple]) -> tuple:
    """Stack the tables of several sequences: cosines and sines [B, 1, T, 1 or 2, D/2]; periods stay separate."""
    if len(tables[0]) == 2:
        return tuple(mx.stack(parts)[:, None] for parts in zip(*tables))
    return tuple(tables)
