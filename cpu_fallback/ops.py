"""The vocabulary (core.ops) in NumPy. kernels/ops.py has the same words for symbols, which become a
compiled program.

A weight matrix is float32, float16, uint16 with bfloat16 bits, or low-bit as in the file. A tuple
of matrices stands for their rows concatenated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from mlx_llama.core import ops as plain
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models.parts import Attention, PerLayerInput, Router
from mlx_llama.core.ops import ExpertStacks

from . import arrays
from .cache import View

Matrix = np.ndarray | AffineWeight
Matrices = Matrix | tuple[Matrix, ...]  # a tuple: their rows concatenated
Stack = tuple[Matrix, ...]  # all experts' matrices, by number
# by number: (a [R, K], b [N, R]), float32 arrays, or panels for a compiled program
Adapters = Mapping[int, Any]

# float32 rows widened at a time; they stay in a core's L2 cache until multiplied
BLOCK_BYTES = 1 << 19

add, scale, last_position = plain.add, plain.scale, plain.last_position
scale_heads, split_heads = plain.scale_heads, plain.split_heads
layer_inputs = partial(plain.layer_inputs, sys.modules[__name__])
gated_linear = partial(plain.gated_linear, sys.modules[__name__])
add_rms_norm = partial(plain.add_rms_norm, sys.modules[__name__])


def widen(weight: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Copy a weight as float32, exactly. out: contiguous float32 of the same shape, or None."""
    if out is None:
        out = np.empty(weight.shape, np.float32)
    if weight.dtype == np.uint16:
        # 10 us for 2**17 weights; shifts of integers take 16
        out[...] = weight.view(ml_dtypes.bfloat16)
    elif weight.dtype == np.float16:
        # A cast by NumPy takes 455 us for 2**17 weights, these integer operations 42. Sign-extend,
        # shift exponent and mantissa to float32's fields, clear the copies of the sign: 2**-112 of
        # the value, subnormals included.
        bits = out.view(np.int32)
        bits[...] = weight.view(np.int16)
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, np.int32(-0x70000001), out=bits)
        np.multiply(out, np.float32(2.0**112), out=out)
        if max(out.max(), -out.min()) >= 65536:  # infinity or NaN, which came out finite
            out[...] = weight
    else:
        out[...] = weight
    return out


def embed(tokens: np.ndarray, weight: Matrix) -> np.ndarray:
    if isinstance(weight, AffineWeight):
        return weight.take(tokens.reshape(-1)).reshape((*tokens.shape, -1))
    return widen(weight[tokens])


def linear(x: np.ndarray, weight: Matrices, bias: np.ndarray | None = None) -> np.ndarray:
    """As in core.ops. Widens weights a block of rows at a time, never a whole matrix."""
    rows = x.reshape(-1, x.shape[-1])
    parts = weight if isinstance(weight, tuple) else (weight,)
    outs = [_matmul(rows, part) for part in parts]
    out = outs[0] if len(outs) == 1 else np.concatenate(outs, axis=1)
    if bias is not None:
        out += bias
    return out.reshape((*x.shape[:-1], out.shape[1]))


@np.errstate(over="ignore")  # x / infinity is 0, as it should be for large negative gates
def gate(gate_up: np.ndarray, activation: str) -> np.ndarray:
    return plain.gate(arrays, gate_up, activation)


@np.errstate(over="ignore")  # as for `gate`
def gate_input(gate: np.ndarray, inputs: np.ndarray, spec: PerLayerInput) -> np.ndarray:
    return plain.gate_input(arrays, gate, inputs, spec)


xielu, softcap = partial(plain.xielu, arrays), partial(plain.softcap, arrays)
short_conv = partial(plain.short_conv, arrays)
gated_delta = partial(plain.gated_delta, arrays)


def mix_experts(words: Any, x: np.ndarray, scores: np.ndarray, stacks: ExpertStacks) -> np.ndarray:
    """`experts` of core.ops by the products of `words`."""
    gate, up, down, spec, (gate_bias, up_bias, down_bias), *vectors = stacks
    rows = x.reshape(-1, x.shape[-1])
    chosen, shares = choose_experts(scores.reshape(len(rows), -1), spec.router, *vectors)
    out = np.zeros_like(rows)
    for expert in np.unique(chosen):
        tokens, places = np.nonzero(chosen == expert)
        inputs, share, inner, outer = rows[tokens], shares[tokens, places, None], None, None
        if spec.router.scales_input:
            inputs, share = share * inputs, 1
        if gate_bias is not None:
            inner, outer = np.concatenate([gate_bias[expert], up_bias[expert]]), down_bias[expert]
        hidden = words.gated_linear(inputs, (gate[expert], up[expert]), inner, spec.activation)
        out[tokens] += share * words.linear(hidden, down[expert], outer)
    return out.reshape(x.shape)


experts = partial(mix_experts, sys.modules[__name__])


@np.errstate(over="ignore")  # as for `gate`
def choose_experts(
    scores: np.ndarray, router: Router, *vectors: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    return plain.choose_experts(arrays, scores, router, *vectors)


@np.errstate(over="ignore")
def gate_output(x: np.ndarray, score: np.ndarray) -> np.ndarray:
    return plain.gate_output(arrays, x, score)


def adapt(product: np.ndarray, x: np.ndarray, adapters: Adapters, view: View) -> np.ndarray:
    for b, number in enumerate(view.adapters):
        if number in adapters:
            down, up = adapters[number]
            product[b] += (x[b] @ down.T) @ up.T
    return product


def norm_heads(
    heads: np.ndarray, query_weight: np.ndarray, key_weight: np.ndarray | None, spec: Attention
) -> np.ndarray:
    ends = spec.heads * spec.head_dim, (spec.heads + spec.new_heads) * spec.head_dim
    parts = np.split(heads, ends, axis=-1)
    ones = np.ones(spec.head_dim, np.float32) if spec.norms_values else None
    for i, weight in enumerate((query_weight, key_weight, ones)):
        if weight is not None:
            units = parts[i].reshape((*parts[i].shape[:-1], -1, len(weight)))
            parts[i] = rms_norm(units, weight, spec.eps).reshape(parts[i].shape)
    return np.concatenate(parts, axis=-1)


def rope_and_store(heads: np.ndarray, view: View, spec: Attention) -> np.ndarray:
    query, key, value = split_heads(heads, spec)
    if spec.rotates:
        # the same for all heads
        query, key = (
            rope(part, tuple(table[:, None, -part.shape[2] :, columns] for table in view.tables))
            for part, columns in ((query, spec.query_angles), (key, spec.angles))
        )
    if spec.new_heads:
        view.append(spec.slot, key, value)
    return query


def attend(
    query: np.ndarray, view: View, spec: Attention, sinks: np.ndarray | None = None
) -> np.ndarray:
    B, H, T, D = query.shape
    mixed = np.empty((B, T, H, D), np.float32)
    stored, masks = view.stored(spec.slot, spec.window), view.mask(spec.window)
    for b, ((keys, values), mask) in enumerate(zip(stored, masks)):
        mask, sequence = mask if mask is None else mask[-T:], query[b : b + 1]
        part = attention(sequence, keys[None], values[None], spec.scale, mask, spec.softcap, sinks)
        mixed[b] = part[0].transpose(1, 0, 2)
    return mixed.reshape(B, T, H * D)


def _matmul(rows: np.ndarray, weight: Matrix) -> np.ndarray:
    is_low_bit = isinstance(weight, AffineWeight)
    if not is_low_bit and weight.dtype == np.float32:
        # One row: a matrix-vector product reads the weights at memory bandwidth.
        return (weight @ rows[0])[None] if len(rows) == 1 else rows @ weight.T
    N, K = weight.shape
    out, step = np.empty((len(rows), N), np.float32), max(1, BLOCK_BYTES // (4 * K))
    scratch = None if is_low_bit else np.empty((min(step, N), K), np.float32)
    for start in range(0, N, step):
        stop = min(start + step, N)
        if is_low_bit:
            out[:, start:stop] = rows @ weight.rows(start, stop).float32().T
            continue
        wide = widen(weight[start:stop], scratch[: stop - start])
        if len(rows) == 1:
            np.dot(wide, rows[0], out=out[0, start:stop])
        else:
            out[:, start:stop] = rows @ wide.T
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    mean_square = np.einsum("...e,...e->...", x, x)[..., None] / np.float32(x.shape[-1])
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def rope(x: np.ndarray, table: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Rotate pairs (i, i + R/2) of each head by its position's angle, as core.ops.rope_and_store.

    x: float32 [B, H, T, D]; table: cosines and sines of the positions, float32 [T, R/2] or [B, 1,
    T, R/2], R <= D: the other dimensions stay; returns [B, H, T, D].
    """
    cosine, sine = table
    half = cosine.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1
    )


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    mask: np.ndarray | None = None,
    cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """softmax(query @ keys.T * scale) @ values; each key head serves H / G query heads.

    query: float32 [B, H, T, D]; keys, values: [B, G, L, D]; mask: bool [T, L], True where visible,
    None for all; cap: softcap of the scores; sinks: [H], as in core.ops. Returns [B, H, T, D].
    """
    B, H, T, D = query.shape
    G, L = keys.shape[1:3]
    # one product per group of heads
    grouped = (query * np.float32(scale)).reshape(B, G, H // G * T, D)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(B, G, H // G, T, L)
    if cap:
        scores = softcap(scores, cap)
    if mask is not None:
        scores[..., ~mask] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(G, H // G, 1, 1)
        top = np.maximum(top, sinks)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= total if sinks is None else total + np.exp(sinks - top)
    return (scores.reshape(B, G, H // G * T, L) @ values).reshape(B, H, T, D)
