"""Cache: keys, values and tokens of a sequence. View: access to them by one forward."""

from __future__ import annotations

from typing import Mapping

import numpy as np

from mlx_llama.core.backends.positions import CallView, Positions
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime


class Cache(Positions):
    """Keys and values of all layers for up to `capacity` positions, preallocated and grown in steps.

    keys, values: one array [B, G, allocated, D] of `dtype` per layer; tokens: int32 [B, allocated]. Memory is padded to
    multiples of 16 positions and dimensions for the compiled path; the arrays are views without the padding.
    """

    def __init__(self, config: LlamaConfig, capacity: int, dtype: np.dtype = np.dtype(np.float32), device: str = "cpu"):
        super().__init__(config, capacity, dtype.itemsize)
        self.dtype = dtype
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Empty the cache and free its storage."""
        self.length = 0
        self.allocated = 0
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.tokens: np.ndarray | None = None
        self.addresses: np.ndarray | None = None  # of keys and values, int64 [B, layers, 2]
        self.tables: tuple[np.ndarray, np.ndarray] | None = None  # cosines and sines, float32 [allocated, D/2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes free on the device; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[np.ndarray]:
        """All state that the next call reads, to launch after a chunk of the prompt."""
        return [*self.keys, *self.values] + ([] if self.tokens is None else [self.tokens])

    def view(self, tokens: np.ndarray, index_pos: int) -> View:
        """Allocate for `tokens` [B, T] at `index_pos` and store their ids. Raises ContextError."""
        return View(self, tokens, index_pos)

    def recent(self, window: int, length: int | None = None) -> np.ndarray:
        """The last `window` of the first `length` tokens (None: all), int32 [B, window], padded with -1 in front."""
        length = self.length if length is None else length
        tokens = self.tokens[:, max(0, length - window):length]
        return np.pad(tokens, ((0, 0), (window - tokens.shape[1], 0)), constant_values=-1)

    def trim(self, length: int) -> None:
        """Keep the first `length` positions. Raises ContextError if the cache is shorter."""
        self.check_trim(length)
        self.length = length

    def state(self) -> dict[str, np.ndarray]:
        """Copy the state: tokens int32 [B, length]; keys, values float32 [layers, B, G, length, D]; {} if empty."""
        if self.length == 0:
            return {}
        return {
            "tokens": self.tokens[:, :self.length].copy(),
            "keys": np.stack([array[:, :, :self.length] for array in self.keys]),
            "values": np.stack([array[:, :, :self.length] for array in self.values]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Load the `state` of a cache of any backend. Raises ContextError if it does not fit this model."""
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

        def reallocate(old):
            padded = np.zeros((batch, heads, -(-allocated // 16) * 16, -(-size // 16) * 16), self.dtype)
            new = padded[:, :, :allocated, :size]
            if old is not None:
                new[..., :self.length, :] = old[..., :self.length, :]
            return new

        pairs = list(zip(self.keys, self.values)) or [(None, None)] * c.num_hidden_layers
        keys, values = [reallocate(old) for old, _ in pairs], [reallocate(old) for _, old in pairs]
        first = np.array([[key.ctypes.data, value.ctypes.data] for key, value in zip(keys, values)], np.int64)
        addresses = first + np.arange(batch)[:, None, None] * keys[0].strides[0]
        tokens = np.zeros((batch, allocated), np.int32)
        if self.tokens is not None:
            tokens[:, :self.length] = self.tokens[:, :self.length]
        tables = rope.tables(c, 0, allocated, None)
        # Assign last, so that an interrupt leaves the cache unchanged.
        self.keys, self.values, self.tokens, self.addresses = keys, values, tokens, addresses
        self.tables, self.allocated = tables, allocated


class View(CallView):
    """Access to a cache by one forward: reads stored keys and values, stores new ones.

    keys, values, addresses: the cache's at the time of the call. tables: cosines and sines of the new positions, float32
    [T, D/2] each.
    """

    def __init__(self, cache: Cache, tokens: np.ndarray, index_pos: int):
        super().__init__(cache, *tokens.shape, index_pos)
        if rope.length_dependent(self.config):
            self.tables = rope.tables(self.config, index_pos, self.count, self.end)
        else:
            self.tables = tuple(part[index_pos:self.end] for part in cache.tables)
        cache.tokens[:, index_pos:self.end] = tokens
        self.keys, self.values, self.addresses = cache.keys, cache.values, cache.addresses

    def append(self, layer: int, key: np.ndarray, value: np.ndarray) -> None:
        """Store a layer's new rows. key, value: float32 [B, G, T, D]."""
        self.keys[layer][:, :, self.index_pos:self.end] = key
        self.values[layer][:, :, self.index_pos:self.end] = value

    def stored(self, layer: int, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A layer's keys and values that the new queries see, [B, G, end - first_visible, D] each; the new rows last."""
        first = self.first_visible(window)
        return self.keys[layer][:, :, first:self.end], self.values[layer][:, :, first:self.end]

    def new_keys(self, layer: int) -> np.ndarray:
        """A layer's keys stored by this call, [B, G, T, D]."""
        return self.keys[layer][:, :, self.index_pos:self.end]

    def mask(self, window: int | None = None) -> np.ndarray | None:
        """Attention mask over the `stored` rows: bool [T, end - first_visible], True if visible; None: all are."""
        return self.visible(window)
