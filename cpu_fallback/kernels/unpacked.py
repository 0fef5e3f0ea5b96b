"""Products of low-bit panels with many tokens, for processors with vpdpbusd.

`products.product` unpacks codes for every tile of tokens. With many tokens it is limited by this
work, and by a load of activations for each product. Here the codes and scales of a span of PANELS
panels are unpacked into the L1 cache for up to STRIP tiles, and every loaded activation serves all
panels. Sums have the order of `products.product`, hence the same bits.
"""

from __future__ import annotations

from .codes import Codes, Scales, scale_group_of, unpack_subs
from .emit import Function, Value, Variable, f32, f32s, i32, i32s, kernel
from .layouts import FIELDS, SPAN, ActivationLayout, Layout, LowBitLayout
from .products import dot, dot_offset, store_output
from .target import Target

PANELS = 2
MIN_TILES = 2  # from which separate unpacking pays
STRIP = 16  # tiles that share unpacked codes; their sums take 16 KB
TOKENS = 4  # multiplied at once; with PANELS and two planes of activations, 16 sums

VECTOR = 64  # bytes


def applies(target: Target, layout: Layout, x_layout: ActivationLayout) -> bool:
    """True if this is faster than tile by tile: for codes in several fields."""
    if target.dot != "vnni" or not isinstance(layout, LowBitLayout) or not x_layout.is_integer:
        return False
    return any(len(fields) > 1 for fields in FIELDS[layout.bits])


@kernel
def product(
    f: Function,
    weights,  # panels, panel_bytes apart, whose outputs and biases are contiguous
    panel_bytes,
    blocks,
    x,  # the first tile's first record; tiles are x_tile_bytes apart
    x_tile_bytes,
    tiles,
    out,
    out_stride,
    bias,
    accumulate,
    *,
    target: Target,
    layout: LowBitLayout,
    x_layout: ActivationLayout,
) -> None:
    """As products.product, for `tiles` full tiles of tokens."""
    unpack = _unpack(f.module, target, layout)
    multiply = _multiply(f.module, target, layout, x_layout)
    tile, per_span = target.tile, SPAN // layout.groups
    scratch = f.allocate_stack(_Scratch(layout).nbytes)
    sums = f.allocate_stack(STRIP * tile * PANELS * VECTOR)
    with f.loop(tiles, 0, STRIP) as first:
        count = (tiles - first).minimum(STRIP)
        with f.loop(count * (tile * PANELS)) as i:
            f.store(f.zero(f32s), sums, i * VECTOR, VECTOR)
        with f.loop((blocks + (per_span - 1)) // per_span) as span:
            in_span = (blocks - span * per_span).minimum(per_span)
            start = weights + span * (per_span * layout.block_bytes)
            f.call(unpack, start, panel_bytes, in_span, scratch)
            record = x + first * x_tile_bytes + span * x_layout.record(tile)
            with f.loop(count) as t:
                inputs, target = record + t * x_tile_bytes, sums + t * (tile * PANELS * VECTOR)
                f.call(multiply, scratch, inputs, x_tile_bytes, in_span * layout.groups, target)
        rows = out + first * tile * out_stride
        with f.loop(count * tile) as t:
            for panel in range(PANELS):
                at = rows + t * out_stride + VECTOR * panel if panel else rows + t * out_stride
                total = f.load(f32s, sums, t * (PANELS * VECTOR) + VECTOR * panel, VECTOR)
                store_output(f, total, at, panel)


class _Scratch:
    """Offsets of the parts of an unpacked span."""

    def __init__(self, layout: LowBitLayout):
        self.halves = 2 if layout.group_size == 16 else 1
        self.codes = 0  # [8 groups][8 chunks][PANELS][16 rows][4 bytes]
        # float32 [8 groups][2 halves][PANELS][16 rows]; those of whole groups in the first
        self.scales = SPAN * 8 * PANELS * VECTOR
        self.biases = self.scales + SPAN * 2 * PANELS * VECTOR
        self.outer = self.biases + SPAN * 2 * PANELS * VECTOR  # [PANELS][16 rows]
        self.nbytes = self.outer + PANELS * VECTOR
        # Factor out the outer scale unless there are biases, whose outer scales differ.
        self.factors_outer = layout.two_level and not layout.has_biases


@kernel
def _unpack(
    f: Function, weights, panel_bytes, blocks, out, *, target: Target, layout: LowBitLayout
) -> None:
    """Unpack `blocks` blocks of each panel to `out`, and prefetch the next span."""
    parts, ahead = _Scratch(layout), SPAN // layout.groups * layout.block_bytes
    for panel in range(PANELS):
        first = weights + panel_bytes * panel if panel else weights
        if parts.factors_outer:
            outer = Scales(f, layout, first).outer("scales")
            f.store(outer, out, parts.outer + VECTOR * panel)
        with f.loop(blocks) as i:
            block = first + i * layout.block_bytes
            f.prefetch(block + ahead, layout.offsets["codes"])
            subs = unpack_subs(f, layout, block)
            with f.loop(layout.groups) as g:
                codes = Codes(f, target, layout, block, g, target.tile)
                scales = Scales(f, layout, block, subs=subs)
                skip = g * layout.group_bytes + layout.offsets["codes"] + ahead
                f.prefetch(block + skip, layout.group_bytes)
                at = out + (i * layout.groups + g) * (8 * PANELS * VECTOR)
                for k in codes.order():
                    f.store(codes.chunk(k), at, parts.codes + VECTOR * (PANELS * k + panel))
                at = out + (i * layout.groups + g) * (2 * PANELS * VECTOR)
                for half in range(parts.halves):
                    number, place = scale_group_of(layout, g, half), PANELS * half + panel
                    find = scales.inner if parts.factors_outer else scales
                    f.store(find("scales", number), at, parts.scales + VECTOR * place)
                    if layout.has_biases:
                        f.store(scales("biases", number), at, parts.biases + VECTOR * place)


@kernel
def _multiply(
    f: Function,
    span,
    x,
    tile_bytes,
    groups,  # in the span
    sums,
    *,
    target: Target,
    layout: LowBitLayout,
    x_layout: ActivationLayout,
) -> None:
    """sums[t][panel][16 rows] += unpacked span times a tile's record."""
    parts, tile = _Scratch(layout), target.tile
    planes = 2 if x_layout.kind == "int8x2" else 1
    offset = dot_offset(target, layout)
    numbers = range(PANELS)
    for start in range(0, tile, TOKENS):
        tokens = range(start, start + TOKENS)
        inner = [[Variable(f, f.zero(f32s)) for _ in numbers] for _ in tokens]
        with f.loop(groups) as g:
            codes, scales = span + g * (8 * PANELS * VECTOR), span + g * (2 * PANELS * VECTOR)
            record = x + g * x_layout.codes(tile)
            if not start:
                f.prefetch(record + tile_bytes, x_layout.codes(tile), 1)
                f.prefetch(x + tile_bytes + (g * 256 + x_layout.at("offset_sum", tile)), 256, 1)
            for half in range(parts.halves):

                def load_sums(part: str, type_) -> list[Value]:
                    part = part if parts.halves == 1 else part.replace("sum", "half_sums")
                    at = x + g * (4 * parts.halves * tile) + x_layout.at(part, tile)
                    return [f.load(type_, at, 4 * (half * tile + t)).splat() for t in tokens]

                zero = f.zero(i32s)
                low = [
                    [begin] * PANELS
                    for begin in (load_sums("offset_sum", i32) if offset else [zero] * TOKENS)
                ]
                high = [[zero] * PANELS for _ in tokens]
                for k in range(8) if parts.halves == 1 else range(4 * half, 4 * half + 4):
                    chunks = [
                        f.load(i32s, codes, parts.codes + VECTOR * (PANELS * k + panel), VECTOR)
                        for panel in numbers
                    ]
                    for plane, totals in enumerate((high, low)[2 - planes :]):
                        for i, t in enumerate(tokens):
                            code = f.load(i32, record, 4 * (tile * (8 * plane + k) + t)).splat()
                            totals[i] = [
                                dot(f, target, total, chunk, code)
                                for total, chunk in zip(totals[i], chunks)
                            ]

                def load_scales(first: int) -> list[Value]:
                    at = first + VECTOR * PANELS * half
                    return [f.load(f32s, scales, at + VECTOR * n, VECTOR) for n in numbers]

                scale = load_scales(parts.scales)
                bias = load_scales(parts.biases) if layout.has_biases else []
                plain = load_sums("sum", f32) if layout.has_biases else []
                for i in range(TOKENS):
                    for panel in numbers:
                        product = low[i][panel]
                        if planes == 2:
                            product = (high[i][panel] << 8) + product
                        total = f.fma(product.to_float(), scale[panel], inner[i][panel].get())
                        if layout.has_biases:
                            total = f.fma(bias[panel], plain[i], total)
                        inner[i][panel].set(total)
        for i, t in enumerate(tokens):
            scale = f.load(f32, x, x_layout.at("scale", tile) + 4 * t).splat()
            for panel in numbers:
                at = VECTOR * (t * PANELS + panel)
                factor = scale
                if parts.factors_outer:
                    factor = scale * f.load(f32s, span, parts.outer + VECTOR * panel, VECTOR)
                total = f.fma(inner[i][panel].get(), factor, f.load(f32s, sums, at, VECTOR))
                f.store(total, sums, at, VECTOR)
