"""The one owner of sequence state: keys, values and tokens so far, rope tables and the mask of the current call."""

from __future__ import annotations

from typing import Mapping

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import Positions
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
        # mx.fast.rope forms its angles in float32, which is off by 1e-3 at position 100 000: no matter for 16-bit
        # activations, but float32 promises the other backends' tokens. MLX's CPU device has no such kernel: there the
        # tables take fewer operations at every width.
        self.tabulated = dtype == mx.float32 or device.type == mx.cpu
        self.reset()

    def reset(self) -> None:
        """Forget everything and give the storage back."""
        self.length = 0
        self.allocated = 0
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.tokens: mx.array | None = None
        self.rope: tuple | None = None  # of the current call's positions
        self.mask: mx.array | str | None = None  # of the current call

    @property
    def nbytes(self) -> int:
        """Bytes of storage held for keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes that the device has left; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[mx.array]:
        """All that the next call depends on: what to launch after a chunk of the prompt."""
        return [*self.keys, *self.values] + ([] if self.tokens is None else [self.tokens])

    def begin(self, tokens: mx.array, index_pos: int) -> None:
        """Make room for `tokens` [B, T] at `index_pos` and prepare their rope table and mask. Raises ContextError."""
        B, T = tokens.shape
        self.reserve(B, index_pos, T)
        dynamic = rope.length_dependent(self.config)
        if self.tabulated:
            self.rope = (self._make_angles(index_pos, T, index_pos + T) if dynamic
                         else tuple(part[index_pos:index_pos + T] for part in self.tables))
        else:
            self.rope = (*(self._make_periods(index_pos + T) if dynamic else self.tables), index_pos)
        self.tokens[:, index_pos:index_pos + T] = tokens
        if T == 1:
            self.mask = None
        elif not (self.config.sliding_window and self.config.sliding_window < index_pos + T):
            self.mask = "causal"
        else:
            self.mask = mx.array(self.visible(index_pos, T))
        self._end = index_pos + T

    def append(self, layer: int, key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [B, G, T, D] of a layer; returns its visible keys and values [B, G, L, D], new ones last."""
        first, start, end = self.first_visible(self.length), self.length, self._end
        self.keys[layer][:, :, start:end] = key
        self.values[layer][:, :, start:end] = value
        return self.keys[layer][:, :, first:end], self.values[layer][:, :, first:end]

    def end(self) -> None:
        """Count the rows that `append` stored in every layer. Before this a failed call has changed nothing."""
        self.length = self._end

    def recent(self, window: int, length: int | None = None) -> mx.array:
        """The last `window` tokens of the first `length` (None: of all), int32 [B, window], filled with -1 in front where
        there are fewer."""
        length = self.length if length is None else length
        tokens = self.tokens[:, max(0, length - window):length]
        return mx.pad(tokens, ((0, 0), (window - tokens.shape[1], 0)), constant_values=-1)

    def trim(self, length: int) -> None:
        """Keep the first `length` positions. Raises ContextError if there are fewer."""
        self.check_trim(length)
        self.length = length

    def state(self) -> dict[str, np.ndarray]:
        """Everything as neutral arrays: tokens int32 [B, length]; keys, values float32 [layers, B, G, length, D]."""
        if self.length == 0:
            return {}
        return {
            "tokens": runtime.to_numpy(self.tokens[:, :self.length]),
            "keys": np.stack([runtime.to_numpy(array[:, :, :self.length]) for array in self.keys]),
            "values": np.stack([runtime.to_numpy(array[:, :, :self.length]) for array in self.values]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state` gave, on any backend. Raises ContextError when it does not fit this model."""
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

    def _make_tables(self, allocated: int) -> tuple:
        return self._make_angles(0, allocated, None) if self.tabulated else self._make_periods(None)

    def _make_angles(self, start: int, count: int, seq_len: int | None) -> tuple[mx.array, mx.array]:
        cosine, sine = rope.tables(self.config, start, count, seq_len)
        return mx.array(cosine), mx.array(sine)

    def _make_periods(self, seq_len: int | None) -> tuple[mx.array, float]:
        frequencies, factor = rope.inverse_frequencies(self.config, seq_len)
        return mx.array((1 / frequencies).astype(np.float32)), factor

    def _grow(self, batch: int, allocated: int) -> None:
        c = self.config
        shape = (batch, c.num_key_value_heads, allocated, c.head_dim)

        def grown(new, old):
            if old is not None:
                new[..., :self.length, :] = old[..., :self.length, :]
            return new

        held = list(zip(self.keys, self.values)) or [(None, None)] * c.num_hidden_layers
        keys = [grown(mx.zeros(shape, self.dtype), old) for old, _ in held]
        values = [grown(mx.zeros(shape, self.dtype), old) for _, old in held]
        tokens = mx.zeros((batch, allocated), mx.int32)
        if self.tokens is not None:
            tokens[:, :self.length] = self.tokens[:, :self.length]
        tables = self._make_tables(allocated)
        # All at once: an interrupt before this line has changed nothing.
        self.keys, self.values, self.tokens, self.tables, self.allocated = keys, values, tokens, tables, allocated
