"""Cache: the one owner of sequence state. View: the part of it that one forward sees."""

from __future__ import annotations

from typing import Mapping

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import CallView, Positions
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime


class Cache(Positions):
    """Keys and values of all layers for up to `capacity` positions, preallocated and grown in steps.

    keys, values: one array [B, G, allocated, D] per layer; tokens: int32 [B, allocated].
    """

    def __init__(self, config: LlamaConfig, capacity: int, dtype: mx.Dtype = mx.float32,
                 device: mx.Device = mx.Device(mx.cpu)):
        super().__init__(config, capacity, dtype.size)
        self.dtype = dtype
        self.device = device
        # mx.fast.rope forms its angles in float32, 1e-3 off at position 100 000. That is exact enough for 16-bit
        # activations, but float32 promises the other backends' tokens. MLX's CPU device has no such kernel: tables take
        # fewer primitives there at every width.
        self.tabulated = dtype == mx.float32 or device.type == mx.cpu
        self.reset()

    def reset(self) -> None:
        """Drop all positions and free the storage."""
        self.length = 0
        self.allocated = 0
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.tokens: mx.array | None = None
        self.tables: tuple | None = None  # cosines and sines of all positions, or periods and a factor: see ops.rope

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes of free memory on the device; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[mx.array]:
        """Arrays that the next call depends on, to launch after a chunk of the prompt."""
        return [*self.keys, *self.values] + ([] if self.tokens is None else [self.tokens])

    def view(self, tokens: mx.array, index_pos: int) -> View:
        """The view of one call over `tokens` int32 [B, T] from `index_pos` on, stored at once. Raises ContextError."""
        return View(self, tokens, index_pos)

    def recent(self, window: int, length: int | None = None) -> mx.array:
        """The last `window` of the first `length` tokens (None: of all): int32 [B, window], -1 in front where there are
        fewer."""
        length = self.length if length is None else length
        tokens = self.tokens[:, max(0, length - window):length]
        return mx.pad(tokens, ((0, 0), (window - tokens.shape[1], 0)), constant_values=-1)

    def trim(self, length: int) -> None:
        """Keep the first `length` positions. Raises ContextError if there are fewer."""
        self.check_trim(length)
        self.length = length

    def state(self) -> dict[str, np.ndarray]:
        """All positions as NumPy arrays: tokens int32 [B, length]; keys, values float32 [layers, B, G, length, D]."""
        if self.length == 0:
            return {}
        return {
            "tokens": runtime.to_numpy(self.tokens[:, :self.length]),
            "keys": np.stack([runtime.to_numpy(array[:, :, :self.length]) for array in self.keys]),
            "values": np.stack([runtime.to_numpy(array[:, :, :self.length]) for array in self.values]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Load the `state` of any backend's cache. Raises ContextError when it does not fit this model."""
        self.check_state(state)
        self.reset()
        if not state:
            return
        B, length = state["tokens"].shape
        with mx.stream(self.device):
            self._grow(B, self.room_for(0, length))
            self.tokens[:, :length] = mx.array(state["tokens"])
            for layer, (key, value) in enumerate(zip(state["keys"], state["values"])):
                self.keys[layer][:, :, :length] = mx.array(key).astype(self.dtype)
                self.values[layer][:, :, :length] = mx.array(value).astype(self.dtype)
        self.length = length

    def _grow(self, batch: int, allocated: int) -> None:
        c = self.config
        shape = (batch, c.num_key_value_heads, allocated, c.head_dim)

        def copy_rows(new, old):
            if old is not None:
                new[..., :self.length, :] = old[..., :self.length, :]
            return new

        stored = list(zip(self.keys, self.values)) or [(None, None)] * c.num_hidden_layers
        keys = [copy_rows(mx.zeros(shape, self.dtype), old) for old, _ in stored]
        values = [copy_rows(mx.zeros(shape, self.dtype), old) for _, old in stored]
        tokens = mx.zeros((batch, allocated), mx.int32)
        if self.tokens is not None:
            tokens[:, :self.length] = self.tokens[:, :self.length]
        tables = _make_angles(c, 0, allocated) if self.tabulated else _make_periods(c)
        # Assign all at once: an interrupt before this line changes nothing.
        self.keys, self.values, self.tokens, self.tables, self.allocated = keys, values, tokens, tables, allocated


class View(CallView):
    """One call on a cache: slices at positions that the host knows.

    tables: of the new positions, as ops.rope takes them. flat: the stream x is [B, E], without an axis of positions.
    """

    flat = False

    def __init__(self, cache: Cache, tokens: mx.array, index_pos: int):
        super().__init__(cache, *tokens.shape, index_pos)
        if cache.tabulated:
            self.tables = (_make_angles(self.config, index_pos, self.count, self.end) if rope.length_dependent(self.config)
                           else tuple(part[index_pos:self.end] for part in cache.tables))
        else:
            self.tables = (*(_make_periods(self.config, self.end) if rope.length_dependent(self.config) else cache.tables),
                           index_pos)
        cache.tokens[:, index_pos:self.end] = tokens
        self.keys, self.values = cache.keys, cache.values
        self._masks: dict[int, mx.array] = {}  # by window

    def append(self, layer: int, key: mx.array, value: mx.array) -> None:
        """Store new rows [B, G, T, D] of a layer."""
        self.keys[layer][:, :, self.index_pos:self.end] = key
        self.values[layer][:, :, self.index_pos:self.end] = value

    def stored(self, layer: int, window: int | None = None) -> tuple[mx.array, mx.array]:
        """A layer's keys and values that the new queries see: [B, G, end - first_visible, D] each, the new ones last."""
        first = self.first_visible(window)
        return self.keys[layer][:, :, first:self.end], self.values[layer][:, :, first:self.end]

    def new_keys(self, layer: int) -> mx.array:
        """Keys that this call stored in a layer, [B, G, T, D]."""
        return self.keys[layer][:, :, self.index_pos:self.end]

    def mask(self, window: int | None = None) -> mx.array | str | None:
        """The `stored` rows that each query sees: bool [T, end - first_visible], "causal", or None for all."""
        if self.count == 1:
            return None
        if not window or window >= self.end:
            return "causal"
        if window not in self._masks:
            self._masks[window] = mx.array(self.visible(window))
        return self._masks[window]


def _make_angles(config: LlamaConfig, start: int, count: int, seq_len: int | None = None) -> tuple[mx.array, mx.array]:
    """Cosines and sines, float32 [count, D/2]."""
    cosine, sine = rope.tables(config, start, count, seq_len)
    return mx.array(cosine), mx.array(sine)


def _make_periods(config: LlamaConfig, seq_len: int | None = None) -> tuple[mx.array, float]:
    """Tokens per radian, float32 [D/2], and the factor on cosine and sine."""
    frequencies, factor = rope.inverse_frequencies(config, seq_len)
    return mx.array((1 / frequencies).astype(np.float32)), factor
