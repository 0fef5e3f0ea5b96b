"""Packing of stored weights into panels (layouts.py), at load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import TABLES, AffineWeight, GGUFWeight
from mlx_llama.core.system.forks import cached_property

from ..pages import HUGE_PAGE, allocate
from .layouts import ROWS, WIDTHS, FloatLayout, Layout, LowBitLayout

ADAPTER = FloatLayout("float32")  # matrices of low-rank adapters
_INDICES = {name: np.zeros(256, np.uint8) for name in TABLES}  # by table, each code's
for _name, _values in TABLES.items():
    _INDICES[_name][_values[::-1]] = np.arange(16)[::-1]
_SLAB = 1 << 21  # weights that a thread packs at a time


class Arena:
    """Memory for panels, uint8."""

    ALIGN = 64

    def __init__(self, memory: np.ndarray):
        self.bytes, self.address = memory, memory.ctypes.data
        self._used = 0

    def take(self, nbytes: int) -> int:
        """Allocate `nbytes`; returns their offset in the arena. Raises MemoryError."""
        start = self._used
        self._used = start + -(-nbytes // self.ALIGN) * self.ALIGN
        if self._used > len(self.bytes) + self.ALIGN - 1:
            raise MemoryError(f"the arena of {len(self.bytes)} bytes has no room for {nbytes} more")
        return start


def allocate_arena(nbytes: int) -> Arena:
    """An arena on huge pages if available. Raises MemoryError, OSError or ValueError."""
    return Arena(allocate(nbytes, HUGE_PAGE, huge=True))


@dataclass(frozen=True)
class Plan:
    """A matrix [N, K] and its layout in panels."""

    tensor: Tensor | AffineWeight
    layout: Layout

    @property
    def rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def panels(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def blocks(self) -> int:
        return -(-self.tensor.shape[1] // self.layout.block)

    @property
    def columns(self) -> int:
        """Columns, padded to whole blocks."""
        return self.blocks * self.layout.block

    @property
    def source(self) -> str:
        """The GGUF format that the kernel unpacks; "" for numbers, or codes in a byte each."""
        tensor = self.tensor
        if not isinstance(tensor, GGUFWeight) or tensor.shape[1] != self.columns:
            return ""
        return tensor.format if tensor.factors is None else ""

    @property
    def direct(self) -> np.ndarray | None:
        """The file's rows [N, columns]; None if they are unpacked, padded or transposed first."""
        if self.source:
            return self.tensor.blocks
        if not isinstance(self.tensor, Tensor) or self.tensor.shape[1] != self.columns:
            return None
        rows = self.tensor.stored
        return rows if rows.strides[1] == rows.itemsize else None

    @property
    def panel_bytes(self) -> int:
        return self.blocks * self.layout.block_bytes

    @property
    def nbytes(self) -> int:
        return self.panels * self.panel_bytes


@dataclass(frozen=True)
class Panels:
    """A matrix [N, K] in panels, contiguous from `address` on."""

    plan: Plan
    arena: Arena
    start: int  # offset in the arena

    @property
    def address(self) -> int:
        return self.arena.address + self.start

    @property
    def shape(self) -> tuple[int, int]:
        return self.plan.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    def slabs(self) -> list[Slab]:
        """Split the matrix for several threads."""
        count, step = self.plan.panels, max(1, _SLAB // (self.plan.columns * ROWS))
        return [Slab(self, first, min(first + step, count)) for first in range(0, count, step)]

    def array(self) -> np.ndarray:
        """View the bytes, uint8 [panels, blocks, block bytes]."""
        plan = self.plan
        nbytes = self.arena.bytes[self.start : self.start + plan.nbytes]
        return nbytes.reshape(plan.panels, plan.blocks, -1)


def pack_array(values: np.ndarray, kernel: Kernel) -> Panels:
    """Pack float32 values [N, K] in their own arena. kernel: fills ADAPTER's layout."""
    tensor = Tensor("an adapter", ADAPTER.dtype, values.shape, np.ascontiguousarray(values))
    plan = Plan(tensor, ADAPTER)
    packed = Panels(plan, Arena(allocate(plan.nbytes)), 0)
    for slab in packed.slabs():
        slab.fill(kernel)
    return packed


def weight_layout(tensor: Tensor | AffineWeight) -> Layout:
    if isinstance(tensor, Tensor):
        return FloatLayout(tensor.dtype)
    fields = ("bits", "group_size", "offset", "has_biases", "two_level", "scale_dtype")
    numbers = {name: getattr(tensor, name) for name in fields}
    layout = LowBitLayout(**numbers, is_e4m3=tensor.mode == "mxfp8")
    return dataclasses.replace(layout, bits=4, table=tensor.table) if tensor.table else layout


# filling.fill, compiled for a plan's layout and source
Kernel = Callable[[int, int, int, int, int], None]


@dataclass(frozen=True)
class Slab:
    """Panels first .. last - 1 of a matrix, which a thread fills together."""

    matrix: Panels
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        tensor, (start, stop) = self.matrix.plan.tensor, self._rows
        return tensor.nbytes // tensor.shape[0] * (stop - start)

    @property
    def _rows(self) -> tuple[int, int]:
        """(first, last + 1) of the matrix's rows, without the last panel's padding."""
        return ROWS * self.first, min(ROWS * self.last, self.matrix.plan.rows)

    @cached_property
    def file_rows(self) -> tuple[int, int]:
        """(first, last + 1) of the rows to read in the file."""
        start, stop = self._rows
        if (order := self.matrix.plan.tensor.order) is None:
            return start, stop
        return int(order[start:stop].min()), int(order[start:stop].max()) + 1

    def read_ahead(self) -> None:
        """Ask the system to read the file in the background."""
        first, end = self.file_rows
        self.matrix.plan.tensor.read_ahead(first, end)

    def fill(self, kernel: Kernel) -> None:
        """Fill the panels from the file and release the file's pages.

        Raises ValueError for rows that the kernel cannot read, CheckpointError for a file that was
        truncated since it was opened.
        """
        matrix, plan, count = self.matrix, self.matrix.plan, self.last - self.first
        tensor, (start, stop) = plan.tensor, self._rows
        fits = matrix.start + plan.nbytes <= len(matrix.arena.bytes)
        if not (0 <= self.first < self.last <= plan.panels and fits):
            raise ValueError(
                f"{tensor.name}: panels {self.first} to {self.last} of {plan.panels} are not "
                "all in the arena"
            )
        (first, end), count_in_file = self.file_rows, tensor.stored_rows
        if not 0 <= first < end <= count_in_file:
            raise ValueError(
                f"{tensor.name}: the row order refers to rows outside its {count_in_file}"
            )
        tensor.read(first, end)
        scaling, which = None, slice(start, stop)
        if tensor.order is not None:
            which = tensor.order[start:stop]
        if plan.direct is not None:
            rows = plan.direct
            numbers = np.arange(start, stop) if tensor.order is None else which
        else:
            if isinstance(tensor, Tensor):
                rows = tensor.stored[which]
            else:
                scaling = tensor.rows(start, stop)
                rows = scaling.codes
                if plan.layout.table:
                    rows = _INDICES[plan.layout.table][rows]
            rows, numbers = _pad_to(rows, stop - start, plan.columns), np.arange(stop - start)
        # Columns of a row as the kernel reads them: numbers, codes, or bytes of the file's blocks.
        width = WIDTHS[plan.layout.dtype] if isinstance(plan.layout, FloatLayout) else 1
        columns = plan.columns
        if plan.source:
            columns = columns // tensor.layout.block_size * tensor.layout.nbytes
        if rows.itemsize != width or rows.shape[1] != columns or rows.strides[1] != width:
            raise ValueError(
                f"{tensor.name}: {plan.layout.name} panels cannot be filled from {rows.dtype} rows "
                f"of {rows.shape}, {rows.strides} bytes apart"
            )
        padding = np.zeros(columns * width, np.uint8)  # zero rows have zero scales
        addresses = np.full(ROWS * count, padding.ctypes.data)
        addresses[: stop - start] = rows.ctypes.data + numbers * rows.strides[0]
        out = matrix.address + self.first * plan.panel_bytes
        kernel(addresses.ctypes.data, count, plan.blocks, out, plan.panel_bytes)
        if scaling is not None:
            for part, values, dtype in _scales(plan.layout, scaling):
                self._store_scales(part, values, dtype)
        tensor.release(first, end)

    def _store_scales(self, part: str, values: np.ndarray, dtype: str) -> None:
        """Scatter values [n, groups] to [panel, block, group of the block, 16 rows]."""
        plan, layout, count = self.matrix.plan, self.matrix.plan.layout, self.last - self.first
        per_block = 1 if part.startswith("super") else layout.scale_groups
        values = _pad_to(values, ROWS * count, plan.blocks * per_block)
        if dtype == "byte":
            values = values.view(np.uint8)
        elif dtype == "bfloat16":
            # The values are exact in bfloat16, the upper half of a float32. A cast by ml_dtypes
            # takes five times as long.
            bits = np.asarray(values, np.float32).view(np.uint32)
            values = (bits >> np.uint32(16)).astype(np.uint16)
        else:
            with np.errstate(over="ignore"):  # a file may hold infinite scales
                values = values.astype(dtype, copy=False)
        width = values.itemsize
        shape = count, plan.blocks, per_block, ROWS
        strides = plan.panel_bytes, layout.block_bytes, ROWS * width, width
        at = self.matrix.start + self.first * plan.panel_bytes + layout.offsets[part]
        target = np.ndarray(shape, values.dtype, self.matrix.arena.bytes, at, strides)
        target[...] = values.reshape(count, ROWS, plan.blocks, per_block).transpose(0, 2, 3, 1)


def _scales(layout: LowBitLayout, rows) -> Iterable[tuple[str, np.ndarray, str]]:
    """By part of a block: (name, values [n, groups of the row], stored dtype or "byte")."""
    kinds = ("scales", "biases")[: 1 + layout.has_biases]
    for kind in kinds:
        if layout.two_level:
            yield kind, getattr(rows, f"sub_{kind}"), "byte"
            yield f"super_{kind}", getattr(rows, f"super_{kind}"), layout.scale_dtype
        else:
            yield kind, getattr(rows, kind), layout.scale_dtype


def _pad_to(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Pad with zeros to [rows, columns]; returns a C-contiguous array."""
    if array.shape == (rows, columns):
        return np.ascontiguousarray(array)
    padded = np.zeros((rows, columns), array.dtype)
    padded[: array.shape[0], : array.shape[1]] = array
    return padded
