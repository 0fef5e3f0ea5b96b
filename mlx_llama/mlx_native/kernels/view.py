"""StepView: the view of a decode step whose position is an array, so that one trace serves every position."""

from __future__ import annotations

import mlx.core as mx


class StepView:
    """The words of cache.View over arrays, for one token of each sequence.

    A Python number would be a key of the trace: mx.compile would trace every token again and keep every trace. So the
    position is int32 [], and attention reads the whole room behind a mask. A larger room is another trace.

    keys, values: [B, G, allocated, D] per layer, tokens: int32 [B, allocated]; `token` [B, 1] is stored at `position`.
    tables: Cache.tables on entry, those of the position after. The arrays given stay as they are.
    """

    flat = True
    count = 1

    def __init__(self, token: mx.array, position: mx.array, tokens: mx.array, keys: list[mx.array],
                 values: list[mx.array], tables: tuple):
        self.position = position
        self.tokens = mx.slice_update(tokens, token, position, (1,))
        self.keys, self.values = list(keys), list(values)
        if tables[0].ndim == 2:  # cosines and sines, not periods
            self.tables = tuple(mx.slice(table, position, (0,), (1, table.shape[1])) for table in tables)
        else:
            self.tables = (*tables, position)
        self._masks: dict[int | None, mx.array] = {}  # by window

    def append(self, layer: int, key: mx.array, value: mx.array) -> None:
        """Store a new row [B, G, 1, D] of a layer."""
        self.keys[layer] = mx.slice_update(self.keys[layer], key, self.position, (2,))
        self.values[layer] = mx.slice_update(self.values[layer], value, self.position, (2,))

    def stored(self, layer: int, window: int | None = None) -> tuple[mx.array, mx.array]:
        """A layer's keys and values, visible or not: [B, G, allocated, D] each; see `mask`."""
        return self.keys[layer], self.values[layer]

    def new_keys(self, layer: int) -> mx.array:
        """Keys that this step stored in a layer, [B, G, 1, D]."""
        batch, heads, _, size = self.keys[layer].shape
        return mx.slice(self.keys[layer], self.position, (2,), (batch, heads, 1, size))

    def mask(self, window: int | None = None) -> mx.array:
        """The `stored` rows that the query sees: bool [1, 1, 1, allocated]."""
        if window not in self._masks:
            allocated = self.tokens.shape[1]
            columns = mx.arange(allocated)
            visible = columns <= self.position
            if window and window < allocated:
                visible = visible & (columns > self.position - window)
            self._masks[window] = visible.reshape(1, 1, 1, allocated)
        return self._masks[window]

    def recent(self, window: int) -> mx.array:
        """The last `window` tokens, this step's last: int32 [B, window], -1 in front where there are fewer."""
        last = mx.arange(1 - window, 1) + self.position
        return mx.where(last < 0, -1, mx.take(self.tokens, mx.maximum(last, 0), axis=1))
