"""Compiled searches for the scales of blocks, bit for bit those of core.files.gguf_quantize: the
same operations in the same order, which LLVM does not fuse. Each lane holds a group.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlx_llama.core.files.gguf_quantize import IQ4_MIDPOINTS, IQ4_NUMBERS, Search

from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i32, kernel
from .target import Target, compile_module


def compiled_search(target: Target) -> Search:
    """The functions of `Search` for a target, each compiled at its first use."""
    return Search(*(functools.partial(run, target) for run in (fit_min, fit_scales, descend)))


def fit_min(target, x, weights, low, high, grid) -> np.ndarray:
    constants = len(x), *grid, weights is not None
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


def _load(f: Function, address: Value, size: int, groups: Value) -> list[Value]:
    """Rows of float32 [size, groups], for 16 groups."""
    return [f.load(f32s, address + groups * (4 * i)) for i in range(size)]


def _store(f: Function, values: list[Value], address: Value, groups: Value) -> None:
    for i, value in enumerate(values):
        f.store(value, address + groups * (4 * i))


def _replace(condition: Value, variables: list[Variable], values: list[Value]) -> None:
    for variable, value in zip(variables, values):
        variable.set(condition.select(value, variable.get()))


def _sum(values: Iterable[Value]) -> Value:
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
        values = _load(f, x + at, size, groups)
        if is_weighed:
            w = _load(f, weights + at, size, groups)
        else:
            spread = f.math("sqrt", _sum(value * value for value in values) / float(size))
            w = [f.math("fabs", value) + spread for value in values]
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
            minimum = is_above.select(f.zero(f32s), minimum)
            error = measure(codes, scale, minimum)
            is_better = determinant.compare(">", 0.0) & error.compare("<", best[0].get())
            _replace(is_better, best, [error, scale, minimum, inverse, origin])
        _store(f, [variable.get() for variable in best[1:]], out + at, groups)


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
        values = _load(f, x + at, size, groups)
        w = [value * value for value in values]
        if is_weighed:
            w = _load(f, weights + at, size, groups)
        edge = f.load(f32s, largest + at)

        def round_(value: Value) -> Value:
            if top is not None:
                return _round(f, value, -top, top - 1)
            number = f.constant(f32s, float(IQ4_NUMBERS[0]))
            for midpoint, other in zip(IQ4_MIDPOINTS, IQ4_NUMBERS[1:]):
                is_below = value.compare("<", float(midpoint))
                number = is_below.select(number, f.constant(f32s, float(other)))
            return number

        def attempt(inverse: Value) -> tuple[Value, Value, list[Value]]:
            codes = [round_(value * inverse) for value in values]
            weighed = [weight * code for weight, code in zip(w, codes)]
            sum_l2 = _sum(a * code for a, code in zip(weighed, codes))
            if top is None:
                sum_lx = _sum(a * value for a, value in zip(weighed, values))
            else:
                weighed = [weight * value for weight, value in zip(w, values)]
                sum_lx = _sum(a * code for a, code in zip(weighed, codes))
            scale = sum_lx / sum_l2
            return sum_lx, sum_l2, [inverse, scale, scale * sum_lx]

        if top is None:
            start = f.constant(f32s, 1.0) / ((f.zero(f32s) - edge) / float(IQ4_NUMBERS[0]))
        else:
            start = f.constant(f32s, -float(top)) / edge
        best = [Variable(f, value) for value in (start, f.zero(f32s), f.zero(f32s))]
        _, sum_l2, fit = attempt(start)
        _replace(sum_l2.compare(">", 0.0), best, fit)
        with f.loop(15 if top is None else 18) as i:
            number = i.truncate(i32)
            if top is None:
                offset = (number - 7).to_float() + float(IQ4_NUMBERS[0])
            else:
                number = number.compare("<", 9).select(number - 9, number - 8)
                offset = f.zero(f32) - (number.to_float() * _float32(0.1) + float(top))
            sum_lx, sum_l2, fit = attempt(offset.splat() / edge)
            is_better = (sum_lx * sum_lx).compare(">", best[2].get() * sum_l2)
            _replace(is_better & sum_l2.compare(">", 0.0), best, fit)
        _store(f, [best[1].get(), best[0].get()], out + at, groups)


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
        at = group * 4
        values, codes, w = (_load(f, source + at, size, groups) for source in (x, codes, weights))
        weighed = [weight * value for weight, value in zip(w, values)]
        sum_lx = Variable(f, _sum(a * code for a, code in zip(weighed, codes)))
        sum_l2 = Variable(f, _sum(weight * code * code for weight, code in zip(w, codes)))
        best = [Variable(f, code) for code in codes]
        with f.loop(5):
            for value, weight, a, variable in zip(values, w, weighed, best):
                code, old_lx, old_l2 = variable.get(), sum_lx.get(), sum_l2.get()
                rest_lx, rest_l2 = old_lx - a * code, old_l2 - weight * code * code
                new = _round(f, value * rest_l2 / rest_lx, low, high)
                new_lx, new_l2 = rest_lx + a * new, rest_l2 + weight * new * new
                is_better = rest_lx.compare(">", 0.0) & new.compare("!=", code)
                is_better &= (rest_l2 if low == -np.inf else new_l2).compare(">", 0.0)
                is_better &= (new_lx * new_lx * old_l2).compare(">", old_lx * old_lx * new_l2)
                _replace(is_better, [variable, sum_lx, sum_l2], [new, new_lx, new_l2])
        total = sum_l2.get()
        scale = total.compare(">", 0.0).select(sum_lx.get() / total, 0.0)
        _store(f, [*(variable.get() for variable in best), scale], out + at, groups)


def _float32(number: float) -> float:
    return float(np.float32(number))
