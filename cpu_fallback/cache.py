"""The one owner of sequence state: keys, values and tokens so far, rope tables and the mask of the current call."""

from __future__ import annotations

from typing import Mapping

import numpy as np

from mlx_llama.core.backends.positions import Positions
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime


class Cache(Positions):
    """Keys and values of all layers for up to `capacity` positions, preallocated and grown in steps.

    keys, values: one array [B, G, allocated, D] per layer; tokens: int32 [B, allocated]. Heads and positions are filled up
    to whole vectors of 16 in memory, for the compiled path; the arrays show only what counts.
    """

    def __init__(self, config: LlamaConfig, capacity: int, dtype: np.dtype = np.dtype(np.float32), device: str = "cpu"):
        super().__init__(config, capacity, dtype.itemsize)
        self.dtype = dtype
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Forget everything and give the storage back."""
        self.length = 0
        self.allocated = 0
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.tokens: np.ndarray | None = None
        self.addresses: np.ndarray | None = None  # of keys and values, int64 [B, layers, 2]
        self.rope: tuple[np.ndarray, np.ndarray] | None = None  # of the current call's positions
        self.mask: np.ndarray | None = None  # of the current call

    @property
    def nbytes(self) -> int:
        """Bytes of storage held for keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes that the device has left; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[np.ndarray]:
        """All that the next call depends on: what to launch after a chunk of the prompt."""
        return [*self.keys, *self.values] + ([] if self.tokens is None else [self.tokens])

    def begin(self, tokens: np.ndarray, index_pos: int) -> None:
        """Make room for `tokens` [B, T] at `index_pos` and prepare their rope table and mask. Raises ContextError."""
        B, T = tokens.shape
        self.reserve(B, index_pos, T)
        if rope.length_dependent(self.config):
            self.rope = rope.tables(self.config, index_pos, T, index_pos + T)
        else:
            self.rope = tuple(part[index_pos:index_pos + T] for part in self._tables)
        self.tokens[:, index_pos:index_pos + T] = tokens
        self.mask = self.visible(index_pos, T)
        self._end = index_pos + T

    def append(self, layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Store new rows [B, G, T, D] of a layer; returns its visible keys and values [B, G, L, D], new ones last."""
        first, start, end = self.first_visible(self.length), self.length, self._end
        self.keys[layer][:, :, start:end] = key
        self.values[layer][:, :, start:end] = value
        return self.keys[layer][:, :, first:end], self.values[layer][:, :, first:end]

    def end(self) -> None:
        """Count the rows that `append` stored in every layer. Before this a failed call has changed nothing."""
        self.length = self._end

    def recent(self, window: int, length: int | None = None) -> np.ndarray:
        """The last `window` tokens of the first `length` (None: of all), int32 [B, window], filled with -1 in front where
        there are fewer."""
        length = self.length if length is None else length
        tokens = self.tokens[:, max(0, length - window):length]
        return np.pad(tokens, ((0, 0), (window - tokens.shape[1], 0)), constant_values=-1)

    def trim(self, length: int) -> None:
        """Keep the first `length` positions. Raises ContextError if there are fewer."""
        self.check_trim(length)
        self.length = length

    def state(self) -> dict[str, np.ndarray]:
        """Everything as neutral arrays: tokens int32 [B, length]; keys, values float32 [layers, B, G, length, D]."""
        if self.length == 0:
            return {}
        return {
            "tokens": self.tokens[:, :self.length].copy(),
            "keys": np.stack([array[:, :, :self.length] for array in self.keys]),
            "values": np.stack([array[:, :, :self.length] for array in self.values]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state` gave, on any backend. Raises ContextError when it does not fit this model."""
        self.check_state(state)
        self.reset()
        if not state:
            return
        B, length = state["tokens"].shape
        self._grow(B, self.room_for(0, length))
        self.tokens[:, :length] = state["tokens"]
        for layer, (key, value) in enumerate(zip(state["keys"], state["values"])):
            self.keys[layer][:, :, :length] = key
            self.values[layer][:, :, :length] = value
        self.length = length

    def _grow(self, batch: int, allocated: int) -> None:
        c = self.config
        heads, size = c.num_key_value_heads, c.head_dim

        def grown(old):
            new = np.zeros((batch, heads, -(-allocated // 16) * 16, -(-size // 16) * 16), self.dtype)[:, :, :allocated, :size]
            if old is not None:
                new[..., :self.length, :] = old[..., :self.length, :]
            return new

        held = list(zip(self.keys, self.values)) or [(None, None)] * c.num_hidden_layers
        keys, values = [grown(old) for old, _ in held], [grown(old) for _, old in held]
        first = np.array([[key.ctypes.data, value.ctypes.data] for key, value in zip(keys, values)], np.int64)
        addresses = first + np.arange(batch)[:, None, None] * keys[0].strides[0]
        tokens = np.zeros((batch, allocated), np.int32)
        if self.tokens is not None:
            tokens[:, :self.length] = self.tokens[:, :self.length]
        tables = rope.tables(c, 0, allocated, None)
        # All at once: an interrupt before this line has changed nothing.
        self.keys, self.values, self.tokens, self.addresses = keys, values, tokens, addresses
        self._tables, self.allocated = tables, allocated
