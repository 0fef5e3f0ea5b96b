"""RMS norms, scaling and softcap: operations on single numbers between two products."""

from __future__ import annotations

from .emit import LANES, Function, Value, Variable, f32, f32s, i32, kernel
from .layouts import GROUP


@kernel
def sum_of_squares(f: Function, a, groups, out) -> None:
    """out[0] = sum of a[i]**2 over `groups` groups of 32. a, out: float32."""
    sums = [Variable(f, f.zero(f32s)) for _ in range(2)]
    with f.loop(groups) as i:
        for half, total in enumerate(sums):
            value = f.load(f32s, a, i * (4 * GROUP) + 4 * LANES * half)
            total.set(f.fma(value, value, total.get()))
    f.store(f.reduce_sum(sums[0].get() + sums[1].get()), out)


@kernel
def norm_head(f: Function, x, weight, width, eps: f32) -> None:
    """RMS norm of one head in place. x, weight: float32 [width]."""
    vectorised = width // LANES * LANES
    sums, rest = Variable(f, f.zero(f32s)), Variable(f, f.constant(f32, 0.0))
    with f.loop(vectorised, 0, LANES) as d:
        value = f.load(f32s, x, d * 4)
        sums.set(f.fma(value, value, sums.get()))
    with f.loop(width, vectorised) as d:
        value = f.load(f32, x, d * 4)
        rest.set(rest.get() + value * value)
    mean = (f.reduce_sum(sums.get()) + rest.get()) / width.truncate(i32).to_float()
    scale = f.constant(f32, 1.0) / f.math("sqrt", mean + eps)
    with f.loop(vectorised, 0, LANES) as d:
        f.store(f.load(f32s, x, d * 4) * scale.splat() * f.load(f32s, weight, d * 4), x, d * 4)
    with f.loop(width, vectorised) as d:
        f.store(f.load(f32, x, d * 4) * scale * f.load(f32, weight, d * 4), x, d * 4)


@kernel
def scale_head(f: Function, x, weight, size) -> None:
    """x *= weight. x, weight: float32 [size]."""
    vectorised = size // LANES * LANES
    with f.loop(vectorised, 0, LANES) as d:
        f.store(f.load(f32s, x, d * 4) * f.load(f32s, weight, d * 4), x, d * 4)
    with f.loop(size, vectorised) as d:
        f.store(f.load(f32, x, d * 4) * f.load(f32, weight, d * 4), x, d * 4)


@kernel
def adjust(f: Function, delta, weight, factor: f32, target, accumulate, groups) -> None:
    """target = delta * factor (* weight, unless 0) (+ target, if accumulate): float32."""
    with f.loop(groups * (GROUP // LANES)) as i:
        at = i * (4 * LANES)
        value = Variable(f, f.load(f32s, delta, at) * factor.splat())
        with f.if_then(weight.compare("!=", 0)):
            value.set(value.get() * f.load(f32s, weight, at))
        with f.if_then(accumulate.compare("!=", 0)):
            value.set(value.get() + f.load(f32s, target, at))
        f.store(value.get(), target, at)


@kernel
def softcap(f: Function, x, groups, cap: f32) -> None:
    """x = cap * tanh(x / cap) in place. x: float32 [32 groups]."""
    with f.loop(groups * (GROUP // LANES)) as i:
        at = i * (4 * LANES)
        f.store(apply_softcap(f, f.load(f32s, x, at), cap.splat()), x, at)


def apply_softcap(f: Function, x: Value, cap: Value) -> Value:
    """cap * tanh(x / cap) of 16 numbers."""
    return cap - cap * 2.0 / (f.exp(x * 2.0 / cap) + 1.0)
