"""The kernels: products of panels with activations, activations from floats, attention. Each is one function of addresses.

Every sum has one fixed order, the same for one token as for a tile of them, so results do not depend on threads, tiles or
on whether a position was decoded or part of a prompt. Addresses and counts are i64; callers check them (program.py).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from mlx_llama.core.files.quantized import GGUF_FORMATS

from . import layouts
from .emit import LANES, Function, Module, Value, Variable, f16, f32, f32s, i8, i16, i32, i32s, i64, vector
from .layouts import GROUP, PLANES, ActivationLayout, FloatLayout, LowBitLayout
from .target import Target

PANELS_AT_ONCE = 4  # of float weights when decoding: independent sums hide the latency of multiply and add


PRODUCT = {"weights": i64, "x": i64, "out": i64, "out_stride": i64, "blocks": i64, "bias": i64, "accumulate": i64}


def product_name(layout: layouts.Layout, form: ActivationLayout, tokens: int, panels: int = 1) -> str:
    return f"product_{layout.name}_{form.name}_{tokens}x{panels}"


def product(module: Module, target: Target, layout: layouts.Layout, form: ActivationLayout, tokens: int, panels: int = 1,
            public: bool = False) -> Function:
    """out[t][16 rows] = panel times x[t] (+ bias) (+ out, if accumulate) for `tokens` tokens.

    weights: the panel; x: the activations' first record; out: float32, token t at t * out_stride bytes; blocks: of the
    panel; bias: float32 [16] or 0. panels > 1 (float weights only): so many panels, `blocks` apart, at once.
    """
    name = product_name(layout, form, tokens, panels)
    if name in module.known:
        return module.known[name]
    f = Function(module, name, PRODUCT, public=public)
    if isinstance(layout, FloatLayout):
        sums = _float_sums(f, layout, tokens, panels)
    elif form.name == "float":
        sums = _dequantised_sums(f, target, layout, tokens)
    else:
        sums = _integer_sums(f, target, layout, form, tokens)
    for panel in range(panels):
        for t in range(tokens):
            at = f.out + f.out_stride * t + 64 * panel if t or panel else f.out
            value = sums[panel * tokens + t]
            total = Variable(f, value.get())
            with f.when(f.bias.compare("!=", 0)):
                total.set(total.get() + f.load(f32s, f.bias, 64 * panel, 4))
            with f.when(f.accumulate.compare("!=", 0)):
                total.set(total.get() + f.load(f32s, at, 0, 4))
            f.store(total.get(), at, 0, 4)
    return f.finish()


def _zeros(f: Function, count: int) -> list[Variable]:
    return [Variable(f, f.zero(f32s)) for _ in range(count)]


def _load_wide(f: Function, dtype: str, address: Value, offset: Value | int) -> Value:
    """16 numbers of `dtype` as float32."""
    if dtype == "float32":
        return f.load(f32s, address, offset, 4)
    if dtype == "float16":
        return f.load(vector(f16), address, offset, 2).widen_half()
    return (f.load(vector(i16), address, offset, 2).unsigned(i32s) << 16).bits(f32s)  # bfloat16: a float32's upper half


def _float_sums(f: Function, layout: FloatLayout, tokens: int, panels: int) -> list[Variable]:
    unroll, width = 8, layouts.WIDTHS[layout.dtype] * layouts.ROWS
    sums = _zeros(f, tokens * panels)
    steps = f.blocks * (GROUP // unroll)
    panel_bytes = f.blocks * layout.block_bytes
    with f.loop(steps) as i:
        weights, x = f.weights + i * (unroll * width), f.x + i * (unroll * 4 * tokens)
        if tokens > 1:
            f.prefetch(weights + panel_bytes, unroll * width)
        for u in range(unroll):
            for panel in range(panels):
                w = _load_wide(f, layout.dtype, weights + panel_bytes * panel if panel else weights, u * width)
                for t in range(tokens):
                    one = sums[panel * tokens + t]
                    one.set(f.fma(w, f.load(f32, x, 4 * (u * tokens + t), 4).splat(), one.get()))
    return sums


class _Codes:
    """The codes of one group, chunk by chunk: int32 [16 rows], byte e of a lane is the code of input 4 k + e."""

    def __init__(self, f: Function, target: Target, bits: int, address: Value):
        self.f, self.target, self.bits, self.address = f, target, bits, address
        self.loaded: dict[int, Value] = {}

    def chunk(self, k: int) -> Value:
        f, result, first = self.f, None, 0
        for width, shift in PLANES[self.bits]:
            at = first + k % width
            if at not in self.loaded:
                self.loaded[at] = f.load(i32s, self.address, 64 * at, 64)
            part = self.loaded[at]
            if width < 8:
                part = _field(f, self.target, part, k // width * width - shift, (1 << width) - 1 << shift)
            result = part if result is None else result | part
            first += width
        return result

    def order(self) -> list[int]:
        """The chunks so that those of one vector stand together."""
        width = PLANES[self.bits][-1][0]
        return [k for first in range(width) for k in range(first, 8, width)]


def _codes(f: Function, target: Target, layout: LowBitLayout, block: Value, group: Value | int) -> _Codes:
    """Of a group of a block."""
    return _Codes(f, target, layout.bits, block + (group * layout.group_bytes + layout.offsets["codes"]))


def _field(f: Function, target: Target, bytes_: Value, move: int, mask: int) -> Value:
    """Every byte of int32 [16] moved right by `move` bits (left, where negative), and what `mask` leaves of it."""
    if target.gfni and move and mask & 1:
        # One instruction: bit i of the result is the parity of the byte and row 7 - i of a matrix of bits. The higher planes
        # do without: a shift is as good there, since their mask and the "or" after it become one instruction.
        rows = [1 << i + move if mask >> i & 1 else 0 for i in reversed(range(8))]
        matrix = f.constant(vector(i8, 64), rows * 8)
        return f.intrinsic("llvm.x86.vgf2p8affineqb.512", matrix.type, bytes_.bits(matrix.type), matrix,
                           f.constant(i8, 0)).bits(i32s)
    moved = bytes_ >> move if move > 0 else bytes_ << -move if move < 0 else bytes_
    return moved & mask * 0x01010101


class _Scales:
    """Scales and biases of one block: outer * inner, where there are two levels; else all is inner."""

    def __init__(self, f: Function, layout: LowBitLayout, block: Value):
        self.f, self.layout, self.block = f, layout, block

    def outer(self, part: str) -> Value:
        """The 16 rows' super "scales" or "biases" of the block."""
        return _load_wide(self.f, self.layout.scale_dtype, self.block, self.layout.offsets[f"super_{part}"])

    def inner(self, part: str, group: Value | int) -> Value:
        """The 16 rows' own "scales" or "biases" of a scale group."""
        f, layout = self.f, self.layout
        if not layout.two_level:
            width = layouts.WIDTHS[layout.scale_dtype] * LANES
            return _load_wide(f, layout.scale_dtype, self.block, group * width + layout.offsets[part])
        sub = f.load(vector(i8), self.block, group * LANES + layout.offsets[part], 16)
        return (sub.signed(i32s) if part == "scales" else sub.unsigned(i32s)).to_float()

    def __call__(self, part: str, group: Value | int) -> Value:
        """Both levels multiplied."""
        inner = self.inner(part, group)
        return self.outer(part) * inner if self.layout.two_level else inner


def _scale_group(layout: LowBitLayout, group: Value | int, half: int) -> Value | int:
    """The scale group of a half (16 inputs) of a group."""
    if layout.group_size == 16:
        return group * 2 + half
    return group // (layout.group_size // GROUP)


def flips(target: Target, layout: LowBitLayout) -> bool:
    """Whether the codes are made signed, as NEON's dot product takes them: 8-bit ones less 128."""
    return target.dot == "sdot" and layout.bits == 8


def dot_offset(target: Target, layout: LowBitLayout) -> int:
    """What is still to be taken off the codes as they enter the dot product."""
    return layout.offset - 128 if flips(target, layout) else layout.offset


def _integer_sums(f: Function, target: Target, layout: LowBitLayout, form: ActivationLayout, tokens: int) -> list[Variable]:
    """Integer products within a group; float32 sums over a span of groups, whose activations share a scale, and the row."""
    sums = _zeros(f, tokens)
    halves = 2 if layout.group_size == 16 else 1
    flip, offset = flips(target, layout), dot_offset(target, layout)
    if offset and offset != form.offset:
        raise ValueError(f"{layout.name} needs activations with sums for the offset {offset}, not {form.offset}")
    per_span = layouts.SPAN // layout.groups
    # With biases both levels of scales are multiplied at once, since the two kinds have outer scales of their own.
    levels_apart = layout.two_level and not layout.has_biases
    with f.loop((f.blocks + (per_span - 1)) // per_span) as span:
        first, record = f.weights + span * (per_span * layout.block_bytes), f.x + span * form.record(tokens)
        inner = _zeros(f, tokens)

        def group(block: Value, g: Value, place: Value) -> None:
            """g: the group's number in its block; place: in the span."""
            codes, scales = _codes(f, target, layout, block, g), _Scales(f, layout, block)
            for half in range(halves):
                order = codes.order() if halves == 1 else range(4 * half, 4 * half + 4)
                chunks = [(k, codes.chunk(k) ^ -0x7F7F7F80 if flip else codes.chunk(k)) for k in order]

                def sums_of(part: str, type_: ir.Type) -> list[Value]:
                    part = part if halves == 1 else part.replace("sum", "half_sums")
                    at = record + place * (4 * halves * tokens) + form.at(part, tokens)
                    return [f.load(type_, at, 4 * (half * tokens + t), 4).splat() for t in range(tokens)]

                starts = sums_of("offset_sum", i32) if offset else [f.zero(i32s)] * tokens
                scale_group = _scale_group(layout, g, half)
                scale = scales.inner("scales", scale_group) if levels_apart else scales("scales", scale_group)
                products = _products(f, target, form, record + place * form.codes(tokens), chunks, starts)
                for one, product in zip(inner, products):
                    one.set(f.fma(product.to_float(), scale, one.get()))
                if layout.has_biases:
                    bias = scales("biases", scale_group)
                    for one, total in zip(inner, sums_of("sum", f32)):
                        one.set(f.fma(bias, total, one.get()))

        with f.loop((f.blocks - span * per_span).at_most(per_span)) as i:
            block = first + i * layout.block_bytes
            with f.loop(layout.groups) as g:  # a loop: unrolled, LLVM would read the groups in another order than they lie in
                ahead = target.ahead if tokens == 1 else f.blocks * layout.block_bytes  # prompts: the next panel
                if tokens > 1 or target.ahead:
                    f.prefetch(block + g * layout.group_bytes + ahead, layout.group_bytes)
                group(block, g, i * layout.groups + g)
        outer = _Scales(f, layout, first).outer("scales") if levels_apart else None
        for t in range(tokens):
            scale = f.load(f32, record, form.at("scale", tokens) + 4 * t, 4).splat()
            sums[t].set(f.fma(inner[t].get(), scale if outer is None else scale * outer, sums[t].get()))
    return sums


def _products(f: Function, target: Target, form: ActivationLayout, x: Value, chunks: list[tuple[int, Value]],
              starts: list[Value]) -> list[Value]:
    """For each token int32 [16 rows]: its start plus the sum over the chunks (number, codes) of code * activation code.

    Integers: the order of the sums does not matter, so one token takes one chain of sums (fewer instructions: a core looks
    only so far ahead while it waits for memory), several take one for each plane (more of them at once).
    """
    tokens = len(starts)
    if target.dot == "madd":
        products = starts
        for k, chunk in chunks:
            for which, codes in enumerate((chunk & 0x00FF00FF, (chunk >> 8) & 0x00FF00FF)):
                pairs = [f.load(i32, x, 8 * (tokens * k + t) + 4 * which, 4).splat() for t in range(tokens)]
                products = [total + _multiply_pairs(f, codes, pair) for total, pair in zip(products, pairs)]
        return products

    def add(totals: list[Value], plane: int, some: list[tuple[int, Value]]) -> list[Value]:
        for k, chunk in some:
            at = 4 * tokens * (8 * plane + k)
            totals = [_dot(f, target, total, chunk, f.load(i32, x, at + 4 * t, 4).splat()) for t, total in enumerate(totals)]
        return totals

    if form.name == "int8":
        return add(starts, 0, chunks)
    if tokens == 1:
        high = add([f.zero(i32s)], 0, chunks)[0] << 8
        return add([high + starts[0]], 1, chunks)
    high, low = [f.zero(i32s)] * tokens, starts
    for one in chunks:
        high, low = add(high, 0, [one]), add(low, 1, [one])
    return [(top << 8) + bottom for top, bottom in zip(high, low)]


def _dot(f: Function, target: Target, sums: Value, codes: Value, x: Value) -> Value:
    """sums + the four products of unsigned (NEON: signed) codes with signed bytes of x, in every lane."""
    bytes_ = vector(i8, 64)
    if target.dot == "vnni":
        return f.intrinsic("llvm.x86.avx512.vpdpbusd.512", i32s, sums, codes.bits(bytes_), x.bits(bytes_))
    quarters = []
    for q in range(4):
        lanes, some = list(range(4 * q, 4 * q + 4)), list(range(16 * q, 16 * q + 16))
        quarters.append(f.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", vector(i32, 4), sums.shuffle(lanes),
                                    codes.bits(bytes_).shuffle(some), x.bits(bytes_).shuffle(some)))
    low, high = (quarters[i].shuffle(list(range(8)), quarters[i + 1]) for i in (0, 2))
    return low.shuffle(list(range(16)), high)


def _multiply_pairs(f: Function, codes: Value, x: Value) -> Value:
    """The sum of both 16-bit products in every lane; LLVM sees the multiply and pair-add instruction in it."""
    halves, wide = vector(i16, 32), vector(i32, 32)
    products = codes.bits(halves).signed(wide) * x.bits(halves).signed(wide)
    return products.shuffle(list(range(0, 32, 2))) + products.shuffle(list(range(1, 32, 2)))


def _dequantised_sums(f: Function, target: Target, layout: LowBitLayout, tokens: int) -> list[Variable]:
    """float32 activations: every weight is dequantised, as the file format defines it, and multiplied."""
    sums = _zeros(f, tokens)
    group_bytes = layouts.FLOAT.codes(tokens)
    with f.loop(f.blocks) as i, f.loop(layout.groups) as group:
        block, x = f.weights + i * layout.block_bytes, f.x + (i * layout.groups + group) * group_bytes
        codes, scales = _codes(f, target, layout, block, group), _Scales(f, layout, block)
        for half in range(2):
            if half == 0 or layout.group_size == 16:
                scale = scales("scales", _scale_group(layout, group, half))
                bias = scales("biases", _scale_group(layout, group, half)) if layout.has_biases else None
            for k in range(4 * half, 4 * half + 4):
                chunk = codes.chunk(k)
                for e in range(4):
                    code = (chunk >> 8 * e if e else chunk) & 255
                    if layout.offset:
                        code = code - layout.offset
                    weight = code.to_float() * scale
                    if bias is not None:
                        weight = weight + bias
                    for t in range(tokens):
                        one = f.load(f32, x, 4 * ((4 * k + e) * tokens + t), 4).splat()
                        sums[t].set(f.fma(weight, one, sums[t].get()))
    return sums


def _exp(f: Function, x: Value) -> Value:
    """exp of 16 numbers, within 2 units in the last place; Cephes' polynomial (Moshier, expf.c)."""
    real = lambda number: f.constant(f32s, float(np.float32(number)))  # noqa: E731
    x = f.math("minnum", f.math("maxnum", x, real(-87.0)), real(88.0))
    n = f.math("rint", x * real(1.44269504))
    r = f.fma(n, real(-0.693359375), x)
    r = f.fma(n, real(2.12194440e-4), r)
    p = real(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = f.fma(p, r, real(c))
    y = f.fma(p, r * r, r) + real(1.0)
    return y * ((n.to_int() + 127) << 23).bits(f32s)


def pack_name(form: ActivationLayout, source: str, tokens: int) -> str:
    return f"pack_{source}_{form.name}_{form.limit}_{form.offset}_{tokens}"


PACK = {"a": i64, "b": i64, "factor": f32, "groups": i64, "out": i64, "slot": i64}


def pack(module: Module, form: ActivationLayout, source: str, tokens: int, public: bool = False) -> Function:
    """Floats of one token -> its slot in the records of a block of `tokens` tokens.

    source: "plain" x = a, "norm" x = a * factor * b, "silu" x = silu(a) * b; a, b: float32 [32 groups]; groups: whole spans
    of them; out: the first record to write; slot: the token's number in its block.
    """
    name = pack_name(form, source, tokens)
    if name in module.known:
        return module.known[name]
    f = Function(module, name, PACK, public=public)
    record = form.record(tokens)

    def values(group: Value) -> list[Value]:
        x = []
        for half in range(2):
            at = group * (4 * GROUP) + 4 * LANES * half
            value = f.load(f32s, f.a, at, 4)
            if source == "norm":
                value = value * f.factor.splat() * f.load(f32s, f.b, at, 4)
            elif source == "silu":
                negative = f.constant(f32s, -0.0) - value
                value = value / (_exp(f, negative) + 1.0) * f.load(f32s, f.b, at, 4)
            x.append(value)
        return x

    if form.name == "float":
        with f.loop(f.groups) as i:
            out = f.out + i * form.codes(tokens)
            for half, value in enumerate(values(i)):
                if tokens == 1:
                    f.store(value, out, 4 * LANES * half, 4)
                    continue
                for e in range(LANES):
                    f.store(value.lane(e), out + f.slot * 4, 4 * tokens * (LANES * half + e), 4)
        return f.finish()
    scratch = f.scratch(4 * GROUP * layouts.SPAN)
    with f.loop(f.groups // layouts.SPAN) as span:
        largest = Variable(f, f.zero(i32s))  # as integers, so that NaN counts as the largest: it spoils the scale, not the codes
        with f.loop(layouts.SPAN) as i:
            for half, value in enumerate(values(span * layouts.SPAN + i)):
                f.store(value, scratch, i * (4 * GROUP) + 4 * LANES * half, 4)
                size = value.bits(i32s) & 0x7FFFFFFF
                largest.set(size.compare(">", largest.get()).choose(size, largest.get()))
        top = f.largest(largest.get()).bits(f32)
        usable = top.compare(">", 1e-30)  # below, 1 / top would overflow: such a span counts as zero
        inverse = usable.choose(f.constant(f32, float(form.limit)) / usable.choose(top, 1.0), 0.0)
        scale = top * float(np.float32(1 / form.limit))
        with f.loop(layouts.SPAN) as i:
            x = [f.load(f32s, scratch, i * (4 * GROUP) + 4 * LANES * half, 4) for half in range(2)]
            _quantise(f, form, x, inverse, f.out + span * record, i, tokens)
        f.store(scale, f.out + span * record + f.slot * 4, form.at("scale", tokens), 4)
    return f.finish()


def _quantise(f: Function, form: ActivationLayout, x: list[Value], inverse: Value, record: Value, place: Value, tokens: int) -> None:
    """Group number `place` of a span, of one token: code = x / scale, rounded."""
    out = record + place * form.codes(tokens)
    codes = [f.math("rint", half * inverse.splat()).to_int() for half in x]
    sums = [f.total(half) for half in codes]

    for name, totals in (("sum", [sums[0] + sums[1]]), ("half_sums", sums)):
        at = record + place * (4 * len(totals) * tokens) + f.slot * 4
        for half, total in enumerate(totals):
            f.store(total.to_float(), at, form.at(name, tokens) + 4 * half * tokens, 4)
            f.store(total * -form.offset, at, form.at(f"offset_{name}", tokens) + 4 * half * tokens, 4)

    if form.name == "int16":
        for half, code in enumerate(codes):
            swapped = code.narrow(vector(i16)).shuffle([4 * j + e for j in range(4) for e in (0, 2, 1, 3)])
            quads = swapped.bits(vector(i64, 4))
            for j in range(4):
                f.store(quads.lane(j), out + f.slot * 8, 8 * tokens * (4 * half + j), 4)
        return
    planes = [codes]
    if form.name == "int8x2":
        high = [(code + 128).shift_signed(8) for code in codes]
        planes = [high, [code - (top << 8) for code, top in zip(codes, high)]]
    for plane, halves in enumerate(planes):
        for half, code in enumerate(halves):
            quads = code.narrow(vector(i8)).bits(vector(i32, 4))
            for j in range(4):
                f.store(quads.lane(j), out + f.slot * 4, 4 * tokens * (8 * plane + 4 * half + j), 4)


def sum_of_squares(module: Module, public: bool = False) -> Function:
    """out[0] = the sum of a[i]**2 over `groups` groups of 32. a, out: float32."""
    name = "sum_of_squares"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"a": i64, "groups": i64, "out": i64}, public=public)
    sums = _zeros(f, 2)
    with f.loop(f.groups) as i:
        for half, one in enumerate(sums):
            value = f.load(f32s, f.a, i * (4 * GROUP) + 4 * LANES * half, 4)
            one.set(f.fma(value, value, one.get()))
    f.store(f.total(sums[0].get() + sums[1].get()), f.out, 0, 4)
    return f.finish()


def rotate(module: Module, head_dim: int, public: bool = False) -> Function:
    """Rotary embedding of one head in place (Hugging Face's layout: pairs i, i + D/2). x: float32 [D]; cosine, sine: [D/2]."""
    name = f"rotate_{head_dim}"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"x": i64, "cosine": i64, "sine": i64}, public=public)
    half = head_dim // 2

    def turn(type_: ir.Type, at: Value | int) -> None:
        first, second = f.load(type_, f.x, at, 4), f.load(type_, f.x + 4 * half, at, 4)
        cosine, sine = f.load(type_, f.cosine, at, 4), f.load(type_, f.sine, at, 4)
        f.store(first * cosine - second * sine, f.x, at, 4)
        f.store(second * cosine + first * sine, f.x + 4 * half, at, 4)

    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        turn(f32s, 4 * i)
    with f.loop(half, whole) as i:
        turn(f32, i * 4)
    return f.finish()


def norm_head(module: Module, head_dim: int, public: bool = False) -> Function:
    """RMS norm of one head in place. x, weight: float32 [D]."""
    name = f"norm_head_{head_dim}"
    if name in module.known:
        return module.known[name]
    f = Function(module, name, {"x": i64, "weight": i64, "eps": f32}, public=public)
    whole = head_dim // LANES * LANES
    sums, rest = f.zero(f32s), Variable(f, f.constant(f32, 0.0))
    for d in range(0, whole, LANES):
        value = f.load(f32s, f.x, 4 * d, 4)
        sums = f.fma(value, value, sums)
    with f.loop(head_dim, whole) as d:
        value = f.load(f32, f.x, d * 4, 4)
        rest.set(rest.get() + value * value)
    mean = (f.total(sums) + rest.get()) / float(head_dim)
    scale = f.constant(f32, 1.0) / f.math("sqrt", mean + f.eps)
    for d in range(0, whole, LANES):
        f.store(f.load(f32s, f.x, 4 * d, 4) * scale.splat() * f.load(f32s, f.weight, 4 * d, 4), f.x, 4 * d, 4)
    with f.loop(head_dim, whole) as d:
        f.store(f.load(f32, f.x, d * 4, 4) * scale * f.load(f32, f.weight, d * 4, 4), f.x, d * 4, 4)
    return f.finish()


ATTEND = {"query": i64, "keys": i64, "values": i64, "out": i64, "first": i64, "end": i64, "row_bytes": i64,
          "heads": i64, "scores": i64, "scores_bytes": i64, "scale": f32}
HEADS_AT_ONCE = 4
TILE = 64  # positions whose values are read for all heads before the next ones
PIECE = 64  # dimensions of a head whose sums are in registers together


def attend(module: Module, head_dim: int, public: bool = False) -> Function:
    """softmax(scale q k^T) v of one token and one key head, for the `heads` query heads that share it.

    query, out: float32 [heads][D] (out may be filled up to whole vectors); keys, values: the head's rows, float32
    [positions][D, filled up with zeros to whole vectors], row_bytes apart, whole blocks of 16 rows readable; first, end:
    the positions to be seen; scores: scratch, scores_bytes apart for each head, 4 bytes for each position from first's
    block of 16 to end's.
    """
    name = f"attend_{head_dim}"
    if name in module.known:
        return module.known[name]
    chunks = -(-head_dim // LANES)
    score = _score_block(module, head_dim)
    mixers = {count: _mix(module, head_dim, count) for count in (HEADS_AT_ONCE, 1)}
    f = Function(module, name, ATTEND, public=public)
    start = f.first // LANES * LANES
    blocks = (f.end - start + (LANES - 1)) // LANES
    with f.loop(blocks) as b:
        position = start + b * LANES
        keys = f.keys + position * f.row_bytes
        with f.loop(f.heads) as h:
            f.call(score, f.query + h * (4 * head_dim), keys, f.row_bytes, position, f.first, f.end,
                   f.scores + h * f.scores_bytes + b * (4 * LANES), f.scale)
    with f.loop(f.heads) as h:
        row = f.scores + h * f.scores_bytes
        top = Variable(f, f.constant(f32s, -3e38))
        with f.loop(blocks) as b:
            top.set(f.math("maxnum", top.get(), f.load(f32s, row, b * (4 * LANES), 4)))
        largest = f.largest(top.get()).splat()
        sums = Variable(f, f.zero(f32s))
        with f.loop(blocks) as b:
            value = f.load(f32s, row, b * (4 * LANES), 4)
            value = value.compare(">", -2e38).choose(_exp(f, value - largest), 0.0)
            f.store(value, row, b * (4 * LANES), 4)
            sums.set(sums.get() + value)
        share = (f.constant(f32, 1.0) / f.total(sums.get())).splat()
        with f.loop(blocks) as b:
            f.store(f.load(f32s, row, b * (4 * LANES), 4) * share, row, b * (4 * LANES), 4)
        with f.loop(head_dim) as d:
            f.store(f.zero(f32), f.out + h * (4 * head_dim), d * 4, 4)
    with f.loop(f.end, f.first, TILE) as tile:
        count = (f.end - tile).at_most(TILE)
        values, seen = f.values + tile * f.row_bytes, f.scores + (tile - start) * 4
        whole = f.heads // HEADS_AT_ONCE * HEADS_AT_ONCE
        for start_head, end_head, at_once in ((f.constant(i64, 0), whole, HEADS_AT_ONCE), (whole, f.heads, 1)):
            with f.loop(end_head, start_head, at_once) as h:
                for piece in range(0, chunks * LANES, PIECE):
                    f.call(mixers[at_once][piece], seen + h * f.scores_bytes, f.scores_bytes, values + 4 * piece, f.row_bytes,
                           count, f.out + h * (4 * head_dim) + 4 * piece)
    return f.finish()


def _score_block(module: Module, head_dim: int) -> Function:
    """Scores of one head against 16 rows of keys; -3e38 outside first .. end."""
    f = Function(module, f"score_block_{head_dim}", {
        "query": i64, "keys": i64, "row_bytes": i64, "position": i64, "first": i64, "end": i64, "out": i64,
        "scale": f32})
    sums: list[Value] = []
    tail = head_dim % LANES
    whole = head_dim // LANES
    query = [f.load(f32s, f.query, 4 * LANES * c, 4) for c in range(whole)]
    if tail:  # the rows of keys are filled up with zeros, the query is not: what stands behind it must not count
        last = f.zero(f32s)
        for e in range(tail):
            last = last.with_lane(e, f.load(f32, f.query, 4 * (LANES * whole + e), 4))
        query.append(last)
    for j in range(LANES):
        row = f.keys + f.row_bytes * j if j else f.keys
        one = f.load(f32s, row, 0, 4) * query[0]
        for c in range(1, len(query)):
            one = f.fma(f.load(f32s, row, 4 * LANES * c, 4), query[c], one)
        sums.append(one)
    # Lanes of 16 vectors summed into one vector: pairs of lanes of pairs of vectors, four times.
    while len(sums) > 1:
        sums = [one.shuffle(list(range(0, 32, 2)), two) + one.shuffle(list(range(1, 32, 2)), two)
                for one, two in zip(sums[::2], sums[1::2])]
    scores = sums[0] * f.scale.splat()
    lanes = f.position.narrow(i32).splat() + f.constant(i32s, list(range(LANES)))
    outside = f.constant(f32s, -3e38)
    scores = lanes.compare("<", f.end.narrow(i32).splat()).choose(scores, outside)
    scores = lanes.compare(">=", f.first.narrow(i32).splat()).choose(scores, outside)
    f.store(scores, f.out, 0, 4)
    return f.finish()


def _mix(module: Module, head_dim: int, heads: int) -> dict[int, Function]:
    """By first dimension of a piece: out[h][piece] += the sum over `count` positions of share[h][position] * values."""
    pieces = {}
    for piece in range(0, -(-head_dim // LANES) * LANES, PIECE):
        dims = min(PIECE, head_dim - piece)
        whole, tail = dims // LANES, dims % LANES
        f = Function(module, f"mix_{head_dim}_{piece}_{heads}", {
            "shares": i64, "shares_bytes": i64, "values": i64, "row_bytes": i64, "count": i64, "out": i64})

        def places(h: int):
            """(out's address, type, lanes) of each vector of a head."""
            out = f.out + 4 * head_dim * h if h else f.out
            return [(out + 4 * LANES * c if c else out) for c in range(whole + bool(tail))]

        sums = []
        for h in range(heads):
            for c, at in enumerate(places(h)):
                if c < whole:
                    sums.append(Variable(f, f.load(f32s, at, 0, 4)))
                else:
                    part = f.zero(f32s)
                    for e in range(tail):
                        part = part.with_lane(e, f.load(f32, at, 4 * e, 4))
                    sums.append(Variable(f, part))
        width = whole + bool(tail)
        with f.loop(f.count) as i:
            row = f.values + i * f.row_bytes
            values = [f.load(f32s, row, 4 * LANES * c, 4) for c in range(width)]
            for h in range(heads):
                share = f.load(f32, f.shares + f.shares_bytes * h + i * 4 if h else f.shares + i * 4, 0, 4).splat()
                for c in range(width):
                    one = sums[h * width + c]
                    one.set(f.fma(share, values[c], one.get()))
        for h in range(heads):
            for c, at in enumerate(places(h)):
                value = sums[h * width + c].get()
                if c < whole:
                    f.store(value, at, 0, 4)
                else:
                    for e in range(tail):
                        f.store(value.lane(e), at, 4 * e, 4)
        pieces[piece] = f.finish()
    return pieces


FILL = {"rows": i64, "panels": i64, "blocks": i64, "out": i64, "panel_bytes": i64}


def fill_name(layout: layouts.Layout, format: str = "") -> str:
    return f"fill_{layout.name}_{format}" if format else f"fill_{layout.name}"


def fill_from_codes(module: Module, layout: LowBitLayout) -> Function:
    """Codes, one per byte -> the codes of `panels` panels. rows: int64 [panels][16], the address of each row's codes."""
    if (name := fill_name(layout)) in module.known:
        return module.known[name]
    f = Function(module, name, FILL, public=True)
    with f.loop(f.panels) as p, f.loop(f.blocks) as b, f.loop(layout.groups) as g:
        at = b * layout.block + g * GROUP
        chunks = [_gather(f, f.rows + p * (8 * LANES), at + 4 * k) for k in range(8)]
        out = f.out + p * f.panel_bytes + b * layout.block_bytes + g * layout.group_bytes + layout.offsets["codes"]
        _store_group(f, layout.bits, chunks, out)
    return f.finish()


def fill_from_blocks(module: Module, layout: LowBitLayout, name: str) -> Function:
    """A GGUF file's blocks of the format `name` -> the codes of `panels` panels. rows: the address of each row's blocks.

    Only for rows of whole blocks of the layout, and formats whose codes need no table.
    """
    if fill_name(layout, name) in module.known:
        return module.known[fill_name(layout, name)]
    file = GGUF_FORMATS[name]
    f = Function(module, fill_name(layout, name), FILL, public=True)
    per_block = layout.block // file.block_size
    groups = file.block_size // GROUP
    with f.loop(f.panels) as p, f.loop(f.blocks) as b, f.loop(per_block) as i:
        rows, at = f.rows + p * (8 * LANES), (b * per_block + i) * file.nbytes
        out = f.out + p * f.panel_bytes + b * layout.block_bytes + i * (groups * layout.group_bytes) + layout.offsets["codes"]
        words: dict[int, Value] = {}

        def word(offset: int) -> Value:
            if offset not in words:
                words[offset] = _gather(f, rows, at + offset)
            return words[offset]

        for g in range(groups):
            chunks = []
            for c in range(GROUP * g, GROUP * (g + 1), 4):
                chunk = None
                for field in file.fields:
                    if field.run == 0:
                        # four single bits to the lowest bits of four bytes
                        bits = (word(field.first + c // 32 * 4) >> c % 32) & 15
                        part = (bits * 0x00204081) & 0x01010101
                    else:
                        per_run = field.run * 8 // field.width
                        place = field.first + c // per_run * field.run + c % field.run
                        part = (word(place) >> c % per_run // field.run * field.width)
                        if field.width < 8:
                            part = part & ((1 << field.width) - 1) * 0x01010101
                    part = part << field.at if field.at else part
                    chunk = part if chunk is None else chunk | part
                chunks.append(chunk ^ (0x01010101 * file.flip - (1 << 32)) if file.flip else chunk)
            _store_group(f, layout.bits, chunks, out + g * layout.group_bytes)
    return f.finish()


def _gather(f: Function, rows: Value, offset: Value) -> Value:
    """Four bytes of each of 16 rows, int32 [16]. rows: where their addresses are."""
    lanes = f.zero(i32s)
    for r in range(LANES):
        lanes = lanes.with_lane(r, f.load(i32, f.load(i64, rows, 8 * r, 8), offset))
    return lanes


def _store_group(f: Function, bits: int, chunks: list[Value], out: Value) -> None:
    """Eight chunks of codes as bit planes (layouts.PLANES)."""
    at = 0
    for width, shift in PLANES[bits]:
        for v in range(width):
            packed = None
            for k in range(v, 8, width):
                part = chunks[k] >> shift if shift else chunks[k]
                part = part & ((1 << width) - 1) * 0x01010101 if width < 8 else part
                part = part << k // width * width if k >= width else part
                packed = part if packed is None else packed | part
            f.store(packed, out, 64 * (at + v), 64)
        at += width


def fill_from_floats(module: Module, layout: FloatLayout) -> Function:
    """Rows of numbers -> panels. rows: int64 [panels][16], the address of each row."""
    if (name := fill_name(layout)) in module.known:
        return module.known[name]
    f = Function(module, name, FILL, public=True)
    width = layouts.WIDTHS[layout.dtype]
    # 4 bytes at a time: one float32 or two 16-bit numbers
    with f.loop(f.panels) as p, f.loop(f.blocks * (GROUP * width // 4)) as word:
        lanes = _gather(f, f.rows + p * (8 * LANES), word * 4)
        out = f.out + p * f.panel_bytes + word * (4 * LANES)
        if width == 4:
            f.store(lanes, out, 0, 64)
        else:
            f.store(lanes.narrow(vector(i16)), out, 0, 32)
            f.store((lanes >> 16).narrow(vector(i16)), out, 32, 32)
    return f.finish()


def fill(module: Module, layout: layouts.Layout, format: str) -> Function:
    """The function that fills panels of a layout from rows of a format ("": numbers, or codes one per byte)."""
    if isinstance(layout, FloatLayout):
        return fill_from_floats(module, layout)
    return fill_from_blocks(module, layout, format) if format else fill_from_codes(module, layout)
