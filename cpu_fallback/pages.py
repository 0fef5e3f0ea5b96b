"""Pages of a cache: keys, values and tokens of 64 positions, which rows share."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_llama.core.backends.positions import CACHE_GROUP
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Attention, Window
from mlx_llama.core.system import machine
from mlx_llama.core.system.forks import cached_property

PAGE = 64  # positions
SPARE_BYTES = 32 << 20  # free pages that are kept for the next row
HUGE_PAGE = 2 << 20  # bytes of a huge page of the system


def map_huge(nbytes: int) -> mmap.mmap:
    """Allocate zeros, privately: Linux has no huge pages for shared mappings."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    machine.prefer_huge_pages(mapped)
    return mapped


def allocate(nbytes: int, align: int = 64, huge: bool = False) -> np.ndarray:
    """Allocate zeros, uint8 [nbytes], at a multiple of `align`. huge: on huge pages if any."""
    size = nbytes + align
    raw = np.frombuffer(map_huge(size), np.uint8) if huge else np.zeros(size, np.uint8)
    skip = -raw.ctypes.data % align
    return raw[skip : skip + nbytes]


@dataclass(frozen=True)
class HeadLayout:
    """Layout of the keys or values of a head at one position."""

    head_dim: int
    bits: int | None = None  # None: numbers are float32; 16: float16; 8: int8 codes

    @property
    def width(self) -> int:
        """Numbers of a head and position, in whole vectors of 16."""
        return -(-self.head_dim // 16) * 16

    @property
    def dtype(self) -> np.dtype:
        return np.dtype({None: np.float32, 16: np.float16, 8: np.int8}[self.bits])

    @property
    def row_bytes(self) -> int:
        """Bytes of a head and position."""
        return self.dtype.itemsize * self.width

    @property
    def groups(self) -> int:
        """Scales of a head and position."""
        return -(-self.head_dim // CACHE_GROUP) if self.bits == 8 else 0


@dataclass(frozen=True)
class PageLayout:
    """Layout of a page.

    A row has pages for each window of layers, and for layers without one, whose pages alone have
    its tokens. Numbers come first, by layer, keys before values, head, position, padded with zeros
    to `width`. Scales follow in the same order, float16, for each CACHE_GROUP codes; then int32
    token ids. Offsets are in bytes.
    """

    # by slot: number of heads, 0 in layers with another window, and layout of each
    layers: tuple[tuple[int, HeadLayout], ...]
    window: Window | None = None

    @classmethod
    def of(cls, config: LlamaConfig, bits: int | None = None) -> tuple[PageLayout, ...]:
        """The layouts of a model's keys and values: without a window, then with each."""
        windows = dict.fromkeys([None, *(kind.window for kind in config.kinds)])

        def layout(mixer: Attention, window: Window | None) -> tuple[int, HeadLayout]:
            heads = mixer.key_value_heads if mixer.window == window else 0
            return heads, HeadLayout(mixer.head_dim, bits)

        return tuple(
            cls(tuple(layout(mixer, window) for mixer in config.attentions), window)
            for window in windows
        )

    @cached_property
    def _starts(self) -> list[int]:
        """Offsets of keys and values by slot, of their scales, and of the tokens."""
        numbers, scales = (
            [heads * PAGE * size for heads, size in sizes for _ in range(2)]
            for sizes in (
                [(heads, head.row_bytes) for heads, head in self.layers],
                [(heads, 2 * head.groups) for heads, head in self.layers],
            )
        )
        return list(itertools.accumulate(numbers + scales, initial=0))

    def numbers(self, slot: int, part: int) -> int:
        """Offset of a layer's keys (part 0) or values (part 1)."""
        return self._starts[2 * slot + part]

    def scales(self, slot: int, part: int) -> int:
        """Offset of the scales of a layer's keys or values."""
        return self._starts[2 * (len(self.layers) + slot) + part]

    @property
    def tokens(self) -> int:
        return self._starts[-1]

    @property
    def nbytes(self) -> int:
        return self.tokens + 4 * PAGE


class Page:
    """One page, at the start of a cache line."""

    def __init__(self, layout: PageLayout):
        large = layout.nbytes >= HUGE_PAGE
        memory = map_huge(layout.nbytes) if large else allocate(layout.nbytes)
        self.memory = np.frombuffer(memory, np.uint8)
        self.address, self.layout = self.memory.ctypes.data, layout
        self.tokens = self.memory[layout.tokens :].view(np.int32)  # [PAGE]
        self.holders = 0  # number of rows that have the page

    def layer(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """A layer's keys and values [2, G, PAGE, width], and their scales [2, G, PAGE, groups]."""
        heads, head = self.layout.layers[slot]

        def part(start: int, width: int, dtype: np.dtype) -> np.ndarray:
            shape = 2, heads, PAGE, width
            return np.ndarray(shape, dtype, self.memory, start)

        return (
            part(self.layout.numbers(slot, 0), head.width, head.dtype),
            part(self.layout.scales(slot, 0), head.groups, np.dtype(np.float16)),
        )


NO_PAGE = Page(PageLayout(()))
NO_PAGE.address = 0


class Pages:
    """The pages of a cache's rows. Up to SPARE_BYTES of free pages are kept."""

    def __init__(self, layout: PageLayout):
        self.layout = layout
        self.taken = 0  # pages that rows hold
        self._spare: list[Page] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that rows hold, shared pages once."""
        return self.taken * self.layout.nbytes

    def take(self) -> Page:
        """Take a page for one row. Its contents are undefined."""
        page = self._spare.pop() if self._spare else Page(self.layout)
        page.holders = 1
        self.taken += 1
        return page

    def copy(self, page: Page, count: int) -> Page:
        """Take a page for one row, and copy the first `count` positions of `page` to it."""
        new = self.take()
        for slot in range(len(self.layout.layers)):
            for target, source in zip(new.layer(slot), page.layer(slot)):
                target[:, :, :count] = source[:, :, :count]
        new.tokens[:count] = page.tokens[:count]
        return new

    def drop(self, pages: Iterable[Page]) -> None:
        """Give back pages that the caller has removed from a row."""
        for page in pages:
            page.holders -= 1
            if not page.holders:
                self.taken -= 1
                if (len(self._spare) + 1) * self.layout.nbytes <= SPARE_BYTES:
                    self._spare.append(page)


class Row:
    """Pages of one sequence by layout, in order; NO_PAGE where a window has passed."""

    def __init__(self, layouts: int) -> None:
        self.pages: list[list[Page]] = [[] for _ in range(layouts)]
        self._make_table(0)

    def append(self, kind: int, pages: list[Page]) -> None:
        """Append pages of the layout of number `kind`."""
        first, last = len(self.pages[kind]), len(self.pages[kind]) + len(pages)
        if last > len(self.table):
            self._make_table(max(8, 2 * last))
        self.table[first:last, kind] = [page.address for page in pages]
        self.pages[kind] += pages

    def replace(self, kind: int, index: int, page: Page) -> Page:
        """Put another page at `index`; returns the former one."""
        former, self.pages[kind][index] = self.pages[kind][index], page
        self._make_table(len(self.table))
        return former

    def cut(self, kind: int, count: int) -> list[Page]:
        """Keep the first `count` pages; returns the others."""
        rest = self.pages[kind][count:]
        if rest:
            del self.pages[kind][count:]
            self._make_table(len(self.table))
        return [page for page in rest if page is not NO_PAGE]

    def slide(self, kind: int, count: int) -> list[Page]:
        """Let go of the first `count` pages; returns them."""
        passed = self.pages[kind][:count]
        self.pages[kind][:count] = [NO_PAGE] * len(passed)
        self._make_table(len(self.table))
        return [page for page in passed if page is not NO_PAGE]

    def tokens(self, first: int, end: int) -> np.ndarray:
        """Copy token ids first .. end - 1, int32."""
        parts = [page.tokens[within] for page, within, _ in pieces(self.pages[0], first, end)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _make_table(self, size: int) -> None:
        """Make a new table of addresses, int64 [size, layouts]: a run may still read the old."""
        table = np.zeros((size, len(self.pages)), np.int64)
        for kind, pages in enumerate(self.pages):
            table[: len(pages), kind] = [page.address for page in pages]
        self.table, self.address = table, table.ctypes.data


def pieces(pages: Sequence[Page], first: int, end: int) -> Iterator[tuple[Page, slice, slice]]:
    """Split positions by page: yield (page, positions in it, the same from `first` on)."""
    at = first
    while at < end:
        number, start = divmod(at, PAGE)
        count = min(PAGE - start, end - at)
        yield pages[number], slice(start, start + count), slice(at - first, at - first + count)
        at += count


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise float32 [..., D] to int8 codes [..., D] and float16 scales [..., groups]."""
    size = x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % CACHE_GROUP)])
    padded = padded.reshape((*x.shape[:-1], -1, CACHE_GROUP))
    scales = (np.abs(padded).max(axis=-1) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    codes = np.rint(padded / np.where(wide > 0, wide, np.float32(np.inf)))
    codes = np.clip(codes, -127, 127).astype(np.int8).reshape((*x.shape[:-1], -1))
    return codes[..., :size], scales


def dequantise(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Multiply codes by scales: float32 [..., D]."""
    wide = np.repeat(scales.astype(np.float32), CACHE_GROUP, axis=-1)
    return codes * wide[..., : codes.shape[-1]]
