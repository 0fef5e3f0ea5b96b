"""Lowering of the forward to compiled programs: model.py and layers.py run once on symbols, and ops append operations.

A symbol stands for float32 rows, one per token, in a buffer of the workspace. Some are evaluated by their reader: packing a
product's inputs computes a norm or a gate, and a product's reader chooses its output buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.spec import LayerSpec

from .. import ops
from .layouts import GROUP, ROWS, SPAN, ActivationLayout, unpack
from .panels import Panels
from .program import Code, Program, float_bits, pack_kind, product_kind, tile
from .workspace import WIDTH, Buffer, Workspace, pad

NO_WINDOW = 1 << 60


@dataclass(eq=False)
class Symbol:
    """Rows computed by a traced program."""

    trace: Trace


@dataclass(eq=False)
class Tokens(Symbol):
    """Token ids of the call; the runner embeds them."""


@dataclass(eq=False)
class Rows(Symbol):
    """Columns at .. at + width of a buffer. heads: number of heads in them, or None."""

    buffer: Buffer
    at: int
    width: int
    heads: int | None = None

    def read(self, tokens: int) -> np.ndarray:
        """Copy the rows: float32 [tokens, width], or [heads, tokens, width / heads]."""
        rows = self.buffer.array[:tokens, self.at:self.at + self.width].copy()
        return rows if self.heads is None else rows.reshape(tokens, self.heads, -1).transpose(1, 0, 2)


@dataclass(eq=False)
class Normed(Symbol):
    """RMS norm of the stream, computed by packing. packed: (operation, layout) of the packing, None before."""

    weight: Buffer
    eps: float
    packed: tuple[int, ActivationLayout] | None = None
    marks: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Gated(Symbol):
    """activation(gate) * up, computed by packing."""

    activation: str


@dataclass(eq=False)
class Product(Symbol):
    """Matrices times packed activations.

    first: the first operation, of packing; operations: one per matrix; parts: (column, rows) of each; marks: names of probes
    to mark after `place`.
    """

    first: int
    operations: list[int]
    parts: list[tuple[int, int]]
    buffer: Buffer | None = None
    accumulates: bool = False
    marks: list[str] = field(default_factory=list)

    def place(self, buffer: Buffer, accumulate: bool = False) -> None:
        """Direct the product to `buffer`, or accumulate it there. Raises ValueError if it does not fit or has a buffer."""
        at, rows = self.parts[-1]
        if at + pad(rows, ROWS) > buffer.array.shape[1]:
            raise ValueError(f"products up to column {at + rows} do not fit a buffer {buffer.array.shape}")
        if self.buffer is not None:
            raise ValueError("the product has a buffer already")
        self.buffer, self.accumulates = buffer, accumulate
        for operation, (at, _) in zip(self.operations, self.parts):
            self.trace.program.amend(operation, out=buffer.address + 4 * at, out_bytes=buffer.row_bytes,
                                     accumulate=int(accumulate))
        for name in self.marks:
            self.trace.probe(name, self)


@dataclass(eq=False)
class Adjusted(Symbol):
    """A product times `factor`, behind a norm if there is a weight; computed where it is read."""

    product: Product
    weight: Buffer | None = None
    eps: float = 0.0
    factor: float = 1.0
    rows: Rows | None = None
    marks: list[str] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The product's first operation."""
        return self.product.first

    def place(self, buffer: Buffer, accumulate: bool = False) -> None:
        """Write or accumulate it to `buffer`. Raises ValueError as Product.place, and without a buffer to compute it in."""
        w = self.trace.workspace
        source = w.delta if accumulate else buffer
        if not len(source.array):
            raise ValueError("the workspace has no buffer for outputs that are normed or scaled: no layer says that it does so")
        self.product.place(source)
        self.trace.program.add(
            "adjust", 1, per_token=True, delta=source.address, delta_bytes=source.row_bytes,
            weight=self.weight.address if self.weight else 0, factor=float_bits(self.factor), target=buffer.address,
            target_bytes=buffer.row_bytes, accumulate=int(accumulate), groups=buffer.array.shape[1] // GROUP,
            width=float_bits(self.trace.config.hidden_size), eps=float_bits(self.eps), scratch=w.scratch.address)
        self.rows = Rows(self.trace, buffer, 0, self.product.parts[0][1])
        for name in self.marks:
            self.trace.probe(name, self)


@dataclass(frozen=True)
class Mark:
    """A probe of a program: after operation `last` - 1, read(tokens) returns its values, float32 [tokens, ...].

    zeroed: the buffer that operations first .. last - 1 accumulate to; zeroed before them, it shows their sum alone.
    """

    name: str
    first: int
    last: int
    read: Callable[[int], np.ndarray]
    zeroed: Buffer | None = None

    def shift(self, by: int) -> Mark:
        """The same mark `by` operations earlier."""
        return Mark(self.name, self.first - by, self.last - by, self.read, self.zeroed)


@dataclass(frozen=True)
class Segment:
    """A finished program and its marks in order. moves: buffers whose last row is copied to the first before a run."""

    program: Program
    marks: tuple[Mark, ...]
    moves: tuple[Buffer, ...]


class View:
    """Stand-in for cache.View while layers.py is traced. count: 1 for a decoded token, more for a prompt."""

    def __init__(self, trace: Trace, count: int):
        self.trace, self.count = trace, count

    def new_keys(self, layer: int) -> Rows:
        """The stored keys, in the buffer where they were rotated."""
        return self.trace.head_rows(self.trace.config.layers[layer])[1]


class Trace:
    """One run of the forward on symbols. decode: kernels for single tokens, else for tiles of tokens.

    segments: the finished programs; vectors: norms and biases that they point to; embedding: the model's, its rows
    times embedding_factor.
    """

    def __init__(self, config: LlamaConfig, code: Code, workspace: Workspace, threads: int, decode: bool):
        self.config, self.code, self.workspace, self.threads, self.decode = config, code, workspace, threads, decode
        self.program = Program(code, threads)
        self.segments: list[Segment] = []
        self.vectors: list[Buffer] = []
        self.embedding: ops.Matrix | None = None
        self.embedding_factor = 1.0
        self.stream = Rows(self, workspace.hidden, 0, config.hidden_size)
        self._marks: list[Mark] = []
        self._moves: list[Buffer] = []

    # ---- probes and segments

    def probe(self, name: str, symbol: Symbol) -> None:
        """Mark the operation after which `symbol` can be read: the latest for rows, its own for others."""
        now = len(self.program)
        if isinstance(symbol, Rows):
            self._marks.append(Mark(name, now, now, symbol.read))
        elif isinstance(symbol, Normed) and symbol.packed:
            operation, layout = symbol.packed
            self._marks.append(Mark(name, operation + 1, operation + 1, self._make_reader(layout)))
        elif isinstance(symbol, Adjusted) and symbol.rows:
            self._marks.append(Mark(name, now, now, symbol.rows.read))
        elif isinstance(symbol, (Normed, Adjusted)) or symbol.buffer is None:
            symbol.marks.append(name)
        else:
            (at, rows), last = symbol.parts[0], symbol.operations[-1] + 1
            first, zeroed = (symbol.operations[0], symbol.buffer) if symbol.accumulates else (last, None)
            self._marks.append(Mark(name, first, last, Rows(self, symbol.buffer, at, rows).read, zeroed))

    def _make_reader(self, layout: ActivationLayout) -> Callable[[int], np.ndarray]:
        records, width = self.workspace.activations[layout].array, self.config.hidden_size
        columns, slots = self.workspace.hidden.array.shape[1], tile(self.code.recipe.target, layout, self.decode)
        return lambda tokens: unpack(layout, records, columns, slots, tokens)[:, :width]

    def split(self, at: int | None = None) -> None:
        """End a segment before operation `at` (None: after the latest)."""
        at = len(self.program) if at is None else at
        rest = self.program.cut(at)
        marks = sorted((mark for mark in self._marks if mark.last <= at), key=lambda mark: mark.last)
        self._marks = [mark.shift(at) for mark in self._marks if mark.last > at]
        self.segments.append(Segment(self.program.finish(), tuple(marks), tuple(self._moves)))
        self.program, self._moves = rest, []

    def narrow(self, buffer: Buffer) -> None:
        """Continue with the last token alone, starting from its row of `buffer`."""
        if not self.decode:
            self.split()
            self.decode = True
        self._moves.append(buffer)

    def finish(self, logits: Product | Adjusted, separate_head: bool) -> list[Segment]:
        """End the trace. separate_head: end a segment before the head, which then runs for HEAD_CHUNK tokens at a time."""
        logits.place(self.workspace.logits)
        if separate_head:
            self.split(logits.first)
        self.split()
        return self.segments

    # ---- operations

    def copy_vector(self, values: np.ndarray) -> Buffer:
        """Copy a norm's weight or a bias, padded with zeros."""
        buffer = Buffer(pad(len(values), WIDTH))
        buffer.array[:len(values)] = values
        self.vectors.append(buffer)
        return buffer

    def head_rows(self, spec: LayerSpec) -> tuple[Rows, Rows, Rows]:
        """Queries, keys and values in the workspace, each padded to a multiple of ROWS columns."""
        at, found = 0, []
        for heads in (spec.heads, spec.key_value_heads, spec.key_value_heads):
            found.append(Rows(self, self.workspace.qkv, at, heads * spec.head_dim, heads))
            at += pad(heads * spec.head_dim, ROWS)
        return tuple(found)

    def pack(self, x: Symbol, layouts: list[ActivationLayout]) -> Buffer:
        """Append packing of x in each layout; returns the buffer that it reads."""
        w, b, b_bytes = self.workspace, None, 0
        if isinstance(x, Normed):
            source, a, b = "norm", w.hidden, x.weight
            x.packed = len(self.program), layouts[0]
            for name in x.marks:
                self.probe(name, x)
        elif isinstance(x, Gated):
            source, a, b, b_bytes = x.activation, w.gate, w.up, w.up.row_bytes
        else:
            source, a = "plain", x.buffer
        groups = a.array.shape[1] // GROUP
        if a.array.shape[1] % WIDTH or b is not None and b.array.shape[-1] < a.array.shape[1]:
            raise ValueError(f"rows of {a.array.shape} and {b and b.array.shape} are not multiples of {WIDTH}")
        part = max(8, pad(-(-groups // 8), 8))  # at most eight parts, since each repeats a norm's sum of squares
        width, eps = (self.config.hidden_size, x.eps) if source == "norm" else (1, self.config.rms_norm_eps)
        for layout in layouts:
            self.program.add(
                pack_kind(layout, source, self.decode), -(-groups // part), per_token=True, wait=layout is layouts[-1],
                a=a.address, a_bytes=a.row_bytes, b=b.address if b else a.address, b_bytes=b_bytes, groups=groups, part=part,
                x=w.activations[layout].address, x_bytes=groups // SPAN * layout.record(self._tile(layout)),
                width=float_bits(width), eps=float_bits(eps), scratch=w.scratch.address)
        return a

    def multiply(self, x: Symbol, panels: tuple[Panels, ...], bias: np.ndarray | None) -> Product:
        """Append packing of x and its products with all matrices. bias: float32, concatenated, or None."""
        first, activation_layout = len(self.program), self.code.recipe.activation_layout
        packed = self.pack(x, list(dict.fromkeys(activation_layout(matrix.plan.layout) for matrix in panels)))
        product = Product(self, first, [], [])
        at = row = 0
        for matrix in panels:
            rows = matrix.plan.rows
            part = None if bias is None else bias[row:row + rows]
            product.operations.append(self._multiply_one(matrix, packed, part, wait=matrix is panels[-1]))
            product.parts.append((at, rows))
            at, row = at + pad(rows, ROWS), row + rows
        if bias is not None and len(bias) != row:
            raise ValueError(f"a bias of {len(bias)} does not fit matrices of {row} rows")
        return product

    def _multiply_one(self, matrix: Panels, packed: Buffer, bias: np.ndarray | None, wait: bool) -> int:
        plan, layout = matrix.plan, self.code.recipe.activation_layout(matrix.plan.layout)
        columns = packed.array.shape[1]
        if plan.columns > columns:
            raise ValueError(f"{plan.tensor.name} {plan.tensor.shape} does not fit inputs of {columns}")
        portion = max(1, (1 << 16 if self.decode else 1 << 17) // plan.panel_bytes)
        portion = min(portion, max(1, plan.panels // (2 * self.threads)))
        if layout.name == "float" and self.decode:
            portion = pad(portion, 4)
        return self.program.add(
            product_kind(plan.layout, self.decode), plan.panels, portion, wait=wait, weights=matrix.address,
            panel_bytes=plan.panel_bytes, blocks=plan.blocks, x=self.workspace.activations[layout].address,
            x_bytes=columns // WIDTH * layout.record(self._tile(layout)), out=0, out_bytes=0,
            bias=0 if bias is None else self.copy_vector(bias).address, accumulate=0)

    def _tile(self, layout: ActivationLayout) -> int:
        return tile(self.code.recipe.target, layout, self.decode)


# ---- ops


@ops.embed.register
def _(tokens: Tokens, weight: ops.Matrix) -> Rows:
    tokens.trace.embedding = weight
    return tokens.trace.stream


@ops.add.register
def _(x: Rows, delta: Product | Adjusted | None) -> Rows:
    if delta is not None:
        delta.place(x.buffer, accumulate=True)
    return x


@ops.rms_norm.register
def _(x: Product, weight: np.ndarray, eps: float) -> Adjusted:
    return Adjusted(x.trace, x, x.trace.copy_vector(weight), eps)


@ops.scale.register
def _(x: Symbol, factor: float) -> Symbol:
    if isinstance(x, Rows):
        if len(x.trace.program):
            raise ValueError("of all rows only the embedding is scaled where it lies")
        x.trace.embedding_factor *= factor
        return x
    adjusted = x if isinstance(x, Adjusted) else Adjusted(x.trace, x)
    adjusted.factor *= factor
    return adjusted


@ops.add_rms_norm.register
def _(x: Rows, delta: Product | Adjusted | None, weight: np.ndarray, eps: float) -> tuple[Rows, Normed]:
    return ops.add(x, delta), Normed(x.trace, x.trace.copy_vector(weight), eps)


@ops.linear.register
def _(x: Symbol, weight: Panels | tuple[Panels, ...], bias: np.ndarray | None = None) -> Product:
    return x.trace.multiply(x, weight if isinstance(weight, tuple) else (weight,), bias)


@ops.gated_linear.register
def _(x: Symbol, weight: tuple[Panels, Panels], bias: np.ndarray | None = None, activation: str = "silu") -> Gated:
    product, w = x.trace.multiply(x, weight, bias), x.trace.workspace
    for operation, (_, rows), buffer in zip(product.operations, product.parts, (w.gate, w.up), strict=True):
        if pad(rows, ROWS) > buffer.array.shape[1]:
            raise ValueError(f"a product of {rows} columns does not fit a buffer {buffer.array.shape}")
        x.trace.program.amend(operation, out=buffer.address, out_bytes=buffer.row_bytes)
    return Gated(x.trace, activation)


@ops.norm_heads.register
def _(heads: Product, query_weight: np.ndarray, key_weight: np.ndarray, spec: LayerSpec) -> Rows:
    trace = heads.trace
    query, key, _ = _place_heads(heads, spec)
    trace.program.add(
        "norm_heads", 1, per_token=True, qkv=query.buffer.address, qkv_bytes=query.buffer.row_bytes, heads=spec.heads,
        key_heads=spec.key_value_heads, keys_at=4 * key.at, query_weight=trace.copy_vector(query_weight).address,
        key_weight=trace.copy_vector(key_weight).address, eps=float_bits(spec.eps))
    return query


@ops.split_heads.register
def _(heads: Symbol, spec: LayerSpec) -> tuple[Rows, Rows, Rows]:
    return _place_heads(heads, spec)


@ops.rope_and_store.register
def _(heads: Symbol, view: View, spec: LayerSpec) -> Rows:
    query, key, value = _place_heads(heads, spec)
    heads.trace.program.add(
        "rotate", 1, per_token=True, qkv=query.buffer.address, qkv_bytes=query.buffer.row_bytes, heads=spec.heads,
        key_heads=spec.key_value_heads, keys_at=4 * key.at, values_at=4 * value.at, rotates=int(spec.rotates),
        **_page_offsets(heads.trace, spec))
    return query


def _page_offsets(trace: Trace, spec: LayerSpec) -> dict[str, int]:
    """Offsets of the layer's keys and values in a page, as operands."""
    pages, i = trace.workspace.pages, spec.index
    return {"page_keys": pages.numbers(i, 0), "page_values": pages.numbers(i, 1), "key_scales": pages.scales(i, 0),
            "value_scales": pages.scales(i, 1)}


def _place_heads(heads: Symbol, spec: LayerSpec) -> tuple[Rows, Rows, Rows]:
    """The rows of query, key and value; directs their product there if it has no buffer yet."""
    found = heads.trace.head_rows(spec)
    if isinstance(heads, Product) and heads.buffer is None:
        if heads.parts != [(one.at, one.width) for one in found]:
            raise ValueError(f"layer {spec.index}: query, key and value have {heads.parts} rows")
        heads.place(found[0].buffer)
    return found


@ops.attend.register
def _(query: Rows, view: View, spec: LayerSpec) -> Rows:
    out = query.trace.workspace.mixed
    query.trace.program.add(
        "attend", spec.key_value_heads, per_token=True, qkv=query.buffer.address, qkv_bytes=query.buffer.row_bytes,
        shared=spec.heads // spec.key_value_heads, key_heads=spec.key_value_heads, out=out.address, out_bytes=out.row_bytes,
        window=spec.window or NO_WINDOW, scale=float_bits(spec.scale), **_page_offsets(query.trace, spec))
    return Rows(query.trace, out, 0, spec.heads * spec.head_dim)


@ops.last_position.register
def _(x: Rows) -> Rows:
    x.trace.narrow(x.buffer)
    return x
