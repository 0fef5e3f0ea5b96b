"""A forward pass as data: a list of operations that a compiled interpreter executes on all threads.

An operation is a record: its kind, its number of items, the addresses of its operands. Threads take
items from shared counters in small portions, so that the others finish a delayed thread's share. A
barrier follows, unless the next operation is independent. A second record, the context, holds the
arguments of a call, such as the number of tokens and where each token's row keeps its pages. Tokens
are packed and multiplied in tiles: full ones, then the smallest that holds the rest. Every tile
sums in the same order, so a decoded token, a few rows and a prompt get the same bits.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from . import filling, team
from .interpreter import write_module
from .operations import operations
from .recipe import Recipe
from .records import COMMON, CONTEXT, FIELDS, FLOATS, WORDS
from .target import Compiled, compile_module
from .workspace import Buffer


class Code:
    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        # numbers of the operations
        self.kinds = {kind: number for number, kind in enumerate(operations(recipe))}
        public: list[tuple] = [(team.start,), (team.serve,), (filling.checksum,)]
        public += [(filling.fill, *source) for source in recipe.sources]
        public += [(filling.embed, recipe.target, *table) for table in recipe.embeddings]
        names = [kernel.name(*constants) for kernel, *constants in public]
        key, write = repr(recipe), partial(write_module, recipe)
        everything = ["run", "run_clocked", *names]
        self.compiled: Compiled = compile_module(recipe.target, key, everything, write)
        find = self.compiled.function
        kernels = (find(name, kernel.parameters()) for name, (kernel, *_) in zip(names, public))
        # for a team; of panels
        self.start, self.serve, self.checksum, *functions = kernels
        self.fill = dict(zip(recipe.sources, functions))
        self.embed = dict(zip(recipe.embeddings, functions[len(recipe.sources) :]))
        # the interpreter, with a clock
        self.run_clocked = self.compiled.function("run_clocked", len(team.WALK))


class Program:
    """A list of operations for `threads` threads. Memory at its addresses must outlive it."""

    def __init__(self, code: Code, threads: int):
        self.code, self.threads = code, threads
        # kinds, and fields and operands by name
        self.operations: list[tuple[str, dict[str, int]]] = []
        self.records: np.ndarray | None = None
        self._context: np.ndarray | None = None  # the last whole run's, and its call
        self._whole: team.Call | None = None

    def add(
        self,
        kind: str,
        items: int,
        per_token: bool = False,
        portion: int = 1,
        wait: bool = True,
        **operands: int | float | Buffer,
    ) -> int:
        """Append an operation with all `operands` of its kind; returns its index. wait=False: omit
        the barrier after it.

        A Buffer is its address, and its row_bytes unless they are given, too. Raises TypeError or
        ValueError for wrong operands or an unknown kind.
        """
        names = set(FIELDS[kind.split()[0]]) - set(COMMON)
        values = _expand(operands, names)
        if set(values) != names:
            raise TypeError(f"operands of {kind} are {sorted(names)}, not {sorted(values)}")
        if kind not in self.code.kinds:
            raise ValueError(
                f"{kind!r} is not among the compiled operations {sorted(self.code.kinds)}"
            )
        common = self.code.kinds[kind], items, int(per_token), max(1, portion), int(wait), 0
        values |= zip(COMMON, common)
        if bad := {
            name: value for name, value in values.items() if not isinstance(value, int) or value < 0
        }:
            raise ValueError(f"operands of {kind} must be integers from 0 on, not {bad}")
        self.operations.append((kind, values))
        return len(self) - 1

    def __len__(self) -> int:
        return len(self.operations)

    def direct(self, index: int, out: Buffer, column: int = 0) -> None:
        """Let a product write to `out` from a column on, before `finish`."""
        self.operations[index][1].update(out=out.address + 4 * column, out_bytes=out.row_bytes)

    def accumulate(self, index: int) -> None:
        """Let a product add to its output, before `finish`."""
        self.operations[index][1]["accumulate"] = 1

    def scale_sum(self, factor: float) -> None:
        """Let the last operation, an "adjust" that adds to its target, multiply the sum."""
        kind, values = self.operations.pop()
        if kind != "adjust" or not values["accumulate"]:
            raise ValueError(f"only a sum can be scaled in place, not the results of {kind}")
        kind = "adjust scaled"
        scaled = values | {"kind": self.code.kinds[kind]} | _expand({"scale": factor}, set())
        self.operations.append((kind, scaled))

    def cut(self, at: int) -> Program:
        """Move the operations from `at` on to a new program, before `finish`."""
        rest = Program(self.code, self.threads)
        self.operations, rest.operations = self.operations[:at], self.operations[at:]
        return rest

    def finish(self) -> Program:
        """Write the records; no operations follow. Raises ValueError for a missing output."""
        self.records = np.zeros((len(self), WORDS), np.int64)
        for record, (kind, values) in zip(self.records, self.operations):
            if values.get("out") == 0:
                raise ValueError("a product has no output buffer")
            fields = FIELDS[kind.split()[0]]
            for name, value in values.items():
                record[fields[name]] = value
        self._address = self.records.ctypes.data
        # a cache line for each thread's share
        self._counters = np.zeros((len(self), self.threads, 8), np.int64)
        self._counter_bytes = memoryview(self._counters).cast("B")
        self._zeros, step = bytes(self._counters.nbytes), self._counters.strides[0]
        addresses = self._counters.ctypes.data + step * np.arange(len(self))
        self.records[:, COMMON.index("counters")] = addresses
        return self

    def prepare(
        self,
        context: np.ndarray,
        first: int = 0,
        last: int | None = None,
        ticks: np.ndarray | None = None,
    ) -> team.Call:
        """Reset the counters before a run of operations first .. last - 1 (None: to the end);
        returns the interpreter's call.

        context: int64 [words of CONTEXT]. ticks: int64 [threads, 1 + 2 operations], where a clocked
        run writes the clock (see interpreter.py). Raises ValueError.
        """
        if context is self._context and last is None and ticks is None:
            self._counter_bytes[:] = self._zeros
            return self._whole
        if self.records is None or context.shape != (len(CONTEXT),) or context.dtype != np.int64:
            raise ValueError(
                f"a run needs a finished program and a context int64 [{len(CONTEXT)}], "
                f"not {context.dtype} {context.shape}"
            )
        self._counter_bytes[:] = self._zeros
        count = (len(self) if last is None else last) - first
        name, times = "run", (0, 0)
        if ticks is not None:
            name, times = "run_clocked", (ticks.ctypes.data, ticks.strides[0])
        walk, program = self.code.compiled.address[name], self._address + first * 8 * WORDS
        call = walk, program, count, context.ctypes.data, *times
        if last is None and ticks is None:
            self._whole, self._context = call, context
        return call


def _expand(operands: dict[str, int | float | Buffer], names: set[str]) -> dict[str, int]:
    """The words of operands. names: of the operation's."""
    words = {}
    for name, value in operands.items():
        if isinstance(value, Buffer):
            words[name] = value.address
            if (stride := f"{name}_bytes") in names:
                words.setdefault(stride, operands.get(stride, value.row_bytes))
        elif name in FLOATS:
            words[name] = int(np.float32(value).view(np.uint32))
        else:
            words[name] = value
    return words


assert sys.byteorder == "little"
