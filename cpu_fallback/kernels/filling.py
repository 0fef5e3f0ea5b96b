"""Kernels that fill panels (layouts.py) from rows of a file, and look up rows of an embedding.

A kernel reads 16 bytes of each of a panel's 16 rows and transposes them to four vectors, whose
lanes are the rows. Stores are whole cache lines, in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_llama.core.files.quantized import GGUF_FORMATS, GGUFFormat

from . import layouts
from .codes import dequantise, unpack_subs
from .emit import (
    LANES,
    Function,
    Rows,
    Value,
    Variable,
    f16,
    f32,
    i8,
    i16,
    i32,
    i32s,
    i64,
    kernel,
    vector,
)
from .layouts import FIELDS, GROUP, ROWS, FloatLayout, LowBitLayout
from .target import Target

_EVERY_BYTE = 0x01010101


@kernel
def fill(
    f: Function,
    rows,  # int64 [panels][16], addresses of rows, which hold whole blocks of the layout
    panels,
    blocks,  # in a panel
    out,
    panel_bytes,
    *,
    layout: layouts.Layout,
    format: str,
) -> None:
    """Fill panels from rows of a GGUF format; "": numbers, or codes in a byte, without scales."""
    with f.loop(panels) as p, f.loop(blocks) as b:
        of_panel, target = rows + p * (8 * ROWS), out + p * panel_bytes + b * layout.block_bytes
        if isinstance(layout, FloatLayout):
            _fill_from_floats(f, layout, of_panel, b, target)
        elif format:
            fill_block(f, layout, format, of_panel, b, target)
        else:
            with f.loop(layout.groups) as g:
                block = _Block(f, of_panel, b * layout.block + g * GROUP, GROUP)
                chunks = [block.word(4 * k) for k in range(8)]
                codes = target + g * layout.group_bytes + layout.offsets["codes"]
                _store_group(f, layout.bits, chunks, codes)


CHECKSUM_BYTES = 512


@kernel
def checksum(f: Function, start, nbytes, out) -> None:
    """Compute the checksum, CHECKSUM_BYTES, of `nbytes`, a multiple of 64.

    It is 128 words; each is a polynomial, which differs whenever a single byte differs.
    """
    count = CHECKSUM_BYTES // 64
    sums = [Variable(f, f.zero(i32s)) for _ in range(count)]

    def add(address: Value, index: int) -> None:
        sums[index].set(sums[index].get() * 0x01000193 + f.load(i32s, address, 64 * index, 64))

    whole = nbytes // CHECKSUM_BYTES * CHECKSUM_BYTES
    with f.loop(whole, step=CHECKSUM_BYTES) as at:
        for index in range(count):
            add(start + at, index)
    with f.loop(nbytes, whole, 64) as at:
        add(start + at, 0)
    for index, total in enumerate(sums):
        f.store(total.get(), out, 64 * index)


class _Block:
    """Bytes of 16 rows, `nbytes` from `at` on, loaded at their first use."""

    def __init__(self, f: Function, rows: Value, at: Value, nbytes: int):
        self.f, self.rows, self.at, self.nbytes = f, rows, at, nbytes
        self._loaded: dict[int, list[Value]] = {}

    def word(self, offset: int, first: int = 0) -> Value:
        """Four bytes of each row, int32 [16]. first: start of their field."""
        start, skip = self._find(offset, first)
        words, (index, shift) = self._load(start), divmod(skip, 4)
        if shift == 0:
            return words[index]
        return words[index] >> 8 * shift | words[index + 1] << 32 - 8 * shift

    def half(self, offset: int) -> Value:
        """Two bytes of each row, the low half of int32 [16]; `offset` is even."""
        start, skip = self._find(offset)
        word = self._load(start)[skip // 4]
        return word >> 16 if skip % 4 else word

    # As core.files.quantized has them for NumPy, for functions of scales

    def words(self, at: int, count: int) -> Rows:
        return Rows(self.word(at + 4 * i) for i in range(count))

    def split(self, words: Iterable[Value]) -> Rows:
        """The bytes of words, in the low bits."""
        return Rows(word >> 8 * i if i else word for word in words for i in range(4))

    def fields(self, word: Value, bits: int) -> Rows:
        return Rows(word >> bits * i & (1 << bits) - 1 for i in range(8))

    def repeat(self, word: Value, count: int) -> Rows:
        return Rows([word] * count)

    def bytes(self, at: int, count: int) -> Rows:
        return self.split(self.words(at, count // 4))

    def halve_e8m0(self, at: int) -> Value:
        """Half of 2**(e - 127) in bfloat16, subnormal for the smallest two exponents."""
        e = self.word(at) & 255
        return (e < 2).select(e + 1 << 5, e - 1 << 7)

    def halve_e4m3(self, codes: Rows) -> Rows:
        """Halves of E4M3's magnitudes in bfloat16; 127 means zero."""
        values = Rows()
        for code in codes:
            bits = ((code & 0x7F) << 7).truncate(vector(i16)).bitcast(vector(f16))
            half = (bits.widen_half() * 128.0).bitcast(i32s) >> 16
            is_zero = (code & 0xFF).compare("==", 0x7F)
            values.append(is_zero.select(self.f.zero(i32s), half))
        return values

    def _find(self, offset: int, first: int = 0) -> tuple[int, int]:
        """(start of 16 bytes to load, position of `offset` in them)."""
        start = min(first + (offset - first) // 16 * 16, self.nbytes - 16)
        return start, offset - start

    def _load(self, start: int) -> list[Value]:
        """Transpose 16 bytes of each row to four words."""
        if start not in self._loaded:
            f = self.f
            at = self.at + start if start else self.at
            parts = [
                f.load(vector(i32, 4), f.load(i64, self.rows, 8 * row), at, align=1)
                for row in range(ROWS)
            ]
            # quads[j]: rows j, j + 4, j + 8, j + 12; then transpose 4 x 4 words in each quarter
            first, every = list(range(8)), list(range(16))
            quads = [
                parts[j]
                .shuffle(first, parts[j + 4])
                .shuffle(every, parts[j + 8].shuffle(first, parts[j + 12]))
                for j in range(4)
            ]
            low, high = (
                [
                    _shuffle_quarters(quads[j], quads[j + 1], (a, 16 + a, a + 1, 17 + a))
                    for j in (0, 2)
                ]
                for a in (0, 2)
            )
            self._loaded[start] = [
                _shuffle_quarters(left, right, (a, a + 1, 16 + a, 17 + a))
                for left, right in (low, high)
                for a in (0, 2)
            ]
        return self._loaded[start]


def _shuffle_quarters(left: Value, right: Value, lanes: tuple[int, ...]) -> Value:
    """Shuffle each quarter of two vectors alike. lanes: those of the first quarter."""
    return left.shuffle([lane + k for k in range(0, 16, 4) for lane in lanes], right)


def _fill_from_floats(f: Function, layout: FloatLayout, rows: Value, b: Value, out: Value) -> None:
    width = layouts.WIDTHS[layout.dtype]
    block = _Block(f, rows, b * (GROUP * width), GROUP * width)
    for i in range(GROUP * width // 4):
        word, at = block.word(4 * i), 4 * ROWS * i
        if width == 4:
            f.store(word, out, at, 64)
        else:  # two numbers
            f.store(word.truncate(vector(i16)), out, at, 32)
            f.store((word >> 16).truncate(vector(i16)), out, at + 32, 32)


def fill_block(
    f: Function, layout: LowBitLayout, format: str, rows: Value, b: Value, out: Value
) -> None:
    """Fill the block at `out` from block `b` of 16 rows. rows: address of their addresses."""
    file = GGUF_FORMATS[format]
    per_block, groups = layout.block // file.block_size, file.block_size // GROUP
    for i in range(per_block):
        block = _Block(f, rows, b * (per_block * file.nbytes) + i * file.nbytes, file.nbytes)
        parts = file.scales(block)
        if layout.packs_subs:
            parts["subs"] = _pack_subs(parts.pop("scales"), parts.pop("biases"))
        for part, values in parts.items():
            values = values if isinstance(values, list) else [values]
            kind = i16 if layout.width(part) == 2 else i32 if layout.width(part) == 4 else i8
            for number, value in enumerate(values, i * len(values)):
                value = value if kind is i32 else value.truncate(vector(kind))
                f.store(value, out, layout.offsets[part] + number * ROWS * layout.width(part), 16)
        for g in range(groups):
            chunks = [_read_codes(block, file, c) for c in range(GROUP * g, GROUP * (g + 1), 4)]
            codes = out + (i * groups + g) * layout.group_bytes + layout.offsets["codes"]
            _store_group(f, layout.bits, chunks, codes)


def _pack_subs(scales: list[Value], biases: list[Value]) -> list[Value]:
    """Sub scales and biases of eight groups in 6 bits (layouts.LowBitLayout)."""
    vectors = scales[:4], scales[4:], biases[:4]
    return [
        low | (high >> 2 * i & 3) << 6
        for i, lows in enumerate(vectors)
        for low, high in zip(lows, biases[4:])
    ]


def _read_codes(block: _Block, file: GGUFFormat, c: int) -> Value:
    """Codes c .. c + 3 of each row's block, in a byte each: int32 [16]."""
    chunk = None
    for field in file.fields:
        if field.run == 0:
            # Spread four bits to the lowest bits of four bytes.
            four = block.word(field.first + c // 32 * 4, field.first) >> c % 32 & 15
            part = four * 0x00204081 & _EVERY_BYTE
        else:
            per_run = field.run * 8 // field.width
            word = block.word(field.first + c // per_run * field.run + c % field.run, field.first)
            part = word >> c % per_run // field.run * field.width
            if field.width < 8:
                part = part & ((1 << field.width) - 1) * _EVERY_BYTE
        part = part << field.at if field.at else part
        chunk = part if chunk is None else chunk | part
    return chunk ^ -0x7F7F7F80 if file.flip else chunk  # 0x80 in every byte


def _store_group(f: Function, bits: int, chunks: list[Value], out: Value) -> None:
    """Store eight chunks of codes (layouts.FIELDS)."""
    vectors: list[Value | None] = [None] * bits
    for chunk, fields in zip(chunks, FIELDS[bits]):
        for at, lowest, width, place in fields:
            part = chunk >> place if place else chunk
            part = part & ((1 << width) - 1) * _EVERY_BYTE if width < 8 else part
            part = part << lowest if lowest else part
            vectors[at] = part if vectors[at] is None else vectors[at] | part
    for at, packed in enumerate(vectors):
        f.store(packed, out, 64 * at, 64)


@kernel
def embed(
    f: Function,
    rows,  # int64 [16], addresses of rows, all of them valid
    count,  # rows to dequantise, 1 to 16
    blocks,  # in a row, of the layout
    out,  # float32, row t at t * out_bytes
    out_bytes,
    *,
    target: Target,
    layout: LowBitLayout,
    format: str,
) -> None:
    """Dequantise rows of a GGUF format: fill a block of a panel, then read it by column."""
    block, columns = f.allocate_stack(layout.block_bytes), f.allocate_stack(4 * LANES * GROUP)
    with f.loop(blocks) as b:
        fill_block(f, layout, format, rows, b, block)
        subs = unpack_subs(f, layout, block)
        with f.loop(layout.groups) as g:
            for column, weight in dequantise(f, target, layout, block, subs, g, 1):
                f.store(weight, columns, 4 * LANES * column)
            first = (b * layout.groups + g) * (4 * GROUP)
            with f.loop(count) as t, f.loop(GROUP) as column:
                value = f.load(f32, columns + column * (4 * LANES) + t * 4)
                f.store(value, out + t * out_bytes + first + column * 4)
