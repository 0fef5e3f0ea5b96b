"""Cache: owner of all sequence state. View: access to it by one forward."""

from __future__ import annotations

from typing import Mapping

import numpy as np
import torch

from mlx_llama.core.backends.positions import CallView, Positions
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime


class Cache(Positions):
    """Keys and values of all layers for up to `capacity` positions, allocated in steps.

    keys, values: one array [B, G, allocated, D] per layer; tokens: int32 [B, allocated].
    """

    def __init__(self, config: LlamaConfig, capacity: int, dtype: torch.dtype = torch.float32,
                 device: torch.device = torch.device("cpu")):
        super().__init__(config, capacity, dtype.itemsize)
        self.dtype = dtype
        self.device = device
        self.version = 0  # counts writes and changes of the storage
        self.reset()

    def reset(self) -> None:
        """Drop all positions and free the storage."""
        self.version += 1
        self.length = 0
        self.allocated = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.tokens: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # with one more position; `tokens` is a view of it
        self.tables: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines and sines of all positions

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes of free memory on the device; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[torch.Tensor]:
        """Arrays that the next call depends on, to launch after a chunk of the prompt."""
        return [*self.keys, *self.values] + ([] if self.tokens is None else [self.tokens])

    def view(self, tokens: torch.Tensor, index_pos: int) -> View:
        """Allocate for `tokens` int32 [B, T] at `index_pos` and store them. Raises ContextError."""
        return View(self, tokens, index_pos)

    def recent(self, window: int, length: int | None = None) -> torch.Tensor:
        """The last `window` of the first `length` tokens (None: of all), int32 [B, window], padded with -1 in front."""
        length = self.length if length is None else length
        tokens = self.tokens[:, max(0, length - window):length]
        return torch.nn.functional.pad(tokens, (window - tokens.shape[1], 0), value=-1)

    def _token_after(self, index_pos: int) -> torch.Tensor:
        """View int32 [1, 1] in which a step by kernels at `index_pos` stores the next token."""
        return self._tokens[:, index_pos + 1:index_pos + 2]

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
        """Load the `state` of any backend's cache. Raises ContextError if it does not fit this model."""
        self.check_state(state)
        self.reset()
        if not state:
            return
        B, length = state["tokens"].shape
        self._grow(B, self.room_for(0, length))
        self.tokens[:, :length] = torch.from_numpy(state["tokens"])
        for layer, (key, value) in enumerate(zip(state["keys"], state["values"])):
            self.keys[layer][:, :, :length] = torch.from_numpy(key)
            self.values[layer][:, :, :length] = torch.from_numpy(value)
        self.length = length

    def _tables(self, start: int, count: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = rope.tables(self.config, start, count, seq_len)
        return runtime._sent(cosines, self.device), runtime._sent(sines, self.device)

    def _grow(self, batch: int, allocated: int) -> None:
        c = self.config
        shape = (batch, c.num_key_value_heads, allocated, c.head_dim)

        def reallocate(old):
            new = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if old is not None:
                new[..., :self.length, :] = old[..., :self.length, :]
            return new

        layers = list(zip(self.keys, self.values)) or [(None, None)] * c.num_hidden_layers
        keys, values = [reallocate(old) for old, _ in layers], [reallocate(old) for _, old in layers]
        # One position more than allocated: the step at the last position stores the next token there.
        longer = torch.zeros((batch, allocated + 1), dtype=torch.int32, device=self.device)
        tokens = longer[:, :allocated]
        if self.tokens is not None:
            tokens[:, :self.length] = self.tokens[:, :self.length]
        tables = self._tables(0, allocated, None)
        # Assign last: an interrupt while allocating leaves the cache unchanged.
        self.version += 1
        self.keys, self.values, self.tokens, self._tokens = keys, values, tokens, longer
        self.tables, self.allocated = tables, allocated


class View(CallView):
    """Access to a cache by one forward: reads stored keys and values, stores new ones.

    keys, values: the cache's at the time of the call. tables: cosines and sines of the new positions, float32
    [T, D/2].
    """

    def __init__(self, cache: Cache, tokens: torch.Tensor, index_pos: int):
        super().__init__(cache, *tokens.shape, index_pos)
        cache.version += 1
        if rope.length_dependent(self.config):
            self.tables = cache._tables(index_pos, self.count, self.end)
        else:
            self.tables = tuple(part[index_pos:self.end] for part in cache.tables)
        cache.tokens[:, index_pos:self.end] = tokens
        self.keys, self.values = cache.keys, cache.values
        self._masks: dict[int, torch.Tensor] = {}  # by window

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store new keys and values of a layer, [B, G, T, D] each."""
        self.keys[layer][:, :, self.index_pos:self.end] = key
        self.values[layer][:, :, self.index_pos:self.end] = value

    def stored(self, layer: int, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values that the new queries see: [B, G, end - first_visible, D] each, the new ones last."""
        first = self.first_visible(window)
        return self.keys[layer][:, :, first:self.end], self.values[layer][:, :, first:self.end]

    def new_keys(self, layer: int) -> torch.Tensor:
        """Keys that this call stored in a layer, [B, G, T, D]."""
        return self.keys[layer][:, :, self.index_pos:self.end]

    def mask(self, window: int | None = None) -> torch.Tensor | str | None:
        """The `stored` positions that each query sees: bool [T, end - first_visible], "causal", or None for all."""
        if self.count == 1:
            return None
        if not window or window >= self.end:
            return "causal"
        if window not in self._masks:
            self._masks[window] = self._visible_on_device(window)
        return self._masks[window]

    def _visible_on_device(self, window: int) -> torch.Tensor:
        """CallView.visible, computed on the device to avoid a copy from the host."""
        rows = torch.arange(self.index_pos, self.end, device=self.cache.device)[:, None]
        columns = torch.arange(self.first_visible(window), self.end, device=self.cache.device)[None, :]
        return (columns <= rows) & (columns > rows - window)
