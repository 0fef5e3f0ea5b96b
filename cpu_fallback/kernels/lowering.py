"""Lowering of the forward to compiled programs: core.llama runs on symbols, and the words of ops.py
append operations.

A symbol stands for float32 numbers of each token in a buffer of the workspace. Some symbols are
evaluated by their reader: packing a product's inputs computes a norm or a gate, and a product's
reader chooses its output buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mlx_llama.core import ops
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Attention

from .layouts import GROUP, ROWS, SPAN, ActivationLayout, unpack
from .panels import Panels, Plan
from .products import panels_at_once
from .program import Code, Program
from .recipe import split_tokens
from .records import kind_of
from .workspace import WIDTH, Buffer, Workspace, pad


@dataclass(eq=False)
class Symbol:
    """Numbers computed by a traced program; itself the call's tokens, which the runner embeds."""

    trace: Trace


@dataclass(eq=False)
class Columns(Symbol):
    """Columns at .. at + width - 1 of a buffer."""

    buffer: Buffer
    at: int
    width: int
    heads: int | None = None  # number of heads in them

    def read(self, tokens: int) -> np.ndarray:
        """Copy the numbers: float32 [tokens, width], or [heads, tokens, width / heads]."""
        rows = self.buffer.array[:tokens, self.at : self.at + self.width].copy()
        if self.heads is None:
            return rows
        return rows.reshape(tokens, self.heads, -1).transpose(1, 0, 2)


@dataclass(eq=False)
class Normed(Symbol):
    """RMS norm of the stream, computed by packing."""

    weight: Buffer
    eps: float
    packed: tuple[int, ActivationLayout] | None = None  # operation and layout of the first packing
    marks: list[str] = field(default_factory=list)  # probes to mark when it is packed

    @property
    def buffer(self) -> Buffer:
        return self.trace.workspace.hidden


@dataclass(eq=False)
class Gated(Symbol):
    """activation(gate) * up, or xIELU, computed by packing. up: xIELU's numbers."""

    activation: str
    gate: Buffer
    up: Buffer


@dataclass(eq=False)
class Product(Symbol):
    """Matrices times packed activations."""

    first: int  # the first operation, of packing
    operations: list[int]  # one for each matrix
    parts: list[tuple[int, int]]  # (first column, number of columns) of each matrix's output
    buffer: Buffer | None = None  # where `place` directs it
    accumulates: bool = False
    marks: list[str] = field(default_factory=list)  # probes to mark after `place`
    # (operation, column) of products that add to it
    additions: list[tuple[int, int]] = field(default_factory=list)

    def add(self, other: Product) -> None:
        """Let `other`, appended later, add to it."""
        for operation in other.operations:
            self.trace.program.accumulate(operation)
        columns = (at for at, _ in other.parts)
        self.additions += [*zip(other.operations, columns), *other.additions]

    @property
    def last(self) -> int:
        return max([self.operations[-1], *(operation for operation, _ in self.additions)])

    def place(self, buffer: Buffer, accumulate: bool = False) -> None:
        """Write or accumulate the product to `buffer`. Raises ValueError if it does not fit."""
        at, rows = self.parts[-1]
        if at + pad(rows, ROWS) > buffer.array.shape[1]:
            raise ValueError(
                f"products up to column {at + rows} do not fit a buffer {buffer.array.shape}"
            )
        if self.buffer is not None:
            raise ValueError("the product has a buffer already")
        self.buffer, self.accumulates = buffer, accumulate
        program, columns = self.trace.program, [at for at, _ in self.parts]
        for operation, at in (*zip(self.operations, columns), *self.additions):
            program.direct(operation, buffer, at)
        if accumulate:
            for operation in self.operations:
                program.accumulate(operation)
        for name in self.marks:
            self.trace.probe(name, self)


@dataclass(eq=False)
class Adjusted(Symbol):
    """A product, or a sum in a buffer, times `factor`, after a norm if it has a weight; or the
    softcap of a product.
    """

    product: Product | Columns
    weight: Buffer | None = None
    eps: float = 0.0
    factor: float = 1.0
    cap: float = 0.0
    columns: Columns | None = None  # where `place` wrote it
    marks: list[str] = field(default_factory=list)

    @property
    def first(self) -> int:
        return self.product.first

    def place(self, buffer: Buffer, accumulate: bool = False, source: Buffer | None = None) -> None:
        """Write or accumulate it to `buffer`; the product goes to `source` first. Raises ValueError
        as Product.place.
        """
        w, product = self.trace.workspace, self.product
        source = source or (w.delta if accumulate else buffer)
        if not len(source.array):
            raise ValueError("the workspace has no buffer for normed or scaled outputs")
        if isinstance(product, Product):
            product.place(source)
            width = product.parts[0][1]
        else:
            source, width = product.buffer, product.width
        program, groups = self.trace.program, buffer.array.shape[1] // GROUP
        if self.cap:
            program.add("softcap", 1, True, target=source, groups=groups, cap=self.cap)
        else:
            norm = dict(weight=self.weight or 0, eps=self.eps, scratch=w.scratch)
            norm |= dict(factor=self.factor, width=self.trace.config.hidden_size)
            target = dict(target=buffer, accumulate=int(accumulate), scale=1.0)
            program.add("adjust", 1, True, delta=source, groups=groups, **norm, **target)
        # for probes, of sums of products alone if it accumulates
        self.columns = Columns(self.trace, source, 0, width)
        for name in self.marks:
            self.trace.probe(name, self)


@dataclass(frozen=True)
class Mark:
    """A probe of a program."""

    name: str
    first: int
    last: int
    # after operation last - 1, read(tokens) returns the values, float32 [tokens, ...]
    read: Callable[[int], np.ndarray]
    # The buffer that operations first .. last - 1 accumulate to. Zeroed, it has their sum.
    zeroed: Buffer | None = None

    def shift(self, by: int) -> Mark:
        """The same mark `by` operations earlier."""
        return Mark(self.name, self.first - by, self.last - by, self.read, self.zeroed)


@dataclass(frozen=True)
class Segment:
    """A finished program."""

    program: Program
    marks: tuple[Mark, ...]  # in order
    moves: tuple[Buffer, ...]  # whose last row is copied to the first before a run


class View(ops.View):
    """Stand-in for cache.View while the forward is traced."""

    def __init__(
        self, trace: Trace, count: int, adapters: tuple[int, ...] = (), is_probed: bool = True
    ):
        """count: 1 for a decoded token, more for a prompt. adapters: numbers of those that the rows
        may have. is_probed: mark the probes."""
        self.trace, self.count, self.adapters = trace, count, adapters
        self.listener = trace.probe if is_probed else None

    def probe_sum(self, name: str, x: Symbol, delta: Symbol, layer: int, words: ops.Ops) -> None:
        """Mark x + delta, which the next norm computes."""
        if self.listener:
            self.trace.sums.append(f"{layer}.{name}")

    def new_keys(self, spec: Attention) -> Columns:
        """The stored keys, in the buffer where they were rotated."""
        return self.trace.head_columns(spec)[1]


class Trace:
    """A run of the forward on symbols."""

    def __init__(
        self, config: LlamaConfig, code: Code, workspace: Workspace, threads: int, decode: bool
    ):
        """decode: for single tokens; products take smaller portions of panels."""
        self.config, self.code, self.workspace = config, code, workspace
        self.threads, self.decode = threads, decode
        self.program = Program(code, threads)
        self.segments: list[Segment] = []  # finished programs
        self.vectors: list[Buffer] = []  # norms and biases that they point to
        # of the tokens' rows in the stream, then of those in workspace.inputs
        self.embeddings: list[ops.Matrix] = []
        self.embedding_factor = 1.0  # multiplies rows that are looked up
        self.stream = Columns(self, workspace.hidden, 0, config.hidden_size)
        self.sums: list[str] = []  # probes of the stream's next sum
        self._marks: list[Mark] = []
        self._moves: list[Buffer] = []

    # ---- probes and segments

    def probe(self, name: str, symbol: Symbol) -> None:
        """Mark the operation after which `symbol` can be read, for columns the latest."""
        now = len(self.program)
        if isinstance(symbol, Columns):
            self._marks.append(Mark(name, now, now, symbol.read))
        elif isinstance(symbol, Normed) and symbol.packed:
            operation, layout = symbol.packed
            self._marks.append(Mark(name, operation + 1, operation + 1, self._make_reader(layout)))
        elif isinstance(symbol, Adjusted) and symbol.columns:
            self._marks.append(Mark(name, now, now, symbol.columns.read))
        elif isinstance(symbol, (Normed, Adjusted)) or symbol.buffer is None:
            symbol.marks.append(name)
        else:
            (at, width), last = symbol.parts[0], symbol.last + 1
            first, zeroed, columns = last, None, Columns(self, symbol.buffer, at, width)
            if symbol.accumulates:
                first, zeroed = symbol.operations[0], symbol.buffer
            self._marks.append(Mark(name, first, last, columns.read, zeroed))

    def mark_sums(self) -> None:
        """Mark the probes of the sum that was just added."""
        for name in self.sums:
            self.probe(name, self.stream)
        self.sums = []

    def _make_reader(self, layout: ActivationLayout) -> Callable[[int], np.ndarray]:
        records, width = self.workspace.activations[layout].array, self.config.hidden_size
        columns, target = self.workspace.hidden.array.shape[1], self.code.recipe.target
        token_bytes = columns // WIDTH * layout.record(1)

        def read(tokens: int) -> np.ndarray:
            tiles = [
                unpack(layout, records[first * token_bytes :], columns, size, count)
                for first, count, size in split_tokens(target, layout, tokens)
            ]
            return np.concatenate(tiles)[:, :width]

        return read

    def split(self, at: int | None = None) -> None:
        """End a segment before operation `at` (None: after the latest)."""
        at = len(self.program) if at is None else at
        rest = self.program.cut(at)
        marks = [mark for mark in self._marks if mark.last <= at]
        marks.sort(key=lambda mark: mark.last)
        self._marks = [mark.shift(at) for mark in self._marks if mark.last > at]
        self.segments.append(Segment(self.program.finish(), tuple(marks), tuple(self._moves)))
        self.program, self._moves = rest, []

    def narrow(self, buffer: Buffer) -> None:
        """Continue with the last token only, from its row of `buffer`."""
        if not self.decode:
            self.split()
            self.decode = True
        if buffer not in self._moves:
            self._moves.append(buffer)

    def finish(self, logits: Product | Adjusted, separate_head: bool) -> list[Segment]:
        """End the trace. separate_head: the head runs for HEAD_CHUNK tokens at a time."""
        logits.place(self.workspace.logits)
        if separate_head:
            self.split(logits.first)
        self.split()
        return self.segments

    # ---- operations

    def copy_vector(self, values: np.ndarray) -> Buffer:
        """Copy a norm's weight or a bias, padded with zeros."""
        buffer = Buffer(pad(len(values), WIDTH))
        buffer.array[: len(values)] = values
        self.vectors.append(buffer)
        return buffer

    def copy_rows(self, values: np.ndarray) -> Buffer:
        """Copy rows of numbers, each padded with zeros."""
        buffer = Buffer(len(values), pad(values.shape[1], WIDTH))
        buffer.array[:, : values.shape[1]] = values
        self.vectors.append(buffer)
        return buffer

    def head_columns(self, spec: Attention) -> tuple[Columns, Columns, Columns]:
        """Queries, keys and values in the workspace, each padded to a multiple of ROWS columns."""
        at, parts = 0, []
        for heads in (spec.heads, spec.new_heads, spec.new_heads):
            parts.append(Columns(self, self.workspace.qkv, at, heads * spec.head_dim, heads))
            at += pad(heads * spec.head_dim, ROWS)
        return tuple(parts)

    def pack(
        self,
        x: Symbol,
        layouts: list[ActivationLayout],
        of_experts: bool = False,
        scales: bool = False,
    ) -> Buffer:
        """Append packing of x in each layout; returns x's buffer. scales: times experts' shares."""
        w, b = self.workspace, None
        if isinstance(x, Normed):
            source, a, b = "norm", w.hidden, x.weight
            if x.packed is None and not of_experts:
                x.packed = len(self.program), layouts[0]
                for name in x.marks:
                    self.probe(name, x)
        elif isinstance(x, Gated):
            source, a, b = x.activation, x.gate, x.up
        else:
            source, a = "plain", x.buffer
        groups = a.array.shape[1] // GROUP
        is_row = b is not None and source != "xielu"
        if a.array.shape[1] % WIDTH or (is_row and b.array.shape[-1] < a.array.shape[1]):
            raise ValueError(
                f"rows of {a.array.shape} and {b and b.array.shape} are not multiples of {WIDTH}"
            )
        # at most eight parts, since each computes a norm's sum of squares
        part = max(8, pad(-(-groups // 8), 8))
        is_norm = source == "norm"
        word, parts, routed = "pack", -(-groups // part), {}
        if of_experts:
            r, used = w.routing, self.config.num_experts_per_tok
            word, parts = "gather", parts * used
            is_sorted = int(isinstance(x, Gated))
            routed = {"tiles": r.tiles, "order": r.order, "used": used, "is_sorted": is_sorted}
            routed["shares"] = r.shares if scales else 0
            if scales and source != "norm":
                raise ValueError("only a norm's numbers are multiplied by shares when packed")
        is_gated = isinstance(x, Gated) and source != "xielu"
        inputs = dict(a=a, b=b or a, b_bytes=x.up.row_bytes if is_gated else 0, groups=groups)
        width, eps = (self.config.hidden_size, x.eps) if is_norm else (1, self.config.rms_norm_eps)
        inputs |= dict(part=part, width=width, eps=eps, scratch=w.scratch, **routed)
        for layout in layouts:
            records = dict(x=w.activations[layout], x_bytes=groups // SPAN * layout.record(1))
            wait = layout is layouts[-1]
            kind = kind_of(word, source, layout)
            self.program.add(kind, parts, True, wait=wait, **inputs, **records)
        return a

    def multiply(self, x: Symbol, panels: tuple[Panels, ...], bias: np.ndarray | None) -> Product:
        """Append packing of x and its products. bias: float32, concatenated, or None."""
        first, activation_layout = len(self.program), self.code.recipe.activation_layout
        layouts = dict.fromkeys(activation_layout(matrix.plan.layout) for matrix in panels)
        packed = self.pack(x, list(layouts))
        product = Product(self, first, [], [])
        at = row = 0
        for matrix in panels:
            rows = matrix.plan.rows
            part = None if bias is None else bias[row : row + rows]
            operation = self._multiply_one(matrix, packed, part, wait=matrix is panels[-1])
            product.operations.append(operation)
            product.parts.append((at, rows))
            at, row = at + pad(rows, ROWS), row + rows
        if bias is not None and len(bias) != row:
            raise ValueError(f"a bias of {len(bias)} does not fit matrices of {row} rows")
        return product

    def multiply_experts(
        self,
        stack: tuple[Panels, ...],
        bias: np.ndarray | None,
        packed: Buffer,
        out: Buffer,
        wait: bool = True,
    ) -> None:
        """Append the products of each tile with its expert's matrix. bias: float32 [experts, N]."""
        plan, used = stack[0].plan, self.config.num_experts_per_tok
        columns = packed.array.shape[1]
        if plan.columns > columns or plan.panels * ROWS > out.array.shape[1]:
            raise ValueError(
                f"{plan.tensor.name} {plan.tensor.shape} does not fit inputs of {columns}, outputs "
                f"of {out.array.shape[1]}"
            )
        addresses = Buffer(len(stack), dtype=np.int64)
        addresses.array[:] = [matrix.address for matrix in stack]
        self.vectors.append(addresses)
        biases = Buffer(0 if bias is None else len(stack), plan.panels * ROWS)
        if bias is not None:
            biases.array[:, : plan.rows] = bias
            self.vectors.append(biases)
        largest, share = max(1, (1 << 17) // plan.panel_bytes), 2 * self.threads
        part = min(largest, -(-plan.panels * used // share), plan.panels)
        part = pad(part, panels_at_once(self.code.recipe.target, plan.layout, 1))
        operands = dict(weights=addresses, panels=plan.panels, part=part, out=out)
        operands["tiles"] = self.workspace.routing.tiles
        operands |= dict(biases=0 if bias is None else biases, bias_bytes=biases.row_bytes)
        kind, items = kind_of("experts", plan.layout), used * -(-plan.panels // part)
        self.program.add(kind, items, True, wait=wait, **operands, **self._inputs(plan, columns))

    def _inputs(self, plan: Plan, columns: int) -> dict[str, int | Buffer]:
        """Operands of a product: sizes of its panels, and packed activations."""
        layout = self.code.recipe.activation_layout(plan.layout)
        x, x_bytes = self.workspace.activations[layout], columns // WIDTH * layout.record(1)
        return dict(panel_bytes=plan.panel_bytes, blocks=plan.blocks, x=x, x_bytes=x_bytes)

    def add_low_rank(
        self, product: Product, x: Symbol, a: Panels, b: tuple[Panels, ...], adapter: int
    ) -> None:
        """Add (x @ a.T) @ b.T to `product` in rows with this adapter. b: by part of the product."""
        w, layout = self.workspace, self.code.recipe.activation_layout(a.plan.layout)
        b = b[: len(product.parts)]  # values that are keys
        inner = self._multiply_one(a, self.pack(x, [layout]), None, wait=True)
        self.program.direct(inner, w.low_rank)
        width = pad(a.plan.rows, GROUP)
        groups = width // GROUP
        self.program.add("select", 1, True, target=w.low_rank, groups=groups, adapter=adapter)
        packed = self.pack(Columns(self, w.low_rank, 0, width), [layout])
        for part, (at, _) in zip(b, product.parts, strict=True):
            operation = self._multiply_one(part, packed, None, wait=part is b[-1])
            self.program.accumulate(operation)
            product.additions.append((operation, at))

    def _multiply_one(
        self, matrix: Panels, packed: Buffer, bias: np.ndarray | None, wait: bool
    ) -> int:
        plan, columns = matrix.plan, packed.array.shape[1]
        if plan.columns > columns:
            raise ValueError(
                f"{plan.tensor.name} {plan.tensor.shape} does not fit inputs of {columns}"
            )
        portion = max(1, (1 << 16 if self.decode else 1 << 17) // plan.panel_bytes)
        portion = min(portion, max(1, plan.panels // (2 * self.threads)))
        portion = pad(portion, panels_at_once(self.code.recipe.target, plan.layout, 1))
        operands = dict(weights=matrix.address, out=0, out_bytes=0, accumulate=0)
        operands["bias"] = 0 if bias is None else self.copy_vector(bias)
        operands |= self._inputs(plan, columns)
        kind = kind_of("product", plan.layout)
        return self.program.add(kind, plan.panels, portion=portion, wait=wait, **operands)
