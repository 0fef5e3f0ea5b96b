"""A forward pass as data: a list of operations that a compiled interpreter executes on all threads.

An operation is a record of 32 words (int64): its kind, its number of items, the addresses of its operands. Threads take
items from shared counters in small portions, so that the others finish a delayed thread's share. A barrier follows, unless
the next operation is independent. A second record, the context, holds the arguments of a call, such as the number of tokens
and where each token's row keeps its pages. Tokens are packed and multiplied in tiles: full ones, then the smallest that holds the rest. Every
tile sums in the same order, so the same records serve a decoded token, a few rows and a prompt, with the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from ..pages import PAGE
from . import attention, embedding, filling, layouts, norms, packing, paging, products, rope, routing, team, unpacked
from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i64
from .layouts import GROUP, ActivationLayout, FloatLayout, Layout, LowBitLayout
from .target import Compiled, Target, compile_module

WORDS = 32  # of a record

# kind: number of the operation. items: their count, times the context's tokens if per_token. portion: items taken at a time.
# wait: whether a barrier follows. counters: address of the counters of the threads' shares.
_COMMON = ("kind", "items", "per_token", "portion", "wait", "counters")
# Addresses are of float32 by default; every "_bytes" is a stride, x_bytes of one token's share of its tile.
_OPERANDS = {
    # items: panels. out[token] = panels times x[token] (+ bias) (+ out)
    "product": ("weights", "panel_bytes", "blocks", "x", "x_bytes", "out", "out_bytes", "bias", "accumulate"),
    # items: tokens. delta (times weight, after the norm, if there is a weight) times factor -> target (+ target)
    "adjust": ("delta", "delta_bytes", "weight", "factor", "target", "target_bytes", "accumulate", "groups", "width", "eps",
               "scratch"),
    # items: tokens. target within cap, in place
    "softcap": ("target", "target_bytes", "groups", "cap"),
    # items: tokens. target is zero unless the token's row has the adapter of this number
    "select": ("target", "target_bytes", "groups", "adapter"),
    # items: parts of a token's groups, by tile, part, token. a (times b, after the norm or the activation) -> records at x
    "pack": ("a", "a_bytes", "b", "b_bytes", "groups", "part", "x", "x_bytes", "width", "eps", "scratch"),
    # items: tokens. RMS norm of every head of query and key, in place; a norm of all heads sees one head of their width
    "norm_heads": ("qkv", "qkv_bytes", "heads", "key_heads", "query_width", "key_width", "keys_at", "query_weight",
                   "key_weight", "eps"),
    # items: key heads of tokens. Rotate queries and keys in place if `rotates`, store keys and values into pages of their row.
    # page_keys, page_values, key_scales, value_scales: offsets in a page; table_at, query_table_at: of the layer's angles in a table's row
    "rotate": ("qkv", "qkv_bytes", "heads", "key_heads", "keys_at", "values_at", "page_keys", "page_values", "key_scales",
               "value_scales", "rotates", "table_at", "query_table_at"),
    # items: one. scores -> chosen experts of each token, their shares, tiles of their rows
    "route": ("scores", "scores_bytes", "experts", "used", "normalises", "chosen", "shares", "counts", "tiles", "order",
              "rows"),
    # items: parts of the groups of each tile, for as many tiles as there may be. As "pack"; rows of a are tokens, or if it
    # is_sorted the tiles' own
    "gather": ("a", "a_bytes", "b", "b_bytes", "groups", "part", "x", "x_bytes", "width", "eps", "scratch", "tiles", "order",
               "used", "is_sorted"),
    # items: parts of the panels for each tile, for as many as there may be. out[row] = panels of its expert times x[row];
    # weights: address of the addresses of all experts' panels
    "experts": ("weights", "panel_bytes", "panels", "part", "blocks", "x", "x_bytes", "out", "out_bytes", "tiles"),
    # items: tokens. outputs times shares, summed -> out (+ out)
    "combine": ("outputs", "outputs_bytes", "rows", "shares", "used", "vectors", "out", "out_bytes", "accumulate"),
    # items: key heads of tokens
    "attend": ("qkv", "qkv_bytes", "shared", "key_heads", "out", "out_bytes", "page_keys", "page_values", "key_scales",
               "value_scales", "window", "scale"),
}
_FIELDS = {kind: {name: index for index, name in enumerate(_COMMON + operands)} for kind, operands in _OPERANDS.items()}
# places: address of the first token's record of PLACE.
CONTEXT = {name: index for index, name in enumerate((
    "tokens", "first_row", "places", "scores", "scores_bytes", "scores_head_bytes", "sync"))}
# A token's position in its row; addresses of the row's page table, of the position's cosines and of its sines; the number of
# the row's adapter.
PLACE = {name: index for index, name in enumerate(("position", "pages", "cosine", "sine", "adapter"))}

_OPERATION = {"op": i64, "lo": i64, "hi": i64, "thread": i64, "context": i64}


@dataclass(frozen=True)
class Recipe:
    """All that the machine code depends on.

    sources: the weights' layouts and the file formats that they are filled from (filling.fill); activation_bits: of
    activations against low-bit weights, 8 with bfloat16 weights: bfloat16 too, where the target multiplies it; activation: of
    the gate, as LayerSpec has it; cache_bits: 8 for int8 keys and values, 16 for float16, None for float32; rotary_dim: of a
    head, None for all of it; softcap: of attention's scores; has_experts: a router chooses MLPs; embedding: as one of `sources`,
    None: its rows are not looked up by machine code.
    """

    target: Target
    sources: tuple[tuple[Layout, str], ...]
    activation_bits: int
    head_dim: int
    activation: str = "silu"
    cache_bits: int | None = None
    rotary_dim: int | None = None
    softcap: float | None = None
    has_experts: bool = False
    embedding: tuple[LowBitLayout, str] | None = None

    def activation_layout(self, layout: Layout) -> ActivationLayout:
        """The layout of activations for a layout of weights; without an offset, that of other weights if possible."""
        if isinstance(layout, FloatLayout) and layout.dtype == "bfloat16" and self.activation_bits == 8 and self.target.bf16:
            return layouts.BFLOAT16
        if isinstance(layout, FloatLayout) or self.activation_bits == 32:
            return layouts.FLOAT
        low_bit = [layout, *(other for other in self.layouts if not isinstance(other, FloatLayout))]
        offset = next(filter(None, (products.dot_offset(self.target, one) for one in low_bit)), 0)
        return layouts.activation_layout(self.activation_bits, self.target.dot, offset)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(dict.fromkeys(layout for layout, _ in self.sources))

    @property
    def activations(self) -> tuple[ActivationLayout, ...]:
        """Layouts of activations for all weights."""
        return tuple(dict.fromkeys(self.activation_layout(layout) for layout in self.layouts))

    @property
    def rounds_to_bfloat16(self) -> bool:
        """Some products take activations in bfloat16."""
        return layouts.BFLOAT16 in self.activations


def tiles(target: Target, x_layout: ActivationLayout) -> tuple[int, ...]:
    """Tokens of each tile of activations, smallest first; the last is the full one."""
    return target.tiles(low_bit=x_layout.is_integer)


def expert_tiles(target: Target) -> tuple[int, ...]:
    """Rows of each tile of an expert, smallest first: powers of two that products with low-bit and float weights have."""
    return tuple(size for size in target.tiles(low_bit=True) if size in target.tiles(low_bit=False) and size in (1, 2, 4, 8))


def split_tokens(target: Target, x_layout: ActivationLayout, tokens: int) -> list[tuple[int, int, int]]:
    """(first token, tokens, slots) of each tile of activations, as the machine code packs them."""
    sizes = tiles(target, x_layout)
    starts = range(0, tokens, sizes[-1])
    counts = [min(sizes[-1], tokens - first) for first in starts]
    return [(first, count, next(size for size in sizes if size >= count)) for first, count in zip(starts, counts)]


class Code:
    """The machine code for a recipe. kinds: numbers of the operations by name; run: the interpreter; run_clocked: the same,
    which also reads a clock (_write_interpreter); start, serve: for a team; embed: embedding.embed or None;
    fill: by source; checksum: of panels."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.kinds = {name: index for index, (name, _) in enumerate(_operations(recipe))}
        fills = {source: filling.fill_name(*source) for source in recipe.sources}
        public = ["run", "run_clocked", "start", "serve", "checksum", *fills.values()]
        if recipe.embedding:
            public.append(embedding.embed_name(*recipe.embedding))
        self.compiled: Compiled = compile_module(recipe.target, repr(recipe), public, lambda: write_module(recipe))
        self.run, self.run_clocked = (self.compiled.function(name, len(team.WALK)) for name in ("run", "run_clocked"))
        self.start, self.serve = self.compiled.function("start", 2), self.compiled.function("serve", 3)
        self.embed = self.compiled.function(public[-1], len(embedding.EMBED)) if recipe.embedding else None
        self.checksum = self.compiled.function("checksum", len(filling.CHECKSUM))
        self.fill = {source: self.compiled.function(name, len(filling.FILL)) for source, name in fills.items()}


def experts_kind(layout: Layout) -> str:
    return f"experts {layout.name}"


def gather_kind(x_layout: ActivationLayout, source: str) -> str:
    return f"gather {source} {x_layout.name} {x_layout.offset}"


def product_kind(layout: Layout) -> str:
    return f"product {layout.name}"


def pack_kind(x_layout: ActivationLayout, source: str) -> str:
    return f"pack {source} {x_layout.name} {x_layout.offset}"


class Program:
    """A list of operations. threads: number that run it. All addresses in it must outlive it.
    """

    def __init__(self, code: Code, threads: int):
        self.code, self.threads = code, threads
        self._records: list[dict[str, int]] = []
        self.records: np.ndarray | None = None

    def add(self, kind: str, items: int, portion: int = 1, per_token: bool = False, wait: bool = True,
            **operands: int) -> int:
        """Append an operation with all `operands` of its kind; returns its index. wait=False: omit the barrier after it.

        Raises TypeError or ValueError for wrong operands, ValueError for a kind that the code lacks.
        """
        fields = _FIELDS[kind.split()[0]]
        if set(operands) != set(fields) - set(_COMMON):
            raise TypeError(f"operands of {kind} are {sorted(set(fields) - set(_COMMON))}, not {sorted(operands)}")
        if kind not in self.code.kinds:
            raise ValueError(f"{kind!r} is not among the compiled operations {sorted(self.code.kinds)}")
        values = {"kind": self.code.kinds[kind], "items": items, "per_token": int(per_token), "portion": max(1, portion),
                  "wait": int(wait), "counters": 0} | operands
        if bad := {name: value for name, value in values.items() if not isinstance(value, int) or value < 0}:
            raise ValueError(f"operands of {kind} must be integers from 0 on, not {bad}")
        self._records.append({fields[name]: value for name, value in values.items()})
        return len(self._records) - 1

    def __len__(self) -> int:
        return len(self._records)

    def amend(self, index: int, **operands: int) -> None:
        """Change operands of an operation, before `finish`."""
        kind = next(name for name, number in self.code.kinds.items() if number == self._records[index][0])
        fields = _FIELDS[kind.split()[0]]
        self._records[index] |= {fields[name]: value for name, value in operands.items()}

    def cut(self, at: int) -> Program:
        """Move the operations from `at` on to a new program, before `finish`."""
        rest = Program(self.code, self.threads)
        self._records, rest._records = self._records[:at], self._records[at:]
        return rest

    def finish(self) -> Program:
        """Write the records; no operations can follow. Raises ValueError for a product without an output."""
        names = {number: name for name, number in self.code.kinds.items()}
        for record in self._records:
            kind = names[record[0]].split()[0]
            if kind in ("product", "combine") and not record[_FIELDS[kind]["out"]]:
                raise ValueError("a product has no output buffer")
        count = len(self._records)
        self.records = np.zeros((count, WORDS), np.int64)
        for row, record in zip(self.records, self._records):
            for index, value in record.items():
                row[index] = value
        self._address = self.records.ctypes.data
        self._counters = np.zeros((count, self.threads, 8), np.int64)  # one cache line for each thread's share
        self.records[:, _COMMON.index("counters")] = self._counters.ctypes.data + self._counters[0].nbytes * np.arange(count)
        return self

    def prepare(self, context: np.ndarray) -> team.Call:
        """Reset the counters before a run; returns the call of the interpreter. context: int64 [words of CONTEXT]. Raises
        ValueError."""
        return self.call(context, 0, len(self))

    def call(self, context: np.ndarray, first: int, last: int) -> team.Call:
        """As `prepare`, for operations first .. last - 1."""
        if self.records is None or context.shape != (len(CONTEXT),) or context.dtype != np.int64:
            raise ValueError(f"a run needs a finished program and a context int64 [{len(CONTEXT)}], "
                             f"not {context.dtype} {context.shape}")
        self._counters.fill(0)
        return (self.code.compiled.address["run"], self._address + first * 8 * WORDS, last - first, context.ctypes.data, 0, 0)

    def describe(self) -> list[tuple[str, dict[str, int]]]:
        """(kind, its fields and operands by name) of each operation."""
        names = {number: name for name, number in self.code.kinds.items()}
        fields = {kind: _FIELDS[kind.split()[0]] for kind in self.code.kinds}
        return [(kind, {name: record[at] for name, at in fields[kind].items()})
                for record, kind in ((record, names[record[0]]) for record in self._records)]

    def part(self, first: int, last: int) -> Part:
        """Select operations first .. last - 1 for a run of their own."""
        return Part(self, first, last)


@dataclass(frozen=True)
class Part:
    """Operations first .. last - 1 of a program, run alone."""

    program: Program
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def prepare(self, context: np.ndarray) -> team.Call:
        """As Program.prepare."""
        return self.program.call(context, self.first, self.last)


# ---- machine code

Writer = Callable[[Module, str], Function]  # writes an operation's function of this name


def _load_word(f: Function, record: Value, index: int) -> Value:
    return f.load(i64, record, 8 * index, 8)


class _Operation:
    """An operation's function under construction. Operands are attributes."""

    def __init__(self, module: Module, name: str):
        self.kind = name.split()[0]
        self.f = Function(module, "op " + name, _OPERATION)

    def __getattr__(self, name: str) -> Value:
        if name not in _FIELDS[self.kind]:
            raise AttributeError(name)
        return _load_word(self.f, self.f.op, _FIELDS[self.kind][name])

    def load_float(self, name: str) -> Value:
        """A float32 operand, in the low half of its word."""
        return self.f.load(f32, self.f.op, 8 * _FIELDS[self.kind][name], 4)

    def context(self, name: str) -> Value:
        """A word of the context."""
        return _load_word(self.f, self.f.context, CONTEXT[name])

    def place(self, token: Value) -> dict[str, Value]:
        """A token's record of PLACE."""
        record = self.context("places") + token * (8 * len(PLACE))
        return {name: _load_word(self.f, record, index) for name, index in PLACE.items()}


def _operations(recipe: Recipe) -> list[tuple[str, Writer]]:
    """Names of all operations, with the functions that write them."""
    target, found = recipe.target, []
    for layout in recipe.layouts:
        found.append((product_kind(layout), _product_writer(target, layout, recipe.activation_layout(layout))))
    for x_layout in recipe.activations:
        for source in ("norm", "plain", recipe.activation):
            found.append((pack_kind(x_layout, source), _pack_writer(x_layout, source, tiles(target, x_layout))))
    if recipe.has_experts:
        sizes = expert_tiles(target)
        for layout in recipe.layouts:
            found.append((experts_kind(layout), _experts_writer(target, layout, recipe.activation_layout(layout), sizes)))
        for x_layout in recipe.activations:
            for source in ("norm", "plain", recipe.activation):
                found.append((gather_kind(x_layout, source), _gather_writer(x_layout, source)))
        found += [("route", _route_writer(sizes)), ("combine", _write_combine)]
    found.append(("adjust", _write_adjust))
    found.append(("softcap", _write_softcap))
    found.append(("select", _write_select))
    found.append(("norm_heads", _write_norm_heads))
    found.append(("rotate", _rotate_writer(recipe.head_dim, recipe.cache_bits, recipe.rotary_dim)))
    found.append(("attend", _attend_writer(recipe.head_dim, recipe.cache_bits, recipe.softcap)))
    return found


def _product_writer(target: Target, layout: Layout, x_layout: ActivationLayout) -> Writer:
    def write(module: Module, name: str) -> Function:
        sizes = tiles(target, x_layout)
        kernels = {}  # by tile: {panels at once: kernel}, most panels first
        for size in sizes:
            several = products.panels_at_once(target, layout, size)
            kernels[size] = {count: products.product(module, target, layout, x_layout, size, count)
                             for count in dict.fromkeys((several, 1))}
        o = _Operation(module, name)
        f = o.f
        weights, panel_bytes, blocks, out, out_bytes = o.weights, o.panel_bytes, o.blocks, o.out, o.out_bytes
        x, x_bytes, bias, accumulate = o.x, o.x_bytes, o.bias, o.accumulate
        has_bias = bias.compare("!=", 0)

        def multiply(size: int, token: Value, start: Value) -> None:
            """Multiply the panels start .. hi - 1 with the tile that starts at `token`."""
            for at_once, kernel in kernels[size].items():
                end = start + (f.hi - start) // at_once * at_once
                with f.loop(end, start, at_once) as p:
                    f.call(kernel, weights + p * panel_bytes, x + token * x_bytes,
                           out + p * (4 * layouts.ROWS) + token * out_bytes, out_bytes, blocks,
                           has_bias.select(bias + p * (4 * layouts.ROWS), 0), accumulate)
                start = end

        tokens = o.context("tokens")
        *smaller, full = sizes
        largest = smaller[-1] if smaller else 0
        count = (tokens + (full - 1 - largest)) // full  # the rest takes a full tile only if no smaller one holds it
        first = Variable(f, f.lo)  # panel to multiply tile by tile
        if unpacked.applies(target, layout, x_layout):
            kernel = unpacked.product(module, target, layout, x_layout, unpacked.PANELS)
            with f.if_then(count.compare(">=", unpacked.MIN_TILES)):
                first.set(f.lo + (f.hi - f.lo) // unpacked.PANELS * unpacked.PANELS)
                with f.loop(first.get(), f.lo, unpacked.PANELS) as p:
                    f.call(kernel, weights + p * panel_bytes, panel_bytes, blocks, x, x_bytes * full, count,
                           out + p * (4 * layouts.ROWS), out_bytes, has_bias.select(bias + p * (4 * layouts.ROWS), 0), accumulate)
        with f.loop(count) as tile:
            multiply(full, tile * full, first.get())
        rest = tokens - count * full
        for below, size in zip((0, *smaller), smaller):
            with f.if_then(rest.compare(">", below) & rest.compare("<=", size)):
                multiply(size, count * full, f.lo)
        return f.finish()

    return write


def _pack_writer(x_layout: ActivationLayout, source: str, sizes: tuple[int, ...]) -> Writer:
    def write(module: Module, name: str) -> Function:
        packs = [packing.pack(module, x_layout, source, single) for single in (True, False)]
        squares = norms.sum_of_squares(module)
        o = _Operation(module, name)
        f = o.f
        part, groups = o.part, o.groups
        parts = (groups + part - 1) // part
        tokens, full = o.context("tokens"), sizes[-1]
        with f.loop(f.hi, f.lo) as item:
            # Tokens of a tile share cache lines. Threads take different parts of them, mostly those that they computed.
            first = item // (parts * full) * full  # of the tile
            rest = tokens - first
            inside, count = item - first * parts, rest.minimum(full)
            token, start = first + inside % count, inside // count * part
            row = token + o.context("first_row")
            a, b = o.a + row * o.a_bytes, o.b + row * o.b_bytes
            factor = f.constant(f32, 1.0)
            if source == "norm":
                scratch = o.scratch + f.thread * 64
                f.call(squares, a, groups, scratch)
                width, eps = o.load_float("width"), o.load_float("eps")
                factor = f.constant(f32, 1.0) / f.math("sqrt", f.load(f32, scratch, 0, 4) / width + eps)
            slots = f.constant(i64, full)
            for size in reversed(sizes[:-1]):
                slots = rest.compare("<=", size).select(f.constant(i64, size), slots)
            at = start * (4 * GROUP)
            out = o.x + first * o.x_bytes + start // layouts.SPAN * (slots * x_layout.record(1))
            with f.if_else(slots.compare("==", 1)) as branches:
                for branch, pack in zip(branches, packs):
                    with branch:
                        f.call(pack, a + at, b + at, factor, (groups - start).minimum(part), out, token - first, slots)
        return f.finish()

    return write


def _route_writer(sizes: tuple[int, ...]) -> Writer:
    def write(module: Module, name: str) -> Function:
        choose, sort = routing.choose(module), routing.sort(module, sizes)
        o = _Operation(module, name)
        f = o.f
        tokens = o.context("tokens")
        with f.loop(f.hi, f.lo):
            f.call(choose, o.scores, o.scores_bytes, tokens, o.experts, o.used, o.normalises, o.chosen, o.shares)
            f.call(sort, o.chosen, tokens * o.used, o.experts, o.counts, o.tiles, o.order, o.rows)
        return f.finish()

    return write


class _Tile:
    """A tile's record. number: from 0."""

    def __init__(self, o: _Operation, number: Value):
        self._f, self._record = o.f, o.tiles + (number + 1) * (8 * len(routing.TILE))

    def __getattr__(self, name: str) -> Value:
        return _load_word(self._f, self._record, routing.TILE[name])


def _gather_writer(x_layout: ActivationLayout, source: str) -> Writer:
    def write(module: Module, name: str) -> Function:
        packs = [packing.pack(module, x_layout, source, single) for single in (True, False)]
        squares = norms.sum_of_squares(module)
        o = _Operation(module, name)
        f = o.f
        part, groups = o.part, o.groups
        parts = (groups + part - 1) // part
        tiles, is_sorted = _load_word(f, o.tiles, 0), o.is_sorted.compare("!=", 0)
        with f.loop(f.hi.minimum(tiles * parts), f.lo) as item:
            tile, start = _Tile(o, item // parts), item % parts * part
            first, slots = tile.row, tile.slots
            at = start * (4 * GROUP)
            out = o.x + first * o.x_bytes + start // layouts.SPAN * (slots * x_layout.record(1))
            with f.loop(tile.count) as slot:
                row = is_sorted.select(first + slot, _load_word(f, o.order + (first + slot) * 8, 0) // o.used)
                a, b = o.a + row * o.a_bytes, o.b + row * o.b_bytes
                factor = f.constant(f32, 1.0)
                if source == "norm":
                    scratch = o.scratch + f.thread * 64
                    f.call(squares, a, groups, scratch)
                    width, eps = o.load_float("width"), o.load_float("eps")
                    factor = f.constant(f32, 1.0) / f.math("sqrt", f.load(f32, scratch, 0, 4) / width + eps)
                with f.if_else(slots.compare("==", 1)) as branches:
                    for branch, pack in zip(branches, packs):
                        with branch:
                            f.call(pack, a + at, b + at, factor, (groups - start).minimum(part), out, slot, slots)
        return f.finish()

    return write


def _experts_writer(target: Target, layout: Layout, x_layout: ActivationLayout, sizes: tuple[int, ...]) -> Writer:
    def write(module: Module, name: str) -> Function:
        counts = {size: dict.fromkeys((products.panels_at_once(target, layout, size), 1)) for size in sizes}
        kernels = {size: {count: products.product(module, target, layout, x_layout, size, count) for count in counts[size]}
                   for size in sizes}
        o = _Operation(module, name)
        f = o.f
        panels, part, panel_bytes, blocks, out_bytes = o.panels, o.part, o.panel_bytes, o.blocks, o.out_bytes
        parts = (panels + part - 1) // part
        tiles, zero = _load_word(f, o.tiles, 0), f.constant(i64, 0)
        with f.loop(f.hi.minimum(tiles * parts), f.lo) as item:
            tile, start = _Tile(o, item // parts), item % parts * part
            end = (start + part).minimum(panels)
            slots, row = tile.slots, tile.row
            weights = _load_word(f, o.weights + tile.expert * 8, 0)
            x, out = o.x + row * o.x_bytes, o.out + row * out_bytes
            for size in sizes:
                with f.if_then(slots.compare("==", size)):
                    first = start
                    for at_once, kernel in kernels[size].items():
                        last = first + (end - first) // at_once * at_once
                        with f.loop(last, first, at_once) as p:
                            f.call(kernel, weights + p * panel_bytes, x, out + p * (4 * layouts.ROWS), out_bytes, blocks,
                                   zero, 0)
                        first = last
        return f.finish()

    return write


def _write_combine(module: Module, name: str) -> Function:
    combine = routing.combine(module)
    o = _Operation(module, name)
    f = o.f
    outputs, outputs_bytes, used, vectors, accumulate = o.outputs, o.outputs_bytes, o.used, o.vectors, o.accumulate
    with f.loop(f.hi, f.lo) as token:
        at = token * used
        f.call(combine, outputs, outputs_bytes, o.rows + at * 8, o.shares + at * 4, used, vectors,
               o.out + token * o.out_bytes, accumulate)
    return f.finish()


def _write_adjust(module: Module, name: str) -> Function:
    adjust, squares = norms.adjust(module), norms.sum_of_squares(module)
    o = _Operation(module, name)
    f = o.f
    weight, groups = o.weight, o.groups
    with f.loop(f.hi, f.lo) as token:
        delta = o.delta + token * o.delta_bytes
        factor = Variable(f, o.load_float("factor"))
        with f.if_then(weight.compare("!=", 0)):
            scratch = o.scratch + f.thread * 64
            f.call(squares, delta, groups, scratch)
            mean = f.load(f32, scratch, 0, 4) / o.load_float("width")
            factor.set(factor.get() / f.math("sqrt", mean + o.load_float("eps")))
        f.call(adjust, delta, weight, factor.get(), o.target + token * o.target_bytes, o.accumulate, groups)
    return f.finish()


def _write_softcap(module: Module, name: str) -> Function:
    softcap = norms.softcap(module)
    o = _Operation(module, name)
    f = o.f
    target, target_bytes, groups, cap = o.target, o.target_bytes, o.groups, o.load_float("cap")
    with f.loop(f.hi, f.lo) as token:
        f.call(softcap, target + token * target_bytes, groups, cap)
    return f.finish()


def _write_select(module: Module, name: str) -> Function:
    o = _Operation(module, name)
    f = o.f
    target, target_bytes, groups, adapter = o.target, o.target_bytes, o.groups, o.adapter
    with f.loop(f.hi, f.lo) as token:
        with f.if_then(o.place(token)["adapter"].compare("!=", adapter)):
            with f.loop(groups * (GROUP // LANES)) as i:
                f.store(f.zero(f32s), target + token * target_bytes, i * (4 * LANES), 4)
    return f.finish()


def _write_norm_heads(module: Module, name: str) -> Function:
    norm = norms.norm_head(module)
    o = _Operation(module, name)
    f = o.f
    eps = o.load_float("eps")
    queries, keys = (o.heads, o.query_width, o.query_weight), (o.key_heads, o.key_width, o.key_weight)
    keys_at = o.keys_at
    with f.loop(f.hi, f.lo) as token:
        row = o.qkv + token * o.qkv_bytes
        for first, (count, width, weight) in ((row, queries), (row + keys_at, keys)):
            with f.loop(count) as h:
                f.call(norm, first + h * width * 4, weight, width, eps)
    return f.finish()


def _rotate_writer(head_dim: int, cache_bits: int | None, rotary_dim: int | None) -> Writer:
    layout = paging.page_layout(head_dim, cache_bits)

    def write(module: Module, name: str) -> Function:
        rotate, store = rope.rotate(module, rotary_dim or head_dim), paging.store(module, head_dim, cache_bits)
        o = _Operation(module, name)
        f = o.f
        table_at, query_table_at = o.table_at, o.query_table_at
        heads, key_heads, rotates = o.heads, o.key_heads, o.rotates.compare("!=", 0)
        shared = heads // key_heads
        with f.loop(f.hi, f.lo) as item:
            token, h = item // key_heads, item % key_heads
            row, place = o.qkv + token * o.qkv_bytes, o.place(token)
            cosine, sine, position = place["cosine"], place["sine"], place["position"]
            key, value = (row + start + h * (4 * head_dim) for start in (o.keys_at, o.values_at))
            with f.if_then(rotates):
                with f.loop(shared) as query:
                    f.call(rotate, row + (h * shared + query) * (4 * head_dim), cosine + query_table_at, sine + query_table_at)
                f.call(rotate, key, cosine + table_at, sine + table_at)
            page, at = f.load(i64, place["pages"], position // PAGE * 8, 8), h * PAGE + position % PAGE
            for source, numbers, scales in ((key, o.page_keys, o.key_scales), (value, o.page_values, o.value_scales)):
                f.call(store, source, page + numbers + at * layout.row_bytes, page + scales + at * (2 * layout.groups))
        return f.finish()

    return write


def _attend_writer(head_dim: int, cache_bits: int | None, cap: float | None) -> Writer:
    layout = paging.page_layout(head_dim, cache_bits)

    def write(module: Module, name: str) -> Function:
        attend = attention.attend(module, head_dim, cache_bits, cap=cap)
        o = _Operation(module, name)
        f = o.f
        key_heads, shared, window = o.key_heads, o.shared, o.window
        keys, values, key_scales, value_scales = o.page_keys, o.page_values, o.key_scales, o.value_scales
        scores = o.context("scores") + f.thread * o.context("scores_bytes")
        scale = o.load_float("scale")
        head, tokens = shared * (4 * head_dim), o.context("tokens")
        last = tokens * key_heads - 1
        # Tokens of one prompt find the keys in a cache, where those before them had them; tokens of several rows do not.
        several_rows = tokens.compare("==", 1) | o.place(f.zero(i64))["pages"].compare("!=", o.place(tokens - 1)["pages"])

        def locate(item: Value) -> tuple[Value, ...]:
            token, h = item // key_heads, item % key_heads
            place = o.place(token)
            end = place["position"] + 1
            return token, h, place["pages"], end.compare(">", window).select(end - window, 0), end

        with f.loop(f.hi, f.lo) as item:
            token, h, pages, first, end = locate(item)
            _, next_h, next_pages, next_first, next_end = locate((item + 1).minimum(last))
            at, scales_at = h * (PAGE * layout.row_bytes), h * (PAGE * 2 * layout.groups)
            f.call(attend, o.qkv + token * o.qkv_bytes + h * head, pages, keys + at, values + at,
                   key_scales + scales_at, value_scales + scales_at, o.out + token * o.out_bytes + h * head, first, end,
                   shared, scores, o.context("scores_head_bytes"), scale, several_rows.select(next_pages, 0),
                   keys + next_h * (PAGE * layout.row_bytes), next_first, next_end)
        return f.finish()

    return write


def _barrier(module: Module) -> Function:
    """Wait for all threads. sync: two i64 on cache lines of their own, the number of arrivals and the round.

    On weakly ordered processors (Arm) an operation sees all stores before the barrier: each arrival releases its thread's and
    acquires those of the arrivals before it, and the last one's new round, which the others acquire, releases all.
    """
    f = Function(module, "barrier", {"sync": i64, "threads": i64})
    round_at = f.sync + 64
    before = f.atomic_load(round_at)
    arrived = f.atomic_add(f.sync, 1)
    with f.if_else((arrived + 1).compare("==", f.threads)) as (last, others):
        with last:
            f.atomic_store(f.sync, 0)
            f.atomic_add(round_at, 1)
        with others:
            polls = Variable(f, f.constant(i64, 0))
            with f.forever() as break_if:
                break_if(f.atomic_load(round_at).compare("!=", before))
                team.wait(f, polls)
    return f.finish()


def _read_clock(f: Function) -> Value:
    """Ticks of the processor's constant clock, which profile.py calibrates."""
    if "aarch64" in f.module.triple or "arm64" in f.module.triple:
        name = f.module.add_metadata([ir.MetaDataString(f.module, "cntvct_el0")])
        kind, intrinsic = ir.FunctionType(i64, [ir.MetaDataType()]), "llvm.read_volatile_register.i64"
        read = f.module.globals.get(intrinsic) or ir.Function(f.module, kind, intrinsic)
        return Value(f, f.builder.call(read, [name]))
    return f.intrinsic("llvm.readcyclecounter", i64)


def write_module(recipe: Recipe) -> Module:
    """Write the LLVM code for a recipe: fill functions, operations, interpreters, and what hands them to a team."""
    module = Module()
    module.triple = recipe.target.triple
    for source in recipe.sources:
        filling.fill(module, *source)
    filling.checksum(module)
    if recipe.embedding:
        embedding.embed(module, recipe.target, *recipe.embedding)
    operations = [write(module, name) for name, write in _operations(recipe)]
    barrier = _barrier(module)
    _write_interpreter(module, "run", operations, barrier, clocked=False)
    _write_interpreter(module, "run_clocked", operations, barrier, clocked=True)
    team.write(module)
    return module


def _write_interpreter(module: Module, name: str, operations: list[Function], barrier: Function, clocked: bool) -> None:
    """Write the function that executes a program's records. clocked: to `times`, the address of int64 [1 + 2 count], it
    writes the clock at the start and, for each record, after its items and after its barrier."""
    f = Function(module, name, team.WALK, public=True)
    sync, tokens = (_load_word(f, f.context, CONTEXT[name]) for name in ("sync", "tokens"))
    at = {name: index for index, name in enumerate(_COMMON)}
    if clocked:
        f.store(_read_clock(f), f.times, 0, 8)
    with f.loop(f.count) as i:
        op = f.program + i * (8 * WORDS)
        items = _load_word(f, op, at["items"])
        items = _load_word(f, op, at["per_token"]).compare("!=", 0).select(items * tokens, items)
        portion, kind, counters = (_load_word(f, op, at[name]) for name in ("portion", "kind", "counters"))
        # A thread starts with its own share of the items, which stays in its caches, then helps the others.
        with f.loop(f.threads) as turn:
            owner = (f.thread + turn) % f.threads
            begin, end = owner * items // f.threads, (owner + 1) * items // f.threads
            with f.forever() as break_if:
                lo = begin + f.atomic_add(counters + owner * 64, portion)
                break_if(lo.compare(">=", end))
                hi = (lo + portion).minimum(end)
                f.switch(kind, [lambda operation=operation: f.call(operation, op, lo, hi, f.thread, f.context)
                                for operation in operations])
        if clocked:
            f.store(_read_clock(f), f.times, i * 16 + 8, 8)
        with f.if_then(_load_word(f, op, at["wait"]).compare("!=", 0)):
            f.call(barrier, sync, f.threads)
        if clocked:
            f.store(_read_clock(f), f.times, i * 16 + 16, 8)
    f.finish()


def float_bits(number: float) -> int:
    """Bits of a float32 as the low half of a word."""
    return int(np.float32(number).view(np.uint32))


assert sys.byteorder == "little"
