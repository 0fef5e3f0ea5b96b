"""The vocabulary (core.ops) on symbols: words append operations to a program."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.models.parts import (
    Attention,
    GatedDelta,
    LayerInputs,
    PerLayerInput,
    Recurrent,
    ShortConv,
    Window,
)
from mlx_llama.core.ops import DeltaWeights, ExpertStacks

from .. import ops
from .emit import LANES
from .layouts import ROWS
from .lowering import Adjusted, Columns, Gated, Normed, Product, Symbol, Trace, View
from .panels import Panels
from .routing import share_kind
from .workspace import Buffer, pad

NO_WINDOW = 1 << 60


def embed(tokens: Symbol, weight: ops.Matrix) -> Columns:
    trace = tokens.trace
    trace.embeddings.append(weight)
    if len(trace.embeddings) == 1:
        return trace.stream
    return Columns(trace, trace.workspace.inputs, 0, weight.shape[1])


def add(x: Columns | Product | Adjusted, delta: Product | Adjusted | None) -> Columns | Adjusted:
    if isinstance(x, Product):
        x.add(delta)
        return Adjusted(x.trace, x)  # the stream is not changed before both have read it
    if isinstance(x, Adjusted):  # as the first, both products have read it
        w = x.trace.workspace
        x.place(w.delta)
        delta.place(w.delta, accumulate=True, source=w.routing.shared)
        return Columns(x.trace, w.delta, 0, x.trace.config.hidden_size)
    if delta is not None:
        delta.place(x.buffer, accumulate=True)
    x.trace.mark_sums()
    return x


def rms_norm(x: Product | Columns, weight: np.ndarray, eps: float) -> Adjusted:
    return Adjusted(x.trace, x, x.trace.copy_vector(weight), eps)


def scale(x: Symbol, factor: float) -> Symbol:
    if isinstance(x, Columns):
        if len(x.trace.program):
            x.trace.program.scale_sum(factor)
        else:
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
    matrices = weight if isinstance(weight, tuple) else (weight,)
    if len(matrices) > 1 and matrices[-1] is matrices[-2]:  # values that are keys
        matrices = matrices[:-1]
    return x.trace.multiply(x, matrices, bias)


def adapt(product: Product, x: Symbol, adapters: ops.Adapters, view: View) -> Product:
    for number in view.adapters:
        if number in adapters:
            a, b = adapters[number]
            product.trace.add_low_rank(product, x, a, b, number)
    return product


def gated_linear(
    x: Symbol,
    weight: tuple[Panels, Panels],
    bias: np.ndarray | None = None,
    activation: str = "silu",
) -> Gated:
    return gate(x.trace.multiply(x, weight, bias), activation)


def gate(gate_up: Product, activation: str) -> Gated:
    units = [rows for _, rows in gate_up.parts]
    buffers = gate_up.trace.workspace.hidden_units.get(units[0], ())
    if len(buffers) != len(units) or len({*units}) > 1:
        raise ValueError(f"no layer has an MLP of {units} columns")
    _direct(gate_up, buffers)
    gate, up = buffers
    return Gated(gate_up.trace, activation, gate, up)


def xielu(x: Product, positive: float, negative: float, beta: float, eps: float) -> Gated:
    buffer, _ = x.trace.workspace.hidden_units[x.parts[0][1]]
    _direct(x, (buffer,))
    numbers = x.trace.copy_vector(np.array([positive, negative, beta, eps], np.float32))
    return Gated(x.trace, "xielu", buffer, numbers)


def _direct(product: Product, buffers: tuple[Buffer, ...]) -> None:
    for operation, (at, _), buffer in zip(product.operations, product.parts, buffers, strict=True):
        additions = [addition for addition, column in product.additions if column == at]
        for number in (operation, *additions):
            product.trace.program.direct(number, buffer)


def experts(x: Symbol, scores: Product, stacks: ExpertStacks) -> Product:
    gate, up, down, spec, (gate_bias, up_bias, down_bias), router_bias, expert_scale = stacks
    trace, router = x.trace, spec.router
    r = trace.workspace.routing
    scores.place(r.scores)
    choice = dict(scores=r.scores, experts=spec.count, used=router.used, chosen=r.chosen)
    choice |= dict(groups=router.groups, used_groups=router.used_groups, ranks=r.ranks)
    choice["bias"] = 0 if router_bias is None else trace.copy_vector(router_bias)
    choice |= dict(sharing=share_kind(router), scale=router.scale, shares=r.shares)
    sorting = dict(counts=r.counts, tiles=r.tiles, order=r.order, rows=r.row_of)
    scales = expert_scale is not None
    sorting["expert_scale"] = trace.copy_vector(expert_scale) if scales else 0
    trace.program.add("route scaled" if scales else "route", 1, **choice, **sorting)
    find = trace.code.recipe.activation_layout
    layouts = [find(stack[0].plan.layout) for stack in (gate, up, down)]
    packed = trace.pack(x, list(dict.fromkeys(layouts[:2])), True, router.scales_input)
    gates, ups = trace.workspace.hidden_units[gate[0].plan.rows]
    gated = Gated(trace, spec.activation, gates, ups)
    trace.multiply_experts(gate, gate_bias, packed, gated.gate, wait=False)
    trace.multiply_experts(up, up_bias, packed, gated.up)
    packed = trace.pack(gated, layouts[2:], of_experts=True)
    trace.multiply_experts(down, down_bias, packed, r.outputs)
    width = trace.config.hidden_size
    sources = dict(outputs=r.outputs, rows=r.row_of, used=router.used)
    sources["shares"] = r.ones if router.scales_input else r.shares
    vectors = pad(width, ROWS) // ROWS
    operation = trace.program.add(
        "combine", 1, True, **sources, vectors=vectors, out=0, out_bytes=0, accumulate=0
    )
    return Product(trace, scores.first, [operation], [(0, width)])


def gate_output(x: Product | Columns, score: Product) -> Product | Gated:
    trace = x.trace
    if isinstance(x, Columns):  # a mixer's output, gated when it is packed
        gate = trace.workspace.gates[x.width]
        score.place(gate)
        return Gated(trace, "sigmoid", gate, x.buffer)
    r, (_, width) = trace.workspace.routing, x.parts[0]
    x.place(r.shared)
    score.place(r.shared_scores)
    sources = dict(x=r.shared, score=r.shared_scores, vectors=pad(width, ROWS) // ROWS)
    target = dict(out=0, out_bytes=0, accumulate=0)
    operation = trace.program.add("gate_output", 1, True, **sources, **target)
    return Product(trace, x.first, [operation], [(0, width)])


def norm_heads(
    heads: Product, query_weight: np.ndarray, key_weight: np.ndarray | None, spec: Attention
) -> Columns:
    trace = heads.trace
    query, key, value = split_heads(heads, spec)
    if spec.norms_values and spec.new_heads:
        source = key if spec.qkv[1] == spec.qkv[2] else value
        places = dict(source_at=4 * source.at, at=4 * value.at, eps=spec.eps)
        places |= dict(qkv=query.buffer, heads=spec.new_heads, size=spec.head_dim)
        trace.program.add("norm_values", 1, True, wait=source is key, **places)
    if key_weight is None:  # no keys: key.width is 0
        key_weight = query_weight
    operands = dict(qkv=query.buffer, keys_at=4 * key.at, eps=spec.eps)
    operands |= dict(query_width=len(query_weight), query_weight=trace.copy_vector(query_weight))
    operands |= dict(key_width=len(key_weight), key_weight=trace.copy_vector(key_weight))
    heads_of = dict(heads=query.width // len(query_weight), key_heads=key.width // len(key_weight))
    trace.program.add("norm_heads", 1, True, **operands, **heads_of)
    return query


def scale_heads(query: Columns, weight: np.ndarray, spec: Attention) -> Columns:
    trace = query.trace
    sizes, copied = dict(heads=spec.heads, size=spec.head_dim), trace.copy_vector(weight)
    trace.program.add("scale_heads", 1, True, qkv=query.buffer, **sizes, weight=copied)
    return query


def split_heads(heads: Symbol, spec: Attention) -> tuple[Columns, Columns, Columns]:
    """As in core.ops; directs the heads' product to these columns if it has no buffer."""
    parts = heads.trace.head_columns(spec)
    if isinstance(heads, Product) and heads.buffer is None:
        if heads.parts != [(part.at, part.width) for part in parts[: len({*spec.qkv})]]:
            raise ValueError(f"layer {spec.index}: query, key and value have {heads.parts} rows")
        heads.place(parts[0].buffer)
    return parts


def rope_and_store(heads: Symbol, view: View, spec: Attention) -> Columns:
    trace, (query, key, value) = heads.trace, split_heads(heads, spec)
    items, portion = spec.key_value_heads, 1 if trace.decode else spec.key_value_heads
    operands = dict(qkv=query.buffer, heads=spec.heads, query_table_at=4 * spec.query_angles.start)
    if not spec.new_heads:
        kind = f"rotate_queries {spec.head_dim}"
        trace.program.add(kind, items, True, portion, **operands, key_heads=items)
        return query
    operands |= _page_offsets(trace, spec) | dict(keys_at=4 * key.at, values_at=4 * value.at)
    operands |= dict(table_at=4 * spec.angles.start, rotates=int(spec.rotates))
    trace.program.add(f"rotate {spec.head_dim}", items, True, portion, **operands)
    return query


def _page_offsets(trace: Trace, spec: Attention) -> dict[str, int]:
    """Offsets of the layer's keys and values in a page, as operands; and the number of heads."""
    layouts, i = trace.workspace.pages, spec.slot
    (kind,) = (n for n, layout in enumerate(layouts) if layout.window == spec.window)
    pages = layouts[kind]
    numbers = {"page_keys": pages.numbers(i, 0), "page_values": pages.numbers(i, 1)}
    scales = {"key_scales": pages.scales(i, 0), "value_scales": pages.scales(i, 1)}
    table = {"page_kind": 8 * kind, "page_step": 8 * len(layouts)}
    return {"key_heads": spec.key_value_heads} | numbers | scales | table


def attend(query: Columns, view: View, spec: Attention, sinks: np.ndarray | None = None) -> Columns:
    width = spec.heads * spec.head_dim
    out = query.trace.workspace.mixed[width]
    operands = _page_offsets(query.trace, spec) | dict(qkv=query.buffer, out=out, scale=spec.scale)
    operands["shared"] = spec.heads // spec.key_value_heads
    operands["sinks"] = 0 if sinks is None else query.trace.copy_vector(sinks)
    window = spec.window or Window(NO_WINDOW)
    operands |= dict(window=window.size, is_chunk=int(window.is_chunk))
    query.trace.program.add(f"attend {spec.head_dim}", spec.key_value_heads, True, **operands)
    return Columns(query.trace, out, 0, width)


def short_conv(
    x: Product, view: View, spec: ShortConv, weight: np.ndarray, bias: np.ndarray | None = None
) -> Columns:
    trace = x.trace
    w = trace.workspace
    x.place(w.recurrence.channels)
    bias = np.zeros(spec.size, np.float32) if bias is None else bias
    _convolve(trace, spec, weight, bias, w.mixed[spec.size])
    return Columns(trace, w.mixed[spec.size], 0, spec.size)


def _convolve(
    trace: Trace, spec: Recurrent, weight: np.ndarray, bias: np.ndarray, out: Buffer
) -> None:
    """Append the convolution of weights [C, W]."""
    r, channels = trace.workspace.recurrence, len(weight)
    operands = dict(x=r.channels, channels=channels, history=spec.width - 1, out=out)
    operands |= dict(weights=trace.copy_rows(weight.T), bias=trace.copy_vector(bias))
    items = -(-channels // LANES)
    operands["portion"] = min(16, -(-items // (2 * trace.threads)))
    kind = "convolve gated" if isinstance(spec, ShortConv) else "convolve silu"
    trace.program.add(kind, items, state=4 * r.places[spec.slot][0][0], **operands)


def gated_delta(x: Product, view: View, spec: GatedDelta, weights: DeltaWeights) -> Gated:
    trace, width = x.trace, spec.value_heads * spec.value_size
    w, r = trace.workspace, trace.workspace.recurrence
    gate, out = w.gates[width], w.mixed[width]
    _direct(x, (r.channels, gate, r.strengths, r.decays))
    _convolve(trace, spec, weights.conv, np.zeros(spec.channels, np.float32), r.channels)
    vectors = dict(rates=weights.rate, biases=weights.bias, norm=weights.norm)
    operands = {name: trace.copy_vector(values) for name, values in vectors.items()}
    operands |= dict(x=r.channels, strengths=r.strengths, decays=r.decays, out=out)
    shared = 1 if spec.tiled else spec.value_heads // spec.key_heads
    sizes = dict(key_heads=spec.key_heads, shared=shared)
    sizes |= dict(key_size=spec.key_size, value_size=spec.value_size)
    sizes["state"] = 4 * r.places[spec.slot][1][0]
    numbers = dict(eps=spec.eps, scale=spec.key_size**-0.5)
    trace.program.add("gated_delta", spec.value_heads, **operands, **sizes, **numbers)
    return Gated(trace, "silu", gate, out)


def layer_inputs(
    embedded: Columns, projected: Product, weight: np.ndarray, spec: LayerInputs
) -> Columns:
    trace, w = embedded.trace, embedded.trace.workspace
    projected.place(w.projected)
    factors = dict(root=spec.size**0.5, factor=spec.hidden**-0.5, scale=2**-0.5, eps=spec.eps)
    sources = dict(x=w.projected, embedded=w.inputs, weight=trace.copy_vector(weight))
    sizes = dict(layers=spec.layers, size=spec.size)
    portion = 1 if trace.decode else spec.layers
    trace.program.add("layer_inputs", spec.layers, True, portion, **sources, **sizes, **factors)
    return embedded


def gate_input(gate: Product, inputs: Columns, spec: PerLayerInput) -> Gated:
    trace, w = gate.trace, gate.trace.workspace
    if trace.decode:
        trace.narrow(inputs.buffer)
    gate.place(w.input_gate)
    return Gated(trace, spec.activation, w.input_gate, w.inputs.columns(spec.index * spec.size))


def last_position(x: Columns | Normed | Gated) -> Columns | Normed | Gated:
    buffers = (x.gate, x.up) if isinstance(x, Gated) else (x.buffer,)
    for buffer in buffers:
        x.trace.narrow(buffer)
    return x
