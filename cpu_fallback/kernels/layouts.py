"""Memory layouts of weights and activations for the compiled kernels.

Weights [N, K] are stored as contiguous panels of 16 rows; the last panel is padded with zero rows.
A panel is a sequence of blocks along K, padded with zeros to whole blocks, and a kernel reads it
sequentially once. Lane r of a vector is row r of the panel. Inputs are counted in groups of 32.

Activations are stored in tiles of T tokens (recipe.tiles). A tile is a sequence of records, one per
span of 256 inputs. An integer layout's record holds the span's codes, their scale and their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_llama.core.system.forks import cached_property

ROWS = 16  # a panel's rows, one per lane of a vector
GROUP = 32  # inputs of a group
# groups whose activations share a scale, from a row's start; a multiple of every layout's block
SPAN = 8
SUBS = 12  # bytes of a row's sub scales and biases in 6 bits
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}  # bytes of a number

# Codes of a group take `bits` vectors of 64 bytes without gaps. By bits per code, the fields of
# each chunk k (inputs 4 k .. 4 k + 3, a byte each in a 32-bit lane): (vector, lowest bit in its
# bytes, width, lowest bit in the code). With 6 bits, six chunks take the low bits of a vector each,
# and two chunks the remaining bits.
Field = tuple[int, int, int, int]
FIELDS: dict[int, tuple[tuple[Field, ...], ...]] = {
    2: tuple(((k % 2, k // 2 * 2, 2, 0),) for k in range(8)),
    3: tuple(((0, k, 1, 2), (1 + k % 2, k // 2 * 2, 2, 0)) for k in range(8)),
    4: tuple(((k % 4, k // 4 * 4, 4, 0),) for k in range(8)),
    5: tuple(((0, k, 1, 4), (1 + k % 4, k // 4 * 4, 4, 0)) for k in range(8)),
    6: (
        *(((k, 0, 6, 0),) for k in range(6)),
        *(tuple((first + i, 6, 2, 2 * i) for i in range(3)) for first in (0, 3)),
    ),
    8: tuple(((k, 0, 8, 0),) for k in range(8)),
}


@dataclass(frozen=True)
class FloatLayout:
    """Float weights: a block is 32 inputs, each [16 rows] of `dtype`."""

    dtype: str

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return GROUP

    @property
    def block_bytes(self) -> int:
        return GROUP * ROWS * WIDTHS[self.dtype]


@dataclass(frozen=True)
class LowBitLayout:
    """w = scale * (code - offset) + bias, one scale and bias per row and `group_size` inputs.

    Kernels read a block sequentially, for the hardware prefetcher. A block has no holes but padding
    to 64 bytes before the codes:
        scales       [scale groups][16 rows] of `scale_dtype`
        biases       the same, if has_biases
    or with two levels of scales (256 inputs; scale = super * sub, bias = super bias * sub bias)
        super scale  [16 rows] of `scale_dtype`
        super bias   the same, if has_biases
        sub scales   [scale groups][16 rows] int8
        sub biases   [scale groups][16 rows] uint8, if has_biases
        or, with biases and groups of 32, both in 6 bits: 3 vectors [4 groups][16 rows], whose low 6 bits are the scales of
        groups 0 .. 3, the scales of groups 4 .. 7, the biases of groups 0 .. 3, and whose upper 2 bits are the biases of
        groups 4 .. 7, lowest bits first
    and then
        codes        groups x bits x [16 rows] x 4 bytes, see FIELDS
    table: the codes are stored as indices into a table of core.files.quantized.TABLES.
    is_e4m3: the codes are floating-point numbers of 8 bits (core.files.quantized.FP8_NUMBERS).
    """  # noqa: E501

    bits: int
    group_size: int
    offset: int
    has_biases: bool
    two_level: bool
    scale_dtype: str
    table: str = ""
    is_e4m3: bool = False

    @cached_property
    def name(self) -> str:
        kind = "two_level" if self.two_level else "one_level"
        kind += "_e4m3" if self.is_e4m3 else {"": "", "iq4": "_table", "fp4": "_fp4"}[self.table]
        return f"{self.bits}bit_g{self.group_size}_o{self.offset}_b{int(self.has_biases)}_{kind}_{self.scale_dtype}"  # noqa: E501

    @cached_property
    def groups(self) -> int:
        """Groups of 32 inputs in a block."""
        return 8 if self.two_level else max(2, 2 * self.group_size // GROUP)

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return self.groups * GROUP

    @property
    def scale_groups(self) -> int:
        """Scales of a row in a block."""
        return self.block // self.group_size

    @property
    def packs_subs(self) -> bool:
        """Sub scales and biases take 6 bits, as in the file."""
        return self.two_level and self.has_biases and self.group_size == GROUP

    def width(self, part: str) -> int:
        """Bytes of a number of this part of a block, a scale or bias."""
        return 1 if self.two_level and not part.startswith("super") else WIDTHS[self.scale_dtype]

    @property
    def group_bytes(self) -> int:
        """Bytes of one group's codes."""
        return self.bits * ROWS * 4

    @cached_property
    def offsets(self) -> dict[str, int]:
        kinds = ("scales", "biases")[: 1 + self.has_biases]
        supers = [f"super_{kind}" for kind in kinds if self.two_level]
        sizes = {part: self.width(part) for part in supers}
        if self.packs_subs:
            sizes["subs"] = SUBS
        else:
            sizes |= {kind: self.scale_groups * self.width(kind) for kind in kinds}
        at, parts = 0, {}
        for part, size in sizes.items():
            parts[part] = at
            at += size * ROWS
        parts["codes"] = -(-at // 64) * 64
        return parts

    @property
    def block_bytes(self) -> int:
        return self.offsets["codes"] + self.groups * self.group_bytes


Layout = FloatLayout | LowBitLayout


@dataclass(frozen=True)
class ActivationLayout:
    """A tile of T tokens, a record for each span.

    "float": float32 [256 inputs][T]. "bfloat16": [128 pairs of inputs][T][2], for products with
    bfloat16 weights. "int8x2", "int8", "int16": codes of the 8 groups, x = scale * code; then int32
    offset_sum [8][T] and offset_half_sums [8][2][T] (sums of a group's codes, and of its first and
    last 16, times -offset), float32 sum [8][T] and half_sums [8][2][T] (the plain sums), float32
    scale [T], padded to 256 T bytes. The codes of a group:
        int8x2: code = 256 * high + low, planes [2][8 chunks][T][4 inputs] int8, high first
        int8:   the same with one plane
        int16:  [8 chunks][T][4 inputs: 0, 2, 1, 3] int16, for the 16-bit multiply and pair-add
    """

    kind: str
    limit: int = 0  # the largest code
    offset: int = 0  # the weights' offset; 0: none

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.limit}_{self.offset}"

    @property
    def is_integer(self) -> bool:
        """Codes and scales, for low-bit weights."""
        return self.kind not in ("float", "bfloat16")

    def record(self, tokens: int) -> int:
        """Bytes of a span's record."""
        return SPAN * self.codes(tokens) + (256 * tokens if self.is_integer else 0)

    def codes(self, tokens: int) -> int:
        """Bytes of a group's codes."""
        return {"float": 128, "bfloat16": 64, "int8x2": 64, "int16": 64, "int8": 32}[
            self.kind
        ] * tokens

    def at(self, part: str, tokens: int) -> int:
        return SPAN * self.codes(tokens) + 32 * tokens * _PARTS[part]


_PARTS = {"offset_sum": 0, "offset_half_sums": 1, "sum": 3, "half_sums": 4, "scale": 6}
FLOAT, BFLOAT16 = ActivationLayout("float"), ActivationLayout("bfloat16")


def activation_layout(activation_bits: int, dot: str, offset: int = 0) -> ActivationLayout:
    """The layout for low-bit weights. dot: the target's; offset: the weights'."""
    if activation_bits == 32:
        return FLOAT
    limit = {8: 127, 16: 32639}[activation_bits]  # 127 * 256 + 127
    if dot == "madd":
        return ActivationLayout("int16", limit, offset)
    return ActivationLayout("int8x2" if activation_bits == 16 else "int8", limit, offset)


def unpack(
    layout: ActivationLayout, records: np.ndarray, columns: int, size: int, tokens: int
) -> np.ndarray:
    """Dequantise records, uint8, in tiles of `size` tokens: float32 [tokens, columns]."""
    spans, tiles = columns // (SPAN * GROUP), -(-tokens // size)
    rows = records[: tiles * spans * layout.record(size)].reshape(tiles, spans, layout.record(size))
    raw = np.ascontiguousarray(rows[:, :, : SPAN * layout.codes(size)])
    if not layout.is_integer:
        x, together = raw.view(np.float32), 1
        if layout.kind == "bfloat16":
            x, together = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32), 2
        x = x.reshape(tiles, spans, -1, size, together).transpose(0, 3, 1, 2, 4)
        return x.reshape(-1, columns)[:tokens].copy()
    if layout.kind == "int16":
        codes = raw.view(np.int16).reshape(tiles, spans, SPAN, 8, size, 4)[..., [0, 2, 1, 3]]
    else:
        planes = raw.view(np.int8).reshape(tiles, spans, SPAN, -1, 8, size, 4).astype(np.int32)
        codes = planes[:, :, :, 0]
        if layout.kind == "int8x2":
            codes = 256 * codes + planes[:, :, :, 1]
    # Values beyond the tokens are undefined.
    x = codes.transpose(0, 4, 1, 2, 3, 5).reshape(tiles * size, spans, SPAN * GROUP)[:tokens]
    at = layout.at("scale", size)
    scale = np.ascontiguousarray(rows[:, :, at : at + 4 * size]).view(np.float32)
    scale = scale.transpose(0, 2, 1).reshape(-1, spans, 1)[:tokens]
    return (x.astype(np.float32) * scale).reshape(tokens, columns)
