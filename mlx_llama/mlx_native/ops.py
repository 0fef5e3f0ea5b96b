"""The arithmetic of a Llama, one function each; MLX's fused kernels where it has them."""

from __future__ import annotations

import mlx.core as mx

from .quantized import QuantizedMatrix


def embed(weight: mx.array | QuantizedMatrix, tokens: mx.array) -> mx.array:
    """Rows of the embedding. weight: [V, E]; tokens: int32 [B, T]; returns [B, T, E]."""
    return weight.rows(tokens) if isinstance(weight, QuantizedMatrix) else weight[tokens]


def linear(x: mx.array, weight: mx.array | QuantizedMatrix | tuple, bias: mx.array | None = None) -> mx.array:
    """x @ weight.T + bias. x: [..., K]; weight: [N, K], or a tuple of blocks of rows; bias: [N]; returns [..., N]."""
    if isinstance(weight, mx.array):
        return _columns_product(x, weight.T, bias)
    if isinstance(weight, QuantizedMatrix):
        product = weight.matmul(x)
    else:
        product = mx.concatenate([linear(x, block) for block in weight], axis=-1)
    return product if bias is None else product + bias


def _columns_product(x: mx.array, columns: mx.array, bias: mx.array | None = None) -> mx.array:
    """x @ columns + bias. x: [..., K]; columns: a weight turned over, [K, N]; bias: [N]; returns [..., N]."""
    return x @ columns if bias is None else mx.addmm(bias, x, columns)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, accumulated in float32 (Zhang and Sennrich 2019)."""
    return mx.fast.rms_norm(x, weight, eps)


def rope(x: mx.array, table: tuple) -> mx.array:
    """Rotate pairs (i, i + D/2) of each head by the angle of its position (Su et al. 2021, in Hugging Face's layout).

    x: [B, H, T, D]; table: cosines and sines of the T positions, float32 [T, D/2], multiplied in float32; or, for MLX's
    fused kernel, the periods (1 / inverse frequency, in tokens per radian) as float32 [D/2], the factor on cosine and
    sine, and the position of the first row. Returns [B, H, T, D] of x's dtype.
    """
    if len(table) == 2:
        cosine, sine = table
        first, second = mx.split(x, 2, axis=-1)
        return mx.concatenate([first * cosine - second * sine, second * cosine + first * sine],
                              axis=-1).astype(x.dtype)
    periods, factor, index_pos = table
    if factor != 1:
        x = factor * x
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=None, scale=1.0, offset=index_pos, freqs=periods)


def attention(query: mx.array, keys: mx.array, values: mx.array, scale: float,
              mask: mx.array | str | None = None) -> mx.array:
    """softmax(query @ keys.T * scale) @ values; each key head serves H / G query heads (Ainslie et al. 2023).

    query: [B, H, T, D]; keys, values: [B, G, L, D]; mask: bool [T, L], True where visible, None for all, "causal" where
    the last query is at the last key. Returns [B, H, T, D].
    """
    return mx.fast.scaled_dot_product_attention(query, keys, values, scale=scale, mask=mask)


def swiglu(gate_up: mx.array) -> mx.array:
    """silu(gate) * up (Shazeer 2020). gate_up: [..., 2 F], the gate first; returns [..., F]."""
    gate, up = mx.split(gate_up, 2, axis=-1)
    return gate * mx.sigmoid(gate) * up
