"""Kernels as LLVM functions of addresses: products with panels, packing of activations, norms, rope, attention.

Every sum has a fixed order, the same for one token and a tile. Results depend neither on threads and tiles nor on whether a
position was decoded or part of a prompt. Addresses and counts are i64; program.py and its callers check them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import numpy as np
from llvmlite import ir

from mlx_llama.core.files.quantized import IQ4_VALUES

from ..pages import CACHE_GROUP, PAGE, PageLayout
from . import layouts
from .emit import LANES, Function, Module, Value, Variable, bf16, f16, f32, f32s, i8, i16, i32, i32s, i64, vector
from .layouts import FIELDS, GROUP, ActivationLayout, FloatLayout, LowBitLayout
from .target import Target

CHAIN = 4  # dependent integer products of one token
PANELS_AT_ONCE = 4  # at most; of float weights for one token

PRODUCT = {"weights": i64, "x": i64, "out": i64, "out_stride": i64, "blocks": i64, "bias": i64, "accumulate": i64}


def panels_at_once(target: Target, layout: layouts.Layout, tokens: int) -> int:
    """Consecutive panels that a product multiplies together, a divisor of PANELS_AT_ONCE."""
    if not isinstance(layout, FloatLayout):
        return 1
    # Independent sums hide the latency of fma; the registers hold `sums` beside the weights. Each panel is a stream from memory,
    # and two of them are read faster than four.
    sums, most = (16, 2) if target.wide else (4, PANELS_AT_ONCE)
    return max(1, min(most, sums // tokens))


def product_name(layout: layouts.Layout, x_layout: ActivationLayout, tokens: int, panels: int = 1) -> str:
    return f"product_{layout.name}_{x_layout.name}_{tokens}x{panels}"


def product(module: Module, target: Target, layout: layouts.Layout, x_layout: ActivationLayout, tokens: int, panels: int = 1,
            public: bool = False) -> Function:
    """out[t][16 rows] = panel times x[t] (+ bias) (+ out, if accumulate) for `tokens` tokens.

    weights: the panel; x: the activations' first record; out: float32, token t at t * out_stride bytes; blocks: of the
    panel; bias: float32 [16] or 0. panels > 1 (float weights only): multiply this many consecutive panels.
    """
    name = product_name(layout, x_layout, tokens, panels)
    if name in module.known:
        return module.known[name]
    f = Function(module, name, PRODUCT, public=public)
    if isinstance(layout, FloatLayout):
        sums = (_float_sums if x_layout == layouts.FLOAT else _bfloat16_sums)(f, target, layout, tokens, panels)
    elif x_layout.name == "float":
        sums = _dequantised_sums(f, target, layout, tokens)
    else:
        sums = _integer_sums(f, target, layout, x_layout, tokens)
    for panel in range(panels):
        for t in range(tokens):
            at = f.out + f.out_stride * t + 64 * panel if t or panel else f.out
            value = sums[panel * tokens + t]
            total = Variable(f, value.get())
            with f.if_then(f.bias.compare("!=", 0)):
                total.set(total.get() + f.load(f32s, f.bias, 64 * panel, 4))
            with f.if_then(f.accumulate.compare("!=", 0)):
                total.set(total.get() + f.load(f32s, at, 0, 4))
            f.store(total.get(), at, 0, 4)
    return f.finish()


def _zeros(f: Function, count: int) -> list[Variable]:
    return [Variable(f, f.zero(f32s)) for _ in range(count)]


def _load_wide(f: Function, dtype: str, address: Value, offset: Value | int, lanes: int = LANES) -> Value:
    """Load numbers of `dtype` as float32."""
    if dtype == "float32":
        return f.load(vector(f32, lanes), address, offset, 4)
    if dtype == "float16":
        return f.load(vector(f16, lanes), address, offset, 2).widen_half()
    # bfloat16: the upper half of a float32
    return (f.load(vector(i16, lanes), address, offset, 2).zero_extend(vector(i32, lanes)) << 16).bitcast(vector(f32, lanes))


def _float_sums(f: Function, target: Target, layout: FloatLayout, tokens: int, panels: int) -> list[Variable]:
    unroll, width = 8, layouts.WIDTHS[layout.dtype] * layouts.ROWS
    sums = _zeros(f, tokens * panels)
    steps = f.blocks * (GROUP // unroll)
    panel_bytes = f.blocks * layout.block_bytes
    with f.loop(steps) as i:
        weights, x = f.weights + i * (unroll * width), f.x + i * (unroll * 4 * tokens)
        if tokens > 1:
            for panel in range(panels):  # of the next panels
                f.prefetch(weights + panel_bytes * (panels + panel), unroll * width)
        else:
            for panel in range(panels):
                for level, distance in target.prefetch(layout.name):
                    f.prefetch(weights + (panel_bytes * panel + distance), unroll * width, level)
        for u in range(unroll):
            for panel in range(panels):
                w = _load_wide(f, layout.dtype, weights + panel_bytes * panel if panel else weights, u * width)
                for t in range(tokens):
                    one = sums[panel * tokens + t]
                    one.set(f.fma(w, f.load(f32, x, 4 * (u * tokens + t), 4).splat(), one.get()))
    return sums


def _bfloat16_sums(f: Function, target: Target, layout: FloatLayout, tokens: int, panels: int) -> list[Variable]:
    """As _float_sums, with activations in bfloat16: two products an instruction, subnormal numbers are zero."""
    unroll, width, pairs = 8, 2 * layouts.ROWS, vector(bf16, 32)
    sums = _zeros(f, tokens * panels)
    panel_bytes = f.blocks * layout.block_bytes
    with f.loop(f.blocks * (GROUP // unroll)) as i:
        weights, x = f.weights + i * (unroll * width), f.x + i * (unroll * 2 * tokens)
        for panel in range(panels):
            if tokens > 1:
                f.prefetch(weights + panel_bytes * (panels + panel), unroll * width)
            else:
                for level, distance in target.prefetch(layout.name):
                    f.prefetch(weights + (panel_bytes * panel + distance), unroll * width, level)
        for u in range(0, unroll, 2):
            for panel in range(panels):
                two = f.load(vector(i16, 32), weights + panel_bytes * panel if panel else weights, u * width, 2)
                w = two.shuffle([16 * half + row for row in range(16) for half in range(2)]).bitcast(pairs)
                for t in range(tokens):
                    one = sums[panel * tokens + t]
                    both = f.load(i32, x, 4 * (u // 2 * tokens + t), 4).splat().bitcast(pairs)
                    one.set(f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", f32s, one.get(), w, both))
    return sums


class _Codes:
    """Codes of one group, by chunk k: int32 [rows], byte e of a lane is the code of input 4 k + e."""

    def __init__(self, f: Function, target: Target, layout: LowBitLayout, address: Value, gfni: bool, rows: range):
        self.f, self.target, self.address, self.gfni, self.rows = f, target, address, gfni, rows
        self.bits, self.has_table = layout.bits, layout.has_table
        self.loaded: dict[int, Value] = {}

    def chunk(self, k: int) -> Value:
        result = None
        for at, lowest, width, place in FIELDS[self.bits][k]:
            if at not in self.loaded:
                self.loaded[at] = self.f.load(vector(i32, len(self.rows)), self.address, 64 * at + 4 * self.rows.start,
                                              4 * len(self.rows))
            part = self.loaded[at]
            if width < 8:
                part = _field(self.f, self.gfni, part, lowest - place, (1 << width) - 1 << place)
            result = part if result is None else result | part
        return look_up(self.f, self.target, result) if self.has_table else result

    def order(self) -> list[int]:
        """Chunk numbers, grouped by the vector that holds them."""
        return sorted(range(8), key=lambda k: FIELDS[self.bits][k][-1][0])


def codes_of(f: Function, target: Target, layout: LowBitLayout, block: Value, group: Value | int, tokens: int,
           rows: range = range(LANES)) -> _Codes:
    """Codes of a block's group."""
    # One or two tokens wait for memory, with fewer instructions for less. More wait for the units of products, where Zen 4
    # also executes gfni, unlike shifts.
    gfni = target.gfni and tokens <= 2
    return _Codes(f, target, layout, block + (group * layout.group_bytes + layout.offsets["codes"]), gfni, rows)


def look_up(f: Function, target: Target, indices: Value) -> Value:
    """Replace each byte of `indices`, int32 [rows], by its value in IQ4_VALUES: one instruction per register."""
    nbytes = 4 * indices.type.count
    width = min(nbytes, {"avx2": 32, "neon": 16}.get(target.name, 64))
    name = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[width]
    if target.name == "neon":
        name = "llvm.aarch64.neon.tbl1.v16i8"
    kind, bytes_ = vector(i8, width), indices.bitcast(vector(i8, nbytes))
    table = f.constant(kind, [int(value) - 256 * (value > 127) for value in IQ4_VALUES] * (width // 16))
    parts = [bytes_.shuffle(list(range(at, at + width))) for at in range(0, nbytes, width)]
    return _concatenate([f.intrinsic(name, kind, table, part) for part in parts]).bitcast(indices.type)


def _field(f: Function, gfni: bool, bytes_: Value, move: int, mask: int) -> Value:
    """Shift every byte of int32 [16] right by `move` bits (left, if negative), and mask it."""
    if gfni and move and mask & 1:
        # One instruction: bit i of the result is the parity of the byte and row 7 - i of a bit matrix. Higher planes use
        # shifts, which are as fast: their mask and the "or" after it become one instruction.
        rows = [1 << i + move if mask >> i & 1 else 0 for i in reversed(range(8))]
        matrix = f.constant(vector(i8, 64), rows * 8)
        return f.intrinsic("llvm.x86.vgf2p8affineqb.512", matrix.type, bytes_.bitcast(matrix.type), matrix,
                           f.constant(i8, 0)).bitcast(i32s)
    shifted = bytes_ >> move if move > 0 else bytes_ << -move if move < 0 else bytes_
    return shifted & mask * 0x01010101


def unpack_subs(f: Function, layout: LowBitLayout, block: Value) -> Value:
    """Address of a block's sub scales, then biases, [scale groups][16 rows] bytes: in the block, or unpacked on the stack."""
    if not layout.packs_subs:
        return block + layout.offsets["scales"]
    out, mask = f.allocate_stack(4 * LANES * 4), 0x3F3F3F3F
    words = [f.load(i32s, block, layout.offsets["subs"] + 4 * LANES * i, 4 * LANES) for i in range(3)]
    last = words[0] >> 6 & 0x03030303 | words[1] >> 4 & 0x0C0C0C0C | words[2] >> 2 & 0x30303030
    for i, word in enumerate((*(word & mask for word in words), last)):
        f.store(word, out, 4 * LANES * i, 4 * LANES)
    return out


class Scales:
    """Scales and biases of some rows of one block: outer * inner with two levels, else inner alone.

    subs: unpack_subs of the block, without which a block of two levels has outer scales alone.
    """

    def __init__(self, f: Function, layout: LowBitLayout, block: Value, rows: range = range(LANES), subs: Value | None = None):
        self.f, self.layout, self.block, self.rows, self.subs = f, layout, block, rows, subs

    def _load(self, offset: Value | int) -> Value:
        dtype = self.layout.scale_dtype
        return _load_wide(self.f, dtype, self.block, offset + layouts.WIDTHS[dtype] * self.rows.start, len(self.rows))

    def outer(self, part: str) -> Value:
        """The rows' super "scales" or "biases" of the block."""
        return self._load(self.layout.offsets[f"super_{part}"])

    def inner(self, part: str, group: Value | int) -> Value:
        """The rows' "scales" or "biases" of a scale group, without the super level."""
        f, layout, count = self.f, self.layout, len(self.rows)
        if not layout.two_level:
            return self._load(group * (layouts.WIDTHS[layout.scale_dtype] * LANES) + layout.offsets[part])
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


def flips_codes(target: Target, layout: LowBitLayout) -> bool:
    """True if 128 is subtracted from the codes: NEON's dot product takes signed bytes."""
    return target.dot == "sdot" and (layout.bits == 8 or layout.has_table)


def dot_offset(target: Target, layout: LowBitLayout) -> int:
    """The offset to subtract from the codes in the dot product."""
    return layout.offset - 128 if flips_codes(target, layout) else layout.offset


def _integer_sums(f: Function, target: Target, layout: LowBitLayout, x_layout: ActivationLayout,
                  tokens: int) -> list[Variable]:
    """Integer products within a group; float32 sums over a span, whose activations share a scale, and over the row."""
    # NEON multiplies a quarter of the rows at a time, whose sums for a tile its registers hold.
    quarters = 4 if target.dot == "sdot" else 1
    parts = [range(first, first + LANES // quarters) for first in range(0, LANES, LANES // quarters)]
    zero = f.zero(vector(f32, LANES // quarters))
    sums = [[Variable(f, zero) for _ in range(tokens)] for _ in parts]
    halves = 2 if layout.group_size == 16 else 1
    flip, offset = flips_codes(target, layout), dot_offset(target, layout)
    if offset and offset != x_layout.offset:
        raise ValueError(f"{layout.name} needs activations with sums for the offset {offset}, not {x_layout.offset}")
    per_span = layouts.SPAN // layout.groups
    # Factor out the outer scale unless there are biases, whose outer scales differ.
    factor_outer = layout.two_level and not layout.has_biases
    with f.loop((f.blocks + (per_span - 1)) // per_span) as span:
        first, record = f.weights + span * (per_span * layout.block_bytes), f.x + span * x_layout.record(tokens)
        inner = [[Variable(f, zero) for _ in range(tokens)] for _ in parts]

        def add_group(block: Value, subs: Value, g: Value, span_group: Value, rows: range, inner: list[Variable]) -> None:
            """g: the group's number in its block; span_group: in the span; inner: the rows' sums by token."""
            codes, scales = codes_of(f, target, layout, block, g, tokens, rows), Scales(f, layout, block, rows, subs)
            for half in range(halves):
                order = codes.order() if halves == 1 else range(4 * half, 4 * half + 4)
                chunks = [(k, codes.chunk(k) ^ -0x7F7F7F80 if flip else codes.chunk(k)) for k in order]

                def load_sums(part: str, type_: ir.Type) -> list[Value]:
                    part = part if halves == 1 else part.replace("sum", "half_sums")
                    at = record + span_group * (4 * halves * tokens) + x_layout.at(part, tokens)
                    return [f.load(type_, at, 4 * (half * tokens + t), 4).splat(len(rows)) for t in range(tokens)]

                starts = load_sums("offset_sum", i32) if offset else [f.zero(vector(i32, len(rows)))] * tokens
                scale_group = scale_group_of(layout, g, half)
                scale = scales.inner("scales", scale_group) if factor_outer else scales("scales", scale_group)
                products = _products(f, target, x_layout, record + span_group * x_layout.codes(tokens), chunks, starts)
                for one, product in zip(inner, products):
                    one.set(f.fma(product.to_float(), scale, one.get()))
                if layout.has_biases:
                    bias = scales("biases", scale_group)
                    for one, total in zip(inner, load_sums("sum", f32)):
                        one.set(f.fma(bias, total, one.get()))

        with f.loop((f.blocks - span * per_span).minimum(per_span)) as i:
            block = first + i * layout.block_bytes
            _prefetch(f, target, block, layout.offsets["codes"], layout, tokens)
            subs = unpack_subs(f, layout, block)
            with f.loop(layout.groups) as g:  # a loop: in unrolled code LLVM would reorder the reads
                codes = block + (g * layout.group_bytes + layout.offsets["codes"])
                _prefetch(f, target, codes, layout.group_bytes, layout, tokens)
                for rows, ones in zip(parts, inner):
                    add_group(block, subs, g, i * layout.groups + g, rows, ones)
        for rows, ones, totals in zip(parts, inner, sums):
            outer = Scales(f, layout, first, rows).outer("scales") if factor_outer else None
            for t in range(tokens):
                scale = f.load(f32, record, x_layout.at("scale", tokens) + 4 * t, 4).splat(len(rows))
                totals[t].set(f.fma(ones[t].get(), scale if outer is None else scale * outer, totals[t].get()))
    if quarters == 1:
        return sums[0]
    return [Variable(f, _concatenate([totals[t].get() for totals in sums])) for t in range(tokens)]


def _concatenate(parts: list[Value]) -> Value:
    """One vector of all lanes of 1, 2 or 4 vectors."""
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [low.shuffle(lanes, high) for low, high in zip(parts[::2], parts[1::2])]
    return parts[0]


def _prefetch(f: Function, target: Target, address: Value, nbytes: int, layout: LowBitLayout, tokens: int) -> None:
    """Prefetch weights that lie ahead of those at `address`."""
    if tokens > 2 and target.tile_prefetch_bytes:
        f.prefetch(address + target.tile_prefetch_bytes, nbytes, level=1)
    elif tokens == target.tile and not target.tile_prefetch_bytes:
        f.prefetch(address + f.blocks * layout.block_bytes, nbytes)  # of the next panel
    elif tokens <= 2:
        for level, distance in target.prefetch(layout.name):
            f.prefetch(address + distance, nbytes, level)


def _products(f: Function, target: Target, x_layout: ActivationLayout, x: Value, chunks: list[tuple[int, Value]],
              starts: list[Value]) -> list[Value]:
    """For each token int32 [rows]: its start plus the sum over chunks (number, codes) of code * activation code.

    The order of integer sums is free. One token takes chains of at most CHAIN sums, which a core overlaps; several tokens take
    one chain per plane.
    """
    tokens = len(starts)
    if target.dot == "madd":
        products = starts
        for k, chunk in chunks:
            for which, codes in enumerate((chunk & 0x00FF00FF, (chunk >> 8) & 0x00FF00FF)):
                pairs = [f.load(i32, x, 8 * (tokens * k + t) + 4 * which, 4).splat() for t in range(tokens)]
                products = [total + _multiply_pairs(f, codes, pair) for total, pair in zip(products, pairs)]
        return products

    def load_code(index: int) -> Value:
        """Four codes of x in all lanes."""
        if target.dot == "sdot":  # takes them from one lane of a register
            return f.load(vector(i32, 4), x, 16 * (index // 4), 4).shuffle([index % 4] * 4)
        return f.load(i32, x, 4 * index, 4).splat()

    def add(totals: list[Value], plane: int, chunks: list[tuple[int, Value]]) -> list[Value]:
        for k, chunk in chunks:
            at = tokens * (8 * plane + k)
            totals = [dot(f, target, total, chunk, load_code(at + t)) for t, total in enumerate(totals)]
        return totals

    if x_layout.name == "int8":
        return add(starts, 0, chunks)
    zero = f.zero(starts[0].type)
    if tokens == 1:
        totals = []
        for plane, start in enumerate((zero, starts[0])):
            chains = [add([zero if at else start], plane, chunks[at:at + CHAIN])[0] for at in range(0, len(chunks), CHAIN)]
            totals.append(functools.reduce(operator.add, chains))
        return [(totals[0] << 8) + totals[1]]
    high, low = [zero] * tokens, starts
    for chunk in chunks:
        high, low = add(high, 0, [chunk]), add(low, 1, [chunk])
    return [(top << 8) + bottom for top, bottom in zip(high, low)]


def dot(f: Function, target: Target, sums: Value, codes: Value, x: Value) -> Value:
    """Add to each lane the four products of unsigned (NEON: signed) codes with signed bytes of x."""
    bytes_ = vector(i8, 4 * sums.type.count)
    name = "llvm.x86.avx512.vpdpbusd.512" if target.dot == "vnni" else "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return f.intrinsic(name, sums.type, sums, codes.bitcast(bytes_), x.bitcast(bytes_))


def _multiply_pairs(f: Function, codes: Value, x: Value) -> Value:
    """The sum of both 16-bit products in every lane; LLVM selects the multiply and pair-add instruction."""
    halves, wide = vector(i16, 32), vector(i32, 32)
    products = codes.bitcast(halves).sign_extend(wide) * x.bitcast(halves).sign_extend(wide)
    return products.shuffle(list(range(0, 32, 2))) + products.shuffle(list(range(1, 32, 2)))


def _dequantised_sums(f: Function, target: Target, layout: LowBitLayout, tokens: int) -> list[Variable]:
    """Products with float32 activations: dequantise every weight as the file format defines."""
    sums = _zeros(f, tokens)
    group_bytes = layouts.FLOAT.codes(tokens)
    with f.loop(f.blocks) as i:
        block = f.weights + i * layout.block_bytes
        subs = unpack_subs(f, layout, block)
        with f.loop(layout.groups) as group:
            x = f.x + (i * layout.groups + group) * group_bytes
            codes, scales = codes_of(f, target, layout, block, group, tokens), Scales(f, layout, block, subs=subs)
            for half in range(2):
                if half == 0 or layout.group_size == 16:
                    scale = scales("scales", scale_group_of(layout, group, half))
                    bias = scales("biases", scale_group_of(layout, group, half)) if layout.has_biases else None
                for k in range(4 * half, 4 * half + 4):
                    for e, weight in enumerate(dequantise(codes.chunk(k), layout, scale, bias)):
                        for t in range(tokens):
                            one = f.load(f32, x, 4 * ((4 * k + e) * tokens + t), 4).splat()
                            sums[t].set(f.fma(weight, one, sums[t].get()))
    return sums


def dequantise(chunk: Value, layout: LowBitLayout, scale: Value, bias: Value | None) -> Iterator[Value]:
    """Weights float32 [rows] of the four inputs of a chunk of codes."""
    for e in range(4):
        code = (chunk >> 8 * e if e else chunk) & 255
        if layout.offset:
            code = code - layout.offset
        weight = code.to_float() * scale
        yield weight if bias is None else weight + bias


def exp(f: Function, x: Value) -> Value:
    """exp of 16 numbers within 2 ulps, by Cephes' polynomial (Moshier, expf.c)."""
    real = lambda number: f.constant(f32s, float(np.float32(number)))  # noqa: E731
    x = f.smaller(f.larger(x, -87.0), 88.0)
    n = f.math("rint", x * real(1.44269504))
    r = f.fma(n, real(-0.693359375), x)
    r = f.fma(n, real(2.12194440e-4), r)
    p = real(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = f.fma(p, r, real(c))
    y = f.fma(p, r * r, r) + real(1.0)
    return y * ((n.to_int() + 127) << 23).bitcast(f32s)


def pack_name(x_layout: ActivationLayout, source: str, single: bool) -> str:
    return f"pack_{source}_{x_layout.name}_{x_layout.limit}_{x_layout.offset}_{'one' if single else 'tile'}"


PACK = {"a": i64, "b": i64, "factor": f32, "groups": i64, "out": i64, "slot": i64, "slots": i64}


def pack(module: Module, x_layout: ActivationLayout, source: str, single: bool, public: bool = False) -> Function:
    """Pack one token's floats into its slot in the records of a block of `slots` tokens; single: of one.

    source: "plain" x = a, "norm" x = a * factor * b, "silu" x = silu(a) * b; a, b: float32 [32 groups]; groups: multiple
    of SPAN; "gelu_tanh" likewise with gelu by the tanh approximation; out: the first record to write; slot: the token's
    number in its block.
    """
    name = pack_name(x_layout, source, single)
    if name in module.known:
        return module.known[name]
    f = Function(module, name, PACK, public=public)
    tokens, slot = (1, f.constant(i64, 0)) if single else (f.slots, f.slot)
    record = x_layout.record(tokens)

    def load_values(group: Value) -> list[Value]:
        x = []
        for half in range(2):
            at = group * (4 * GROUP) + 4 * LANES * half
            value = f.load(f32s, f.a, at, 4)
            if source == "norm":
                value = value * f.factor.splat() * f.load(f32s, f.b, at, 4)
            elif source == "silu":
                negative = f.constant(f32s, -0.0) - value
                value = value / (exp(f, negative) + 1.0) * f.load(f32s, f.b, at, 4)
            elif source == "gelu_tanh":  # a (1 + tanh(u)) / 2 = a / (1 + exp(-2 u))
                cubic = value * value * value * float(np.float32(0.044715))
                negative = (value + cubic) * float(np.float32(-1.5957691216))
                value = value / (exp(f, negative) + 1.0) * f.load(f32s, f.b, at, 4)
            x.append(value)
        return x

    if x_layout.name == "float":
        with f.loop(f.groups) as i:
            out = f.out + i * x_layout.codes(tokens)
            for half, value in enumerate(load_values(i)):
                if single:
                    f.store(value, out, 4 * LANES * half, 4)
                    continue
                for e in range(LANES):
                    f.store(value.extract_lane(e), out + slot * 4, 4 * tokens * (LANES * half + e), 4)
        return f.finish()
    if x_layout.name == "bfloat16":
        with f.loop(f.groups) as i:
            out = f.out + i * x_layout.codes(tokens) + slot * 4
            for half, value in enumerate(load_values(i)):
                pairs = _round_to_bfloat16(f, value).bitcast(vector(i32, LANES // 2))
                for pair in range(LANES // 2):
                    f.store(pairs.extract_lane(pair), out, 4 * tokens * (LANES // 2 * half + pair), 4)
        return f.finish()
    scratch = f.allocate_stack(4 * GROUP * layouts.SPAN)
    with f.loop(f.groups // layouts.SPAN) as span:
        largest = Variable(f, f.zero(i32s))  # compare as integers, so that NaN reaches the scale
        with f.loop(layouts.SPAN) as i:
            for half, value in enumerate(load_values(span * layouts.SPAN + i)):
                f.store(value, scratch, i * (4 * GROUP) + 4 * LANES * half, 4)
                size = value.bitcast(i32s) & 0x7FFFFFFF
                largest.set(size.compare(">", largest.get()).select(size, largest.get()))
        top = f.reduce_max(largest.get()).bitcast(f32)
        usable = top.compare(">", 1e-30)  # keeps limit / top finite; smaller spans become zero
        inverse = usable.select(f.constant(f32, float(x_layout.limit)) / usable.select(top, 1.0), 0.0)
        scale = top * float(np.float32(1 / x_layout.limit))
        with f.loop(layouts.SPAN) as i:
            x = [f.load(f32s, scratch, i * (4 * GROUP) + 4 * LANES * half, 4) for half in range(2)]
            _quantise(f, x_layout, x, inverse, f.out + span * record, i, slot, tokens)
        f.store(scale, f.out + span * record + slot * 4, x_layout.at("scale", tokens), 4)
    return f.finish()


def _round_to_bfloat16(f: Function, x: Value) -> Value:
    """Upper halves of float32, rounded to nearest, ties to even: int16 [16]."""
    bits = x.bitcast(i32s)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return x.compare("==", x).select(rounded, 0x7FC0).truncate(vector(i16))


def _quantise(f: Function, x_layout: ActivationLayout, x: list[Value], inverse: Value, record: Value, group: Value,
              slot: Value, tokens: Value | int) -> None:
    """Quantise one token's group of a span: code = x / scale, rounded. tokens: slots of the block."""
    out = record + group * x_layout.codes(tokens)
    codes = [f.math("rint", half * inverse.splat()).to_int() for half in x]
    sums = [f.reduce_sum(half) for half in codes]

    for name, totals in (("sum", [sums[0] + sums[1]]), ("half_sums", sums)):
        at = record + group * (4 * len(totals) * tokens) + slot * 4
        for half, total in enumerate(totals):
            f.store(total.to_float(), at, x_layout.at(name, tokens) + 4 * half * tokens, 4)
            f.store(total * -x_layout.offset, at, x_layout.at(f"offset_{name}", tokens) + 4 * half * tokens, 4)

    if x_layout.name == "int16":
        for half, code in enumerate(codes):
            swapped = code.truncate(vector(i16)).shuffle([4 * j + e for j in range(4) for e in (0, 2, 1, 3)])
            quads = swapped.bitcast(vector(i64, 4))
            for j in range(4):
                f.store(quads.extract_lane(j), out + slot * 8, 8 * tokens * (4 * half + j), 4)
        return
    planes = [codes]
    if x_layout.name == "int8x2":
        high = [(code + 128).arithmetic_shift(8) for code in codes]
        planes = [high, [code - (top << 8) for code, top in zip(codes, high)]]
    for plane, halves in enumerate(planes):
        for half, code in enumerate(halves):
            quads = code.truncate(vector(i8)).bitcast(vector(i32, 4))
            for j in range(4):
                f.store(quads.extract_lane(j), out + slot * 4, 4 * tokens * (8 * plane + 4 * half + j), 4)


def sum_of_squares(module: Module, public: bool = False) -> Function:
    """out[0] = sum of a[i]**2 over `groups` groups of 32. a, out: float32."""
    name = "sum_of_squares"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"a": i64, "groups": i64, "out": i64}, public=public)
    sums = _zeros(f, 2)
    with f.loop(f.groups) as i:
        for half, one in enumerate(sums):
            value = f.load(f32s, f.a, i * (4 * GROUP) + 4 * LANES * half, 4)
            one.set(f.fma(value, value, one.get()))
    f.store(f.reduce_sum(sums[0].get() + sums[1].get()), f.out, 0, 4)
    return f.finish()


ADJUST = {"delta": i64, "weight": i64, "factor": f32, "target": i64, "accumulate": i64, "groups": i64}


def adjust(module: Module, public: bool = False) -> Function:
    """target = delta * factor (* weight) (+ target, if accumulate). delta, target, weight: float32 [32 groups], weight or 0."""
    name = "adjust"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, ADJUST, public=public)
    with f.loop(f.groups * (GROUP // LANES)) as i:
        at = i * (4 * LANES)
        value = Variable(f, f.load(f32s, f.delta, at, 4) * f.factor.splat())
        with f.if_then(f.weight.compare("!=", 0)):
            value.set(value.get() * f.load(f32s, f.weight, at, 4))
        with f.if_then(f.accumulate.compare("!=", 0)):
            value.set(value.get() + f.load(f32s, f.target, at, 4))
        f.store(value.get(), f.target, at, 4)
    return f.finish()


def softcap(module: Module, public: bool = False) -> Function:
    """x = cap * tanh(x / cap) in place. x: float32 [32 groups]."""
    name = "softcap"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"x": i64, "groups": i64, "cap": f32}, public=public)
    with f.loop(f.groups * (GROUP // LANES)) as i:
        at = i * (4 * LANES)
        f.store(_softcap(f, f.load(f32s, f.x, at, 4), f.cap.splat()), f.x, at, 4)
    return f.finish()


def _softcap(f: Function, x: Value, cap: Value) -> Value:
    """cap * tanh(x / cap) of 16 numbers."""
    return cap - cap * 2.0 / (exp(f, x * 2.0 / cap) + 1.0)


def rotate(module: Module, head_dim: int, public: bool = False) -> Function:
    """Rotary embedding of one head in place, pairs (i, i + D/2). x: float32 [D]; cosine, sine: [D/2]."""
    name = f"rotate_{head_dim}"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"x": i64, "cosine": i64, "sine": i64}, public=public)
    half = head_dim // 2

    def rotate_pairs(type_: ir.Type, at: Value | int) -> None:
        first, second = f.load(type_, f.x, at, 4), f.load(type_, f.x + 4 * half, at, 4)
        cosine, sine = f.load(type_, f.cosine, at, 4), f.load(type_, f.sine, at, 4)
        f.store(first * cosine - second * sine, f.x, at, 4)
        f.store(second * cosine + first * sine, f.x + 4 * half, at, 4)

    vectorised = half // LANES * LANES
    for i in range(0, vectorised, LANES):
        rotate_pairs(f32s, 4 * i)
    with f.loop(half, vectorised) as i:
        rotate_pairs(f32, i * 4)
    return f.finish()


def norm_head(module: Module, public: bool = False) -> Function:
    """RMS norm of one head in place. x, weight: float32 [width]."""
    name = "norm_head"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"x": i64, "weight": i64, "width": i64, "eps": f32}, public=public)
    vectorised = f.width // LANES * LANES
    sums, rest = Variable(f, f.zero(f32s)), Variable(f, f.constant(f32, 0.0))
    with f.loop(vectorised, 0, LANES) as d:
        value = f.load(f32s, f.x, d * 4, 4)
        sums.set(f.fma(value, value, sums.get()))
    with f.loop(f.width, vectorised) as d:
        value = f.load(f32, f.x, d * 4, 4)
        rest.set(rest.get() + value * value)
    mean = (f.reduce_sum(sums.get()) + rest.get()) / f.width.truncate(i32).to_float()
    scale = f.constant(f32, 1.0) / f.math("sqrt", mean + f.eps)
    with f.loop(vectorised, 0, LANES) as d:
        f.store(f.load(f32s, f.x, d * 4, 4) * scale.splat() * f.load(f32s, f.weight, d * 4, 4), f.x, d * 4, 4)
    with f.loop(f.width, vectorised) as d:
        f.store(f.load(f32, f.x, d * 4, 4) * scale * f.load(f32, f.weight, d * 4, 4), f.x, d * 4, 4)
    return f.finish()


def page_layout(head_dim: int, cache_bits: int | None) -> PageLayout:
    """Sizes of a head's rows in a page; they do not depend on the numbers of layers and heads."""
    return PageLayout(1, 1, head_dim, cache_bits)


def store(module: Module, head_dim: int, cache_bits: int | None, public: bool = False) -> Function:
    """Store one head's row of a key or value in a page. x: float32 [D]; out: float32 [D], with cache_bits 16 float16.

    cache_bits 8: out: int8 codes [D]; scales: float16, one per CACHE_GROUP, the largest magnitude / 127, as pages.quantise.
    """
    name = f"store_{head_dim}_{cache_bits}"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"x": i64, "out": i64, "scales": i64}, public=public)
    if not cache_bits:
        vectorised = head_dim // LANES * LANES
        for d in range(0, vectorised, LANES):
            f.store(f.load(f32s, f.x, 4 * d, 4), f.out, 4 * d, 4)
        with f.loop(head_dim, vectorised) as d:
            f.store(f.load(f32, f.x, d * 4, 4), f.out, d * 4, 4)
        return f.finish()
    if cache_bits == 16:
        for d in range(0, head_dim, LANES):  # a page has room for whole vectors
            f.store(_load_part(f, f.x, d, head_dim).narrow_half(), f.out, 2 * d, 2)
        return f.finish()
    for group, first in enumerate(range(0, head_dim, CACHE_GROUP)):
        x = [_load_part(f, f.x, d, head_dim) for d in range(first, min(first + CACHE_GROUP, head_dim), LANES)]
        # Compare magnitudes as integers, so that NaN reaches the scale.
        largest = f.zero(i32s)
        for value in x:
            size = value.bitcast(i32s) & 0x7FFFFFFF
            largest = size.compare(">", largest).select(size, largest)
        scale = (f.reduce_max(largest).bitcast(f32) / 127.0).narrow_half()
        wide = scale.widen_half()
        divisor = wide.compare("==", 0.0).select(f.constant(f32, float("inf")), wide).splat()
        for c, value in enumerate(x):
            rounded = f.math("rint", value / divisor)
            code = f.smaller(f.larger(rounded, -127.0), 127.0).to_int()
            f.store(code.truncate(vector(i8)), f.out, first + LANES * c, 1)  # a page has room for whole vectors
        f.store(scale, f.scales, 2 * group, 2)
    return f.finish()


def _load_part(f: Function, address: Value, d: int, head_dim: int) -> Value:
    """Load float32 d .. d + 15 of a head, zeros from D on: the next head follows, which may hold NaN."""
    if d + LANES <= head_dim:
        return f.load(f32s, address, 4 * d, 4)
    part = f.zero(f32s)
    for e in range(head_dim - d):
        part = part.insert_lane(e, f.load(f32, address, 4 * (d + e), 4))
    return part


ATTEND = {"query": i64, "pages": i64, "keys": i64, "values": i64, "key_scales": i64, "value_scales": i64, "out": i64,
          "first": i64, "end": i64, "heads": i64, "scores": i64, "scores_bytes": i64, "scale": f32, "next_pages": i64,
          "next_keys": i64, "next_first": i64, "next_end": i64}
HEADS_AT_ONCE = 4
PIECE = 64  # dimensions of a head summed in registers together


def attend(module: Module, head_dim: int, cache_bits: int | None = None, public: bool = False,
           cap: float | None = None) -> Function:
    """softmax(scale q k^T) v of one token and one key head, for the `heads` query heads that share it.

    query, out: float32 [heads][D] (out may be padded to whole vectors); pages: the addresses of the row's pages, int64;
    keys, values: offsets of the head's rows in a page, float32, float16 or int8 [PAGE][D padded with zeros to whole vectors];
    key_scales, value_scales: likewise, float16 [PAGE][groups], for int8; first, end: the visible positions; scores: scratch,
    scores_bytes apart for each head, 4 bytes per position from first's block of 16 to end's; next_pages, next_keys, next_first,
    next_end: of the attention that follows, to prefetch its keys, 0: all of them are in a cache.

    cap: softcap of the scores, None for none. Narrow numbers are widened once for all heads, 16 keys or a page of values at a
    time, which stay in the L1 cache.
    """
    name = f"attend_{head_dim}_{cache_bits}"
    if name in module.known:
        return module.known[name]
    layout = page_layout(head_dim, cache_bits)
    row_bytes, scale_bytes = layout.row_bytes, 2 * layout.groups
    chunks = -(-head_dim // LANES)
    score = _score_block(module, head_dim, cap)
    mixers = {count: _mix(module, head_dim, count) for count in (HEADS_AT_ONCE, 1)}
    widen = _widen_rows(module, layout) if cache_bits else None
    f = Function(module, name, ATTEND, public=public)
    wide_bytes = 4 * layout.width  # of a row of numbers
    scratch = f.allocate_stack(PAGE * wide_bytes) if cache_bits else None

    def load_rows(numbers: Value, scales: Value, slot: Value, count: Value | int) -> Value:
        """Address of `count` rows from `slot` on as float32."""
        numbers = numbers + slot * row_bytes
        if scratch is None:
            return numbers
        f.call(widen, numbers, scales + slot * scale_bytes, count, scratch)
        return scratch

    def prefetch_share(rows: Value, count: Value, h: Value, heads: int) -> None:
        """Prefetch what `heads` heads from h on have to of `count` rows: loads that are spread do not wait for each other."""
        lines = (count * row_bytes + 63) // 64
        share = (lines + (f.heads - 1)) // f.heads
        with f.loop(((h + heads) * share).minimum(lines), h * share) as line:
            f.prefetch(rows + line * 64, 64)

    prefetches = f.next_pages.compare("!=", 0)
    start = f.first // LANES * LANES
    blocks = (f.end - start + (LANES - 1)) // LANES
    with f.loop(blocks) as b:
        position = start + b * LANES
        page, slot = f.load(i64, f.pages, position // PAGE * 8, 8), position % PAGE
        keys = load_rows(page + f.keys, page + f.key_scales, slot, LANES)
        ahead, ahead_count = page + f.values + slot * row_bytes, prefetches.select((f.end - position).minimum(LANES), 0)
        with f.loop(f.heads) as h:
            prefetch_share(ahead, ahead_count, h, 1)
            f.call(score, f.query + h * (4 * head_dim), keys, position, f.first, f.end,
                   f.scores + h * f.scores_bytes + b * (4 * LANES), f.scale)
    with f.loop(f.heads) as h:
        row = f.scores + h * f.scores_bytes
        top = Variable(f, f.constant(f32s, -3e38))
        with f.loop(blocks) as b:
            top.set(f.larger(f.load(f32s, row, b * (4 * LANES), 4), top.get()))  # skips NaN
        largest = f.reduce_max(top.get()).splat()
        sums = Variable(f, f.zero(f32s))
        with f.loop(blocks) as b:
            value = f.load(f32s, row, b * (4 * LANES), 4)
            value = value.compare(">", -2e38).select(exp(f, value - largest), 0.0)
            f.store(value, row, b * (4 * LANES), 4)
            sums.set(sums.get() + value)
        share = (f.constant(f32, 1.0) / f.reduce_sum(sums.get())).splat()
        with f.loop(blocks) as b:
            f.store(f.load(f32s, row, b * (4 * LANES), 4) * share, row, b * (4 * LANES), 4)
        out, whole = f.out + h * (4 * head_dim), head_dim // LANES * LANES
        for d in (*range(0, whole, LANES), *range(whole, head_dim)):
            f.store(f.zero(f32s if d < whole else f32), out, 4 * d, 4)
    # A page's values are read for all heads before the next page's.
    with f.loop((f.end + (PAGE - 1)) // PAGE, f.first // PAGE) as number:
        begin, page = number * PAGE, f.load(i64, f.pages, number * 8, 8)
        begin = begin.compare(">", f.first).select(begin, f.first)
        count, slot = (number * PAGE + PAGE).minimum(f.end) - begin, begin % PAGE
        values = load_rows(page + f.values, page + f.value_scales, slot, count)
        shares = f.scores + (begin - start) * 4
        ahead_number = number - f.first // PAGE + f.next_first // PAGE
        ahead_count = (f.next_end - ahead_number * PAGE).minimum(PAGE)
        ahead_count = (prefetches & ahead_count.compare(">", 0)).select(ahead_count, 0)
        ahead = Variable(f, f.next_keys)
        with f.if_then(ahead_count.compare("!=", 0)):
            ahead.set(f.load(i64, f.next_pages, ahead_number * 8, 8) + f.next_keys)
        grouped = f.heads // HEADS_AT_ONCE * HEADS_AT_ONCE
        for start_head, end_head, at_once in ((f.constant(i64, 0), grouped, HEADS_AT_ONCE), (grouped, f.heads, 1)):
            with f.loop(end_head, start_head, at_once) as h:
                prefetch_share(ahead.get(), ahead_count, h, at_once)
                for piece in range(0, chunks * LANES, PIECE):
                    f.call(mixers[at_once][piece], shares + h * f.scores_bytes, f.scores_bytes, values + 4 * piece,
                           count, f.out + h * (4 * head_dim) + 4 * piece)
    return f.finish()


def _widen_rows(module: Module, layout: PageLayout) -> Function:
    """`count` rows of a page as float32 [count][width], exactly: float16 numbers, or codes times scales."""
    f = Function(module, f"widen_rows_{layout.head_dim}_{layout.bits}", {"codes": i64, "scales": i64, "count": i64, "out": i64})
    per_group = CACHE_GROUP // LANES
    with f.loop(f.count) as i:
        codes, scales, out = f.codes + i * layout.row_bytes, f.scales + i * (2 * layout.groups), f.out + i * (4 * layout.width)
        if layout.bits == 16:
            for d in range(0, layout.width, LANES):
                f.store(_load_wide(f, "float16", codes, 2 * d), out, 4 * d, 4)
        for group in range(layout.groups):
            scale = f.load(f16, scales, 2 * group, 2).widen_half().splat()
            for c in range(per_group * group, min(per_group * (group + 1), layout.width // LANES)):
                wide = f.load(vector(i8), codes, LANES * c, 1).sign_extend(i32s).to_float()
                f.store(wide * scale, out, 4 * LANES * c, 4)
    return f.finish()


def _score_block(module: Module, head_dim: int, cap: float | None = None) -> Function:
    """Scores of one head against 16 rows of keys; -3e38 outside first .. end."""
    name = f"score_block_{head_dim}"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {
        "query": i64, "keys": i64, "position": i64, "first": i64, "end": i64, "out": i64, "scale": f32})
    sums: list[Value] = []
    # Keys are padded with zeros.
    query = [_load_part(f, f.query, d, head_dim) for d in range(0, head_dim, LANES)]
    for j in range(LANES):
        row = f.keys + 4 * LANES * len(query) * j if j else f.keys
        one = f.load(f32s, row, 0, 4) * query[0]
        for c in range(1, len(query)):
            one = f.fma(f.load(f32s, row, 4 * LANES * c, 4), query[c], one)
        sums.append(one)
    # Reduce 16 vectors to one of their sums: add pairs of lanes of pairs of vectors, four times; twice within quarters of
    # vectors, then whole quarters, so that every shuffle is one instruction.
    for size, lanes in ((1, [0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30]),
                        (4, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27])):
        for _ in range(2):
            sums = [one.shuffle(lanes, two) + one.shuffle([lane + size for lane in lanes], two)
                    for one, two in zip(sums[::2], sums[1::2])]
    scores = sums[0] * f.scale.splat()
    if cap:
        scores = _softcap(f, scores, f.constant(f32s, float(np.float32(cap))))
    lanes = f.position.truncate(i32).splat() + f.constant(i32s, list(range(LANES)))
    outside = f.constant(f32s, -3e38)
    scores = lanes.compare("<", f.end.truncate(i32).splat()).select(scores, outside)
    scores = lanes.compare(">=", f.first.truncate(i32).splat()).select(scores, outside)
    f.store(scores, f.out, 0, 4)
    return f.finish()


def _mix(module: Module, head_dim: int, heads: int) -> dict[int, Function]:
    """By first dimension of a piece: out[h][piece] += sum over `count` positions of share[h][position] * values."""
    pieces, row_bytes = {}, -(-head_dim // LANES) * LANES * 4
    for piece in range(0, -(-head_dim // LANES) * LANES, PIECE):
        dims = min(PIECE, head_dim - piece)
        full, tail = dims // LANES, dims % LANES
        name = f"mix_{head_dim}_{piece}_{heads}"
        if name in module.known:
            pieces[piece] = module.known[name]
            continue
        f = Function(module, name, {"shares": i64, "shares_bytes": i64, "values": i64, "count": i64, "out": i64})

        def addresses(h: int) -> list[Value]:
            """Addresses of a head's output vectors."""
            out = f.out + 4 * head_dim * h if h else f.out
            return [(out + 4 * LANES * c if c else out) for c in range(full + bool(tail))]

        sums = []
        for h in range(heads):
            for c, at in enumerate(addresses(h)):
                sums.append(Variable(f, _load_part(f, at, 0, LANES if c < full else tail)))
        width = full + bool(tail)
        with f.loop(f.count) as i:
            row = f.values + i * row_bytes
            values = [f.load(f32s, row, 4 * LANES * c, 4) for c in range(width)]
            for h in range(heads):
                share = f.load(f32, f.shares + f.shares_bytes * h + i * 4 if h else f.shares + i * 4, 0, 4).splat()
                for c in range(width):
                    one = sums[h * width + c]
                    one.set(f.fma(share, values[c], one.get()))
        for h in range(heads):
            for c, at in enumerate(addresses(h)):
                value = sums[h * width + c].get()
                if c < full:
                    f.store(value, at, 0, 4)
                else:
                    for e in range(tail):
                        f.store(value.extract_lane(e), at, 4 * e, 4)
        pieces[piece] = f.finish()
    return pieces
