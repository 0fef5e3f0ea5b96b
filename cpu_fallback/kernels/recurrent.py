"""Mixers with a recurrent state: convolutions of few positions, and the gated delta rule.

An item computes all tokens of a call, in order: it reads a row's state of before the call at the
row's first token, and of after the call from then on. Channels and value heads are independent, and
sums have a fixed order, so that bits do not depend on chunks, rows or threads.
"""

from __future__ import annotations

from llvmlite import ir

from . import norms
from .emit import LANES, Function, Value, Variable, f32, f32s, i64, kernel
from .records import Operation
from .workspace import CHUNK

COLUMNS = 2 * LANES  # of a value head's matrix, summed in registers together
# Numbers of a token and value head: factors of the matrix, of the update, of key and query to unit
# length (the query's with its scale), and the product of both as they are
_NUMBERS = ("decay", "strength", "key", "query", "product")
_AT = {name: 4 * index for index, name in enumerate(_NUMBERS)}


def convolve(f: Operation, gates: bool) -> None:
    """out = c * conv(b * x) if `gates`, of x's thirds b, c and x; else silu(conv(x))."""
    x, x_bytes, out, out_bytes = f.x, f.x_bytes, f.out, f.out_bytes
    weights, weights_bytes, bias = f.weights, f.weights_bytes, f.bias
    channels, history, state = f.channels, f.history, f.state
    row_bytes, whole = channels * 4, channels // LANES
    with f.loop(f.load_context("tokens")) as token:
        row, result = x + token * x_bytes, out + token * out_bytes
        before, after = f.states(token)
        before, after = before + state, after + state

        def compute(type_: ir.Type, at: Value) -> None:
            value = f.load(type_, row, at)
            if gates:
                value = value * f.load(type_, row + row_bytes * 2, at)
            total = Variable(f, f.load(type_, bias, at))
            with f.loop(history) as i:
                former = f.load(type_, before + i * row_bytes, at)
                by = f.load(type_, weights + i * weights_bytes, at)
                total.set(_multiply_add(f, former, by, total.get()))
                with f.if_then(i.compare(">", 0)):
                    f.store(former, after + (i - 1) * row_bytes, at)
            with f.if_then(history.compare(">", 0)):
                f.store(value, after + (history - 1) * row_bytes, at)
            by = f.load(type_, weights + history * weights_bytes, at)
            mixed = _multiply_add(f, value, by, total.get())
            if gates:
                mixed = f.load(type_, row + row_bytes, at) * mixed
            else:
                mixed = mixed * _sigmoid(f, mixed)
            f.store(mixed, result, at)

        with f.loop(f.hi.minimum(whole), f.lo) as item:
            compute(f32s, item * (4 * LANES))
        with f.if_then(f.hi.compare(">", whole)), f.loop(channels, whole * LANES) as channel:
            compute(f32, channel * 4)


def gated_delta(f: Operation) -> None:
    """The gated delta rule of one value head an item, and the norm of its output."""
    x, x_bytes, out, out_bytes, state = f.x, f.x_bytes, f.out, f.out_bytes, f.state
    key_size, value_size, shared, key_heads = f.key_size, f.value_size, f.shared, f.key_heads
    key_bytes, value_bytes, tokens = key_size * 4, value_size * 4, f.load_context("tokens")
    numbers = f.allocate_stack(4 * len(_NUMBERS) * CHUNK)
    with f.loop(f.hi, f.lo) as head:
        queries = x + head // shared % key_heads * key_bytes
        keys = queries + key_heads * key_bytes
        values = x + key_heads * key_bytes * 2 + head * value_bytes
        matrix, results = state + head * key_size * value_bytes, out + head * value_bytes
        with f.loop(tokens) as token:
            strength, decay = (
                f.load(f32, first + token * stride, head * 4).splat()
                for first, stride in (
                    (f.strengths, f.strengths_bytes),
                    (f.decays, f.decays_bytes),
                )
            )
            rate, bias = (f.load(f32, first, head * 4).splat() for first in (f.rates, f.biases))
            row, at = token * x_bytes, numbers + token * (4 * len(_NUMBERS))
            decay = f.exp(rate * _softplus(f, decay + bias))
            f.store(decay.extract_lane(0), at, _AT["decay"])
            f.store(_sigmoid(f, strength).extract_lane(0), at, _AT["strength"])
            scale = f.load_float("scale")
            f.call(_measure(f.module), queries + row, keys + row, key_size, scale, at)

        def update(columns: int, at: Value) -> None:
            """Update some columns of the matrix, token by token; the columns stay in cache."""
            with f.loop(tokens) as token:
                row, number = token * x_bytes, numbers + token * (4 * len(_NUMBERS))
                before, after = (block + matrix + at for block in f.states(token))
                inputs = queries + row, keys + row, values + row + at
                result = results + token * out_bytes + at
                step = _update(f.module, columns)
                f.call(step, before, after, *inputs, result, number, key_size, value_bytes)

        done = f.zero(i64)
        for columns in (COLUMNS, LANES, 1):
            end = value_size // columns * columns
            with f.loop(end, done, columns) as column:
                update(columns, column * 4)
            done = end
        with f.loop(tokens) as token:
            result, eps = results + token * out_bytes, f.load_float("eps")
            f.call(norms.norm_head(f.module), result, f.norm, value_size, eps)


@kernel
def _measure(f: Function, query, key, size, scale: f32, out) -> None:
    """Write the numbers of a query and a key, float32 [size]."""
    pairs = (query, query), (key, key), (query, key)
    sums = [Variable(f, f.zero(f32s)) for _ in pairs]
    rests = [Variable(f, f.zero(f32)) for _ in pairs]
    for type_, at in f.loop_numbers(size):
        for totals, (a, b) in zip(zip(sums, rests), pairs):
            total = totals[type_ is f32]
            product = f.load(type_, a, at), f.load(type_, b, at)
            total.set(_multiply_add(f, *product, total.get()))
    query_norm, key_norm, product = (
        f.reduce_sum(total.get()) + rest.get() for total, rest in zip(sums, rests)
    )
    f.store(scale / f.math("sqrt", query_norm + 1e-6), out, _AT["query"])
    f.store(f.constant(f32, 1.0) / f.math("sqrt", key_norm + 1e-6), out, _AT["key"])
    f.store(product, out, _AT["product"])


@kernel
def _update(
    f: Function,
    before,  # first number of the columns, in the matrix [size][row_bytes]
    after,
    query,  # float32 [size]
    key,
    value,  # float32 [columns]
    out,
    numbers,
    size,
    row_bytes,
    *,
    columns: int,
) -> None:
    """One token's update of some columns S: S *= decay, S += k (strength (v - k S)), out = q S.

    k S and q S are sums of S as it was, which is read once for both: q S after the update is
    decay q S + (q k) (strength (v - k S)).
    """
    type_ = f32s if columns >= LANES else f32
    places = [4 * LANES * i for i in range(max(1, columns // LANES))]

    def widen(number: Value) -> Value:
        return number.splat() if type_ is f32s else number

    decay, strength, unit_key, unit_query, product = (
        f.load(f32, numbers, at) for at in _AT.values()
    )
    key_sums, query_sums = ([Variable(f, f.zero(type_)) for _ in places] for _ in range(2))
    with f.loop(size) as i:
        row = before + i * row_bytes
        k, q = (widen(f.load(f32, first, i * 4)) for first in (key, query))
        for at, key_sum, query_sum in zip(places, key_sums, query_sums):
            number = f.load(type_, row, at)
            key_sum.set(_multiply_add(f, k, number, key_sum.get()))
            query_sum.set(_multiply_add(f, q, number, query_sum.get()))
    steps = []
    for at, key_sum, query_sum in zip(places, key_sums, query_sums):
        recalled = key_sum.get() * widen(decay * unit_key)
        step = (f.load(type_, value, at) - recalled) * widen(strength * unit_key)
        result = _multiply_add(f, widen(product), step, query_sum.get() * widen(decay))
        f.store(result * widen(unit_query), out, at)
        steps.append(step)
    by = widen(decay)
    with f.loop(size) as i:
        row, target = before + i * row_bytes, after + i * row_bytes
        k = widen(f.load(f32, key, i * 4))
        for at, step in zip(places, steps):
            f.store(_multiply_add(f, k, step, f.load(type_, row, at) * by), target, at)


def _multiply_add(f: Function, a: Value, b: Value, c: Value) -> Value:
    """a * b + c of 16 numbers, or of one."""
    return a * b + c if a.type is f32 else f.fma(a, b, c)


def _sigmoid(f: Function, x: Value) -> Value:
    """1 / (1 + exp(-x)) of 16 numbers, or of one."""
    wide = x.splat() if x.type is f32 else x
    result = f.constant(f32s, 1.0) / (f.exp(f.constant(f32s, -0.0) - wide) + 1.0)
    return result.extract_lane(0) if x.type is f32 else result


def _softplus(f: Function, x: Value) -> Value:
    """log(1 + exp(x)) of 16 numbers: max(x, 0) + log(1 + e), e = exp(-|x|), whose logarithm is
    2 atanh(e / (2 + e)) by its series.
    """
    e = f.exp(f.constant(f32s, -0.0) - f.math("fabs", x))
    s = e / (e + 2.0)
    square, series = s * s, f.constant(f32s, 1 / 17)
    for divisor in range(15, 0, -2):
        series = f.fma(series, square, f.constant(f32s, 1 / divisor))
    return f.larger(x, 0.0) + s * series * 2.0
