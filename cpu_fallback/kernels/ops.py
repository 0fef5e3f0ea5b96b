"""The vocabulary (core.ops) on symbols: words append operations to a program."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.models.spec import ExpertsSpec, LayerSpec

from .. import ops
from .layouts import ROWS
from .lowering import Adjusted, Columns, Gated, Normed, Product, Symbol, Tokens, Trace, View
from .panels import Panels
from .workspace import Buffer, pad

NO_WINDOW = 1 << 60


def embed(tokens: Tokens, weight: ops.Matrix) -> Columns:
    tokens.trace.embedding = weight
    return tokens.trace.stream


def add(x: Columns, delta: Product | Adjusted | None) -> Columns:
    if delta is not None:
        delta.place(x.buffer, accumulate=True)
        x.trace.mark_sums()
    return x


def rms_norm(x: Product, weight: np.ndarray, eps: float) -> Adjusted:
    return Adjusted(x.trace, x, x.trace.copy_vector(weight), eps)


def scale(x: Symbol, factor: float) -> Symbol:
    if isinstance(x, Columns):
        if len(x.trace.program):
            raise ValueError("the stream cannot be scaled in place, except as the embedding")
        x.trace.embedding_factor *= factor
        return x
    adjusted = x if isinstance(x, Adjusted) else Adjusted(x.trace, x)
    adjusted.factor *= factor
    return adjusted


def softcap(x: Product, cap: float) -> Adjusted:
    return Adjusted(x.trace, x, cap=cap)


def add_rms_norm(
    x: Columns, delta: Product | Adjusted | None, weight: np.ndarray, eps: float
) -> tuple[Columns, Normed]:
    return add(x, delta), Normed(x.trace, x.trace.copy_vector(weight), eps)


def linear(
    x: Symbol, weight: Panels | tuple[Panels, ...], bias: np.ndarray | None = None
) -> Product:
    return x.trace.multiply(x, weight if isinstance(weight, tuple) else (weight,), bias)


def adapt(product: Product, x: Symbol, adapters: ops.Adapters, view: View) -> Product:
    for number in view.adapters:
        if number in adapters:
            product.trace.add_low_rank(product, x, *adapters[number], number)
    return product


def gated_linear(
    x: Symbol,
    weight: tuple[Panels, Panels],
    bias: np.ndarray | None = None,
    activation: str = "silu",
) -> Gated:
    return gate(x.trace.multiply(x, weight, bias), activation)


def gate(gate_up: Product, activation: str) -> Gated:
    w = gate_up.trace.workspace
    _direct(gate_up, w.gate, w.up)
    return Gated(gate_up.trace, activation)


def xielu(x: Product, positive: float, negative: float, beta: float, eps: float) -> Gated:
    _direct(x, x.trace.workspace.gate)
    numbers = x.trace.copy_vector(np.array([positive, negative, beta, eps], np.float32))
    return Gated(x.trace, "xielu", numbers)


def _direct(product: Product, *buffers: Buffer) -> None:
    """Write each part of a product to a buffer."""
    program = product.trace.program
    for operation, (at, rows), buffer in zip(
        product.operations, product.parts, buffers, strict=True
    ):
        if pad(rows, ROWS) > buffer.array.shape[1]:
            raise ValueError(
                f"a product of {rows} columns does not fit a buffer {buffer.array.shape}"
            )
        additions = [addition for addition, column in product.additions if column == at]
        for number in (operation, *additions):
            program.direct(number, buffer)


def experts(
    x: Symbol,
    scores: Product,
    gate: tuple[Panels, ...],
    up: tuple[Panels, ...],
    down: tuple[Panels, ...],
    spec: ExpertsSpec,
    activation: str = "silu",
) -> Product:
    trace = x.trace
    w, r = trace.workspace, trace.workspace.routing
    scores.place(r.scores)
    trace.program.add(
        "route",
        1,
        scores=r.scores,
        experts=spec.count,
        used=spec.used,
        normalises=int(spec.normalises),
        chosen=r.chosen,
        shares=r.shares,
        counts=r.counts,
        tiles=r.tiles,
        order=r.order,
        rows=r.row_of,
    )
    find = trace.code.recipe.activation_layout
    layouts = [find(stack[0].plan.layout) for stack in (gate, up, down)]
    packed = trace.pack(x, list(dict.fromkeys(layouts[:2])), of_experts=True)
    trace.multiply_experts(gate, packed, w.gate, wait=False)
    trace.multiply_experts(up, packed, w.up)
    packed = trace.pack(Gated(trace, activation), layouts[2:], of_experts=True)
    trace.multiply_experts(down, packed, r.outputs)
    width = trace.config.hidden_size
    operation = trace.program.add(
        "combine",
        1,
        per_token=True,
        outputs=r.outputs,
        rows=r.row_of,
        shares=r.shares,
        used=spec.used,
        vectors=pad(width, ROWS) // ROWS,
        out=0,
        out_bytes=0,
        accumulate=0,
    )
    return Product(trace, scores.first, [operation], [(0, width)])


def norm_heads(
    heads: Product, query_weight: np.ndarray, key_weight: np.ndarray, spec: LayerSpec
) -> Columns:
    trace = heads.trace
    query, key, _ = _place_heads(heads, spec)
    trace.program.add(
        "norm_heads",
        1,
        per_token=True,
        qkv=query.buffer,
        heads=query.width // len(query_weight),
        key_heads=key.width // len(key_weight),
        query_width=len(query_weight),
        key_width=len(key_weight),
        keys_at=4 * key.at,
        query_weight=trace.copy_vector(query_weight),
        key_weight=trace.copy_vector(key_weight),
        eps=spec.eps,
    )
    return query


def scale_heads(query: Columns, weight: np.ndarray, spec: LayerSpec) -> Columns:
    trace = query.trace
    trace.program.add(
        "scale_heads",
        1,
        per_token=True,
        qkv=query.buffer,
        heads=spec.heads,
        size=spec.head_dim,
        weight=trace.copy_vector(weight),
    )
    return query


def split_heads(heads: Symbol, spec: LayerSpec) -> tuple[Columns, Columns, Columns]:
    return _place_heads(heads, spec)


def rope_and_store(heads: Symbol, view: View, spec: LayerSpec) -> Columns:
    query, key, value = _place_heads(heads, spec)
    heads.trace.program.add(
        "rotate",
        spec.key_value_heads,
        portion=1 if heads.trace.decode else spec.key_value_heads,
        per_token=True,
        qkv=query.buffer,
        heads=spec.heads,
        key_heads=spec.key_value_heads,
        keys_at=4 * key.at,
        values_at=4 * value.at,
        rotates=int(spec.rotates),
        table_at=4 * spec.angles.start,
        query_table_at=4 * spec.query_angles.start,
        **_page_offsets(heads.trace, spec),
    )
    return query


def _page_offsets(trace: Trace, spec: LayerSpec) -> dict[str, int]:
    """Offsets of the layer's keys and values in a page, as operands."""
    pages, i = trace.workspace.pages, spec.index
    return {
        "page_keys": pages.numbers(i, 0),
        "page_values": pages.numbers(i, 1),
        "key_scales": pages.scales(i, 0),
        "value_scales": pages.scales(i, 1),
    }


def _place_heads(heads: Symbol, spec: LayerSpec) -> tuple[Columns, Columns, Columns]:
    """The columns of query, key and value; directs their product there if it has no buffer."""
    parts = heads.trace.head_columns(spec)
    if isinstance(heads, Product) and heads.buffer is None:
        if heads.parts != [(part.at, part.width) for part in parts]:
            raise ValueError(f"layer {spec.index}: query, key and value have {heads.parts} rows")
        heads.place(parts[0].buffer)
    return parts


def attend(query: Columns, view: View, spec: LayerSpec) -> Columns:
    out = query.trace.workspace.mixed
    query.trace.program.add(
        "attend",
        spec.key_value_heads,
        per_token=True,
        qkv=query.buffer,
        shared=spec.heads // spec.key_value_heads,
        key_heads=spec.key_value_heads,
        out=out,
        window=spec.window or NO_WINDOW,
        scale=spec.scale,
        **_page_offsets(query.trace, spec),
    )
    return Columns(query.trace, out, 0, spec.heads * spec.head_dim)


def last_position(x: Columns) -> Columns:
    x.trace.narrow(x.buffer)
    return x
