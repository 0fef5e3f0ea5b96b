"""RMS norms, scaling and softcap: operations on single numbers between two products."""

from __future__ import annotations

from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i32, i64, kernel
from .layouts import GROUP

ADJUST = {
    "delta": i64,
    "weight": i64,
    "factor": f32,
    "target": i64,
    "accumulate": i64,
    "groups": i64,
}


@kernel
def sum_of_squares(module: Module, public: bool = False) -> Function:
    """out[0] = sum of a[i]**2 over `groups` groups of 32. a, out: float32."""
    f = Function(module, "sum_of_squares", {"a": i64, "groups": i64, "out": i64}, public=public)
    sums = [Variable(f, f.zero(f32s)) for _ in range(2)]
    with f.loop(f.groups) as i:
        for half, total in enumerate(sums):
            value = f.load(f32s, f.a, i * (4 * GROUP) + 4 * LANES * half, 4)
            total.set(f.fma(value, value, total.get()))
    f.store(f.reduce_sum(sums[0].get() + sums[1].get()), f.out, 0, 4)
    return f.finish()


@kernel
def norm_head(module: Module, public: bool = False) -> Function:
    """RMS norm of one head in place. x, weight: float32 [width]."""
    f = Function(
        module, "norm_head", {"x": i64, "weight": i64, "width": i64, "eps": f32}, public=public
    )
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
        f.store(
            f.load(f32s, f.x, d * 4, 4) * scale.splat() * f.load(f32s, f.weight, d * 4, 4),
            f.x,
            d * 4,
            4,
        )
    with f.loop(f.width, vectorised) as d:
        f.store(f.load(f32, f.x, d * 4, 4) * scale * f.load(f32, f.weight, d * 4, 4), f.x, d * 4, 4)
    return f.finish()


@kernel
def adjust(module: Module, public: bool = False) -> Function:
    """target = delta * factor (* weight, unless 0) (+ target, if accumulate). All three: float32
    [32 groups].
    """
    f = Function(module, "adjust", ADJUST, public=public)
    with f.loop(f.groups * (GROUP // LANES)) as i:
        at = i * (4 * LANES)
        value = Variable(f, f.load(f32s, f.delta, at, 4) * f.factor.splat())
        with f.if_then(f.weight.compare("!=", 0)):
            value.set(value.get() * f.load(f32s, f.weight, at, 4))
        with f.if_then(f.accumulate.compare("!=", 0)):
            value.set(value.get() + f.load(f32s, f.target, at, 4))
        f.store(value.get(), f.target, at, 4)
    return f.finish()


@kernel
def softcap(module: Module, public: bool = False) -> Function:
    """x = cap * tanh(x / cap) in place. x: float32 [32 groups]."""
    f = Function(module, "softcap", {"x": i64, "groups": i64, "cap": f32}, public=public)
    with f.loop(f.groups * (GROUP // LANES)) as i:
        at = i * (4 * LANES)
        f.store(apply_softcap(f, f.load(f32s, f.x, at, 4), f.cap.splat()), f.x, at, 4)
    return f.finish()


def apply_softcap(f: Function, x: Value, cap: Value) -> Value:
    """cap * tanh(x / cap) of 16 numbers."""
    return cap - cap * 2.0 / (f.exp(x * 2.0 / cap) + 1.0)
