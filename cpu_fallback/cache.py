"""Cache: keys, values and tokens of several sequences. View: access to them by one forward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mlx_llama.core.backends.positions import CallView, Layers, Positions, States
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Attention, Window
from mlx_llama.core.system.forks import cached_property

from . import runtime
from .pages import NO_PAGE, PAGE, Page, PageLayout, Pages, Row, dequantise, pieces, quantise
from .states import Block, Blocks


class Tables(NamedTuple):
    """Cosines and sines of positions, float32 [positions, D/2], and where kernels read them."""

    cosines: np.ndarray
    sines: np.ndarray
    addresses: tuple[int, int]
    row_bytes: int

    @classmethod
    def of(cls, config: LlamaConfig, count: int, capacity: int) -> Tables:
        """The tables of the first `count` positions."""
        cosines, sines = map(np.ascontiguousarray, rope.tables(config, 0, count, capacity))
        return cls(cosines, sines, (cosines.ctypes.data, sines.ctypes.data), cosines.strides[0])


class Kept(list[list[Page]]):
    """Pages of each window at a checkpoint."""


def hold(pages: Sequence[Page]) -> list[Page]:
    """These pages, for one more holder."""
    for page in pages:
        page.holders += 1
    return list(pages)


class View(CallView):
    """Access to a cache by one forward: reads stored keys and values, stores new ones."""

    def __init__(
        self,
        cache: Cache,
        tokens: np.ndarray,
        index_pos: int | Sequence[int],
        rows: Sequence[int] | None = None,
    ):
        batch, count = tokens.shape
        super().__init__(cache, batch, count, index_pos, rows)
        self.layouts = cache.layouts
        self._shared = cache.tables  # another call may replace the cache's
        # by sequence, at the time of the call: pages by layout; their addresses, and where this
        # table is
        self.pages: list[tuple[tuple[Page, ...], ...]] = []
        self.page_tables: list[tuple[np.ndarray, int]] = []
        for span, ids in zip(self.spans, tokens):
            cache.store_tokens(span.row, span.start, ids)
            row = cache.page_rows[span.row]
            self.pages.append(tuple(map(tuple, row.pages)))
            self.page_tables.append((row.table, row.address))

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of the new positions, float32 [B, T, D/2] each."""
        if rope.length_dependent(self.config):
            tables = [
                rope.tables(self.config, span.start, span.count, seq_len=span.end)
                for span in self.spans
            ]
            return tuple(np.stack(parts) for parts in zip(*tables))
        if len(self.spans) == 1:
            start, end = self.spans[0].start, self.spans[0].end
            return self._shared.cosines[None, start:end], self._shared.sines[None, start:end]
        positions = np.array([span.start for span in self.spans])[:, None] + np.arange(self.count)
        return self._shared.cosines[positions], self._shared.sines[positions]

    def find_tables(self) -> tuple[int, int]:
        """Addresses of `tables` of a single sequence, made only if the cache lacks them."""
        if self._shared is None or "tables" in vars(self):
            cosines, sines = self.tables
            return cosines.ctypes.data, sines.ctypes.data
        (cosines, sines), at = self._shared.addresses, self.spans[0].start * self._shared.row_bytes
        return cosines + at, sines + at

    @cached_property
    def blocks(self) -> list[tuple[int, Block]]:
        """By sequence: address of its recurrent states before the call, and those after it, for
        kernels to write. A new row has zeros in both.
        """
        blocks, former = [], self.cache.states
        self.cache.blocks.keep(max(sum(map(bool, former)), len(self.spans)))
        for span in self.spans:
            block = self.cache.blocks.take()
            if not (before := former[span.row]):
                before = block
                block.array.fill(0)
            blocks.append((before.address, block))
        return blocks

    def states_after(self, i: int) -> States:
        if "blocks" in vars(self):
            return self.blocks[i][1]
        states = super().states_after(i)
        return states and self.cache.blocks.copy(part for parts in states for part in parts)

    def append(self, layer: int, key: np.ndarray, value: np.ndarray) -> None:
        """Store a layer's new rows. key, value: float32 [B, G, T, D]."""
        for span, pages, keys, values in zip(self.spans, self.pages, key, value):
            self.cache.write(pages, layer, span.start, keys, values)

    def stored(
        self, layer: int, window: Window | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """By sequence, a layer's visible keys and values, [G, end - first_visible, D]."""
        rows, read = zip(self.spans, self.pages), self.cache.read
        return [
            tuple(read(part, layer, span.first_visible(window), span.end)) for span, part in rows
        ]

    def new_keys(self, spec: Attention) -> np.ndarray:
        rows, read = zip(self.spans, self.pages), self.cache.read
        return np.stack([read(pages, spec.slot, span.start, span.end)[0] for span, pages in rows])

    def mask(self, window: Window | None = None) -> list[np.ndarray | None]:
        """As in CallView, without "causal"."""
        return [span.visible(window) for span in self.spans]


class Cache(Positions):
    """Keys and values of `rows` sequences of up to `capacity` positions, in pages.

    A prefix that rows share is stored once: a row that writes to a shared page copies it first.
    """

    runtime, view_type, slide_step = runtime, View, PAGE

    def _make_storage(self) -> None:
        self.layouts = PageLayout.of(self.config, self.bits)
        nbytes = {layout.window: layout.tokens // PAGE for layout in self.layouts}
        self.position_nbytes = sum(nbytes.values())
        self.window_nbytes = {window: count for window, count in nbytes.items() if window}
        # numbers of the layouts of layers, by slot
        windows = [layout.window for layout in self.layouts]
        self.kinds = [windows.index(mixer.window) for mixer in self.config.attentions]
        self.pages = [*map(Pages, self.layouts)]
        self.page_rows = [Row(len(self.layouts)) for _ in self.lengths]
        self.blocks = Blocks(self.config.recurrent)
        # for all positions of any row; None where they depend on a row's length
        self.tables: Tables | None = None

    def _free(self, rows: Sequence[int], is_all: bool) -> None:
        self.blocks.keep(sum(map(bool, self.states)))
        if is_all:
            self.page_rows = [Row(len(self.layouts)) for _ in rows]
            self.pages, self.tables = [*map(Pages, self.layouts)], None
            return
        for row in rows:
            former, self.page_rows[row] = self.page_rows[row], Row(len(self.layouts))
            for kind, pages in enumerate(self.pages):
                pages.drop(former.cut(kind, 0))

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, tokens and recurrent states, what rows share once."""
        return sum(pages.nbytes for pages in self.pages) + self.states_nbytes()

    def nbytes_for(self, length: int) -> int:
        tokens = self.layouts[0].nbytes - self.layouts[0].tokens
        return super().nbytes_for(length) + self.storage_for(length) // PAGE * tokens

    def states_nbytes(self) -> int:
        return super().states_nbytes() + self.blocks.spare_nbytes

    def storage_for(self, end: int) -> int:
        """Positions to allocate for `end`: whole pages."""
        return -(-end // PAGE) * PAGE

    def new_positions(self, row: int, end: int) -> int:
        """Positions to allocate beyond those of the row."""
        return self.storage_for(end) - self.allocated[row]

    def arrays(self) -> list[np.ndarray]:
        pages = (page for row in self.page_rows for pages in row.pages for page in pages)
        return [page.memory for page in pages] + self.state_arrays()

    def _zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape, np.float32)

    _send = staticmethod(np.asarray)
    _stack = staticmethod(np.stack)
    _own = staticmethod(np.asarray)  # `blocks` copies

    def _recent(self, window: int, parts: Sequence[tuple[int, int, int]]) -> np.ndarray:
        recent = np.full((len(parts), window), -1, np.int32)
        for into, (row, start, end) in zip(recent, parts):
            into[window - end + start :] = self.page_rows[row].tokens(start, end)
        return recent

    def trim(self, length: int, row: int = 0) -> int:
        length = super().trim(length, row)
        self.allocated[row] = min(self.allocated[row], self.storage_for(length))
        for kind, pages in enumerate(self.pages):
            pages.drop(self.page_rows[row].cut(kind, self.storage_for(length) // PAGE))
        return length

    def _copy(self, source: int, target: int, length: int) -> None:
        """Share full pages, and copy the last."""
        self.reset(target)
        full, rest = divmod(length, PAGE)
        former = self.page_rows[source].pages
        for kind, pages in enumerate(former if length >= self.oldest[source] else former[:1]):
            last = [self.pages[kind].copy(pages[full], rest)] if rest else []
            self.page_rows[target].append(kind, hold(pages[:full]) + last)
        self.allocated[target] = self.storage_for(length)

    def _slide(self, row: int, length: int) -> None:
        for kind, pages in enumerate(self.pages):
            passed = self._first_page(kind, length)
            pages.drop(self.page_rows[row].slide(kind, passed))

    def _first_page(self, kind: int, length: int) -> int:
        """The first page of a layout that a query after `length` positions sees."""
        window = self.layouts[kind].window
        return max(0, window.first(length)) // PAGE if window else 0

    def _keep_windows(self, row: int, length: int) -> Kept:
        """Hold the pages: the row copies one before it writes to it."""
        count, kept = self.storage_for(length) // PAGE, Kept()
        for kind, pages in enumerate(self.page_rows[row].pages[1:], 1):
            kept.append(hold(pages[self._first_page(kind, length) : count]))
            weakref.finalize(kept, self.pages[kind].drop, kept[-1]).atexit = False
        return kept

    def _put_windows(self, row: int, length: int, windows: Kept | None) -> None:
        storage = self.page_rows[row]
        for kind, pages in enumerate(windows or (), 1):
            self.pages[kind].drop(storage.cut(kind, 0))
            passed = [NO_PAGE] * self._first_page(kind, length)
            storage.append(kind, passed + hold(pages))

    def _export(self, row: int, length: int) -> tuple[np.ndarray, Layers, Layers]:
        storage, pages = self.page_rows[row], list(self.page_rows[row].pages)
        if length < self.oldest[row]:
            for kind, kept in enumerate(self.checkpoints[row][length], 1):
                pages[kind] = [NO_PAGE] * self._first_page(kind, length) + kept
        parts = []
        for slot, kind in enumerate(self.kinds):
            window = self.layouts[kind].window
            first = max(0, window.first(length)) if window else 0
            parts.append(self.read(pages, slot, first, length))
        keys, values = ([layer[part] for layer in parts] for part in (0, 1))
        return storage.tokens(0, length), keys, values

    def _load(self, row: int, tokens: np.ndarray, keys: Layers, values: Layers) -> None:
        storage, length = self.page_rows[row], len(tokens)
        for kind, pages in enumerate(self.pages[1:], 1):
            passed = self._first_page(kind, length)
            count = self.storage_for(length) // PAGE - passed
            storage.append(kind, [NO_PAGE] * passed + [pages.take() for _ in range(count)])
        for page, within, new in pieces(storage.pages[0], 0, length):
            page.tokens[within] = tokens[new]
        for layer, both in enumerate(zip(keys, values)):
            numbers = [np.asarray(part, np.float32) for part in both]
            self.write(storage.pages, layer, length - numbers[0].shape[1], *numbers)

    def _split_states(self, numbers: np.ndarray) -> Block:
        return self.blocks.copy([numbers])

    def read(self, pages: Sequence, layer: int, first: int, end: int) -> np.ndarray:
        """Keys and values first .. end - 1 of a layer, float32 [2, G, end - first, D]. pages: of a
        row by layout.
        """
        pages = pages[self.kinds[layer]]
        start, stop = first // PAGE, -(-end // PAGE)
        within = slice(first - start * PAGE, end - start * PAGE)
        parts, scales = zip(*(page.layer(layer) for page in pages[start:stop]))
        numbers = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        numbers = numbers[:, :, within, : self.config.attentions[layer].head_dim]
        if self.bits != 8:
            return numbers.astype(np.float32, copy=False)
        return dequantise(numbers, np.concatenate(scales, axis=2)[:, :, within])

    def write(
        self, pages: Sequence, layer: int, first: int, keys: np.ndarray, values: np.ndarray
    ) -> None:
        """Store keys and values, float32 [G, count, D], from position `first` on. pages: as of
        `read`.
        """
        pages = pages[self.kinds[layer]]
        size, end = keys.shape[2], first + keys.shape[1]
        for part, numbers in enumerate((keys, values)):
            if self.bits == 8:
                numbers, scales = quantise(numbers)
            for page, within, new in pieces(pages, first, end):
                stored, stored_scales = page.layer(layer)
                stored[part, :, within, :size] = numbers[:, new]
                if self.bits == 8:
                    stored_scales[part, :, within] = scales[:, new]

    def _grow(self, ends: Mapping[int, int]) -> None:
        end = max(map(self.storage_for, ends.values()))
        if not rope.length_dependent(self.config) and (
            self.tables is None or len(self.tables.cosines) < end
        ):
            self.tables = Tables.of(self.config, max(end, super().storage_for(end)), self.capacity)
        for row, end in ends.items():
            storage, positions = self.page_rows[row], self.storage_for(end)
            missing = positions // PAGE - len(storage.pages[0])
            storage.append(0, [self.pages[0].take() for _ in range(missing)])
            self.allocated[row] = positions

    def store_tokens(self, row: int, start: int, tokens: np.ndarray) -> None:
        """Store token ids from `start` on. Pages that other rows hold are copied first, and windows
        get theirs.
        """
        storage, end = self.page_rows[row], start + len(tokens)
        first, count = start // PAGE, -(-end // PAGE)
        if len(tokens) == 1 and all(
            first < len(pages) and pages[first].holders == 1 for pages in storage.pages
        ):  # most steps
            storage.pages[0][first].tokens[start % PAGE] = tokens[0]
            return
        for kind, pages in enumerate(storage.pages):
            if len(pages) < count:
                new_pages = [self.pages[kind].take() for _ in range(count - len(pages))]
                storage.append(kind, new_pages)
            for index in range(first, count):
                page = pages[index]
                if page.holders > 1:
                    copied = self.pages[kind].copy(page, max(0, start - index * PAGE))
                    self.pages[kind].drop([storage.replace(kind, index, copied)])
        for page, within, new in pieces(storage.pages[0], start, end):
            page.tokens[within] = tokens[new]
