"""Compiled kernels as Python functions over NumPy arrays.

A kernel takes addresses. These functions check the dtype, shape, order and alignment of every array
first. Outputs have guards of 0xFF bytes (NaN as floats) on both sides, which are checked
afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import numpy as np

from cpu_fallback.kernels import (
    attention,
    filling,
    norms,
    packing,
    paging,
    panels,
    products,
    unpacked,
)
from cpu_fallback.kernels.emit import Function, Module, f32
from cpu_fallback.kernels.layouts import GROUP, ROWS, SPAN, ActivationLayout
from cpu_fallback.kernels.panels import Panels, Plan, allocate_arena
from cpu_fallback.kernels.target import Target, compile_module
from cpu_fallback.pages import PAGE, HeadLayout, PageLayout

GUARD = 256

Wanted = tuple  # a kernel: its kind and parameters, such as ("attend", 64)
_WRITERS: dict[str, Callable[..., Function]] = {
    "product": lambda module, target, layout, x_layout, tokens, several=1: products.product(
        module, target, layout, x_layout, tokens, several, public=True
    ),
    "unpacked": lambda module, target, layout, x_layout: unpacked.product(
        module, target, layout, x_layout, public=True
    ),
    "embed": lambda module, *constants: filling.embed(module, *constants, public=True),
} | {
    name: lambda module, target, *constants, kernel=kernel: kernel(module, *constants, public=True)
    for name, kernel in {
        "pack": packing.pack,
        "sum_of_squares": norms.sum_of_squares,
        "rotate": norms.rotate,
        "store": paging.store,
        "attend": attention.attend,
        "fill": filling.fill,
    }.items()
}


class Memory:
    """An array of zeros or `values` between guards, `off` bytes after the start of a cache line."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: type | str = np.float32,
        values: np.ndarray | None = None,
        off: int = 0,
    ):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._raw = np.full(nbytes + 2 * GUARD + 64, 0xFF, np.uint8)
        self._start = GUARD + -(self._raw.ctypes.data + GUARD) % 64 + off
        self._end = self._start + nbytes
        self.array = self._raw[self._start : self._end].view(dtype).reshape(shape)
        self.array[...] = 0 if values is None else values

    def assert_guards(self) -> None:
        assert (self._raw[: self._start] == 0xFF).all() and (
            self._raw[self._end :] == 0xFF
        ).all(), "written outside"


def address(
    array: np.ndarray, dtype: type | str, shape: tuple[int | None, ...], align: int = 4
) -> int:
    """The array's address. Raises ValueError unless dtype, shape (None: any size), order and
    alignment are the kernel's.
    """
    if array.dtype != np.dtype(dtype) or array.ndim != len(shape) or not array.flags.c_contiguous:
        raise ValueError(
            f"{array.dtype} {array.shape}, contiguous {array.flags.c_contiguous}: not {dtype} "
            f"{shape}"
        )
    if any(size is not None and have != size for have, size in zip(array.shape, shape)):
        raise ValueError(f"shape {array.shape}, not {shape}")
    if array.ctypes.data % align:
        raise ValueError(f"address {array.ctypes.data:#x} is not a multiple of {align}")
    return array.ctypes.data


class Outputs(Memory):
    """Rows of `width` float32, NaN or `before`, with 16 more numbers that stay NaN."""

    def __init__(self, rows: int, width: int, before: np.ndarray | None = None):
        super().__init__((rows, width + 16), values=np.nan)
        self.width = width
        if before is not None:
            address(before, np.float32, (rows, width))
            self.array[:, :width] = before

    def read(self) -> np.ndarray:
        self.assert_guards()
        assert np.isnan(self.array[:, self.width :]).all()
        return self.array[:, : self.width].copy()


class Library:
    """The kernels `wanted`, compiled as one module for a target. key: added to the key of the
    cached machine code.
    """

    def __init__(self, target: Target, wanted: Iterable[Wanted], key: str = ""):
        self.target = target
        wanted = list(wanted)
        module = Module()
        module.triple = target.triple
        functions = {
            signature: _WRITERS[signature[0]](module, target, *signature[1:])
            for signature in wanted
        }
        names = list(dict.fromkeys(function.ir.name for function in functions.values()))
        self._compiled = compile_module(target, f"tests {key} {wanted}", names, lambda: module)
        self._calls = {signature: self._call(function) for signature, function in functions.items()}

    def _call(self, function: Function) -> Callable[..., None]:
        types = [
            ctypes.c_float if value.type == f32 else ctypes.c_int64
            for value in function.parameters.values()
        ]
        return ctypes.CFUNCTYPE(None, *types)(self._compiled.address[function.ir.name])

    def fill(self, tensor) -> Panels:
        """Pack a matrix."""
        plan = Plan(tensor, panels.weight_layout(tensor))
        arena = allocate_arena(plan.nbytes)
        arena.bytes[...] = 0xFF
        matrix = Panels(plan, arena, arena.take(plan.nbytes))
        for slab in matrix.slabs():
            slab.fill(self._calls["fill", plan.layout, plan.source])
        return matrix

    def embed(self, tensor, ids: np.ndarray) -> np.ndarray:
        """float32 [len(ids), K]: up to 16 rows of a GGUF matrix by number."""
        layout, (_, width) = panels.weight_layout(tensor), tensor.shape
        rows = np.full(ROWS, tensor.blocks.ctypes.data)
        rows[: len(ids)] += (
            ids if tensor.order is None else tensor.order[ids]
        ) * tensor.blocks.strides[0]
        out = Outputs(len(ids), width)
        self._calls["embed", layout, tensor.format](
            rows.ctypes.data,
            len(ids),
            width // layout.block,
            out.array.ctypes.data,
            out.array.strides[0],
        )
        return out.read()

    def product(
        self,
        matrix: Panels,
        x_layout: ActivationLayout,
        records: np.ndarray,
        tokens: int,
        bias: np.ndarray | None = None,
        before: np.ndarray | None = None,
        several: int = 1,
    ) -> np.ndarray:
        """float32 [tokens, 16 panels]: matrix times one block of packed activations, plus `bias`
        and `before`.
        """
        plan = matrix.plan
        run = self._calls[
            ("product", plan.layout, x_layout, tokens, *([several] if several > 1 else []))
        ]
        if plan.panels % several:
            raise ValueError(f"{plan.panels} panels in runs of {several}")
        spans = -(-plan.columns // (SPAN * GROUP))
        x = address(records, np.uint8, (spans * x_layout.record(tokens),), 64)
        width = ROWS * plan.panels
        out = Outputs(tokens, width, before)
        weights = address(
            matrix.array(), np.uint8, (plan.panels, plan.blocks, plan.layout.block_bytes), 64
        )
        biases = address(bias, np.float32, (width,)) if bias is not None else 0
        for first in range(0, plan.panels, several):
            run(
                weights + first * plan.panel_bytes,
                x,
                address(out.array, np.float32, (tokens, width + 16)) + 4 * ROWS * first,
                out.array.strides[0],
                plan.blocks,
                biases and biases + 4 * ROWS * first,
                int(before is not None),
            )
        return out.read()

    def unpacked(
        self,
        matrix: Panels,
        x_layout: ActivationLayout,
        records: np.ndarray,
        tiles: int,
        bias: np.ndarray | None = None,
        before: np.ndarray | None = None,
    ) -> np.ndarray:
        """As `product`, of the matrix's first panels with `tiles` full tiles, whose records follow
        each other.
        """
        plan, tile, together = matrix.plan, self.target.tile, unpacked.PANELS
        panels = plan.panels // together * together
        tile_bytes = -(-plan.columns // (SPAN * GROUP)) * x_layout.record(tile)
        x = address(records, np.uint8, (tiles * tile_bytes,), 64)
        if before is not None:
            before = np.ascontiguousarray(before[:, : ROWS * panels])
        out = Outputs(tiles * tile, ROWS * panels, before)
        weights = address(
            matrix.array(), np.uint8, (plan.panels, plan.blocks, plan.layout.block_bytes), 64
        )
        biases = address(bias, np.float32, (ROWS * plan.panels,)) if bias is not None else 0
        for first in range(0, panels, together):
            self._calls["unpacked", plan.layout, x_layout](
                weights + first * plan.panel_bytes,
                plan.panel_bytes,
                plan.blocks,
                x,
                tile_bytes,
                tiles,
                out.array.ctypes.data + 4 * ROWS * first,
                out.array.strides[0],
                biases and biases + 4 * ROWS * first,
                int(before is not None),
            )
        return out.read()

    def pack(
        self,
        x_layout: ActivationLayout,
        source: str,
        tokens: int,
        a: np.ndarray,
        b: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        """The records of a block. a, b: float32 [tokens, K], K a multiple of 256; factor: float32
        [tokens].
        """
        groups = a.shape[1] // GROUP
        out = Memory((groups // SPAN * x_layout.record(tokens),), np.uint8, values=0xEE)
        b = a if b is None else b
        for slot in range(tokens):
            self._calls["pack", x_layout, source, tokens == 1](
                address(a[slot], np.float32, (groups * GROUP,)),
                address(b[slot], np.float32, (groups * GROUP,)),
                1.0 if factor is None else float(factor[slot]),
                groups,
                address(out.array, np.uint8, (None,), 64),
                slot,
                tokens,
            )
        out.assert_guards()
        return out.array

    def sum_of_squares(self, a: np.ndarray) -> np.float32:
        """a: float32 [K], K a multiple of 32."""
        out = Memory((1,))
        self._calls["sum_of_squares",](
            address(a, np.float32, (a.size // GROUP * GROUP,)),
            a.size // GROUP,
            address(out.array, np.float32, (1,)),
        )
        out.assert_guards()
        return out.array[0]

    def rotate(self, x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
        """x: float32 [D]; cosine, sine: [D / 2]."""
        out = Memory(x.shape, values=x)
        half = x.size // 2
        self._calls["rotate", x.size](
            address(out.array, np.float32, (2 * half,)),
            address(cosine, np.float32, (half,)),
            address(sine, np.float32, (half,)),
        )
        out.assert_guards()
        return out.array

    def attend(
        self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, end: int
    ) -> np.ndarray:
        """query: float32 [heads, D]; keys, values: [positions, D]. Invisible rows are NaN in the
        kernel's memory.

        Each page is an array of its own, keys before values; the table has them in reverse order of
        their addresses.
        """
        D = query.shape[1]
        head = HeadLayout(D)
        layout = PageLayout(((1, head),))
        pages = sorted(
            (Memory((2, PAGE, head.width), values=np.nan) for _ in range(-(-end // PAGE))),
            key=lambda page: -page.array.ctypes.data,
        )
        for part, stored in enumerate((keys, values)):
            for position in range(first, end):
                row = pages[position // PAGE].array[part, position % PAGE]
                row[:D], row[D:] = stored[position], 0
        return self._attend(query, pages, layout, first, end)

    def store_and_attend(
        self,
        query: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        first: int,
        end: int,
        bits: int = 8,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Store keys and values [positions, D] in `bits` and attend to them: (output, float16
        numbers or codes [2, positions, D], scales of codes).
        """
        D = query.shape[1]
        head = HeadLayout(D, bits)
        layout = PageLayout(((1, head),))
        # NaN
        pages = [Memory((layout.tokens,), np.uint8, values=0xFF) for _ in range(-(-end // PAGE))]
        numbers = np.empty((2, len(keys), D), np.int8 if bits == 8 else np.float16)
        scales = np.empty((2, len(keys), head.groups), np.float16)
        for part, stored in enumerate((keys, values)):
            for position in range(first, end):
                page, slot = pages[position // PAGE], position % PAGE
                followed = Memory((D + 16,), values=np.nan)
                followed.array[:D] = stored[position]
                at = layout.numbers(0, part) + slot * head.row_bytes
                scale = layout.scales(0, part) + slot * 2 * head.groups if bits == 8 else 0
                self._calls["store", D, bits](
                    address(followed.array, np.float32, (D + 16,)),
                    page.array.ctypes.data + at,
                    page.array.ctypes.data + scale,
                )
                row = page.array[at : at + head.row_bytes].view(numbers.dtype)
                numbers[part, position] = row[:D]
                if bits == 8:
                    groups = page.array[scale : scale + 2 * head.groups]
                    scales[part, position] = groups.view(np.float16)
                else:
                    assert not row[D:].any()
        return self._attend(query, pages, layout, first, end), numbers, scales

    def _attend(
        self, query: np.ndarray, pages: list[Memory], layout: PageLayout, first: int, end: int
    ) -> np.ndarray:
        heads, D = query.shape
        table = Memory((len(pages),), np.int64, values=[page.array.ctypes.data for page in pages])
        asked, out = Memory((heads, D), values=query), Memory((heads, D), values=np.nan)
        scores = Memory((heads, -(-end // 16) * 16 - first // 16 * 16 + 16), values=np.nan)
        ((_, head),) = layout.layers
        name = ("attend", D, head.bits) if head.bits else ("attend", D)
        arguments = (
            address(asked.array, np.float32, (heads, D)),
            address(table.array, np.int64, (len(pages),), 8),
            8,
            *(layout.numbers(0, part) for part in range(2)),
            *(layout.scales(0, part) for part in range(2)),
            address(out.array, np.float32, (heads, D)),
            first,
            end,
            heads,
            address(scores.array, np.float32, (heads, None)),
            scores.array.strides[0],
            D**-0.5,
        )
        # Prefetched: nothing, then keys of these positions and of later ones, in the same pages.
        outputs = []
        for following in (
            (0, 0, 0, 0),
            (table.array.ctypes.data, layout.numbers(0, 0), first // 2, end),
        ):
            self._calls[name](*arguments, *following, 0)
            outputs.append(out.array.copy())
        np.testing.assert_array_equal(*outputs)
        for memory in (asked, *pages, table, out, scores):
            memory.assert_guards()
        return out.array


# ---- packed activations in NumPy, by the description of layouts.ActivationLayout


def write_records(x_layout: ActivationLayout, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Pack x = scale * codes: uint8 [spans x record]. codes: int32 [T, K], K % 256 == 0; scale:
    float32 [T, spans].
    """
    T, K = codes.shape
    groups = codes.reshape(T, -1, SPAN, 8, 4)
    halves = codes.reshape(T, -1, SPAN, 2, 16).sum(axis=4).transpose(1, 2, 3, 0)  # [spans, 8, 2, T]
    if x_layout.kind == "int16":
        parts = [groups[..., [0, 2, 1, 3]].astype(np.int16).transpose(1, 2, 3, 0, 4)]
    else:
        high = (groups + 128) >> 8
        planes = np.stack([high, groups - 256 * high] if x_layout.kind == "int8x2" else [groups])
        assert np.abs(planes).max() <= 128
        parts = [planes.astype(np.int8).transpose(2, 3, 0, 4, 1, 5)]
    total = halves.sum(axis=2)
    parts += [-x_layout.offset * total.astype(np.int32), -x_layout.offset * halves.astype(np.int32)]
    parts += [total.astype(np.float32), halves.astype(np.float32), np.ascontiguousarray(scale.T)]
    spans = [
        np.ascontiguousarray(part).reshape(K // SPAN // GROUP, -1).view(np.uint8) for part in parts
    ]
    records = np.concatenate(spans, axis=1)
    records = np.pad(
        records, ((0, 0), (0, x_layout.record(T) - records.shape[1])), constant_values=0xFF
    )
    return Memory((records.size,), np.uint8, records.reshape(-1)).array


def write_floats(x: np.ndarray) -> np.ndarray:
    """Pack x: float32 [T, K] in the layout "float"."""
    records = np.ascontiguousarray(x.T).view(np.uint8).reshape(-1)
    return Memory((records.size,), np.uint8, records).array


def write_bfloat16(x: np.ndarray) -> np.ndarray:
    """Pack x: float32 [T, K] of bfloat16 values in the layout "bfloat16"."""
    upper = (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
    records = (
        np.ascontiguousarray(upper.reshape(len(x), -1, 2).transpose(1, 0, 2))
        .view(np.uint8)
        .reshape(-1)
    )
    return Memory((records.size,), np.uint8, records).array


def read_records(
    x_layout: ActivationLayout, records: np.ndarray, tokens: int
) -> dict[str, np.ndarray]:
    """Unpack codes [T, K], scale [T, spans], sum, offset_sum [T, groups], half_sums,
    offset_half_sums [T, groups, 2]; for "float" codes only."""
    rows = records.reshape(-1, x_layout.record(tokens))
    T, S = tokens, len(rows)
    if x_layout.kind == "float":
        return {"codes": records.view(np.float32).reshape(S * SPAN * GROUP, T).T}
    if x_layout.kind == "bfloat16":
        upper = (
            records.view(np.uint16)
            .reshape(-1, T, 2)
            .transpose(1, 0, 2)
            .reshape(T, S * SPAN * GROUP)
        )
        return {"codes": (upper.astype(np.uint32) << 16).view(np.float32)}
    raw = np.ascontiguousarray(rows[:, : SPAN * x_layout.codes(T)])
    if x_layout.kind == "int16":
        codes = raw.view(np.int16).reshape(S, SPAN, 8, T, 4)[..., [0, 2, 1, 3]].astype(np.int32)
    else:
        planes = raw.view(np.int8).reshape(S, SPAN, -1, 8, T, 4).astype(np.int32)
        codes = (
            planes[:, :, 0] if x_layout.kind == "int8" else 256 * planes[:, :, 0] + planes[:, :, 1]
        )

    def part(name: str, dtype: type, *shape: int) -> np.ndarray:
        count = int(np.prod(shape)) * T
        words = (
            np.ascontiguousarray(rows[:, x_layout.at(name, T) :][:, : 4 * count])
            .view(dtype)
            .reshape(S, *shape, T)
        )
        return np.moveaxis(words, -1, 0).reshape(T, -1, *shape[1:])

    return {
        "codes": codes.transpose(3, 0, 1, 2, 4).reshape(T, -1),
        "scale": part("scale", np.float32, 1),
        "sum": part("sum", np.float32, SPAN),
        "half_sums": part("half_sums", np.float32, SPAN, 2),
        "offset_sum": part("offset_sum", np.int32, SPAN),
        "offset_half_sums": part("offset_half_sums", np.int32, SPAN, 2),
    }
