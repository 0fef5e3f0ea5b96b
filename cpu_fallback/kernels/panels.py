"""Packing of stored weights into panels (layouts.py), at load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight, GGUFWeight

from ..pages import HUGE_PAGE, map_huge
from .layouts import ROWS, WIDTHS, FloatLayout, Layout, LowBitLayout

_SLAB = 1 << 19  # weights per job; they fit a core's L2 cache


class Arena:
    """One allocation for all panels, on huge pages if available."""

    ALIGN = 64

    def __init__(self, nbytes: int):
        self._map = map_huge(max(1, nbytes) + HUGE_PAGE)
        mapped = np.frombuffer(self._map, np.uint8)
        skip = -mapped.ctypes.data % HUGE_PAGE
        self.bytes = mapped[skip:skip + nbytes]
        self.address = self.bytes.ctypes.data
        self._used = 0

    def take(self, nbytes: int) -> int:
        """Allocate `nbytes`; returns their offset in the arena, a multiple of 64. Raises MemoryError if full."""
        start = self._used
        self._used = start + -(-nbytes // self.ALIGN) * self.ALIGN
        if self._used > len(self.bytes) + self.ALIGN - 1:
            raise MemoryError(f"the arena of {len(self.bytes)} bytes has no room for {nbytes} more")
        return start


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
        """Blocks of a panel."""
        return -(-self.tensor.shape[1] // self.layout.block)

    @property
    def columns(self) -> int:
        """Columns, padded to whole blocks."""
        return self.blocks * self.layout.block

    @property
    def source(self) -> str:
        """The GGUF format whose blocks the kernel unpacks; "" if it takes numbers, or codes one per byte."""
        if not isinstance(self.tensor, GGUFWeight) or self.tensor.layout.table or self.tensor.shape[1] != self.columns:
            return ""
        return self.tensor.format

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
        """(N, K)."""
        return self.plan.tensor.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.plan.nbytes

    def array(self) -> np.ndarray:
        """View the bytes, uint8 [panels, blocks, block bytes]."""
        plan = self.plan
        return self.arena.bytes[self.start:self.start + plan.nbytes].reshape(plan.panels, plan.blocks, -1)


def weight_layout(tensor: Tensor | AffineWeight) -> Layout:
    """The layout of a stored matrix; every format keeps its width."""
    if isinstance(tensor, Tensor):
        return FloatLayout(tensor.dtype)
    return LowBitLayout(tensor.bits, tensor.group_size, tensor.offset, tensor.has_biases, tensor.two_level,
                        tensor.scale_dtype)


def fill(panels: Panels, kernel: Callable[[int, int, int, int, int], None],
         submit: Callable[[Callable[[int, int], None], int, int], object]) -> list:
    """Split the filling of `panels` into jobs: submit(work, first panel, last panel + 1) for each slab.

    kernel: the compiled arithmetic.fill for the plan's layout and source. Returns the results of `submit`.
    """
    plan = panels.plan
    step = max(1, _SLAB // (plan.columns * ROWS))

    def work(first: int, last: int) -> None:
        fill_slab(panels, kernel, first, last)

    return [submit(work, first, min(first + step, plan.panels)) for first in range(0, plan.panels, step)]


def fill_slab(panels: Panels, kernel: Callable[[int, int, int, int, int], None], first: int, last: int) -> None:
    """Fill panels first .. last - 1. Raises ValueError for rows that the kernel cannot read."""
    plan, tensor = panels.plan, panels.plan.tensor
    if not 0 <= first < last <= plan.panels or panels.start + plan.nbytes > len(panels.arena.bytes):
        raise ValueError(f"{tensor.name}: panels {first} to {last} of {plan.panels} are not all in the arena")
    start, stop = ROWS * first, min(ROWS * last, plan.rows)
    scaling = None
    if plan.source:
        scaling = tensor.scaling(start, stop)
        rows = tensor.blocks
        numbers = np.arange(start, stop) if tensor.order is None else tensor.order[start:stop]
        # Pad the last panel with any row's codes: their scales are zero.
        numbers = np.concatenate([numbers, np.full(ROWS * (last - first) - len(numbers), numbers[-1])])
    else:
        if isinstance(tensor, Tensor):
            rows = tensor.bits[start:stop]
        else:
            scaling = tensor.rows(start, stop)
            rows = scaling.codes
        rows = _pad_to(rows, ROWS * (last - first), plan.columns)
        numbers = np.arange(len(rows))
    # Columns of a row as the kernel reads it: numbers, codes, or bytes of the file's blocks.
    width = WIDTHS[plan.layout.dtype] if isinstance(plan.layout, FloatLayout) else 1
    count = plan.columns // tensor.layout.block_size * tensor.layout.nbytes if plan.source else plan.columns
    if rows.itemsize != width or rows.strides[1] != width or rows.shape[1] != count:
        raise ValueError(f"{tensor.name}: {plan.layout.name} panels cannot be filled from {rows.dtype} rows of "
                         f"{rows.shape}, {rows.strides} bytes apart")
    if numbers.shape != (ROWS * (last - first),) or numbers.min() < 0 or numbers.max() >= len(rows):
        raise ValueError(f"{tensor.name}: the row order refers to rows outside its {len(rows)}")
    addresses = rows.ctypes.data + numbers * rows.strides[0]
    kernel(addresses.ctypes.data, last - first, plan.blocks, panels.address + first * plan.panel_bytes, plan.panel_bytes)
    if scaling is not None:
        for part, values, dtype in _scales(plan.layout, scaling):
            _store_scales(panels, first, last, part, values, dtype)


def _scales(layout: LowBitLayout, rows) -> Iterable[tuple[str, np.ndarray, str]]:
    """Yield (part of a block, its values [n, groups of the row], their stored dtype or "byte")."""
    kinds = ("scales", "biases")[:1 + layout.has_biases]
    for kind in kinds:
        if layout.two_level:
            yield kind, getattr(rows, f"sub_{kind}"), "byte"
            yield f"super_{kind}", getattr(rows, f"super_{kind}"), layout.scale_dtype
        else:
            yield kind, getattr(rows, kind), layout.scale_dtype


def _store_scales(panels: Panels, first: int, last: int, part: str, values: np.ndarray, dtype: str) -> None:
    """Scatter values [n, groups] to [panel, block, group of the block, 16 rows]."""
    plan, layout = panels.plan, panels.plan.layout
    per_block = 1 if part.startswith("super") else layout.scale_groups
    values = _pad_to(values, ROWS * (last - first), plan.blocks * per_block)
    if dtype == "bfloat16":
        # The values are exact in bfloat16, the upper half of a float32. A cast by ml_dtypes takes five times as long.
        values = (np.asarray(values, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    elif dtype != "byte":
        with np.errstate(over="ignore"):  # a file may hold infinite scales
            values = values.astype(dtype, copy=False)
    else:
        values = values.view(np.uint8)
    width = 1 if dtype == "byte" else WIDTHS[dtype]
    target = np.ndarray(
        (last - first, plan.blocks, per_block, ROWS), values.dtype, panels.arena.bytes,
        panels.start + first * plan.panel_bytes + layout.offsets[part],
        (plan.panel_bytes, layout.block_bytes, ROWS * width, width))
    target[...] = values.reshape(last - first, ROWS, plan.blocks, per_block).transpose(0, 2, 3, 1)


def _pad_to(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Pad with zeros to [rows, columns]; returns a C-contiguous array."""
    if array.shape == (rows, columns):
        return np.ascontiguousarray(array)
    padded = np.zeros((rows, columns), array.dtype)
    padded[:array.shape[0], :array.shape[1]] = array
    return padded
