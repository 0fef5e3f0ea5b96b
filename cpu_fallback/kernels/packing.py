"""Packing of activations: float32 rows to records (layouts.ActivationLayout)."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.ops import SWIGLU_ALPHA, SWIGLU_LIMIT

from . import layouts
from .emit import LANES, Function, Value, Variable, f32, f32s, i8, i16, i32, i64, kernel, vector
from .layouts import GROUP, ActivationLayout


@kernel
def pack(
    f: Function,
    a,
    b,  # float32 [32 groups]; of xIELU its four numbers
    factor: f32,
    groups,  # a multiple of SPAN
    out,  # the first record to write
    index,  # the token's place in its tile
    size,  # tokens in the tile
    *,
    x_layout: ActivationLayout,
    source: str,
    single: bool,
) -> None:
    """Pack one token's numbers x into the records of its tile; single: a tile of one token.

    source: "plain" x = a; "norm" x = a * factor * b; "silu" x = silu(a) * b; "gelu_tanh" x =
    gelu(a) * b, by the tanh approximation; "clamped_swiglu" as core.ops.gate; "xielu" x = xielu(a);
    "sigmoid" x = sigmoid(a) * b.
    """
    tokens, index = (1, f.constant(i64, 0)) if single else (size, index)
    record = x_layout.record(tokens)

    def load_values(group: Value) -> list[Value]:
        x = []
        for half in range(2):
            at = group * (4 * GROUP) + 4 * LANES * half
            value = f.load(f32s, a, at)
            if source == "norm":
                value = value * factor.splat() * f.load(f32s, b, at)
            elif source == "silu":
                negative = f.constant(f32s, -0.0) - value
                value = value / (f.exp(negative) + 1.0) * f.load(f32s, b, at)
            elif source == "gelu_tanh":  # a (1 + tanh(u)) / 2 = a / (1 + exp(-2 u))
                cubic = value * value * value * float(np.float32(0.044715))
                negative = (value + cubic) * float(np.float32(-1.5957691216))
                value = value / (f.exp(negative) + 1.0) * f.load(f32s, b, at)
            elif source == "clamped_swiglu":
                value = f.smaller(f.constant(f32s, SWIGLU_LIMIT), value)
                up = f.smaller(f.constant(f32s, SWIGLU_LIMIT), f.load(f32s, b, at))
                up = f.larger(f.constant(f32s, -SWIGLU_LIMIT), up)
                negative = value * -float(np.float32(SWIGLU_ALPHA))
                value = value / (f.exp(negative) + 1.0) * (up + 1.0)
            elif source == "sigmoid":
                negative = f.constant(f32s, -0.0) - value
                value = f.load(f32s, b, at) / (f.exp(negative) + 1.0)
            elif source == "xielu":
                value = _xielu(f, value, b)
            x.append(value)
        return x

    if x_layout.kind == "float":
        with f.loop(groups) as i:
            codes = out + i * x_layout.codes(tokens)
            for half, value in enumerate(load_values(i)):
                if single:
                    f.store(value, codes, 4 * LANES * half)
                    continue
                for e in range(LANES):
                    number, column = value.extract_lane(e), codes + index * 4
                    f.store(number, column, 4 * tokens * (LANES * half + e))
        return
    if x_layout.kind == "bfloat16":
        with f.loop(groups) as i:
            codes = out + i * x_layout.codes(tokens) + index * 4
            for half, value in enumerate(load_values(i)):
                pairs = _round_to_bfloat16(f, value).bitcast(vector(i32, LANES // 2))
                for pair in range(LANES // 2):
                    both = pairs.extract_lane(pair)
                    f.store(both, codes, 4 * tokens * (LANES // 2 * half + pair))
        return
    scratch = f.allocate_stack(4 * GROUP * layouts.SPAN)
    with f.loop(groups // layouts.SPAN) as span:
        # compare as integers, so that NaN reaches the scale
        largest = Variable(f, f.zero(vector(i32)))
        with f.loop(layouts.SPAN) as i:
            for half, value in enumerate(load_values(span * layouts.SPAN + i)):
                f.store(value, scratch, i * (4 * GROUP) + 4 * LANES * half)
                magnitude = value.bitcast(vector(i32)) & 0x7FFFFFFF
                is_larger = magnitude.compare(">", largest.get())
                largest.set(is_larger.select(magnitude, largest.get()))
        top = f.reduce_max(largest.get()).bitcast(f32)
        usable = top.compare(">", 1e-30)  # keeps limit / top finite; smaller spans become zero
        inverse = f.constant(f32, float(x_layout.limit)) / usable.select(top, 1.0)
        inverse = usable.select(inverse, 0.0)
        scale = top * float(np.float32(1 / x_layout.limit))
        with f.loop(layouts.SPAN) as i:
            x = [f.load(f32s, scratch, i * (4 * GROUP) + 4 * LANES * half) for half in range(2)]
            _quantise(f, x_layout, x, inverse, out + span * record, i, index, tokens)
        f.store(scale, out + span * record + index * 4, x_layout.at("scale", tokens))


def _xielu(f: Function, x: Value, numbers: Value) -> Value:
    """xIELU (core.ops) of 16 numbers."""
    positive, negative, beta, eps = (f.load(f32, numbers, 4 * i).splat() for i in range(4))
    least = x.compare("<", eps).select(x, eps)
    # exp(x) - 1 by Taylor's series where the difference would cancel
    series = least * float(np.float32(1 / 5040))
    for divisor in (720, 120, 24, 6, 2, 1):
        series = (series + float(np.float32(1 / divisor))) * least
    below = least.compare(">", -0.5).select(series, f.exp(least) - 1.0) - x
    curve = x.compare(">", 0.0).select(x * x * positive, below * negative)
    return curve + x * beta


def _round_to_bfloat16(f: Function, x: Value) -> Value:
    """Upper halves of float32, rounded to nearest, ties to even: int16 [16]."""
    bits = x.bitcast(vector(i32))
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return x.compare("==", x).select(rounded, 0x7FC0).truncate(vector(i16))


def _quantise(
    f: Function,
    x_layout: ActivationLayout,
    x: list[Value],
    inverse: Value,
    record: Value,
    group: Value,
    index: Value,
    tokens: Value | int,
) -> None:
    """Quantise one token's group of a span: code = x / scale, rounded. tokens: of the tile."""
    out = record + group * x_layout.codes(tokens)
    codes = [f.math("rint", half * inverse.splat()).to_int() for half in x]
    sums = [f.reduce_sum(half) for half in codes]

    for name, totals in (("sum", [sums[0] + sums[1]]), ("half_sums", sums)):
        at = record + group * (4 * len(totals) * tokens) + index * 4
        for half, total in enumerate(totals):
            plain = total.to_float()
            f.store(plain, at, x_layout.at(name, tokens) + 4 * half * tokens)
            scaled = total * -x_layout.offset
            f.store(scaled, at, x_layout.at(f"offset_{name}", tokens) + 4 * half * tokens)

    if x_layout.kind == "int16":
        order = [4 * j + e for j in range(4) for e in (0, 2, 1, 3)]
        for half, code in enumerate(codes):
            swapped = code.truncate(vector(i16)).shuffle(order)
            quads = swapped.bitcast(vector(i64, 4))
            for j in range(4):
                f.store(quads.extract_lane(j), out + index * 8, 8 * tokens * (4 * half + j), 4)
        return
    planes = [codes]
    if x_layout.kind == "int8x2":
        high = [(code + 128).arithmetic_shift(8) for code in codes]
        planes = [high, [code - (top << 8) for code, top in zip(codes, high)]]
    for plane, halves in enumerate(planes):
        for half, code in enumerate(halves):
            quads = code.truncate(vector(i8)).bitcast(vector(i32, 4))
            for j in range(4):
                quad, column = quads.extract_lane(j), out + index * 4
                f.store(quad, column, 4 * tokens * (8 * plane + 4 * half + j))
