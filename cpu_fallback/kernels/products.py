"""Products of panels with packed activations.

Every sum has a fixed order, the same for one token and a tile, so results do not depend on threads,
tiles, or whether a position was decoded or part of a prompt. Callers check addresses and counts.
"""

from __future__ import annotations

import functools
import operator

from llvmlite import ir

from . import layouts
from .codes import Codes, Scales, dequantise, scale_group_of, unpack_subs
from .emit import Function, Value, Variable, bf16, concatenate, f32, i8, i16, i32, kernel, vector
from .layouts import GROUP, ROWS, ActivationLayout, FloatLayout, LowBitLayout
from .target import Target

CHAIN = 4  # dependent integer products of one token
PANELS_AT_ONCE = 4  # at most; of float weights for one token


def panels_at_once(target: Target, layout: layouts.Layout, tokens: int) -> int:
    """Number of consecutive panels to multiply together, a divisor of PANELS_AT_ONCE."""
    if not isinstance(layout, FloatLayout):
        return 2 if layout.is_e4m3 and tokens <= 2 else 1
    # Independent sums hide the latency of fma; the registers hold `sums` beside the weights. Each
    # panel is a stream from memory, and two streams are read faster than four.
    sums, limit = (16, 2) if target.wide else (4, PANELS_AT_ONCE)
    return max(1, min(limit, sums // tokens))


@kernel
def product(
    f: Function,
    weights,  # address of the panel
    x,  # the activations' first record
    out,  # float32, token t at t * out_stride bytes
    out_stride,
    blocks,  # in the panel
    bias,  # float32 [16], or 0
    accumulate,
    *,
    target: Target,
    layout: layouts.Layout,
    x_layout: ActivationLayout,
    tokens: int,
    panels: int = 1,
) -> None:
    """out[t][16 rows] = panel times x[t] (+ bias) (+ out, if accumulate) for `tokens` tokens.

    panels > 1 (float weights and float activations only): multiply this many consecutive panels.
    """
    if isinstance(layout, FloatLayout):
        sums = _float_sums(f, target, layout, x_layout == layouts.BFLOAT16, tokens, panels)
    elif x_layout.kind == "float":
        sums = _dequantised_sums(f, target, layout, tokens, panels)
    else:
        sums = _integer_sums(f, target, layout, x_layout, tokens)
    for panel in range(panels):
        for t in range(tokens):
            at = out + out_stride * t + 64 * panel if t or panel else out
            store_output(f, sums[panel * tokens + t].get(), at, panel)


def store_output(f: Function, value: Value, at: Value, panel: int) -> None:
    """Store a panel's 16 outputs of a token, plus bias and former outputs if asked for."""
    total = Variable(f, value)
    with f.if_then(f.bias.compare("!=", 0)):
        total.set(total.get() + f.load(vector(f32), f.bias, 64 * panel))
    with f.if_then(f.accumulate.compare("!=", 0)):
        total.set(total.get() + f.load(vector(f32), at))
    f.store(total.get(), at)


def _float_sums(
    f: Function, target: Target, layout: FloatLayout, pairs: bool, tokens: int, panels: int
) -> list[Variable]:
    """Products of float weights, 8 inputs at a time. pairs: of bfloat16 numbers, two inputs to an
    instruction, for which subnormal numbers count as zero; else of float32 numbers.
    """
    unroll, width = 8, layouts.WIDTHS[layout.dtype] * ROWS
    interleaved = [16 * half + row for row in range(16) for half in range(2)]
    sums = [Variable(f, f.zero(vector(f32))) for _ in range(tokens * panels)]
    steps, panel_bytes = f.blocks * (GROUP // unroll), f.blocks * layout.block_bytes
    with f.loop(steps) as i:
        weights = f.weights + i * (unroll * width)
        x = f.x + i * (unroll * (2 if pairs else 4) * tokens)
        for panel in range(panels):
            if tokens > 1:  # the next panels' weights
                f.prefetch(weights + panel_bytes * (panels + panel), unroll * width)
            else:
                for level, distance in target.prefetch(layout.name):
                    f.prefetch(weights + (panel_bytes * panel + distance), unroll * width, level)
        for u in range(0, unroll, 1 + pairs):
            for panel in range(panels):
                first = weights + panel_bytes * panel if panel else weights
                if pairs:
                    w = f.load(vector(i16, 32), first, u * width).shuffle(interleaved)
                    w = w.bitcast(vector(bf16, 32))
                else:
                    w = f.load_as_float32(layout.dtype, first, u * width)
                for t in range(tokens):
                    total = sums[panel * tokens + t]
                    value = f.load(i32 if pairs else f32, x, 4 * (u // (1 + pairs) * tokens + t))
                    value = value.splat()
                    if pairs:
                        name, both = "llvm.x86.avx512bf16.dpbf16ps.512", value.bitcast(w.type)
                        total.set(f.intrinsic(name, vector(f32), total.get(), w, both))
                    else:
                        total.set(f.fma(w, value, total.get()))
    return sums


def flips_codes(target: Target, layout: LowBitLayout) -> bool:
    """True if 128 is subtracted from the codes: NEON's dot product takes signed bytes."""
    return target.dot == "sdot" and (layout.bits == 8 or layout.table == "iq4")


def dot_offset(target: Target, layout: LowBitLayout) -> int:
    """The offset to subtract from the codes in the dot product."""
    return layout.offset - 128 if flips_codes(target, layout) else layout.offset


def _integer_sums(
    f: Function, target: Target, layout: LowBitLayout, x_layout: ActivationLayout, tokens: int
) -> list[Variable]:
    """Integer products within a group; float32 sums over a span, and over the row."""
    # NEON multiplies a quarter of the rows at a time, whose sums for a tile its registers hold.
    quarters = 4 if target.dot == "sdot" else 1
    parts = [range(first, first + ROWS // quarters) for first in range(0, ROWS, ROWS // quarters)]
    zero = f.zero(vector(f32, ROWS // quarters))
    sums = [[Variable(f, zero) for _ in range(tokens)] for _ in parts]
    halves = 2 if layout.group_size == 16 else 1
    flip, offset = flips_codes(target, layout), dot_offset(target, layout)
    if offset and offset != x_layout.offset:
        raise ValueError(
            f"{layout.name} needs activations with sums for the offset {offset}, not "
            f"{x_layout.offset}"
        )
    per_span = layouts.SPAN // layout.groups
    # Factor out the outer scale unless there are biases, whose outer scales differ.
    factor_outer = layout.two_level and not layout.has_biases
    with f.loop((f.blocks + (per_span - 1)) // per_span) as span:
        first = f.weights + span * (per_span * layout.block_bytes)
        record = f.x + span * x_layout.record(tokens)
        inner = [[Variable(f, zero) for _ in range(tokens)] for _ in parts]

        def add_group(block, subs, g, span_group, rows: range, inner: list[Variable]) -> None:
            """g: number of the group in its block; span_group: in the span; inner: by token."""
            codes = Codes(f, target, layout, block, g, tokens, rows)
            scales = Scales(f, layout, block, rows, subs)
            for half in range(halves):
                order = codes.order() if halves == 1 else range(4 * half, 4 * half + 4)
                chunks = [
                    (k, codes.chunk(k) ^ -0x7F7F7F80 if flip else codes.chunk(k)) for k in order
                ]

                def load_sums(part: str, type_: ir.Type) -> list[Value]:
                    part = part if halves == 1 else part.replace("sum", "half_sums")
                    at = record + span_group * (4 * halves * tokens) + x_layout.at(part, tokens)
                    places = [4 * (half * tokens + t) for t in range(tokens)]
                    return [f.load(type_, at, place).splat(len(rows)) for place in places]

                starts = [f.zero(vector(i32, len(rows)))] * tokens
                if offset:
                    starts = load_sums("offset_sum", i32)
                scale_group = scale_group_of(layout, g, half)
                scale = (scales.inner if factor_outer else scales)("scales", scale_group)
                x = record + span_group * x_layout.codes(tokens)
                products = _products(f, target, x_layout, x, chunks, starts)
                for total, product in zip(inner, products):
                    total.set(f.fma(product.to_float(), scale, total.get()))
                if layout.has_biases:
                    bias = scales("biases", scale_group)
                    for total, x_sum in zip(inner, load_sums("sum", f32)):
                        total.set(f.fma(bias, x_sum, total.get()))

        with f.loop((f.blocks - span * per_span).minimum(per_span)) as i:
            block = first + i * layout.block_bytes
            _prefetch(f, target, block, layout.offsets["codes"], layout, tokens)
            subs = unpack_subs(f, layout, block)
            # a loop: in unrolled code LLVM would reorder the reads
            with f.loop(layout.groups) as g:
                codes = block + (g * layout.group_bytes + layout.offsets["codes"])
                _prefetch(f, target, codes, layout.group_bytes, layout, tokens)
                for rows, span_sums in zip(parts, inner):
                    add_group(block, subs, g, i * layout.groups + g, rows, span_sums)
        for rows, span_sums, totals in zip(parts, inner, sums):
            outer = Scales(f, layout, first, rows).outer("scales") if factor_outer else None
            for t in range(tokens):
                scale = f.load(f32, record, x_layout.at("scale", tokens) + 4 * t).splat(len(rows))
                span_sum = span_sums[t].get()
                factor = scale if outer is None else scale * outer
                totals[t].set(f.fma(span_sum, factor, totals[t].get()))
    if quarters == 1:
        return sums[0]
    return [Variable(f, concatenate([totals[t].get() for totals in sums])) for t in range(tokens)]


def _prefetch(
    f: Function, target: Target, address: Value, nbytes: int, layout: LowBitLayout, tokens: int
) -> None:
    """Prefetch weights ahead of those at `address`."""
    if tokens > 2 and target.tile_prefetch_bytes:
        f.prefetch(address + target.tile_prefetch_bytes, nbytes, level=1)
    elif tokens == target.tile and not target.tile_prefetch_bytes:
        f.prefetch(address + f.blocks * layout.block_bytes, nbytes)  # the next panel's weights
    elif tokens <= 2:
        for level, distance in target.prefetch(layout.name):
            f.prefetch(address + distance, nbytes, level)


def _products(
    f: Function,
    target: Target,
    x_layout: ActivationLayout,
    x: Value,
    chunks: list[tuple[int, Value]],
    starts: list[Value],
) -> list[Value]:
    """By token, int32 [rows]: its start plus sums over chunks (number, codes) of products of codes.

    Integer sums may have any order: chains of at most CHAIN sums for a single token, which a core
    overlaps, else one chain per plane.
    """
    tokens = len(starts)
    if target.dot == "madd":
        products = starts
        for k, chunk in chunks:
            for which, codes in enumerate((chunk & 0x00FF00FF, (chunk >> 8) & 0x00FF00FF)):
                places = [8 * (tokens * k + t) + 4 * which for t in range(tokens)]
                pairs = [f.load(i32, x, place).splat() for place in places]
                products = [
                    total + _multiply_pairs(f, codes, pair) for total, pair in zip(products, pairs)
                ]
        return products

    def load_code(index: int) -> Value:
        """Four codes of x in all lanes."""
        if target.dot == "sdot":  # whose operand is one lane of a register
            return f.load(vector(i32, 4), x, 16 * (index // 4)).shuffle([index % 4] * 4)
        return f.load(i32, x, 4 * index).splat()

    def add(totals: list[Value], plane: int, chunks: list[tuple[int, Value]]) -> list[Value]:
        for k, chunk in chunks:
            at = tokens * (8 * plane + k)
            totals = [
                dot(f, target, total, chunk, load_code(at + t)) for t, total in enumerate(totals)
            ]
        return totals

    if x_layout.kind == "int8":
        return add(starts, 0, chunks)
    zero = f.zero(starts[0].type)
    if tokens == 1:
        totals = []
        for plane, start in enumerate((zero, starts[0])):
            chains = [
                add([zero if at else start], plane, chunks[at : at + CHAIN])[0]
                for at in range(0, len(chunks), CHAIN)
            ]
            totals.append(functools.reduce(operator.add, chains))
        return [(totals[0] << 8) + totals[1]]
    high, low = [zero] * tokens, starts
    for chunk in chunks:
        high, low = add(high, 0, [chunk]), add(low, 1, [chunk])
    return [(top << 8) + bottom for top, bottom in zip(high, low)]


def dot(f: Function, target: Target, sums: Value, codes: Value, x: Value) -> Value:
    """Add to each lane the four products of unsigned (NEON: signed) codes with bytes of x."""
    bytes_ = vector(i8, 4 * sums.type.count)
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    if target.dot == "vnni":
        name = "llvm.x86.avx512.vpdpbusd.512"
    return f.intrinsic(name, sums.type, sums, codes.bitcast(bytes_), x.bitcast(bytes_))


def _multiply_pairs(f: Function, codes: Value, x: Value) -> Value:
    """The sum of both 16-bit products in every lane, a single instruction."""
    halves, wide = vector(i16, 32), vector(i32, 32)
    products = codes.bitcast(halves).sign_extend(wide) * x.bitcast(halves).sign_extend(wide)
    return products.shuffle(list(range(0, 32, 2))) + products.shuffle(list(range(1, 32, 2)))


def _dequantised_sums(
    f: Function, target: Target, layout: LowBitLayout, tokens: int, panels: int
) -> list[Variable]:
    """Products with float32 activations: dequantise every weight."""
    sums = [Variable(f, f.zero(vector(f32))) for _ in range(tokens * panels)]
    group_bytes, panel_bytes = layouts.FLOAT.codes(tokens), f.blocks * layout.block_bytes
    with f.loop(f.blocks) as i:
        first = f.weights + i * layout.block_bytes
        blocks = [first + panel_bytes * panel if panel else first for panel in range(panels)]
        for block in blocks if layout.is_e4m3 else ():
            _prefetch(f, target, block, layout.block_bytes, layout, tokens)
        subs = [unpack_subs(f, layout, block) for block in blocks]
        with f.loop(layout.groups) as group:
            x = f.x + (i * layout.groups + group) * group_bytes
            columns = (
                dequantise(f, target, layout, block, sub, group, tokens)
                for block, sub in zip(blocks, subs)
            )
            for weights in zip(*columns):
                for panel, (column, weight) in enumerate(weights):
                    for t in range(tokens):
                        total = sums[panel * tokens + t]
                        value = f.load(f32, x, 4 * (column * tokens + t)).splat()
                        total.set(f.fma(weight, value, total.get()))
    return sums
