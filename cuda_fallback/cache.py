"""Cache: owner of all sequence state. View: access to it by one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mlx_llama.core.backends.positions import CallView, Positions, Span, position_nbytes
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from . import runtime
from .kernels.storage import Storage, split_rows


class Cache(Positions):
    """Tokens, keys and values of `rows` sequences of up to `capacity` positions each, allocated by row, in steps.

    bits: of keys and values, as in storage.stored_dtype. versions: count writes to a row and changes of its storage.
    """

    def __init__(self, config: LlamaConfig, capacity: int, dtype: torch.dtype = torch.float32,
                 device: torch.device = torch.device("cpu"), rows: int = 1, bits: int | None = None):
        super().__init__(config, capacity, position_nbytes(config, dtype.itemsize, bits), rows)
        self.dtype, self.device, self.bits = dtype, device, bits
        self.versions = [0] * rows
        self._storage: list[Storage | None] = [None] * rows
        self.tables: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines and sines of all positions of any row

    def reset(self, row: int | None = None) -> None:
        """Drop all positions of a row, None for every row, and free its storage. Raises ContextError."""
        if row is not None:
            self.check_row(row)
        for one in range(self.rows) if row is None else (row,):
            self.lengths[one] = self.allocated[one] = 0
            self._storage[one] = None
            self.versions[one] += 1
        if row is None:
            self.tables = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and tokens."""
        return sum(array.nbytes for array in self.arrays())

    def free_memory(self) -> int | None:
        """Bytes of free memory on the device; None: unknown."""
        return runtime.free_memory(self.device)

    def arrays(self) -> list[torch.Tensor]:
        """Arrays that the next call depends on, to launch after a chunk of the prompt."""
        return [array for storage in self._storage if storage for array in storage.arrays()]

    def view(self, tokens: torch.Tensor, index_pos: int | Sequence[int], rows: Sequence[int] | None = None) -> View:
        """Allocate for `tokens` int32 [B, T] at `index_pos` of `rows` and store them. Raises ContextError."""
        return View(self, tokens, index_pos, rows)

    def recent(self, window: int, rows: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """The last `window` tokens of rows, int32 [B, window], padded with -1 in front.

        rows: None for the first ones; lengths: look at the first so many tokens of each row, None: at all.
        """
        rows = range(self.rows if lengths is None else len(lengths)) if rows is None else rows
        lengths = [self.lengths[row] for row in rows] if lengths is None else lengths
        found = torch.full((len(rows), window), -1, dtype=torch.int32, device=self.device)
        for into, row, length in zip(found, rows, lengths, strict=True):
            if count := min(window, length):
                into[window - count:] = self._storage[row].tokens[length - count:length]
        return found

    def trim(self, length: int, row: int = 0) -> None:
        """Keep the first `length` positions of a row. Raises ContextError if there are fewer."""
        self.check_trim(length, row)
        self.lengths[row] = length

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to the empty row `target`. Raises ContextError."""
        self.check_copy(source, target, length)
        if length == 0:
            return
        self.reserve({target: length})
        self.versions[target] += 1
        self._storage[target].copy_from(self._storage[source], length)
        self.lengths[target] = length

    def state(self, row: int = 0) -> dict[str, np.ndarray]:
        """A row's positions as NumPy arrays: tokens int32 [length]; keys, values float32 [layers, G, length, D]. {} if empty."""
        self.check_row(row)
        length, storage = self.lengths[row], self._storage[row]
        if length == 0:
            return {}
        parts = (storage.read(slice(None), part, 0, length, torch.float32) for part in (0, 1))
        keys, values = (runtime.to_numpy(part) for part in parts)
        return {"tokens": runtime.to_numpy(storage.tokens[:length]), "keys": keys, "values": values}

    @torch.inference_mode()
    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None:
        """Load the `state` of a row of any backend's cache. Raises ContextError if it does not fit this model."""
        self.check_state(state, row)
        self.reset(row)
        if not state:
            return
        length = len(state["tokens"])
        self.reserve({row: length})
        storage = self._storage[row]
        storage.tokens[:length] = torch.from_numpy(state["tokens"])
        for part, name in enumerate(("keys", "values")):
            for layer, values in enumerate(state[name]):
                storage.write(layer, part, 0, runtime._sent(values, self.device)[None])
        self.versions[row] += 1
        self.lengths[row] = length

    def _make_tables(self, start: int, count: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = rope.tables(self.config, start, count, seq_len)
        return runtime._sent(cosines, self.device), runtime._sent(sines, self.device)

    @torch.inference_mode()
    def _grow(self, ends: Mapping[int, int]) -> None:
        new = {}
        for row, end in ends.items():
            new[row] = Storage.allocate(self.config, self.storage_for(end), self.dtype, self.bits, self.device)
            if self._storage[row] and self.lengths[row]:
                new[row].copy_from(self._storage[row], self.lengths[row])
        tables, longest = self.tables, max(len(storage.tokens) - 1 for storage in new.values())
        if tables is None or len(tables[0]) < longest:
            tables = self._make_tables(0, longest, self.capacity)
        # Assign last: an interrupt while allocating leaves the cache unchanged.
        for row, storage in new.items():
            self._storage[row], self.allocated[row] = storage, len(storage.tokens) - 1
            self.versions[row] += 1
        if tables is not self.tables:
            self.tables = tables
            self.versions = [version + 1 for version in self.versions]


class View(CallView):
    """Access to rows of a cache by one forward: reads stored keys and values, stores new ones.

    tables: cosines and sines of the new positions, float32 [B, T, D/2].
    """

    def __init__(self, cache: Cache, tokens: torch.Tensor, index_pos: int | Sequence[int], rows: Sequence[int] | None = None):
        super().__init__(cache, *tokens.shape, index_pos, rows)
        self._storage = [cache._storage[span.row] for span in self.spans]
        for span, storage, new in zip(self.spans, self._storage, tokens):
            cache.versions[span.row] += 1
            storage.tokens[span.start:span.end] = new
        if rope.length_dependent(self.config):
            tables = [cache._make_tables(span.start, span.count, span.end) for span in self.spans]
        else:
            tables = [tuple(part[span.start:span.end] for part in cache.tables) for span in self.spans]
        self.tables = tuple(part[0][None] if self.batch == 1 else torch.stack(part) for part in zip(*tables))
        self._masks: dict[tuple[int, int], torch.Tensor] = {}  # by window and start

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store new keys and values of a layer, [B, G, T, D] each."""
        for part, new in enumerate((key, value)):
            for span, storage, own in zip(self.spans, self._storage, split_rows(new)):
                storage.write(layer, part, span.start, own)

    def stored(self, layer: int, window: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each sequence, a layer's keys and values that its new queries see: [1, G, end - first_visible, D] each, the
        new ones last."""
        found = []
        for span, storage in zip(self.spans, self._storage):
            first, end = span.first_visible(window), span.end
            if storage.numbers.dtype == self.cache.dtype:
                keys, values = storage.layers[layer]
                found.append((keys[:, :, first:end], values[:, :, first:end]))
            else:
                found.append(tuple(storage.read(layer, part, first, end, self.cache.dtype)[None] for part in (0, 1)))
        return found

    def new_keys(self, layer: int) -> torch.Tensor:
        """Keys that this call stored in a layer, [B, G, T, D]."""
        return torch.stack([storage.read(layer, 0, span.start, span.end, self.cache.dtype)
                            for span, storage in zip(self.spans, self._storage)])

    def mask(self, window: int | None = None) -> list[torch.Tensor | str | None]:
        """Of each sequence, the `stored` positions that each query sees: bool [T, end - first_visible], "causal", or None
        for all."""
        return [self._mask(span, window) for span in self.spans]

    def _mask(self, span: Span, window: int | None) -> torch.Tensor | str | None:
        if span.count == 1:
            return None
        if not window or window >= span.end:
            return "causal"
        if (window, span.start) not in self._masks:
            # Span.visible, computed on the device to avoid a copy from the host.
            rows = torch.arange(span.start, span.end, device=self.cache.device)[:, None]
            columns = torch.arange(span.first_visible(window), span.end, device=self.cache.device)[None, :]
            self._masks[window, span.start] = (columns <= rows) & (columns > rows - window)
        return self._masks[window, span.start]
