"""Cache: owner of all sequence state. View: access to it by one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlx_llama.core.backends.positions import (
    CallView,
    Layers,
    Positions,
    Span,
    States,
    position_nbytes,
)
from mlx_llama.core.models import rope
from mlx_llama.core.models.parts import Attention, Window

from . import kernels, runtime
from .kernels.storage import LiveSlot, LiveStates, Storage, split_rows, state_places


class Call(CallView):
    """A call on rows of a cache. By kernels, recurrent states are changed in LiveStates."""

    cache: Cache

    def __enter__(self) -> Any:
        self.is_live = self.cache.has_live_states
        if self.is_live:
            for span in self.spans:
                self.cache.live_states(span.row).load(self.cache.states[span.row])
        return self

    def states_after(self, i: int) -> States:
        if not self.is_live:
            return super().states_after(i)
        live = self.cache.live_states(self.spans[i].row)
        return live.slots[live.slot]


class View(Call):
    """Access to rows of a cache by one forward: reads stored keys and values, stores new ones.

    tables: cosines and sines of the new positions, float32 [B, T, D/2]. states: what kernels of
    recurrent states read, from state.describe.
    """

    def __init__(
        self,
        cache: Cache,
        tokens: Tensor,
        index_pos: int | Sequence[int],
        rows: Sequence[int] | None = None,
    ):
        batch, count = tokens.shape
        super().__init__(cache, batch, count, index_pos, rows)
        self.states: list[Tensor] = []
        self.row_storage = [cache.row_storage[span.row] for span in self.spans]
        for span, storage, new in zip(self.spans, self.row_storage, tokens):
            cache.versions[span.row] += 1
            storage.tokens[span.start : span.end] = new
        if rope.length_dependent(self.config):
            tables = [cache._make_tables(span.start, span.count, span.end) for span in self.spans]
        else:
            tables = [
                tuple(part[span.start : span.end] for part in cache.tables) for span in self.spans
            ]
        self.tables = tuple(
            part[0][None] if self.batch == 1 else torch.stack(part) for part in zip(*tables)
        )

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None and self.is_live:
            self.cache.swap_states(self.spans)
        super().__exit__(kind, error, trace)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store new keys and values of a layer, [B, G, T, D] each."""
        for part, new in enumerate((key, value)):
            for span, storage, rows in zip(self.spans, self.row_storage, split_rows(new)):
                storage.write(layer, part, span.start, rows)

    def stored(self, layer: int, window: Window | None = None) -> list[tuple[Tensor, Tensor]]:
        """Of each sequence, a layer's keys and values that its new queries see: [1, G, end -
        first_visible, D] each, the new ones last."""
        stored, dtype = [], self.cache.dtype
        for span, storage in zip(self.spans, self.row_storage):
            first, end = span.first_visible(window), span.end
            if storage.numbers.dtype == dtype:
                both = [part[:, :, first:end] for part in storage.layers[layer]]
            else:
                both = [storage.read(layer, part, first, end, dtype)[None] for part in (0, 1)]
            stored.append(tuple(both))
        return stored

    def new_keys(self, spec: Attention) -> Tensor:
        rows, dtype = zip(self.spans, self.row_storage), self.cache.dtype
        keys = [storage.read(spec.slot, 0, span.start, span.end, dtype) for span, storage in rows]
        return torch.stack(keys)

    def _make_mask(self, span: Span, window: Window) -> Tensor:
        # Span.visible, computed on the device to avoid a copy from the host.
        arange = partial(torch.arange, device=self.cache.device)
        rows = arange(span.start, span.end)[:, None]
        columns = arange(span.first_visible(window), span.end)[None]
        return (columns <= rows) & (columns >= window.first(rows))


class Cache(Positions):
    """Tokens, keys and values of `rows` sequences of up to `capacity` positions, by row.

    versions: counts of writes to a row.
    """

    runtime, view_type = runtime, View

    def _make_storage(self) -> None:
        self.position_nbytes = position_nbytes(self.config, self.dtype.itemsize, self.bits)
        self.versions = [0] * self.rows
        self.row_storage: list[Storage | None] = [None] * self.rows
        self.places = state_places(self.config)
        self.live: list[LiveStates | None] = [None] * self.rows  # see `live_states`
        # cosines and sines of all positions of any row
        self.tables: tuple[Tensor, Tensor] | None = None

    def _free(self, rows: Sequence[int], is_all: bool) -> None:
        for row in rows:
            self.row_storage[row] = self.live[row] = None
            self.versions[row] += 1
        if is_all:
            self.tables = None

    def arrays(self) -> list[Tensor]:
        stored = [array for storage in self.row_storage if storage for array in storage.arrays()]
        return stored + self.state_arrays()

    @property
    def has_live_states(self) -> bool:
        """True if kernels compute recurrent states."""
        return bool(self.state_nbytes and kernels.find_kernels(self.device).decode)

    def live_states(self, row: int) -> LiveStates:
        """A row's recurrent states where kernels change them."""
        if (live := self.live[row]) is None:
            live = self.live[row] = LiveStates(self.config, self.device)
        return live

    def swap_states(self, spans: Sequence[Span]) -> None:
        """Let the next kernels read what the last ones have written."""
        if self.state_nbytes:
            for row in {span.row for span in spans}:
                self.live_states(row).slot ^= 1

    def keep_states(self, spans: Sequence[Span]) -> None:
        """Copy the states of rows, whose call writes more than once, for the case that it fails."""
        for span in spans:
            self.states[span.row] = self._freeze(self.states[span.row])

    def states_nbytes(self) -> int:
        spare = sum(self._spare(row) for row, live in enumerate(self.live) if live)
        return super().states_nbytes() + spare

    def _spare(self, row: int) -> int:
        # live states that are not its states now
        slots = 2 - isinstance(self.states[row], LiveSlot)
        return slots * self.state_nbytes if self.live[row] else super()._spare(row)

    def _freeze(self, states: States) -> States:
        if not isinstance(states, LiveSlot):
            return states
        return LiveSlot.split(self.config, states.numbers.clone())

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def _send(self, array: np.ndarray) -> Tensor:
        return runtime.send(array, self.device)

    _stack = staticmethod(torch.stack)
    _own = staticmethod(torch.clone)

    def _recent(self, window: int, parts: Sequence[tuple[int, int, int]]) -> Tensor:
        recent = torch.full((len(parts), window), -1, dtype=torch.int32, device=self.device)
        for into, (row, start, end) in zip(recent, parts):
            if start < end:
                into[window - end + start :] = self.row_storage[row].tokens[start:end]
        return recent

    @torch.inference_mode()
    def _copy(self, source: int, target: int, length: int) -> None:
        self.reserve({target: length})
        self.versions[target] += 1
        self.row_storage[target].copy_from(self.row_storage[source], length)

    def _export(self, row: int, length: int) -> tuple[np.ndarray, Layers, Layers]:
        storage, slots = self.row_storage[row], range(self.config.key_value_layers)
        keys, values = (
            [runtime.to_numpy(storage.read(i, part, 0, length, torch.float32)) for i in slots]
            for part in (0, 1)
        )
        return runtime.to_numpy(storage.tokens[:length]), keys, values

    @torch.inference_mode()
    def _load(self, row: int, tokens: np.ndarray, keys: Layers, values: Layers) -> None:
        storage = self.row_storage[row]
        storage.tokens[: len(tokens)] = torch.from_numpy(tokens)
        for part, layers in enumerate((keys, values)):
            for layer, numbers in enumerate(layers):
                storage.write(layer, part, 0, runtime.send(numbers, self.device)[None])
        self.versions[row] += 1

    def _make_tables(self, start: int, count: int, seq_len: int | None) -> tuple[Tensor, Tensor]:
        cosines, sines = rope.tables(self.config, start, count, seq_len)
        return runtime.send(cosines, self.device), runtime.send(sines, self.device)

    @torch.inference_mode()
    def _grow(self, ends: Mapping[int, int]) -> None:
        new = {}
        for row, end in ends.items():
            new[row] = Storage.allocate(
                self.config, self.storage_for(end), self.dtype, self.bits, self.device
            )
            if self.row_storage[row] and self.lengths[row]:
                new[row].copy_from(self.row_storage[row], self.lengths[row])
        tables, longest = self.tables, max(len(storage.tokens) - 1 for storage in new.values())
        if tables is None or len(tables[0]) < longest:
            tables = self._make_tables(0, longest, self.capacity)
        # Assign last: an interrupt while allocating leaves the cache unchanged.
        for row, storage in new.items():
            self.row_storage[row], self.allocated[row] = storage, len(storage.tokens) - 1
            self.versions[row] += 1
        if tables is not self.tables:
            self.tables = tables
            self.versions = [version + 1 for version in self.versions]
