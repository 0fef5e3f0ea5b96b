"""Codes and scales of low-bit weights in panels (layouts.LowBitLayout)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_llama.core.files.quantized import TABLES

from . import layouts
from .emit import LANES, Function, Value, concatenate, f16, i8, i16, i32, i32s, vector
from .layouts import FIELDS, GROUP, LowBitLayout
from .target import Target


class Codes:
    """Codes of a group: chunk k is int32 [rows], byte e of a lane the code of input 4 k + e."""

    def __init__(
        self,
        f: Function,
        target: Target,
        layout: LowBitLayout,
        block: Value,
        group: Value | int,
        tokens: int,
        rows: range = range(LANES),
    ):
        """tokens: that they are multiplied with."""
        # One or two tokens are limited by memory; fewer instructions help. More tokens are limited
        # by the units that multiply, which Zen 4 also uses for gfni, but not for shifts.
        self.gfni = target.gfni and tokens <= 2
        self.address = block + (group * layout.group_bytes + layout.offsets["codes"])
        self.f, self.target, self.rows = f, target, rows
        self.bits, self.table = layout.bits, layout.table
        self.loaded: dict[int, Value] = {}

    def chunk(self, k: int) -> Value:
        result = None
        for at, lowest, width, place in FIELDS[self.bits][k]:
            if at not in self.loaded:
                count, first = len(self.rows), 64 * at + 4 * self.rows.start
                part = self.f.load(vector(i32, count), self.address, first, 4 * count)
                self.loaded[at] = part
            part, mask = self.loaded[at], (1 << width) - 1 << place
            if width < 8:
                part = _extract_field(self.f, self.gfni, part, lowest - place, mask)
            result = part if result is None else result | part
        return look_up(self.f, self.target, self.table, result) if self.table else result

    def order(self) -> list[int]:
        """Chunk numbers, grouped by the vector that holds them."""
        return sorted(range(8), key=lambda k: FIELDS[self.bits][k][-1][0])


def look_up(f: Function, target: Target, table: str, indices: Value) -> Value:
    """Replace each byte of `indices`, int32 [rows], by its value in a table of TABLES."""
    nbytes = 4 * indices.type.count
    width = min(nbytes, {"avx2": 32, "neon": 16}.get(target.name, 64))
    name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[width]
    name = "llvm.aarch64.neon.tbl1.v16i8" if target.name == "neon" else f"llvm.x86.{name}"
    kind, bytes_ = vector(i8, width), indices.bitcast(vector(i8, nbytes))
    signed = [int(value) - 256 * (value > 127) for value in TABLES[table]]
    values = f.constant(kind, signed * (width // 16))
    parts = [bytes_.shuffle(list(range(at, at + width))) for at in range(0, nbytes, width)]
    looked_up = concatenate([f.intrinsic(name, kind, values, part) for part in parts])
    return looked_up.bitcast(indices.type)


def _extract_field(f: Function, gfni: bool, bytes_: Value, move: int, mask: int) -> Value:
    """Shift every byte of int32 [16] right by `move` bits (left if negative), and mask it."""
    if gfni and move and mask & 1:
        # One instruction: bit i of the result is the parity of the byte and row 7 - i of a bit
        # matrix. Higher planes use shifts, which are as fast: mask and "or" become one instruction.
        rows = [1 << i + move if mask >> i & 1 else 0 for i in reversed(range(8))]
        matrix = f.constant(vector(i8, 64), rows * 8)
        name, kind, zero = "llvm.x86.vgf2p8affineqb.512", matrix.type, f.constant(i8, 0)
        return f.intrinsic(name, kind, bytes_.bitcast(kind), matrix, zero).bitcast(i32s)
    shifted = bytes_ >> move if move > 0 else bytes_ << -move if move < 0 else bytes_
    return shifted & mask * 0x01010101


def _e4m3(codes: Value) -> Value:
    """The numbers of the low bytes of int32 [16], exactly."""
    # float16 has the same fields, three bits more and an exponent that is larger by 8. Conversions
    # of its subnormal numbers are fast, unlike operations on those of float32.
    halves = (codes & 0x7F) << 7 | (codes & 0x80) << 8
    return halves.truncate(vector(i16)).bitcast(vector(f16)).widen_half() * 256.0


def unpack_subs(f: Function, layout: LowBitLayout, block: Value) -> Value:
    """Address of a block's sub scales, then biases, [scale groups][16 rows] bytes."""
    if not layout.packs_subs:
        return block + layout.offsets["scales"]
    out, mask = f.allocate_stack(4 * LANES * 4), 0x3F3F3F3F
    first, step = layout.offsets["subs"], 4 * LANES
    words = [f.load(i32s, block, first + step * i, step) for i in range(3)]
    last = words[0] >> 6 & 0x03030303 | words[1] >> 4 & 0x0C0C0C0C | words[2] >> 2 & 0x30303030
    for i, word in enumerate((*(word & mask for word in words), last)):
        f.store(word, out, 4 * LANES * i, 4 * LANES)
    return out


@dataclass(frozen=True)
class Scales:
    """Scales and biases of some rows of a block: outer * inner with two levels, else inner alone.

    subs: unpack_subs of the block; None if only outer scales are read.
    """

    f: Function
    layout: LowBitLayout
    block: Value
    rows: range = range(LANES)
    subs: Value | None = None

    def _load(self, offset: Value | int) -> Value:
        dtype = self.layout.scale_dtype
        offset = offset + layouts.WIDTHS[dtype] * self.rows.start
        return self.f.load_as_float32(dtype, self.block, offset, len(self.rows))

    def outer(self, part: str) -> Value:
        """The rows' super scales or biases of the block; part: "scales" or "biases"."""
        return self._load(self.layout.offsets[f"super_{part}"])

    def inner(self, part: str, group: Value | int) -> Value:
        """The rows' scales or biases of a scale group, without the super level."""
        f, layout, count = self.f, self.layout, len(self.rows)
        if not layout.two_level:
            row_bytes = layouts.WIDTHS[layout.scale_dtype] * LANES
            return self._load(group * row_bytes + layout.offsets[part])
        first = self.rows.start + (0 if part == "scales" else layout.scale_groups * LANES)
        sub = f.load(vector(i8, count), self.subs, group * LANES + first, count)
        wide = vector(i32, count)
        return (sub.sign_extend(wide) if part == "scales" else sub.zero_extend(wide)).to_float()

    def __call__(self, part: str, group: Value | int) -> Value:
        """The product of both levels."""
        inner = self.inner(part, group)
        return self.outer(part) * inner if self.layout.two_level else inner


def scale_group_of(layout: LowBitLayout, group: Value | int, half: int) -> Value | int:
    """The scale group of half a group (16 inputs)."""
    if layout.group_size == 16:
        return group * 2 + half
    return group // (layout.group_size // GROUP)


def dequantise(
    f: Function,
    target: Target,
    layout: LowBitLayout,
    block: Value,
    subs: Value,
    group: Value,
    tokens: int,
) -> Iterator[tuple[int, Value]]:
    """Dequantise a group as the file format defines: yield (input, float32 [16 rows])."""
    codes = Codes(f, target, layout, block, group, tokens)
    scales, bias = Scales(f, layout, block, subs=subs), None
    for half in range(2):
        if half == 0 or layout.group_size == 16:
            scale = scales("scales", scale_group_of(layout, group, half))
            if layout.has_biases:
                bias = scales("biases", scale_group_of(layout, group, half))
        for k in range(4 * half, 4 * half + 4):
            chunk = codes.chunk(k)
            for e in range(4):
                if layout.is_e4m3:
                    number = _e4m3(chunk >> 8 * e if e else chunk)
                else:
                    code = (chunk >> 8 * e if e else chunk) & 255
                    number = (code - layout.offset if layout.offset else code).to_float()
                weight = number * scale
                yield 4 * k + e, weight if bias is None else weight + bias
