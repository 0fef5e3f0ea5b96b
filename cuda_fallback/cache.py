"""The one owner of sequence state: keys, values and tokens so far, rope tables and the mask of the current call."""

from __future__ import annotations

from typing import Mapping

import numpy as np
import torch

from mlx_llama.core.backends.positions import Positions
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
        self._changes = 0  # times that something was written, or the storage replaced
        self.reset()

    def reset(self) -> None:
        """Forget everything and give the storage back."""
        self._changes += 1
        self.length = 0
        self.allocated = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.tokens: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None  # the same, and one position more
        self.rope: tuple[torch.Tensor, torch.Tensor] | None = None  # of the current call's positions
        self.mask: torch.Tensor | str | None = None  # of the current call

    @property
    def nbytes(self) -> int:
        """Bytes of storage held for keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes that the device has left; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[torch.Tensor]:
        """All that the next call depends on: what to launch after a chunk of the prompt."""
        return [*self.keys, *self.values] + ([] if self.tokens is None else [self.tokens])

    def begin(self, tokens: torch.Tensor, index_pos: int) -> None:
        """Make room for `tokens` [B, T] at `index_pos` and prepare their rope table and mask. Raises ContextError."""
        B, T = tokens.shape
        self.reserve(B, index_pos, T)
        self._changes += 1
        if rope.length_dependent(self.config):
            self.rope = self._tables(index_pos, T, index_pos + T)
        else:
            self.rope = tuple(part[index_pos:index_pos + T] for part in self.tables)
        self.tokens[:, index_pos:index_pos + T] = tokens
        if T == 1:
            self.mask = None
        elif not (self.config.sliding_window and self.config.sliding_window < index_pos + T):
            self.mask = "causal"
        else:
            self.mask = self._visible_on_device(index_pos, T)
        self._end = index_pos + T

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new rows [B, G, T, D] of a layer; returns its visible keys and values [B, G, L, D], new ones last."""
        first, start, end = self.first_visible(self.length), self.length, self._end
        self.keys[layer][:, :, start:end] = key
        self.values[layer][:, :, start:end] = value
        return self.keys[layer][:, :, first:end], self.values[layer][:, :, first:end]

    def end(self) -> None:
        """Count the rows that `append` stored in every layer. Before this a failed call has changed nothing."""
        self.length = self._end

    def recent(self, window: int, length: int | None = None) -> torch.Tensor:
        """The last `window` tokens of the first `length` (None: of all), int32 [B, window], filled with -1 in front where
        there are fewer."""
        length = self.length if length is None else length
        tokens = self.tokens[:, max(0, length - window):length]
        return torch.nn.functional.pad(tokens, (window - tokens.shape[1], 0), value=-1)

    def _token_after(self, index_pos: int) -> torch.Tensor:
        """Where a captured step at `index_pos` leaves the token that follows: int32 [1, 1], a view."""
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

    def _visible_on_device(self, index_pos: int, count: int) -> torch.Tensor:
        """Positions.visible without a copy from the host."""
        rows = torch.arange(index_pos, index_pos + count, device=self.device)[:, None]
        columns = torch.arange(self.first_visible(index_pos), index_pos + count, device=self.device)[None, :]
        mask = columns <= rows
        if self.config.sliding_window:
            mask &= columns > rows - self.config.sliding_window
        return mask

    def _grow(self, batch: int, allocated: int) -> None:
        c = self.config
        shape = (batch, c.num_key_value_heads, allocated, c.head_dim)

        def grown(new, old):
            if old is not None:
                new[..., :self.length, :] = old[..., :self.length, :]
            return new

        held = list(zip(self.keys, self.values)) or [(None, None)] * c.num_hidden_layers
        keys = [grown(torch.zeros(shape, dtype=self.dtype, device=self.device), old) for old, _ in held]
        values = [grown(torch.zeros(shape, dtype=self.dtype, device=self.device), old) for _, old in held]
        # One more than there are positions: a captured step leaves the token here that follows the last.
        every = torch.zeros((batch, allocated + 1), dtype=torch.int32, device=self.device)
        tokens = every[:, :allocated]
        if self.tokens is not None:
            tokens[:, :self.length] = self.tokens[:, :self.length]
        tables = self._tables(0, allocated, None)
        # All at once: an interrupt before this line has changed nothing.
        self._changes += 1
        (self.keys, self.values, self.tokens, self._tokens, self.tables,
         self.allocated) = keys, values, tokens, every, tables, allocated
