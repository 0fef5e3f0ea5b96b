"""Cache: the one owner of sequence state. View: the part of it that one forward sees."""

from __future__ import annotations

from typing import Mapping

import numpy as np
import torch

from mlx_llama.core.backends.positions import CallView, Positions
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime


class Cache(Positions):
    """Keys and values of all layers for up to `capacity` positions, preallocated and grown in steps.

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
        """Forget everything and release the storage."""
        self.version += 1
        self.length = 0
        self.allocated = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.tokens: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # the same with one more position
        self.tables: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines and sines of all positions

    @property
    def nbytes(self) -> int:
        """Bytes of storage held for keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes that the device has left; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[torch.Tensor]:
        """All arrays that the next call depends on: to launch after a chunk of the prompt."""
        return [*self.keys, *self.values] + ([] if self.tokens is None else [self.tokens])

    def view(self, tokens: torch.Tensor, index_pos: int) -> View:
        """Make room for `tokens` [B, T] at `index_pos` and note them. Raises ContextError."""
        return View(self, tokens, index_pos)

    def recent(self, window: int, length: int | None = None) -> torch.Tensor:
        """The last `window` tokens of the first `length` (None: of all), int32 [B, window], filled with -1 in front where
        there are fewer."""
        length = self.length if length is None else length
        tokens = self.tokens[:, max(0, length - window):length]
        return torch.nn.functional.pad(tokens, (window - tokens.shape[1], 0), value=-1)

    def _token_after(self, index_pos: int) -> torch.Tensor:
        """The slot in which a step by kernels at `index_pos` stores the next token: int32 [1, 1], a view."""
        return self._tokens[:, index_pos + 1:index_pos + 2]

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

        def grown(old):
            new = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if old is not None:
                new[..., :self.length, :] = old[..., :self.length, :]
            return new

        held = list(zip(self.keys, self.values)) or [(None, None)] * c.num_hidden_layers
        keys, values = [grown(old) for old, _ in held], [grown(old) for _, old in held]
        # One position more than allocated: the step at the last one stores its token there.
        longer = torch.zeros((batch, allocated + 1), dtype=torch.int32, device=self.device)
        tokens = longer[:, :allocated]
        if self.tokens is not None:
            tokens[:, :self.length] = self.tokens[:, :self.length]
        tables = self._tables(0, allocated, None)
        # All at once: an interrupt before this line has changed nothing.
        self.version += 1
        self.keys, self.values, self.tokens, self._tokens = keys, values, tokens, longer
        self.tables, self.allocated = tables, allocated


class View(CallView):
    """What one forward sees of a cache, and where it stores new keys and values.

    keys, values: the cache's own at the time of the call. tables: cosines and sines of the new positions, float32
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
        """Store new rows [B, G, T, D] of a layer."""
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
        """Which of the `stored` rows each query sees: bool [T, end - first_visible], "causal", or None for all."""
        if self.count == 1:
            return None
        if not window or window >= self.end:
            return "causal"
        if window not in self._masks:
            self._masks[window] = self._visible_on_device(window)
        return self._masks[window]

    def _visible_on_device(self, window: int) -> torch.Tensor:
        """CallView.visible without a copy from the host."""
        rows = torch.arange(self.index_pos, self.end, device=self.cache.device)[:, None]
        columns = torch.arange(self.first_visible(window), self.end, device=self.cache.device)[None, :]
        return (columns <= rows) & (columns > rows - window)
