"""Products of low-bit panels with many tokens, for processors with vpdpbusd.

`products.product` unpacks codes for every tile of tokens. With many tokens it is limited by this
work, and by a load of activations for each product. Here the codes and scales of a span of PANELS
panels are unpacked into the L1 cache for up to STRIP tiles, and every loaded activation serves all
panels. Sums have the order of `products.product`, hence the same bits.
"""

from __future__ import annotations

from .codes import Scales, codes_of, scale_group_of, unpack_subs
from .emit import Function, Module, Value, Variable, f32, f32s, i32, i32s, i64, kernel
from .layouts import FIELDS, SPAN, ActivationLayout, Layout, LowBitLayout
from .products import dot, dot_offset, store_output
from .target import Target

PANELS = 2
MIN_TILES = 2  # from which separate unpacking pays
STRIP = 16  # tiles that share unpacked codes; their sums take 16 KB
TOKENS = 4  # multiplied at once; with PANELS and two planes of activations, 16 sums

VECTOR = 64  # bytes
PRODUCT = {  # as products.PRODUCT, but
    # panels, panel_bytes apart, whose outputs and biases are contiguous
    "weights": i64,
    "panel_bytes": i64,
    "blocks": i64,
    "x": i64,
    "x_tile_bytes": i64,  # the first tile's first record; tiles are x_tile_bytes apart
    "tiles": i64,
    "out": i64,
    "out_stride": i64,
    "bias": i64,
    "accumulate": i64,
}


def applies(target: Target, layout: Layout, x_layout: ActivationLayout) -> bool:
    """True if this is faster than tile by tile: for codes in several fields, which take the most
    work to unpack.
    """
    if target.dot != "vnni" or not isinstance(layout, LowBitLayout) or not x_layout.is_integer:
        return False
    return any(len(fields) > 1 for fields in FIELDS[layout.bits])


@kernel
def product(
    module: Module,
    target: Target,
    layout: LowBitLayout,
    x_layout: ActivationLayout,
    panels: int,
    public: bool = False,
) -> Function:
    """out[t][16 rows] = panels times x[t] (+ bias) (+ out, if accumulate), for `tiles` full tiles
    of tokens.
    """
    name = f"unpacked_product_{layout.name}_{x_layout.name}_{x_layout.offset}_{panels}"
    unpack, multiply = (
        _unpack(module, target, layout, panels),
        _multiply(module, target, layout, x_layout, panels),
    )
    f = Function(module, name, PRODUCT, public=public)
    tile, per_span = target.tile, SPAN // layout.groups
    scratch, sums = (
        f.allocate_stack(_Scratch(layout, panels).nbytes),
        f.allocate_stack(STRIP * tile * panels * VECTOR),
    )
    with f.loop(f.tiles, 0, STRIP) as first:
        count = (f.tiles - first).minimum(STRIP)
        with f.loop(count * (tile * panels)) as i:
            f.store(f.zero(f32s), sums, i * VECTOR, VECTOR)
        with f.loop((f.blocks + (per_span - 1)) // per_span) as span:
            blocks = (f.blocks - span * per_span).minimum(per_span)
            f.call(
                unpack,
                f.weights + span * (per_span * layout.block_bytes),
                f.panel_bytes,
                blocks,
                scratch,
            )
            record = f.x + first * f.x_tile_bytes + span * x_layout.record(tile)
            with f.loop(count) as t:
                f.call(
                    multiply,
                    scratch,
                    record + t * f.x_tile_bytes,
                    f.x_tile_bytes,
                    blocks * layout.groups,
                    sums + t * (tile * panels * VECTOR),
                )
        out = f.out + first * tile * f.out_stride
        with f.loop(count * tile) as t:
            for panel in range(panels):
                at = out + t * f.out_stride + VECTOR * panel if panel else out + t * f.out_stride
                store_output(
                    f, f.load(f32s, sums, t * (panels * VECTOR) + VECTOR * panel, VECTOR), at, panel
                )
    return f.finish()


class _Scratch:
    """Offsets of the parts of an unpacked span."""

    def __init__(self, layout: LowBitLayout, panels: int):
        self.halves = 2 if layout.group_size == 16 else 1
        self.codes = 0  # [8 groups][8 chunks][panels][16 rows][4 bytes]
        # float32 [8 groups][2 halves][panels][16 rows]; scales of whole groups are in the first
        # half
        self.scales = SPAN * 8 * panels * VECTOR
        self.biases = self.scales + SPAN * 2 * panels * VECTOR
        self.outer = self.biases + SPAN * 2 * panels * VECTOR  # [panels][16 rows]
        self.nbytes = self.outer + panels * VECTOR
        # Factor out the outer scale unless there are biases, whose outer scales differ.
        self.factors_outer = layout.two_level and not layout.has_biases


def _unpack(module: Module, target: Target, layout: LowBitLayout, panels: int) -> Function:
    """Unpack `blocks` blocks of each panel to `out`, and prefetch the next span."""
    parts = _Scratch(layout, panels)
    f = Function(
        module,
        f"unpack_{layout.name}_{panels}",
        {"weights": i64, "panel_bytes": i64, "blocks": i64, "out": i64},
    )
    for panel in range(panels):
        first = f.weights + f.panel_bytes * panel if panel else f.weights
        if parts.factors_outer:
            f.store(
                Scales(f, layout, first).outer("scales"), f.out, parts.outer + VECTOR * panel, 4
            )
        with f.loop(f.blocks) as i:
            block = first + i * layout.block_bytes
            f.prefetch(block + SPAN // layout.groups * layout.block_bytes, layout.offsets["codes"])
            subs = unpack_subs(f, layout, block)
            with f.loop(layout.groups) as g:
                codes, scales = (
                    codes_of(f, target, layout, block, g, target.tile),
                    Scales(f, layout, block, subs=subs),
                )
                f.prefetch(
                    block
                    + (
                        g * layout.group_bytes
                        + layout.offsets["codes"]
                        + SPAN // layout.groups * layout.block_bytes
                    ),
                    layout.group_bytes,
                )
                at = f.out + (i * layout.groups + g) * (8 * panels * VECTOR)
                for k in codes.order():
                    f.store(codes.chunk(k), at, parts.codes + VECTOR * (panels * k + panel), 4)
                at = f.out + (i * layout.groups + g) * (2 * panels * VECTOR)
                for half in range(parts.halves):
                    number = scale_group_of(layout, g, half)
                    scale = (
                        scales.inner("scales", number)
                        if parts.factors_outer
                        else scales("scales", number)
                    )
                    f.store(scale, at, parts.scales + VECTOR * (panels * half + panel), 4)
                    if layout.has_biases:
                        f.store(
                            scales("biases", number),
                            at,
                            parts.biases + VECTOR * (panels * half + panel),
                            4,
                        )
    return f.finish()


def _multiply(
    module: Module, target: Target, layout: LowBitLayout, x_layout: ActivationLayout, panels: int
) -> Function:
    """sums[t][panel][16 rows] += unpacked span times a tile's record. groups: of the span."""
    parts, tile = _Scratch(layout, panels), target.tile
    planes = 2 if x_layout.name == "int8x2" else 1
    offset = dot_offset(target, layout)
    f = Function(
        module,
        f"multiply_{layout.name}_{x_layout.name}_{panels}",
        {"span": i64, "x": i64, "tile_bytes": i64, "groups": i64, "sums": i64},
    )
    numbers = range(panels)
    for start in range(0, tile, TOKENS):
        tokens = range(start, start + TOKENS)
        inner = [[Variable(f, f.zero(f32s)) for _ in numbers] for _ in tokens]
        with f.loop(f.groups) as g:
            codes, scales = f.span + g * (8 * panels * VECTOR), f.span + g * (2 * panels * VECTOR)
            x = f.x + g * x_layout.codes(tile)
            if not start:
                f.prefetch(x + f.tile_bytes, x_layout.codes(tile), 1)
                f.prefetch(f.x + f.tile_bytes + (g * 256 + x_layout.at("offset_sum", tile)), 256, 1)
            for half in range(parts.halves):

                def load_sums(part: str, type_) -> list[Value]:
                    part = part if parts.halves == 1 else part.replace("sum", "half_sums")
                    at = f.x + g * (4 * parts.halves * tile) + x_layout.at(part, tile)
                    return [f.load(type_, at, 4 * (half * tile + t), 4).splat() for t in tokens]

                zero = f.zero(i32s)
                low = [
                    [begin] * panels
                    for begin in (load_sums("offset_sum", i32) if offset else [zero] * TOKENS)
                ]
                high = [[zero] * panels for _ in tokens]
                for k in range(8) if parts.halves == 1 else range(4 * half, 4 * half + 4):
                    chunks = [
                        f.load(i32s, codes, parts.codes + VECTOR * (panels * k + panel), VECTOR)
                        for panel in numbers
                    ]
                    for plane, totals in enumerate((high, low)[2 - planes :]):
                        for i, t in enumerate(tokens):
                            code = f.load(i32, x, 4 * (tile * (8 * plane + k) + t), 4).splat()
                            totals[i] = [
                                dot(f, target, total, chunk, code)
                                for total, chunk in zip(totals[i], chunks)
                            ]
                at = VECTOR * panels * half
                scale = [
                    f.load(f32s, scales, parts.scales + at + VECTOR * panel, VECTOR)
                    for panel in numbers
                ]
                bias = [
                    f.load(f32s, scales, parts.biases + at + VECTOR * panel, VECTOR)
                    for panel in numbers
                    if layout.has_biases
                ]
                plain = load_sums("sum", f32) if layout.has_biases else []
                for i in range(TOKENS):
                    for panel in numbers:
                        product = (
                            (high[i][panel] << 8) + low[i][panel] if planes == 2 else low[i][panel]
                        )
                        total = f.fma(product.to_float(), scale[panel], inner[i][panel].get())
                        inner[i][panel].set(
                            f.fma(bias[panel], plain[i], total) if layout.has_biases else total
                        )
        for i, t in enumerate(tokens):
            scale = f.load(f32, f.x, x_layout.at("scale", tile) + 4 * t, 4).splat()
            for panel in numbers:
                at = VECTOR * (t * panels + panel)
                factor = scale
                if parts.factors_outer:
                    factor = scale * f.load(f32s, f.span, parts.outer + VECTOR * panel, VECTOR)
                f.store(
                    f.fma(inner[i][panel].get(), factor, f.load(f32s, f.sums, at, VECTOR)),
                    f.sums,
                    at,
                    VECTOR,
                )
    return f.finish()
