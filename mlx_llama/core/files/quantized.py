"""AffineWeight: every low-bit format as w = scale * (code - offset) + bias over groups of a row.

There are two kinds of matrices: blocks of GGUF (structs: llama.cpp, ggml/src/ggml-common.h;
reference: gguf.quants) and the packing of mx.quantize. Both are unpacked lazily and exactly to
`Rows`: `Rows.float32` has the bits of gguf.quants.dequantize and mx.dequantize (but for the sign of
zero in 4-bit floating-point codes).

4-bit floating-point codes (E2M1) are unpacked to integers: twice the number, plus 16; their scales
are halved. 8-bit ones (E4M3) are indices into a table, Rows.numbers.

Unpacking processes eight codes at a time, one per byte of a 64-bit word: a shift moves all of them,
a mask clears the bits that crossed into another byte.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_llama.core.models.quantization import FLOAT_MODES

from .tensor import NUMBERS, Mapped, Pages, as_numbers

_SLAB = 1 << 18  # weights dequantised at once; fits a core's cache


@dataclass(frozen=True)
class Rows:
    """Unpacked rows of a low-bit matrix: w = scales * (codes - offset) + biases, group by group;
    w = scales * numbers[codes] of mxfp8.
    """

    codes: np.ndarray  # uint8 [n, K], 0 .. 2**bits - 1, C-contiguous
    scales: np.ndarray  # float32 [n, K / group_size]
    biases: np.ndarray | None = None  # float32 [n, K / group_size], None for zero
    offset: int = 0  # a power of two
    # Formats with two levels: scales = super_scales * sub_scales, and the same for biases
    super_scales: np.ndarray | None = None  # float16 [n, K / 256]
    sub_scales: np.ndarray | None = None  # int8 [n, K / group_size]
    super_biases: np.ndarray | None = None  # float16 [n, K / 256], the file's "dmin" negated
    sub_biases: np.ndarray | None = None  # uint8 [n, K / group_size]
    numbers: np.ndarray | None = None  # float32 [256], the number of each code

    def float32(self) -> np.ndarray:
        """Dequantise to float32 [n, K], rounding after the product and after the sum."""
        n, groups = self.scales.shape
        codes, numbers = self.codes.reshape(n, groups, self.codes.shape[1] // groups), self.numbers
        values = codes.astype(np.float32) if numbers is None else numbers[codes]
        if self.offset:
            values -= np.float32(self.offset)
        with np.errstate(all="ignore"):  # a file may hold infinite scales
            values *= self.scales[:, :, None]
            if self.biases is not None:
                values += self.biases[:, :, None]
        return values.reshape(self.codes.shape)


class AffineWeight(Mapped, ABC):
    """A low-bit matrix [N, K] of a mapped file, read lazily; threads may share it."""

    name: str  # Hugging Face's, such as model.layers.0.self_attn.q_proj.weight
    shape: tuple[int, int]  # (N, K), rows in Hugging Face order
    format: str  # GGUF type, such as "Q4_0", "Q4_K" or "IQ4_NL"; mode of mx.quantize
    # width of the codes of `Rows`: 2, 3, 4, 5, 6 or 8; of tables' values, 8 (IQ4) or 5 (E2M1)
    bits: int
    group_size: int  # weights that share a scale: 16, 32, 64 or 128
    offset: int  # the one of its `Rows`
    has_biases: bool
    two_level: bool
    # that holds the file's (super) scales: "float16", "bfloat16" or "float32"
    scale_dtype: str
    dtype: str  # for activations: "float16" for GGUF, that of the scales for mx.quantize
    mode = "affine"  # mx.quantize's mode for the same numbers
    table = ""  # name in TABLES: the codes are its values, and 4-bit indices in the file
    nbytes: int  # in the file
    column_unit: int  # columns that must stay together

    @abstractmethod
    def part(self, name: str, start: int, stop: int) -> AffineWeight:
        """Rows start .. stop - 1 as a matrix called `name`."""

    @abstractmethod
    def reorder(self, order: np.ndarray) -> AffineWeight:
        """The matrix whose row n is row order[n] of this one; rows may repeat."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> AffineWeight:
        """Columns start .. stop - 1, multiples of `column_unit`."""

    @abstractmethod
    def _unpack(self, ids: np.ndarray | slice) -> Rows:
        """Unpack rows by index (int [n])."""

    def mlx_rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows start .. stop - 1 as mx.quantize packs them in `mode`, not "affine": codes uint32
        [n, K * width / 32] and scales uint8 [n, K / group_size].
        """
        raise NotImplementedError(f"{self.format} is affine")

    @property
    def description(self) -> str:
        """The format for users: "Q4_K", or "affine 4-bit, groups of 64"."""
        return self.format

    def copy(self) -> AffineWeight:
        """The same matrix in memory of its own, where it can be copied."""
        return self

    def rows(self, start: int, stop: int) -> Rows:
        """Unpack rows start .. stop - 1."""
        return self._unpack(slice(start, stop))

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Dequantise rows by index: int [n] -> float32 [n, K]."""
        return self._unpack(np.asarray(ids)).float32()

    def float32(self) -> np.ndarray:
        """Dequantise the whole matrix, several times `nbytes`: for tests and comparisons."""
        n, k = self.shape
        result = np.empty(self.shape, np.float32)
        step = max(1, _SLAB // max(k, 1))
        for start in range(0, n, step):
            stop = min(start + step, n)
            result[start:stop] = self.rows(start, stop).float32()
        return result


class _StoredRows(AffineWeight):
    """A matrix whose rows are those of arrays in the file."""

    arrays: Sequence[np.ndarray]  # [rows in the file, ...]

    @abstractmethod
    def _derive(self, name: str, arrays: Sequence[Any], **where: Any) -> AffineWeight:
        """The matrix of other arrays of the same format. where: `pages` and `order`."""

    @property
    def stored_rows(self) -> int:
        return len(self.arrays[0])

    def copy(self) -> AffineWeight:
        arrays = [array.copy() for array in self.arrays]
        return self._derive(self.name, arrays, pages=(), order=self.order)

    def part(self, name: str, start: int, stop: int) -> AffineWeight:
        first, last, order = self.rows_in_file(start, stop)
        arrays = [array[first:last] for array in self.arrays]
        return self._derive(name, arrays, pages=tuple(self.pages_of(first, last)), order=order)

    def reorder(self, order: np.ndarray) -> AffineWeight:
        order = order if self.order is None else self.order[order]
        return self._derive(self.name, self.arrays, pages=self.pages, order=order)

    def columns(self, start: int, stop: int) -> AffineWeight:
        width = self.shape[1]
        arrays = [
            array[:, start * array.shape[1] // width : stop * array.shape[1] // width]
            for array in self.arrays
        ]
        return self._derive(self.name, arrays, pages=self.pages, order=self.order)

    def _rows_of(self, array: int, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Rows of an array, by index: a view of the file if they are in its order."""
        return self.arrays[array][ids if self.order is None else self.order[ids]]


class GGUFWeight(_StoredRows):
    """A GGUF tensor of one of `GGUF_FORMATS`."""

    scale_dtype = dtype = "float16"

    def __init__(
        self,
        name: str,
        format: str,
        shape: tuple[int, int],
        blocks: np.ndarray,
        order: np.ndarray | None = None,
        pages: Pages = (),
        factors: np.ndarray | None = None,
    ):
        """blocks: uint8 [N, row bytes]. order, pages: as in `Mapped`. factors: of the rows' scales,
        in the file's order, float32 [N]; None for ones.
        """
        layout = GGUF_FORMATS[format]
        self.name, self.format, self.shape = name, format, shape
        self.blocks, self.order, self.pages = blocks, order, pages
        self.factors, self.arrays = factors, (blocks,) if factors is None else (blocks, factors)
        self.bits, self.group_size, self.offset = layout.bits, layout.group_size, layout.offset
        self.has_biases, self.two_level = layout.has_biases, layout.two_level
        self.scale_dtype = layout.scale_dtype if factors is None else "float32"
        self.table = layout.table
        if factors is None and format in ("MXFP4", "NVFP4"):
            self.mode = format.lower()
        self.nbytes = blocks.nbytes * shape[0] // max(len(blocks), 1)
        self.layout, self.column_unit = layout, layout.block_size

    def _derive(self, name: str, arrays: Sequence[Any], **where: Any) -> GGUFWeight:
        blocks, layout = arrays[0], self.layout
        rows = blocks if where["order"] is None else where["order"]
        shape = len(rows), blocks.shape[1] // layout.nbytes * layout.block_size
        factors = arrays[1] if len(arrays) > 1 else None
        return GGUFWeight(name, self.format, shape, blocks, factors=factors, **where)

    def columns(self, start: int, stop: int) -> AffineWeight:
        size, nbytes = self.layout.block_size, self.layout.nbytes
        arrays = self.blocks[:, start // size * nbytes : stop // size * nbytes], *self.arrays[1:]
        return self._derive(self.name, arrays, pages=self.pages, order=self.order)

    def mlx_rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if self.mode == "affine":
            return super().mlx_rows(start, stop)
        blocks = self._rows_of(0, slice(start, stop)).reshape(stop - start, -1, self.layout.nbytes)
        # A byte of the file has codes j and j + run; mx.quantize's has neighbours.
        (codes,) = self.layout.fields
        pairs = blocks[:, :, codes.first :].reshape(stop - start, -1, codes.run)
        first, second = pairs[:, :, 0::2], pairs[:, :, 1::2]
        low, high = first & 15 | second << 4, first >> 4 | second & 0xF0
        packed = np.concatenate([low, high], axis=-1).reshape(stop - start, -1)
        scales = blocks[:, :, : codes.first].reshape(stop - start, -1)
        scales = _ue4m3(scales) if self.mode == "nvfp4" else np.ascontiguousarray(scales)
        return packed.view(np.uint32), scales

    def _unpack(self, ids: np.ndarray | slice) -> Rows:
        rows = self._rows_of(0, ids)
        n, k, layout = len(rows), self.shape[1], self.layout
        blocks = rows.reshape(-1, layout.nbytes)
        unpacked = np.empty((n, k), np.uint8)
        layout.unpack(blocks, unpacked.reshape(-1, layout.block_size).view(np.uint64))
        with np.errstate(all="ignore"):
            scaling = layout.scaling(blocks)
        per_row = k // layout.block_size
        rows_of: dict[str, Any] = {
            key: value.reshape(n, per_row * value.shape[1]) for key, value in scaling.items()
        }
        if len(self.arrays) > 1:
            rows_of["scales"] *= self._rows_of(1, ids)[:, None]
        return Rows(unpacked, offset=self.offset, **rows_of)


class MLXWeight(_StoredRows):
    """A matrix that mx.quantize packed, mode "affine"."""

    format = "affine"
    offset, has_biases, two_level = 0, True, False

    def __init__(
        self,
        name: str,
        bits: int,
        group_size: int,
        packed: np.ndarray,
        scales: np.ndarray,
        biases: np.ndarray,
        pages: Pages = (),
        order: np.ndarray | None = None,
    ):
        """packed: uint32 [N, K * bits / 32], a stream of codes per row, low bits first. pages: of
        the three arrays. order: as in `Mapped`. scales, biases: [N, K / group_size] as in the file:
        float32, float16, or bfloat16 patterns as uint16.
        """
        self.name, self.bits, self.group_size = name, bits, group_size
        self.arrays = packed, scales, biases
        rows = len(packed) if order is None else len(order)
        self.shape = (rows, packed.shape[1] * 32 // bits)
        self.scale_dtype = self.dtype = str(as_numbers(scales).dtype)
        stored = packed.nbytes + scales.nbytes + biases.nbytes
        self.nbytes = stored * rows // max(len(packed), 1)
        self.pages, self.column_unit, self.order = pages, math.lcm(group_size, 32), order

    # the arrays with rows in `order`
    packed = property(lambda self: self._rows_of(0))
    scales = property(lambda self: self._rows_of(1))
    biases = property(lambda self: self._rows_of(2))

    def _derive(self, name: str, arrays: Sequence[Any], **where: Any) -> MLXWeight:
        return MLXWeight(name, self.bits, self.group_size, arrays[0], arrays[1], arrays[2], **where)

    @property
    def description(self) -> str:
        return f"affine {self.bits}-bit, groups of {self.group_size}"

    def _unpack(self, ids: np.ndarray | slice) -> Rows:
        packed = self._rows_of(0, ids)
        codes = unpack_stream(packed, self.bits).reshape(len(packed), self.shape[1])
        scales, biases = (as_numbers(self._rows_of(i, ids)).astype(np.float32) for i in (1, 2))
        return Rows(codes, scales, biases, 0)


# Magnitudes of E2M1's codes, doubled to integers
_FP4_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int16)
# Doubled numbers of E2M1's 16 codes, plus 16. Minus zero becomes zero.
FP4_VALUES = np.concatenate([_FP4_TWICE, -_FP4_TWICE]) + 16
# Numbers of E4M3's 256 codes as mx.dequantize has them: 480 in place of NaN
FP8_NUMBERS = ((np.arange(256) & 0x7F) << 7 | (np.arange(256) & 0x80) << 8).astype(np.uint16).view(
    np.float16
).astype(np.float32) * np.float32(256)


def _e8m0(codes: np.ndarray) -> np.ndarray:
    """Half of each scale 2**(code - 127), float32, exact. codes: uint8."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 128)


class FloatWeight(_StoredRows):
    """A matrix that mx.quantize packed in a mode with floating-point codes; also the experts of
    gpt-oss (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
    """

    has_biases = two_level = False
    scale_dtype = dtype = "bfloat16"  # exact for E8M0 and E4M3; mlx_lm's for the activations

    def __init__(
        self,
        name: str,
        mode: str,
        packed: np.ndarray,
        scales: np.ndarray,
        order: np.ndarray | None = None,
        pages: Pages = (),
    ):
        """packed: uint32 [N, K * width / 32], a stream of codes per row, low bits first. scales:
        uint8 [N, K / group_size], E8M0, or E4M3 of mode "nvfp4". order, pages: as in `Mapped`;
        pages of both arrays.
        """
        self.name, self.format, self.mode = name, mode, mode
        self.packed, self.scales, self.arrays = packed, scales, (packed, scales)
        self.order, self.pages = order, pages
        self.width, self.group_size = FLOAT_MODES[mode]
        self.bits, self.offset, self.table = (5, 16, "fp4") if self.width == 4 else (8, 0, "")
        rows = len(packed) if order is None else len(order)
        self.shape = (rows, packed.shape[1] * 32 // self.width)
        self.nbytes = rows * (4 * packed.shape[1] + scales.shape[1])
        self.column_unit = 32

    def _derive(self, name: str, arrays: Sequence[Any], **where: Any) -> FloatWeight:
        return FloatWeight(name, self.mode, arrays[0], arrays[1], **where)

    def mlx_rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self._rows_of(0, slice(start, stop)), self._rows_of(1, slice(start, stop))

    def _unpack(self, ids: np.ndarray | slice) -> Rows:
        packed, stored = np.ascontiguousarray(self._rows_of(0, ids)), self._rows_of(1, ids)
        if self.width == 8:
            codes = packed.view(np.uint8).reshape(len(packed), self.shape[1])
            return Rows(codes.copy(), 2 * _e8m0(stored), numbers=FP8_NUMBERS)
        pairs = np.empty((len(packed), self.shape[1] // 2), np.uint16)
        _FP4_NEIGHBOURS.take(packed.view(np.uint8).reshape(pairs.shape), out=pairs)
        scales = FP8_NUMBERS[stored] / 2 if self.mode == "nvfp4" else _e8m0(stored)
        return Rows(pairs.view(np.uint8), scales, None, self.offset)


def unpack_stream(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack a little-endian stream of codes, uint32 of any shape, to uint8 [weights]. Eight codes
    are `bits` bytes, read as a 64-bit word. Move its halves apart, then the halves of each half,
    until each byte holds a code.
    """
    if bits == 8:
        return packed.reshape(-1).view(np.uint8).copy()
    count = packed.nbytes // bits
    padded = np.empty(packed.nbytes + 8, np.uint8)  # the last word reads past the end
    padded[: packed.nbytes] = packed.reshape(-1).view(np.uint8)
    padded[packed.nbytes :] = 0
    words = np.ndarray((count,), np.uint64, padded, strides=(bits,)).copy()
    moved = np.empty_like(words)
    width = 8 * bits
    for lane in (64, 32, 16):  # each lane's lower `width` bits are in use
        width //= 2
        low = sum(((1 << width) - 1) << at for at in range(0, 64, lane))
        np.bitwise_and(words, np.uint64(low << width), out=moved)
        moved <<= np.uint64(lane // 2 - width)
        words &= np.uint64(low)
        words |= moved
    return words.view(np.uint8)


def pack_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes uint8 [n, K], K a multiple of 32, to uint32 [n, K * bits / 32], row by row."""
    words = np.ascontiguousarray(codes).view(np.uint64)
    width = bits
    for lane in (16, 32, 64):
        low = sum(((1 << width) - 1) << at for at in range(0, 64, lane))
        moved = words >> np.uint64(lane // 2 - width)
        moved &= np.uint64(low << width)
        words = words & np.uint64(low)
        words |= moved
        width *= 2
    stream = words.view(np.uint8).reshape(-1, 8)[:, :bits]
    return np.ascontiguousarray(stream).reshape(len(codes), -1).view(np.uint32)


# Codes of GGUF blocks


def _repeat(value: int) -> np.uint64:
    """A 64-bit word with the same value in every byte."""
    return np.uint64(value * 0x0101010101010101)


def _words(blocks: np.ndarray, first: int, last: int) -> np.ndarray:
    """Bytes first .. last - 1 of every block as 64-bit words, uint64 [B, (last - first) / 8]."""
    return np.ascontiguousarray(blocks[:, first:last]).view(np.uint64)


def _spread(words: np.ndarray, codes: np.ndarray, run: int, bits: int) -> None:
    """Write bits-wide fields of bytes to `codes`: the lowest of `run` words, then the next. words:
    uint64 [B, W]; codes: uint64 [B, W * 8 / bits].
    """
    shifts = range(0, 8, bits)
    source, target = words.reshape(-1, run), codes.reshape(-1, len(shifts), run)
    # A long strided loop per place in the run: a loop along the run would be too short.
    for i, shift in enumerate(shifts):
        for j in range(run):
            np.right_shift(source[:, j], np.uint64(shift), out=target[:, i, j])
    codes &= _repeat((1 << bits) - 1)


# Byte of single bits -> eight codes of 0 or 1
_SINGLE_BITS = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).view(np.uint64)[:, 0]


# Scales of GGUF blocks, by part of `Rows`, as the file has them: from NumPy's `_Blocks`, or in
# compiled code (the cpu backend's kernels/filling.py), where only the low bits are defined.

Parts = dict[str, Any]


class _Blocks:
    """Words of blocks uint8 [B, bytes]."""

    def __init__(self, blocks: np.ndarray):
        self._blocks = blocks

    def words(self, at: int, count: int) -> list[np.ndarray]:
        """uint32 [B] each."""
        return list(self.bytes(at, 4 * count).view(np.uint32).T)

    def half(self, at: int) -> np.ndarray:
        """uint16 [B, 1]."""
        return self.bytes(at, 2).view(np.uint16)

    def bytes(self, at: int, count: int) -> np.ndarray:
        """uint8 [B, count]."""
        return np.ascontiguousarray(self._blocks[:, at : at + count])

    def split(self, words: Sequence[np.ndarray]) -> np.ndarray:
        """The bytes of words, uint8 [B, 4 words]."""
        joined = np.empty((len(self._blocks), len(words)), np.uint32)
        for i, word in enumerate(words):
            joined[:, i] = word
        return joined.view(np.uint8)

    def fields(self, word: np.ndarray, bits: int) -> np.ndarray:
        """Eight fields of a word or half, the lowest first, [B, 8]."""
        places = np.arange(0, 8 * bits, bits, dtype=word.dtype)
        return word.reshape(-1, 1) >> places & (1 << bits) - 1

    def repeat(self, word: np.ndarray, count: int) -> np.ndarray:
        return word[:, None].repeat(count, axis=1)

    def halve_e8m0(self, at: int) -> np.ndarray:
        """Half of 2**(e - 127) in bfloat16."""
        return _e8m0(self.bytes(at, 1)).view(np.uint32) >> 16

    def halve_e4m3(self, codes: np.ndarray) -> np.ndarray:
        """Halves of E4M3's magnitudes in bfloat16; 127 means zero."""
        return (FP8_NUMBERS[_ue4m3(codes)] / 2).view(np.uint32) >> 16


def _one_level(block: Any) -> Parts:
    return {"scales": block.half(0)}


def _with_bias(block: Any) -> Parts:
    return {"scales": block.half(0), "biases": block.half(2)}


def _two_levels(scale: Any, scales: Any, *minima: Any) -> Parts:
    parts = {"super_scales": scale, "scales": scales}
    if minima:  # a bias is the negated minimum: flip the sign bit
        parts |= {"super_biases": minima[0] ^ 0x8000, "biases": minima[1]}
    return parts


def _q2_k(block: Any) -> Parts:
    pairs = block.bytes(0, 16)
    return _two_levels(block.half(80), pairs & 15, block.half(82), pairs >> 4 & 15)


def _q3_k(block: Any) -> Parts:
    # 16 sub scales of 6 bits: the lower four in nibbles of bytes 0..7, the upper two in 8..11
    *lower, upper = block.words(96, 3)
    low = (lower[i % 2] >> i // 2 * 4 & 0x0F0F0F0F for i in range(4))
    words = [part | (upper >> 2 * i & 0x03030303) << 4 for i, part in enumerate(low)]
    return _two_levels(block.half(108), block.split(words) - 32)


def _q4_k(block: Any) -> Parts:
    # Eight sub scales and eight sub biases of 6 bits each in bytes 4..15. 0..3 are the lower six
    # bits of four bytes each. Of 4..7, the lower four bits are nibbles of the last four bytes, the
    # upper two are the upper bits of the bytes of 0..3.
    first, second, last = block.words(4, 3)

    def split(lower: Any, shift: int) -> Any:
        upper = last >> shift & 0x0F0F0F0F | lower >> 2 & 0x30303030
        return block.split([lower & 0x3F3F3F3F, upper])

    return _two_levels(block.half(0), split(first, 0), block.half(2), split(second, 4))


def _q6_k(block: Any) -> Parts:
    return _two_levels(block.half(208), block.bytes(192, 16))


def _q8_k(block: Any) -> Parts:
    return {"scales": block.repeat(block.words(0, 1)[0], 2)}


def _iq4_xs(block: Any) -> Parts:
    codes = block.fields(block.words(4, 1)[0], 4) | block.fields(block.half(2), 2) << 4
    return _two_levels(block.half(0), codes - 32)


def _mxfp4(block: Any) -> Parts:
    return {"scales": block.halve_e8m0(0)}


def _nvfp4(block: Any) -> Parts:
    return {"scales": block.halve_e4m3(block.bytes(0, 4))}


# Table of both IQ4 types (kvalues_iq4nl), plus 128
_IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
IQ4_VALUES = np.array(_IQ4, np.int16) + 128


def _pair_tables(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint16 [65536] for the low and the high nibbles of two bytes: their values, uint8 each."""
    nibbles = values.astype(np.uint16)[(np.arange(256) >> np.array([[0], [4]])) & 15]
    low, high = nibbles[:, None, :] | nibbles[:, :, None] << np.uint16(8)
    return low.reshape(-1), high.reshape(-1)


# {name of a table: its 16 values}, and the same values for pairs of nibbles
TABLES = {"iq4": IQ4_VALUES, "fp4": FP4_VALUES}
_PAIRS = {name: _pair_tables(values) for name, values in TABLES.items()}
# uint16 [256]: a byte -> the values of its low and its high nibble, uint8 each
_FP4_NEIGHBOURS = (FP4_VALUES[np.arange(256) & 15] | FP4_VALUES[np.arange(256) >> 4] << 8).astype(
    np.uint16
)


def _look_up(table: str, run: int, pairs: np.ndarray, codes: np.ndarray) -> None:
    """Write `run` codes of low nibbles, then of high ones, per `run` bytes; pairs: uint16."""
    half = run // 2
    source, target = pairs.reshape(-1, half), codes.view(np.uint16).reshape(-1, 2, half)
    for i in (0, 1):
        target[:, i] = _PAIRS[table][i].take(source)


def _ue4m3(scales: np.ndarray) -> np.ndarray:
    """Scales of NVFP4 as E4M3, uint8: the sign does not count, and 127 means zero."""
    return np.where(scales == 0x7F, np.uint8(0), scales & np.uint8(0x7F))


@dataclass(frozen=True)
class Field:
    """A part of a block's codes. The lowest fields of a run of bytes belong to its first `run`
    codes, the next fields to the next `run` codes, and so on.
    """

    first: int  # byte
    width: int  # bits of each code
    run: int  # bytes; 0: single bits, where a byte holds eight consecutive codes
    at: int = 0  # position of the bits in the code


@dataclass(frozen=True)
class GGUFFormat:
    """A GGUF tensor type."""

    block_size: int  # weights
    nbytes: int  # size of a block
    group_size: int  # from here on as in AffineWeight
    offset: int
    scales: Callable[[Any], Parts]  # reads a block's scales
    fields: tuple[Field, ...]  # bits of the codes, or of indices into the table
    has_biases: bool = False
    two_level: bool = False
    table: str = ""  # name in TABLES: the codes are its values
    scale_dtype: str = "float16"

    @property
    def bits(self) -> int:
        return {"": sum(field.width for field in self.fields), "iq4": 8, "fp4": 5}[self.table]

    @property
    def flip(self) -> int:
        """Exclusive-or mask of signed codes of 8 bits."""
        return self.offset if self.fields[0].width == 8 else 0

    def scaling(self, blocks: np.ndarray) -> dict[str, np.ndarray]:
        """Scaling fields of `Rows` [B, ...] for blocks uint8 [B, bytes]."""
        parts, dtype = self.scales(_Blocks(blocks)), NUMBERS[self.scale_dtype]
        result = {}
        for kind, sub in (("scales", np.int8), ("biases", np.uint8))[: 1 + self.has_biases]:
            name = f"super_{kind}" if self.two_level else kind
            if self.scale_dtype == "bfloat16":  # ml_dtypes' cast takes several times as long
                numbers = (parts[name].astype(np.uint32, copy=False) << 16).view(np.float32)
            else:
                numbers = parts[name].astype(f"u{dtype.itemsize}", copy=False).view(dtype)
            result[kind] = numbers.astype(np.float32, copy=False)
            if self.two_level:
                below = parts[kind].astype(np.uint8, copy=False).view(sub)
                result |= {name: numbers, f"sub_{kind}": below, kind: result[kind] * below}
        return result

    def unpack(self, blocks: np.ndarray, codes: np.ndarray) -> None:
        """Write the codes of blocks uint8 [B, bytes] to uint64 [B, weights / 8], eight per word."""
        for number, field in enumerate(self.fields):
            last = field.first + self.block_size * field.width // 8
            if self.table:
                pairs = np.ascontiguousarray(blocks[:, field.first : last]).view(np.uint16)
                _look_up(self.table, field.run, pairs, codes)
            elif field.run == 0:
                for j in range(last - field.first):
                    codes[:, j] |= _SINGLE_BITS[blocks[:, field.first + j]] << np.uint64(field.at)
            elif field.width == 8:
                np.bitwise_xor(_words(blocks, field.first, last), _repeat(self.flip), out=codes)
            else:
                part = np.empty_like(codes) if number else codes
                _spread(_words(blocks, field.first, last), part, field.run // 8, field.width)
                if number:
                    part <<= np.uint64(field.at)
                    codes |= part


# Comments list the fields of a block's struct.
GGUF_FORMATS: dict[str, GGUFFormat] = {
    # half d; uint8 qs[16]
    "Q4_0": GGUFFormat(32, 18, 32, 8, _one_level, (Field(2, 4, 16),)),
    # half d, m; uint8 qs[16]
    "Q4_1": GGUFFormat(32, 20, 32, 0, _with_bias, (Field(4, 4, 16),), True),
    # half d; uint8 qh[4], qs[16]
    "Q5_0": GGUFFormat(32, 22, 32, 16, _one_level, (Field(6, 4, 16), Field(2, 1, 0, 4))),
    # half d, m; uint8 qh[4], qs[16]
    "Q5_1": GGUFFormat(32, 24, 32, 0, _with_bias, (Field(8, 4, 16), Field(4, 1, 0, 4)), True),
    # half d; int8 qs[32]
    "Q8_0": GGUFFormat(32, 34, 32, 128, _one_level, (Field(2, 8, 32),)),
    # uint8 scales[16], qs[64]; half d, dmin
    "Q2_K": GGUFFormat(256, 84, 16, 0, _q2_k, (Field(16, 2, 32),), True, True),
    # uint8 hmask[32], qs[64], scales[12]; half d
    "Q3_K": GGUFFormat(256, 110, 16, 4, _q3_k, (Field(32, 2, 32), Field(0, 1, 32, 2)), False, True),
    # half d, dmin; uint8 scales[12], qs[128]
    "Q4_K": GGUFFormat(256, 144, 32, 0, _q4_k, (Field(16, 4, 32),), True, True),
    # half d, dmin; uint8 scales[12], qh[32], qs[128]
    "Q5_K": GGUFFormat(256, 176, 32, 0, _q4_k, (Field(48, 4, 32), Field(16, 1, 32, 4)), True, True),
    # uint8 ql[128], qh[64]; int8 scales[16]; half d
    "Q6_K": GGUFFormat(
        256, 210, 16, 32, _q6_k, (Field(0, 4, 64), Field(128, 2, 32, 4)), False, True
    ),
    # float d; int8 qs[256]; int16 sums[16]
    "Q8_K": GGUFFormat(256, 292, 128, 128, _q8_k, (Field(4, 8, 256),), scale_dtype="float32"),
    # half d; uint8 qs[16]
    "IQ4_NL": GGUFFormat(32, 18, 32, 128, _one_level, (Field(2, 4, 16),), table="iq4"),
    # half d; uint16 scales_h; uint8 scales_l[4], qs[128]
    "IQ4_XS": GGUFFormat(256, 136, 32, 128, _iq4_xs, (Field(8, 4, 16),), False, True, "iq4"),
    # uint8 e; uint8 qs[16]
    "MXFP4": GGUFFormat(
        32, 17, 32, 16, _mxfp4, (Field(1, 4, 16),), table="fp4", scale_dtype="bfloat16"
    ),
    # uint8 e[4]; uint8 qs[32]
    "NVFP4": GGUFFormat(
        64, 36, 16, 16, _nvfp4, (Field(4, 4, 8),), table="fp4", scale_dtype="bfloat16"
    ),
}
