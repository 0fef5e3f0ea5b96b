"""RMS norms, scaling, softcap and rotations: operations on single numbers between two products."""

from __future__ import annotations

from llvmlite import ir

from .emit import LANES, Function, Value, Variable, f32, f32s, i32, kernel
from .layouts import GROUP
from .records import Operation


@kernel
def sum_of_squares(f: Function, a, groups, out) -> None:
    """out[0] = sum of a[i]**2 over `groups` groups of 32. a, out: float32."""
    sums = [Variable(f, f.zero(f32s)) for _ in range(2)]
    with f.loop(groups) as i:
        for half, total in enumerate(sums):
            value = f.load(f32s, a, i * (4 * GROUP) + 4 * LANES * half)
            total.set(f.fma(value, value, total.get()))
    f.store(f.reduce_sum(sums[0].get() + sums[1].get()), out)


def root_mean_square(f: Operation, a: Value, groups: Value) -> Value:
    """RMS of a row, by the operation's width and eps."""
    scratch = f.scratch + f.thread * 64
    f.call(sum_of_squares(f.module), a, groups, scratch)
    return f.math("sqrt", f.load(f32, scratch) / f.load_float("width") + f.load_float("eps"))


def adjust(f: Operation, scales: bool = False) -> None:
    """target = delta * factor (* weight / RMS, unless weight is 0) (+ target, if accumulate), times
    scale if `scales`.
    """
    weight, groups = f.weight, f.groups
    has_weight, accumulates = weight.compare("!=", 0), f.accumulate.compare("!=", 0)
    scale = f.load_float("scale").splat() if scales else None
    with f.loop(f.hi, f.lo) as token:
        delta, target = f.delta + token * f.delta_bytes, f.target + token * f.target_bytes
        factor = Variable(f, f.load_float("factor"))
        with f.if_then(has_weight):
            factor.set(factor.get() / root_mean_square(f, delta, groups))
        factor = factor.get().splat()
        with f.loop(groups * (GROUP // LANES)) as i:
            at = i * (4 * LANES)
            value = Variable(f, f.load(f32s, delta, at) * factor)
            with f.if_then(has_weight):
                value.set(value.get() * f.load(f32s, weight, at))
            with f.if_then(accumulates):
                value.set(value.get() + f.load(f32s, target, at))
            if scale:
                value.set(value.get() * scale)
            f.store(value.get(), target, at)


def softcap(f: Operation) -> None:
    """target = cap * tanh(target / cap)."""
    target, target_bytes, groups, cap = f.target, f.target_bytes, f.groups, f.load_float("cap")
    with f.loop(f.hi, f.lo) as token, f.loop(groups * (GROUP // LANES)) as i:
        at = target + token * target_bytes + i * (4 * LANES)
        f.store(apply_softcap(f, f.load(f32s, at), cap.splat()), at)


def apply_softcap(f: Function, x: Value, cap: Value) -> Value:
    """cap * tanh(x / cap) of 16 numbers. NaN stays NaN, which f.exp does not keep."""
    capped = cap - cap * 2.0 / (f.exp(x * 2.0 / cap) + 1.0)
    return x.compare("==", x).select(capped, x)


def select(f: Operation) -> None:
    """Zeros in the rows of tokens that do not have the adapter of this number."""
    target, target_bytes, groups, adapter = f.target, f.target_bytes, f.groups, f.adapter
    with f.loop(f.hi, f.lo) as token, f.if_then(f.place(token)["adapter"].compare("!=", adapter)):
        with f.loop(groups * (GROUP // LANES)) as i:
            f.store(f.zero(f32s), target + token * target_bytes, i * (4 * LANES))


def norm_heads(f: Operation) -> None:
    """RMS norm of every head of query and key, in place."""
    eps = f.load_float("eps")
    queries = f.heads, f.query_width, f.query_weight
    keys, keys_at = (f.key_heads, f.key_width, f.key_weight), f.keys_at
    with f.loop(f.hi, f.lo) as token:
        row = f.qkv + token * f.qkv_bytes
        for first, (count, width, weight) in ((row, queries), (row + keys_at, keys)):
            with f.loop(count) as h:
                f.call(norm_head(f.module), first + h * width * 4, weight, width, eps)


@kernel
def norm_head(f: Function, x, weight, width, eps: f32) -> None:
    """RMS norm of one head in place. x, weight: float32 [width]."""
    scale = f.constant(f32, 1.0) / f.math("sqrt", _mean_square(f, x, width) + eps)
    for type_, at in f.loop_numbers(width):
        by = scale.splat() if type_ is f32s else scale
        f.store(f.load(type_, x, at) * by * f.load(type_, weight, at), x, at)


def _mean_square(f: Function, x: Value, width: Value) -> Value:
    """The mean of x[i]**2, of float32 [width]."""
    sums, rest = Variable(f, f.zero(f32s)), Variable(f, f.zero(f32))
    for type_, at in f.loop_numbers(width):
        value = f.load(type_, x, at)
        if type_ is f32s:
            sums.set(f.fma(value, value, sums.get()))
        else:
            rest.set(rest.get() + value * value)
    return (f.reduce_sum(sums.get()) + rest.get()) / width.truncate(i32).to_float()


def norm_values(f: Operation) -> None:
    """RMS norm, without weights, of heads, written elsewhere or in place."""
    qkv, qkv_bytes, heads, size, eps = f.qkv, f.qkv_bytes, f.heads, f.size, f.load_float("eps")
    source_at, target_at = f.source_at, f.at
    with f.loop(f.hi, f.lo) as token, f.loop(heads) as h:
        row = qkv + token * qkv_bytes + h * size * 4
        x, out = row + source_at, row + target_at
        scale = f.constant(f32, 1.0) / f.math("sqrt", _mean_square(f, x, size) + eps)
        for type_, at in f.loop_numbers(size):
            by = scale.splat() if type_ is f32s else scale
            f.store(f.load(type_, x, at) * by, out, at)


def layer_inputs(f: Operation) -> None:
    """embedded = (embedded * root + norm(x * factor)) * scale, of a layer's numbers an item."""
    x, x_bytes, embedded, embedded_bytes = f.x, f.x_bytes, f.embedded, f.embedded_bytes
    layers, size, weight = f.layers, f.size, f.weight
    root, factor, scale, eps = (f.load_float(name) for name in ("root", "factor", "scale", "eps"))
    with f.loop(f.hi, f.lo) as item:
        token, first = item // layers, item % layers * size * 4
        row, out = x + token * x_bytes + first, embedded + token * embedded_bytes + first
        mean = _mean_square(f, row, size) * factor * factor
        norm = factor / f.math("sqrt", mean + eps)
        for type_, at in f.loop_numbers(size):
            by, width, last = (
                number.splat() if type_ is f32s else number for number in (norm, root, scale)
            )
            normed = f.load(type_, row, at) * by * f.load(type_, weight, at)
            f.store((normed + f.load(type_, out, at) * width) * last, out, at)


def scale_heads(f: Operation) -> None:
    """Each head of the queries times weight, in place."""
    qkv, qkv_bytes, heads, size, weight = f.qkv, f.qkv_bytes, f.heads, f.size, f.weight
    with f.loop(f.hi, f.lo) as token, f.loop(heads) as h:
        x = qkv + token * qkv_bytes + h * size * 4
        for type_, at in f.loop_numbers(size):
            f.store(f.load(type_, x, at) * f.load(type_, weight, at), x, at)


@kernel
def rotate(f: Function, x, cosine, sine, *, head_dim: int) -> None:
    """Rotate pairs (i, i + D/2) of a head in place. x: float32 [D]; cosine, sine: [D/2]."""
    half = head_dim // 2

    def rotate_pairs(type_: ir.Type, at: Value | int) -> None:
        first, second = f.load(type_, x, at), f.load(type_, x + 4 * half, at)
        c, s = f.load(type_, cosine, at), f.load(type_, sine, at)
        f.store(first * c - second * s, x, at)
        f.store(second * c + first * s, x + 4 * half, at)

    vectorised = half // LANES * LANES
    for i in range(0, vectorised, LANES):
        rotate_pairs(f32s, 4 * i)
    with f.loop(half, vectorised) as i:
        rotate_pairs(f32, i * 4)
