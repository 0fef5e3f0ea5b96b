"""The vocabulary (core.ops) in MLX, with its fused kernels if it has them.

The stream x is [B, T, E], or [B, E] in a decode step, which saves primitives.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlx_llama.core import ops as plain
from mlx_llama.core.backends.positions import CACHE_GROUP
from mlx_llama.core.models.parts import Attention, GatedDelta, ShortConv
from mlx_llama.core.ops import DeltaWeights, ExpertStacks

from . import arrays
from .cache import View
from .kernels import delta
from .kernels.buffers import Parts
from .quantized import LowBitMatrix, QuantizedStack


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix [N, K], stored as its transpose, which saves a primitive of each product."""

    columns: mx.array  # [K, N], in either order in memory

    @property
    def shape(self) -> tuple[int, int]:
        return self.columns.shape[1], self.columns.shape[0]

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes

    def matmul(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        """x @ w.T + bias. x: [..., K]; bias: [N]; returns [..., N]."""
        return x @ self.columns if bias is None else mx.addmm(bias, x, self.columns)


Matrix = mx.array | DenseMatrix | LowBitMatrix
Matrices = Matrix | tuple[Matrix, ...]  # a tuple: their rows concatenated
Filter = tuple[mx.array, ...]  # of a convolution: float32 [C] of each position, the new one last
Stack = mx.array | QuantizedStack  # matrices [X, N, K] of all experts, by number

SORT_FROM = 64  # products from which sorting rows by expert pays, as in mlx_lm
# a.T [1 + adapters, K, R] and b.T [1 + adapters, R, N] by number, zeros for none
Adapters = tuple[mx.array, mx.array]

add, scale, last_position = plain.add, plain.scale, plain.last_position
scale_heads, split_heads = plain.scale_heads, plain.split_heads
layer_inputs = partial(plain.layer_inputs, sys.modules[__name__])
gate_input = partial(plain.gate_input, arrays)
gated_linear = partial(plain.gated_linear, sys.modules[__name__])
add_rms_norm = partial(plain.add_rms_norm, sys.modules[__name__])


def embed(tokens: mx.array, weight: mx.array | LowBitMatrix) -> mx.array:
    return weight.rows(tokens) if isinstance(weight, LowBitMatrix) else weight[tokens]


def linear(x: mx.array, weight: Matrices, bias: mx.array | None = None) -> mx.array:
    if isinstance(weight, mx.array):
        weight = DenseMatrix(weight.T)
    if isinstance(weight, DenseMatrix):
        return weight.matmul(x, bias)
    if isinstance(weight, LowBitMatrix):
        product = weight.matmul(x)
    else:
        product = mx.concatenate([linear(x, block) for block in weight], axis=-1)
    return product if bias is None else product + bias


gate, xielu = partial(plain.gate, arrays), partial(plain.xielu, arrays)
softcap, choose_experts = partial(plain.softcap, arrays), partial(plain.choose_experts, arrays)
gate_output = partial(plain.gate_output, arrays)


def experts(x: mx.array, scores: mx.array, stacks: ExpertStacks) -> mx.array:
    router, (gate_bias, up_bias, down_bias) = stacks.spec.router, stacks.biases
    scores = scores.reshape(-1, stacks.spec.count)
    chosen, shares = choose_experts(scores, router, *stacks[5:])
    rows, is_sorted = x.reshape(-1, 1, 1, x.shape[-1]), chosen.size >= SORT_FROM
    if router.scales_input:  # a row for each expert of a token
        rows, shares = (rows * shares[..., None, None]).astype(x.dtype), mx.ones_like(shares)
    if is_sorted:
        order, per_row = mx.argsort(chosen.reshape(-1)), router.used // rows.shape[1]
        rows = rows.reshape(-1, 1, x.shape[-1])[order // per_row]
        chosen = chosen.reshape(-1)[order]
    gate_up = [
        _multiply_stack(rows, stacks.gate, chosen, is_sorted, gate_bias),
        _multiply_stack(rows, stacks.up, chosen, is_sorted, up_bias),
    ]
    hidden = gate(mx.concatenate(gate_up, axis=-1), stacks.spec.activation)
    outputs = _multiply_stack(hidden, stacks.down, chosen, is_sorted, down_bias)
    if is_sorted:
        outputs = outputs[mx.argsort(order)]
    outputs = outputs.reshape(-1, router.used, x.shape[-1])
    return (outputs * shares[..., None]).sum(axis=-2).astype(x.dtype).reshape(x.shape)


def _multiply_stack(
    x: mx.array, stack: Stack, chosen: mx.array, is_sorted: bool, bias: mx.array | None
) -> mx.array:
    """x @ w.T with the matrices `chosen`, broadcast with the axes before M, plus their rows of
    `bias`. x: [..., M, K]; bias: [X, N].
    """
    if isinstance(stack, QuantizedStack):
        product = stack.matmul(x, chosen, is_sorted)
    else:
        matrices = stack.swapaxes(-1, -2)
        product = mx.gather_mm(x, matrices, rhs_indices=chosen, sorted_indices=is_sorted)
    return product if bias is None else product + bias[chosen][..., None, :]


def adapt(product: mx.array, x: mx.array, adapters: Adapters, view: View) -> mx.array:
    """As in core.ops. view.adapters: int32 [B], None if no row has one."""
    if view.adapters is None:
        return product
    down, up = (part[view.adapters] for part in adapters)
    rows = x if x.ndim == 3 else x[:, None]
    return product + (rows @ down @ up).reshape(product.shape)


def norm_heads(
    heads: mx.array, query_weight: mx.array, key_weight: mx.array | None, spec: Attention
) -> mx.array:
    H, G, D = spec.heads, spec.new_heads, spec.head_dim
    shape, parts, axis, unit = heads.shape, heads, -1, D
    if query_weight.size == D:
        parts, axis, unit = heads.reshape((*shape[:-1], H + 2 * G, D)), -2, 1
    if not G:
        return rms_norm(parts, query_weight, spec.eps).reshape(shape)
    query, key, value = mx.split(parts, [H * unit, (H + G) * unit], axis=axis)
    value = rms_norm(value, None, spec.eps) if spec.norms_values else value
    normed = [rms_norm(query, query_weight, spec.eps), rms_norm(key, key_weight, spec.eps), value]
    return mx.concatenate(normed, axis=axis).reshape(shape)


def rope_and_store(heads: mx.array, view: View, spec: Attention) -> mx.array:
    H, G = spec.heads, spec.new_heads
    if not G:
        query = _heads_first(heads, spec)
        tables = _last_angles(view.tables, view.count - query.shape[2])
        return rope(query, _find_angles(tables, spec.query_angles)) if spec.rotates else query
    # queries and keys together
    rotated, value = mx.split(_heads_first(heads, spec), [H + G], axis=1)
    has_shared_angles = spec.angles == spec.query_angles
    if spec.rotates and has_shared_angles:
        rotated = rope(rotated, _find_angles(view.tables, spec.angles))
    query, key = mx.split(rotated, [H], axis=1)
    if spec.rotates and not has_shared_angles:
        query = rope(query, _find_angles(view.tables, spec.query_angles))
        key = rope(key, _find_angles(view.tables, spec.angles))
    view.append(spec.slot, key, value)
    return query


def attend(query: mx.array, view: View, spec: Attention, sinks: mx.array | None = None) -> mx.array:
    """As in core.ops; returns [B, H D] if the view is flat."""
    B, H, T, D = query.shape
    if T == 1 and sinks is None and mx.default_device().type == mx.cpu:
        # The CPU has no fused kernel. A position's queries of a key head are rows of a single
        # product, without broadcasting.
        query = query.reshape(B, spec.key_value_heads, -1, D)
    stored, masks = view.stored(spec.slot, spec.window), view.mask(spec.window)
    if view.count > T:
        # "causal": the last sees all
        masks = [mask[-T:] if isinstance(mask, mx.array) else None for mask in masks]
    queries = [query] if len(stored) == 1 else mx.split(query, B)
    mixed = [
        attention(sequence, keys, values, spec.scale, mask, spec.softcap, sinks)
        for sequence, (keys, values), mask in zip(queries, stored, masks)
    ]
    mixed = mixed[0] if len(stored) == 1 else mx.concatenate(mixed)
    mixed = mixed if T == 1 else mixed.transpose(0, 2, 1, 3)
    return mixed.reshape((B, H * D) if view.flat else (B, T, H * D))


def short_conv(
    x: mx.array, view: View, spec: ShortConv, weight: Filter, bias: mx.array | None = None
) -> mx.array:
    wide = x[:, None] if view.flat else x
    before, after, inputs = mx.split(wide, 3, axis=-1)
    (history,) = view.recurrent(spec.slot)
    mixed, history = _convolve(before * inputs, history, weight)
    view.keep(spec.slot, (history,))
    mixed = after * (mixed if bias is None else mixed + bias).astype(x.dtype)
    return mixed.reshape(*x.shape[:-1], spec.size)


def gated_delta(x: mx.array, view: View, spec: GatedDelta, weights: DeltaWeights) -> mx.array:
    wide = x[:, None] if view.flat else x
    values = spec.value_heads * spec.value_size
    channels, gate, gates = mx.split(wide, [spec.channels, spec.channels + values], axis=-1)
    history, state = view.recurrent(spec.slot)
    mixed, history = _convolve(channels, history, weights.conv)
    mixed = arrays.swish(mixed, mixed)
    sizes = delta.Sizes.of(spec)
    if delta.is_for_metal(mx.default_device()) and not delta.find_fault(sizes, x.dtype):
        outputs, state = delta.advance_by_kernel(mixed, wide, state, sizes, weights)
    elif view.count == 1:
        outputs, state = delta.advance(mixed, gates, state, sizes, weights)
    else:
        starts = [span.start for span in view.spans]
        outputs, state = delta.advance_blocks(mixed, gates, state, sizes, weights, starts)
    view.keep(spec.slot, (history, state))
    normed = mx.fast.rms_norm(outputs, None, spec.eps * spec.key_size**2) * weights.norm
    gate = gate.reshape(outputs.shape).astype(mx.float32)
    return (normed * arrays.swish(gate, gate)).astype(x.dtype).reshape(*x.shape[:-1], values)


def _convolve(x: mx.array, history: mx.array, weight: Filter) -> tuple[mx.array, mx.array]:
    """As core.ops.convolve, of x [B, T, C] in any dtype."""
    count, x = x.shape[1], x.astype(mx.float32)
    if count == 1:
        taps = [*mx.split(history, len(weight) - 1, axis=1), x]
        history = mx.concatenate(taps[1:], axis=1)
    else:
        inputs = mx.concatenate([history, x], axis=1)
        taps = [inputs[:, i : i + count] for i in range(len(weight))]
        history = mx.contiguous(inputs[:, count:])  # a slice would hold all of the inputs
    terms = [tap * part for tap, part in zip(taps, weight)]
    return sum(terms[1:], terms[0]), history


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps)


def rope(x: mx.array, table: tuple) -> mx.array:
    """Rotate pairs (i, i + R/2) of each head by its position's angle, as core.ops.rope_and_store.

    x: [B, H, T, D]. table: cosines and sines of the T positions, float32 [T, 1, R/2] and [T, 2,
    R/2], or [B, 1, T, *], multiplied in float32, with the first of the two sines negated. For MLX's
    fused kernel: periods (1 / inverse frequency, in tokens per radian), float32 [R/2], the factor
    on cosine and sine, and the first position, a number or int32 [B]. Or such a table for each
    sequence. R <= D: the other dimensions do not change. Returns [B, H, T, D] of x's dtype.
    """
    if isinstance(table[0], tuple):
        return mx.concatenate([rope(x[i : i + 1], part) for i, part in enumerate(table)])
    width = 2 * table[0].shape[-1]
    if width < x.shape[-1]:
        return mx.concatenate([rope(x[..., :width], table), x[..., width:]], axis=-1)
    if len(table) == 2:
        cosine, sine = table
        halves = x.reshape((*x.shape[:-1], 2, -1))
        # a single fused primitive in a trace
        rotated = halves * cosine + halves[..., ::-1, :] * sine
        return rotated.reshape(x.shape).astype(x.dtype)
    periods, factor, index_pos = table
    if factor != 1:
        x = factor * x
    return mx.fast.rope(
        x, x.shape[-1], traditional=False, base=None, scale=1.0, offset=index_pos, freqs=periods
    )


def attention(
    query: mx.array,
    keys: Parts,
    values: Parts,
    scale: float,
    mask: mx.array | str | None = None,
    cap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(query @ keys.T * scale) @ values; each key head serves H / G query heads.

    query: [B, H, T, D]; keys, values: Parts of [B, G, L, *], numbers of query's dtype or float16,
    or codes; mask: bool [T, L] or [B, 1, 1, L], True if visible, None for all, "causal" if the last
    query is at the last key; cap: softcap; sinks: [H], as in core.ops. Returns [B, H, T, D].
    """
    is_packed = len(keys) > 1
    if not is_packed and not cap:
        return mx.fast.scaled_dot_product_attention(
            query, keys[0], values[0], scale=scale, mask=mask, sinks=sinks
        )
    # The fused kernel takes neither codes nor a softcap.
    B, H, T, D = query.shape
    G, L = keys[0].shape[1:3]
    padded = keys[1].shape[-1] * CACHE_GROUP if is_packed else D
    x = query.astype(keys[1].dtype if is_packed else query.dtype) * scale
    if padded > D:
        x = mx.pad(x, ((0, 0), (0, 0), (0, 0), (0, padded - D)))
    # Queries of a key head's group are rows of a single product.
    x = x.reshape(B, G, H // G * T, padded)
    if is_packed:
        scores = mx.quantized_matmul(x, *keys, transpose=True, group_size=CACHE_GROUP, bits=8)
    else:
        scores = x @ keys[0].swapaxes(-1, -2)
    scores = scores.reshape(B, G, H // G, T, L)
    if cap:
        scores = softcap(scores, cap)
    if isinstance(mask, str):
        mask = mx.arange(L) <= mx.arange(L - T, L)[:, None]
    if mask is not None:
        scores = mx.where(mask[:, None] if mask.ndim == 4 else mask, scores, -math.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.reshape(G, H // G, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column.astype(scores.dtype)], axis=-1)
    shares = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        shares = shares[..., :L]
    shares = shares.reshape(B, G, H // G * T, L)
    if is_packed:
        mixed = mx.quantized_matmul(
            shares, *values, transpose=False, group_size=CACHE_GROUP, bits=8
        )
    else:
        mixed = shares @ values[0]
    return mixed.reshape(B, H, T, padded)[..., :D].astype(query.dtype)


def _find_angles(tables: tuple, columns: slice) -> tuple:
    """Select columns of the view's tables."""
    if isinstance(tables[0], tuple):
        return tuple(_find_angles(table, columns) for table in tables)
    if tables[0].shape[-1] == columns.stop - columns.start:
        return tables
    count = 2 if len(tables) == 2 else 1  # cosines and sines, or periods
    return (*(part[..., columns] for part in tables[:count]), *tables[count:])


def _last_angles(tables: tuple, skipped: int) -> tuple:
    """The view's tables without the first `skipped` positions."""
    if not skipped:
        return tables
    if isinstance(tables[0], tuple):
        return tuple(_last_angles(table, skipped) for table in tables)
    if len(tables) == 2:
        axis = tables[0].ndim - 3
        return tuple(part[(slice(None),) * axis + (slice(skipped, None),)] for part in tables)
    return (*tables[:2], tables[2] + skipped)


def _heads_first(heads: mx.array, spec: Attention) -> mx.array:
    """Split heads [B, T, (H + 2 G) D], or without T, to [B, H + 2 G, T, D]."""
    B, T = heads.shape[0], heads.shape[1] if heads.ndim == 3 else 1
    count = spec.heads + 2 * spec.new_heads
    if T == 1:
        return heads.reshape(B, count, 1, spec.head_dim)
    return heads.reshape(B, T, count, spec.head_dim).transpose(0, 2, 1, 3)
