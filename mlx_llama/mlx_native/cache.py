"""Cache: the one owner of sequence state. View: the part of it that one forward sees."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import CallView, Layers, Span, States
from mlx_llama.core.models import rope
from mlx_llama.core.models.parts import Attention, Window

from . import runtime
from .kernels.buffers import Buffer, Buffers, Parts, RowStates, make_angles, make_periods
from .kernels.pace import Pace


class View(CallView):
    """Access to a cache by one forward: slices at positions that the host knows."""

    flat = False  # x is [B, T, E], with an axis of positions

    def __init__(
        self,
        cache: Cache,
        tokens: mx.array,
        index_pos: int | Sequence[int],
        rows: Sequence[int] | None = None,
    ):
        batch, count = tokens.shape
        super().__init__(cache, batch, count, index_pos, rows)
        self._states = cache.gather_states([span.row for span in self.spans])
        self.states: list[tuple[mx.array, ...]] = []  # recurrent ones after this call, by slot
        # [B]; None: no row has one
        self.adapters = mx.array(self.adapters, mx.int32) if any(self.adapters) else None
        self.buffers = [cache.buffer_of(span.row, span.end) for span in self.spans]
        tables = [
            self._find_tables(span.start, span.end, buffer)
            for span, buffer in zip(self.spans, self.buffers)
        ]
        # cosines and sines of the new positions, for ops.rope
        self.tables = tables[0] if len(tables) == 1 else tuple(tables)
        if len(tables) > 1 and len(tables[0]) == 2:  # no periods: [B, 1, T, 1 or 2, D/2]
            self.tables = tuple(mx.stack(parts)[:, None] for parts in zip(*tables))
        for i, (span, buffer) in enumerate(zip(self.spans, self.buffers)):
            buffer.tokens[:, span.start : span.end] = tokens[i : i + 1]

    def append(self, layer: int, key: mx.array, value: mx.array) -> None:
        """Store new rows [B, G, T, D] of a layer."""
        if self.count > 1 and self.cache.pace:
            self.cache.pace(key, self.batch * self.count)
        for name, new in (("keys", key), ("values", value)):
            for part, packed in enumerate(self.cache.packing.pack(new)):
                for i, (span, buffer) in enumerate(zip(self.spans, self.buffers)):
                    stored = getattr(buffer, name)[layer][part]
                    stored[:, :, span.start : span.end] = (
                        packed if self.batch == 1 else packed[i : i + 1]
                    )

    def stored(self, layer: int, window: Window | None = None) -> list[tuple[Parts, Parts]]:
        """By sequence, a layer's visible keys and values: Parts of [1, G, visible, *]."""
        stored = []
        for span, buffer in zip(self.spans, self.buffers):
            seen, both = slice(span.first_visible(window), span.end), (buffer.keys, buffer.values)
            stored.append(tuple(tuple(part[:, :, seen] for part in parts[layer]) for parts in both))
        return stored

    def recurrent(self, slot: int) -> tuple[mx.array, ...]:
        return self._states[slot]

    def keep(self, slot: int, states: tuple[mx.array, ...]) -> None:
        if self.count > 1 and self.cache.pace:
            self.cache.pace(states[-1], self.batch * self.count)
        self.states.append(states)

    def states_after(self, i: int) -> States:
        return RowStates(self.states, i)

    def new_keys(self, spec: Attention) -> mx.array:
        keys = []
        for span, buffer in zip(self.spans, self.buffers):
            parts = tuple(part[:, :, span.start : span.end] for part in buffer.keys[spec.slot])
            keys.append(self.cache.packing.unpack(parts, spec.head_dim))
        return mx.concatenate(keys)

    def _make_mask(self, span: Span, window: Window) -> mx.array:
        return mx.array(span.visible(window))

    def _find_tables(self, start: int, end: int, buffer: Buffer) -> tuple:
        dynamic = rope.length_dependent(self.config)
        if dynamic and self.cache.tabulated:
            return make_angles(self.config, start, self.count, end)
        tables = make_periods(self.config, end) if dynamic else self.cache.tables(buffer.length)
        if self.cache.tabulated:
            return tuple(part[start:end] for part in tables)
        return *tables, start


class Cache(Buffers):
    """Keys, values and tokens by row, which lie in buffers (kernels/buffers.py)."""

    runtime, view_type = runtime, View
    pace: Pace | None = None  # measures long prompts
    _stack = staticmethod(mx.stack)

    def _free(self, rows: Sequence[int], is_all: bool) -> None:
        for row in rows:
            buffer = self.release(row)
            if buffer and not is_all:
                self.isolate_last(buffer)
        self.drop_tables()

    def arrays(self) -> list[mx.array]:
        stored = [array for buffer in self.buffers() for array in buffer.arrays()]
        return stored + self.state_arrays()

    _send = staticmethod(mx.array)

    def state(self, row: int = 0, length: int | None = None) -> dict[str, np.ndarray]:
        with mx.stream(self.device):
            return super().state(row, length)

    def _recent(self, window: int, parts: Sequence[tuple[int, int, int]]) -> mx.array:
        recent = []
        for row, start, end in parts:
            if start == end:
                recent.append(mx.full((1, window), -1, mx.int32))
                continue
            buffer, number = self.slots[row]
            tokens = buffer.tokens[number : number + 1, start:end]
            recent.append(mx.pad(tokens, ((0, 0), (window - end + start, 0)), constant_values=-1))
        return recent[0] if len(recent) == 1 else mx.concatenate(recent)

    def _copy(self, source: int, target: int, length: int) -> None:
        with mx.stream(self.device):
            self.reset(target)
            self.reserve({target: length})
            buffer = self.slots[target].buffer
            buffer.copy(0, self.slots[source], length)
            # A pending slice would hold the source's arrays, and its next step would copy them.
            mx.eval(buffer.arrays())

    def _export(self, row: int, length: int) -> tuple[np.ndarray, Layers, Layers]:
        buffer, number = self.slots[row]

        def unpack(parts: Parts, mixer: Attention) -> np.ndarray:
            visible = tuple(part[number, :, :length] for part in parts)
            return runtime.to_numpy(self.packing.unpack(visible, mixer.head_dim))

        with mx.stream(self.device):
            keys, values = (
                [*map(unpack, stored, self.config.attentions)]
                for stored in (buffer.keys, buffer.values)
            )
            return runtime.to_numpy(buffer.tokens[number, :length]), keys, values

    def _load(self, row: int, tokens: np.ndarray, keys: Layers, values: Layers) -> None:
        with mx.stream(self.device):
            buffer, length = self.slots[row].buffer, len(tokens)
            buffer.tokens[:, :length] = mx.array(tokens)
            for stored, layers in ((buffer.keys, keys), (buffer.values, values)):
                for parts, numbers in zip(stored, layers):
                    packed = self.packing.pack(mx.array(numbers).astype(self.dtype))
                    for part, new in zip(parts, packed):
                        part[:, :, :length] = new
            mx.eval(buffer.arrays())
