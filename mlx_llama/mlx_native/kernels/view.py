"""StepView: a decode step's view, whose positions are arrays: one trace serves all."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_llama.core.models.parts import Attention, Window
from mlx_llama.core.ops import View

from .buffers import Packing, Parts, SharedStates


class StepView(View):
    """The words of cache.View over a buffer's arrays, for a token in each slot.

    mx.compile would trace every token again if positions were Python numbers, which are keys of a
    trace. So they are int32 [S], [] for one slot, and attention reads the whole buffer behind a
    mask. A larger buffer is another trace.
    """

    flat = True  # x is [S, E], without an axis of positions
    count = 1

    def __init__(
        self,
        packing: Packing,
        token: mx.array,
        position: mx.array,
        tokens: mx.array,
        keys: Sequence[Parts],
        values: Sequence[Parts],
        states: SharedStates,
        tables: tuple,
        adapters: mx.array | None = None,
    ):
        """Store `token`, int32 [S, 1], at `position`. tokens, keys, values: of the buffer.
        states: recurrent ones [S, *shape], by slot of the mixer."""
        self.position, self.packing, self.adapters = position, packing, adapters
        self.keys, self.values, self.states = list(keys), list(values), list(states)
        # each slot's position, by heads and last axis
        self._indices: dict[tuple[int, int], mx.array] = {}
        self._masks: dict[Window | None, mx.array] = {}
        self.slots, self.length = tokens.shape
        self.is_single = position.ndim == 0
        if self.is_single:
            self.tokens = mx.slice_update(tokens, token, position, (1,))
        else:
            self.tokens = mx.put_along_axis(tokens, position[:, None], token, axis=1)
        if tables[0].ndim == 1:  # periods, not cosines and sines
            self.tables = (*tables, position)
        elif self.is_single:
            parts = (mx.slice(table, position, (0,), (1, *table.shape[1:])) for table in tables)
            self.tables = tuple(parts)
        else:
            # [S, 1, 1, *]
            self.tables = tuple(mx.take(table, position[:, None, None], axis=0) for table in tables)

    def append(self, layer: int, key: mx.array, value: mx.array) -> None:
        """Store new rows [S, G, 1, D] of a layer."""
        self.keys[layer] = self._put(self.keys[layer], key)
        self.values[layer] = self._put(self.values[layer], value)

    def stored(self, layer: int, window: Window | None = None) -> list[tuple[Parts, Parts]]:
        """A layer's keys and values of all slots, visible or not: [S, G, L, *] each; see `mask`."""
        return [(self.keys[layer], self.values[layer])]

    def recurrent(self, slot: int) -> tuple[mx.array, ...]:
        return self.states[slot]

    def keep(self, slot: int, states: tuple[mx.array, ...]) -> None:
        self.states[slot] = states

    def new_keys(self, spec: Attention) -> mx.array:
        parts = tuple(
            mx.slice(part, self.position, (2,), (*part.shape[:2], 1, part.shape[3]))
            if self.is_single
            else mx.take_along_axis(part, self._find_indices(part), axis=2)
            for part in self.keys[spec.slot]
        )
        return self.packing.unpack(parts, spec.head_dim)

    def mask(self, window: Window | None = None) -> list[mx.array]:
        """The `stored` positions that each query sees: bool [S, 1, 1, L]."""
        if window not in self._masks:  # one for all layers of that window
            columns, position = mx.arange(self.length), self.position.reshape(-1, 1)
            visible = columns <= position
            if window and window.size < self.length:
                visible = visible & (columns >= window.first(position))
            self._masks[window] = visible[:, None, None]
        return [self._masks[window]]

    def recent(self, window: int) -> mx.array:
        """The last `window` tokens of each slot: int32 [S, window], -1 in front."""
        last = mx.arange(1 - window, 1) + self.position.reshape(-1, 1)
        return mx.where(last < 0, -1, mx.take_along_axis(self.tokens, mx.maximum(last, 0), axis=1))

    def _put(self, parts: Parts, new: mx.array) -> Parts:
        packed = self.packing.pack(new)
        if not self.is_single:
            put, find = mx.put_along_axis, self._find_indices
            return tuple([put(part, find(part), x, axis=2) for part, x in zip(parts, packed)])
        put, at = mx.slice_update, self.position
        return tuple([put(part, x, at, (2,)) for part, x in zip(parts, packed)])

    def _find_indices(self, part: mx.array) -> mx.array:
        """The position of each slot, int32 [S, G, 1, *], broadcast once for all layers."""
        _, heads, _, size = part.shape
        if (heads, size) not in self._indices:
            self._indices[heads, size] = mx.broadcast_to(
                self.position.reshape(-1, 1, 1, 1), (self.slots, heads, 1, size)
            )
        return self._indices[heads, size]
