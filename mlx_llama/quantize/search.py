"""Compiled searches for the scales of blocks: those of quantize.gguf_quantize run on symbols. The
same operations in the same order, which LLVM does not fuse, give the same bits. Each lane holds a
group.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cpu_fallback.kernels import find_target
from cpu_fallback.kernels.emit import LANES, Function, Module, Rows, Value, Variable, f32s, i32, i64
from cpu_fallback.kernels.target import Target, compile_module
from mlx_llama.quantize.gguf_quantize import IQ4_MIDPOINTS, IQ4_NUMBERS, Search, descend, fit_min


def find_search() -> Search:
    """The compiled searches, or NumPy's without a compiler."""
    target, _ = find_target()
    return CompiledSearch(target) if target else Search()


@dataclass(frozen=True)
class CompiledSearch(Search):
    """Searches for a target, each compiled at its first use."""

    target: Target

    def run(self, function, x, weights, others, constants) -> np.ndarray:
        """As Search.run: float32 [rows, G]."""
        groups, inputs = x.shape[1], [x, x if weights is None else weights, *others]
        if padding := -groups % LANES:
            inputs = [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, padding)]) for a in inputs]
        rows = {fit_min: 4, descend: len(x) + 1}.get(function, 2)
        out = np.empty((rows, groups + padding), np.float32)
        arrays = [*(np.ascontiguousarray(a, np.float32) for a in inputs), out]
        sizes = tuple(len(a) if a.ndim > 1 else 0 for a in inputs)
        compiled = _compile(self.target, function, sizes, weights is not None, constants)
        compiled(*(a.ctypes.data for a in arrays), groups + padding)
        return out[:, :groups]


@functools.cache
def _compile(
    target: Target, function: Callable, sizes: tuple[int, ...], is_weighed: bool, constants: tuple
) -> Callable[..., None]:
    """Machine code of a search. sizes: rows of its arrays, 0 for a vector. Its parameters are the
    arrays' addresses, that of the results, and the number of groups, a multiple of LANES.
    """
    name = "_".join(map(str, (function.__name__, *sizes, is_weighed, *constants)))
    inputs = [f"input_{i}" for i in range(len(sizes))]

    def build() -> Module:
        module = Module()
        f = Function(module, name, dict.fromkeys([*inputs, "out", "groups"], i64), public=True)
        with f.loop(f.groups, 0, LANES) as group:

            def place(address: Value, i: int) -> Value:
                return address + group * 4 + f.groups * (4 * i)

            arrays = [
                Rows(f.load(f32s, place(address, i)) for i in range(size))
                if size
                else f.load(f32s, place(address, 0))
                for address, size in zip(f.parameters.values(), sizes)
            ]
            x, weights, *others = arrays
            results = function(_Words(f), x, weights if is_weighed else None, others, constants)
            for i, value in enumerate(results):
                f.store(value, place(f.out, i))
        f.finish()
        return module

    key = f"{name} {_hash_sources()}"
    return compile_module(target, key, [name], build).function(name, len(inputs) + 2)


@functools.cache
def _hash_sources() -> str:
    """A hash of the sources of searches, which are no part of the kernels' package."""
    files = Path(__file__), Path(__file__).with_name("gguf_quantize.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Words:
    """The arithmetic of searches in a function under construction."""

    def __init__(self, f: Function):
        self._f = f

    def number(self, value: float) -> Value:
        return self._f.constant(f32s, float(np.float32(value)))

    def abs(self, rows: Rows) -> Rows:
        return Rows(self._f.math("fabs", value) for value in rows)

    def sqrt(self, value: Value) -> Value:
        return self._f.math("sqrt", value)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return condition.select(yes, no)

    def total(self, rows: Rows) -> Value:
        """Sum in order."""
        return functools.reduce(operator.add, rows)

    def round(self, values: Rows | Value, low: float, high: float) -> Rows | Value:
        """np.clip(np.rint(values), low, high), which keeps NaN."""
        if isinstance(values, Rows):
            return Rows(self.round(value, low, high) for value in values)
        f, value = self._f, self._f.math("rint", values)
        return f.smaller(self.number(high), f.larger(self.number(low), value))

    def nearest(self, rows: Rows) -> Rows:
        """The nearest of IQ4_NUMBERS, the last for NaN."""

        def find(value: Value) -> Value:
            number = self.number(IQ4_NUMBERS[0])
            for midpoint, other in zip(IQ4_MIDPOINTS, IQ4_NUMBERS[1:]):
                is_below = value < self.number(midpoint)
                number = is_below.select(number, self.number(other))
            return number

        return Rows(map(find, rows))

    def repeat(self, count: int, body: Callable[..., Sequence], state: Sequence) -> list[Value]:
        """`state` after body(i, state) for each i."""
        variables = [Variable(self._f, value) for value in state]
        with self._f.loop(count) as i:
            number = i.truncate(i32).to_float().splat()
            news = body(number, [variable.get() for variable in variables])
            for variable, value in zip(variables, news):
                variable.set(value)
        return [variable.get() for variable in variables]
