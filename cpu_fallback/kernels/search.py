"""Compiled searches for the scales of blocks, bit for bit those of core.files.gguf_quantize: the
same operations in the same order, which LLVM does not fuse. Each lane holds a group.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mlx_llama.core.files.gguf_quantize import IQ4_MIDPOINTS, IQ4_NUMBERS, Search

from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i32, kernel
from .target import Target, compile_module

_BYTES = 4 * LANES


def compiled_search(target: Target) -> Search:
    """The functions of `Search` for a target, each compiled at its first use."""
    return Search(*(functools.partial(run, target) for run in (fit_min, fit_scales, descend)))


def fit_min(target, x, weights, low, high, top, first, steps, delta) -> np.ndarray:
    constants = len(x), top, first, steps, delta, weights is not None
    return _run(target, _fit_min, constants, 4, x, x if weights is None else weights, low, high)


def fit_scales(target, x, weights, largest, top) -> np.ndarray:
    constants = len(x), top, weights is not None
    return _run(target, _fit_scales, constants, 2, x, x if weights is None else weights, largest)


def descend(target, x, codes, weights, low, high) -> tuple[np.ndarray, np.ndarray]:
    out = _run(target, _descend, (len(x), low, high), len(x) + 1, x, codes, weights)
    return out[-1], out[:-1]


def _run(
    target: Target, write: Any, constants: tuple, rows: int, *inputs: np.ndarray
) -> np.ndarray:
    """Run a kernel on float32 arrays [..., G]; returns its outputs, float32 [rows, G]."""
    groups = inputs[0].shape[-1]
    padding = -groups % LANES
    if padding:
        inputs = tuple(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) for x in inputs)
    out = np.empty((rows, groups + padding), np.float32)
    arrays = [*(np.ascontiguousarray(x, np.float32) for x in inputs), out]
    _compile(target, write, constants)(*(x.ctypes.data for x in arrays), groups + padding)
    return out[:, :groups]


@functools.cache
def _compile(target: Target, write: Any, constants: tuple) -> Callable[..., None]:
    def build() -> Module:
        module = Module()
        write(module, *constants, public=True)
        return module

    name = write.name(*constants)
    compiled = compile_module(target, name, [name], build)
    return compiled.function(name, write.parameters())


class _Group:
    """Sixteen groups' rows on the stack: in the arrays they are whole pages apart."""

    def __init__(self, f: Function, address: Value, size: int, groups: Value):
        self.f, self.size, self.address = f, size, f.allocate_stack(size * _BYTES)
        for i in range(size):
            self[i] = f.load(f32s, address + groups * (4 * i))

    def __getitem__(self, i: int) -> Value:
        return self.f.load(f32s, self.address, i * _BYTES)

    def __setitem__(self, i: int, value: Value) -> None:
        self.f.store(value, self.address, i * _BYTES)

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(self.size))


def _sum(values: Iterable[Value]) -> Value:
    """Sum in order."""
    return functools.reduce(operator.add, values)


def _round(f: Function, value: Value, low: float, high: float) -> Value:
    """np.clip(np.rint(value), low, high), which keeps NaN."""
    value = f.math("rint", value)
    return f.smaller(f.constant(f32s, float(high)), f.larger(f.constant(f32s, float(low)), value))


@kernel
def _fit_min(
    f: Function,
    x,  # float32 [size, groups]
    weights,  # the same, if is_weighed
    low,  # float32 [groups]
    high,
    out,  # float32 [4, groups]: scale, minimum; inverse scale and origin of the codes
    groups,  # a multiple of 16
    *,
    size: int,
    top: int,
    first: float,
    steps: int,
    delta: float,
    is_weighed: bool,
) -> None:
    """Search as make_qkx2_quants and make_qkx3_quants."""
    with f.loop(groups, 0, LANES) as group:
        at = group * 4
        values, zero = _Group(f, x + at, size, groups), f.zero(f32s)
        w = _Group(f, (weights if is_weighed else x) + at, size, groups)
        if not is_weighed:
            spread = f.math("sqrt", _sum(value * value for value in values) / float(size))
            for i, value in enumerate(values):
                w[i] = f.math("fabs", value) + spread
        lowest, highest = f.load(f32s, low + at), f.load(f32s, high + at)
        sum_w, sum_x = _sum(w), _sum(weight * value for weight, value in zip(w, values))

        def quantise(inverse: Value, origin: Value) -> list[Value]:
            return [_round(f, (value - origin) * inverse, 0, top) for value in values]

        def measure(codes: list[Value], scale: Value, minimum: Value) -> Value:
            errors = (code * scale + minimum - value for code, value in zip(codes, values))
            return _sum(error * error * weight for error, weight in zip(errors, w))

        inverse = f.constant(f32s, float(top)) / (highest - lowest)
        scale = f.constant(f32s, 1.0) / inverse
        error = measure(quantise(inverse, lowest), scale, lowest)
        best = [Variable(f, value) for value in (error, scale, lowest, inverse, lowest)]
        with f.loop(steps + 1) as i:
            origin = best[2].get()
            offset = i.truncate(i32).to_float() * _float32(delta)
            offset = f.constant(f32, _float32(first)) + offset + float(top)
            inverse = offset.splat() / (highest - origin)
            codes = quantise(inverse, origin)
            weighed = [weight * code for weight, code in zip(w, codes)]
            sum_l = _sum(weighed)
            sum_l2 = _sum(a * code for a, code in zip(weighed, codes))
            sum_xl = _sum(a * value for a, value in zip(weighed, values))
            determinant = sum_w * sum_l2 - sum_l * sum_l
            scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
            is_above = minimum.compare(">", 0.0)
            scale = is_above.select(sum_xl / sum_l2, scale)
            minimum = is_above.select(zero, minimum)
            error = measure(codes, scale, minimum)
            is_better = determinant.compare(">", 0.0) & error.compare("<", best[0].get())
            for variable, value in zip(best, (error, scale, minimum, inverse, origin)):
                variable.set(is_better.select(value, variable.get()))
        for i, variable in enumerate(best[1:]):
            f.store(variable.get(), out + at + groups * (4 * i))


@kernel
def _fit_scales(
    f: Function,
    x,  # float32 [size, groups]
    weights,  # the same, if is_weighed
    largest,  # float32 [groups]
    out,  # float32 [2, groups]: scale; inverse scale of the codes
    groups,  # a multiple of 16
    *,
    size: int,
    top: int | None,  # None for the numbers of IQ4
    is_weighed: bool,
) -> None:
    """Search as make_qx_quants and quantize_row_iq4_nl_impl."""
    with f.loop(groups, 0, LANES) as group:
        at = group * 4
        values = _Group(f, x + at, size, groups)
        w = _Group(f, (weights if is_weighed else x) + at, size, groups)
        if not is_weighed:
            for i, value in enumerate(values):
                w[i] = value * value
        edge = f.load(f32s, largest + at)

        def round_(value: Value) -> Value:
            if top is not None:
                return _round(f, value, -top, top - 1)
            number = f.constant(f32s, float(IQ4_NUMBERS[0]))
            for midpoint, other in zip(IQ4_MIDPOINTS, IQ4_NUMBERS[1:]):
                is_below = value.compare("<", float(midpoint))
                number = is_below.select(number, f.constant(f32s, float(other)))
            return number

        def measure(inverse: Value) -> tuple[Value, Value]:
            codes = [round_(value * inverse) for value in values]
            weighed = [weight * code for weight, code in zip(w, codes)]
            if top is None:
                sum_lx = _sum(a * value for a, value in zip(weighed, values))
            else:
                sum_lx = _sum(
                    weight * value * code for weight, value, code in zip(w, values, codes)
                )
            return sum_lx, _sum(a * code for a, code in zip(weighed, codes))

        if top is None:
            start = f.constant(f32s, 1.0) / ((f.zero(f32s) - edge) / float(IQ4_NUMBERS[0]))
        else:
            start = f.constant(f32s, -float(top)) / edge
        sum_lx, sum_l2 = measure(start)
        scale, is_better = sum_lx / sum_l2, sum_l2.compare(">", 0.0)
        zero = f.zero(f32s)
        best = [
            Variable(f, value)
            for value in (
                start,
                is_better.select(scale, zero),
                is_better.select(scale * sum_lx, zero),
            )
        ]
        with f.loop(15 if top is None else 18) as i:
            number = i.truncate(i32)
            if top is None:
                offset = (number - 7).to_float() + float(IQ4_NUMBERS[0])
            else:
                number = number.compare("<", 9).select(number - 9, number - 8)
                offset = f.zero(f32) - (number.to_float() * _float32(0.1) + float(top))
            inverse = offset.splat() / edge
            sum_lx, sum_l2 = measure(inverse)
            scale = sum_lx / sum_l2
            is_better = (sum_lx * sum_lx).compare(">", best[2].get() * sum_l2)
            is_better = is_better & sum_l2.compare(">", 0.0)
            for variable, value in zip(best, (inverse, scale, scale * sum_lx)):
                variable.set(is_better.select(value, variable.get()))
        f.store(best[1].get(), out + at)
        f.store(best[0].get(), out + at + groups * 4)


@kernel
def _descend(
    f: Function,
    x,  # float32 [size, groups]
    codes,
    weights,
    out,  # float32 [size + 1, groups]: codes, then scales
    groups,  # a multiple of 16
    *,
    size: int,
    low: float,
    high: int,
) -> None:
    """Change codes as make_q3_quants and make_qp_quants."""
    with f.loop(groups, 0, LANES) as group:
        at, zero = group * 4, f.zero(f32s)
        values, best, w = (_Group(f, address + at, size, groups) for address in (x, codes, weights))
        weighed = [weight * value for weight, value in zip(w, values)]
        sum_lx = Variable(f, _sum(a * code for a, code in zip(weighed, best)))
        sum_l2 = Variable(f, _sum(weight * code * code for weight, code in zip(w, best)))
        with f.loop(5):
            for i, value in enumerate(values):
                code, old_lx, old_l2 = best[i], sum_lx.get(), sum_l2.get()
                weight = w[i]
                rest_lx = old_lx - weight * value * code
                rest_l2 = old_l2 - weight * code * code
                new = _round(f, value * rest_l2 / rest_lx, low, high)
                new_lx = rest_lx + weight * value * new
                new_l2 = rest_l2 + weight * new * new
                checks = [rest_lx.compare(">", 0.0), new.compare("!=", code)]
                checks.append((rest_l2 if low == -np.inf else new_l2).compare(">", 0.0))
                checks.append((new_lx * new_lx * old_l2).compare(">", old_lx * old_lx * new_l2))
                is_better = functools.reduce(operator.and_, checks)
                best[i] = is_better.select(new, code)
                sum_lx.set(is_better.select(new_lx, old_lx))
                sum_l2.set(is_better.select(new_l2, old_l2))
        for i, code in enumerate(best):
            f.store(code, out + at + groups * (4 * i))
        total = sum_l2.get()
        scale = total.compare(">", 0.0).select(sum_lx.get() / total, zero)
        f.store(scale, out + at + groups * (4 * size))


def _float32(number: float) -> float:
    return float(np.float32(number))
