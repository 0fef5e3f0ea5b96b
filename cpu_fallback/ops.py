"""The arithmetic of a Llama, one function each.

A weight matrix is float32, float16, or uint16 holding bfloat16 bits (NumPy has no bfloat16; bfloat16 is the upper half
of a float32, so widening it is a shift), or a low-bit QuantizedMatrix; a tuple of matrices is one matrix, rows below rows.
"""

from __future__ import annotations

import numpy as np

from .quantized import QuantizedMatrix

Matrix = np.ndarray | QuantizedMatrix

# A block of widened rows should stay in a core's second-level cache between being written and being multiplied.
BLOCK_BYTES = 1 << 19


def widen(weight: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """float32 copy of a weight of any width, exact. out: contiguous float32 of the same shape to write to."""
    if out is None:
        out = np.empty(weight.shape, np.float32)
    bits = out.view(np.int32)
    if weight.dtype == np.uint16:
        bits[...] = weight
        np.left_shift(bits, 16, out=bits)
    elif weight.dtype == np.float16:
        # NumPy converts float16 one number at a time. In integers: sign-extend, move exponent and mantissa to their
        # places, clear the sign's copies; what is left is 2**-112 of the value, subnormal numbers included.
        bits[...] = weight.view(np.int16)
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, np.int32(-0x70000001), out=bits)
        np.multiply(out, np.float32(2.0**112), out=out)
        if max(out.max(), -out.min()) >= 65536:  # infinity and NaN came out finite
            out[...] = weight
    else:
        out[...] = weight
    return out


def embed(weight: Matrix, tokens: np.ndarray) -> np.ndarray:
    """Rows of the embedding. weight: [V, E]; tokens: int32 [B, T]; returns float32 [B, T, E]."""
    return weight.rows(tokens) if isinstance(weight, QuantizedMatrix) else widen(weight[tokens])


def linear(x: np.ndarray, weight: Matrix | tuple[Matrix, ...], bias: np.ndarray | None = None) -> np.ndarray:
    """x @ weight.T + bias. x: float32 [..., K]; weight: [N, K], any width; bias: float32 [N]; returns float32 [..., N].

    16-bit and low-bit weights are widened a block of rows at a time: no float32 copy of the matrix ever exists.
    """
    rows = x.reshape(-1, x.shape[-1])
    parts = weight if isinstance(weight, tuple) else (weight,)
    outs = [part.matmul(rows) if isinstance(part, QuantizedMatrix) else _matmul(rows, part) for part in parts]
    out = outs[0] if len(outs) == 1 else np.concatenate(outs, axis=1)
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], out.shape[1])


def _matmul(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    if weight.dtype == np.float32:
        # One row goes through a matrix-vector product, which reads the weights at the memory's speed.
        out = (weight @ rows[0])[None] if len(rows) == 1 else rows @ weight.T
    else:
        out = np.empty((len(rows), len(weight)), np.float32)
        step = max(1, BLOCK_BYTES // (4 * weight.shape[1]))
        scratch = np.empty((min(step, len(weight)), weight.shape[1]), np.float32)
        for start in range(0, len(weight), step):
            block = weight[start:start + step]
            wide = widen(block, scratch[:len(block)])
            if len(rows) == 1:
                np.dot(wide, rows[0], out=out[0, start:start + step])
            else:
                out[:, start:start + step] = rows @ wide.T
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis (Zhang and Sennrich 2019). x: float32 [..., E]."""
    mean_square = np.einsum("...e,...e->...", x, x)[..., None] / np.float32(x.shape[-1])
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def rope(x: np.ndarray, table: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Rotate pairs (i, i + D/2) of each head by the angle of its position (Su et al. 2021, in Hugging Face's layout).

    x: float32 [B, H, T, D]; table: cosines and sines of the T positions, float32 [T, D/2]; returns [B, H, T, D].
    """
    cosine, sine = table
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float,
              mask: np.ndarray | None = None) -> np.ndarray:
    """softmax(query @ keys.T * scale) @ values; each key head serves H / G query heads (Ainslie et al. 2023).

    query: float32 [B, H, T, D]; keys, values: [B, G, L, D]; mask: bool [T, L], True where visible, None for all.
    Returns [B, H, T, D].
    """
    B, H, T, D = query.shape
    G, L = keys.shape[1:3]
    grouped = (query * np.float32(scale)).reshape(B, G, H // G * T, D)  # heads of one group share one product
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(B, G, H // G, T, L)
    if mask is not None:
        scores[..., ~mask] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return (scores.reshape(B, G, H // G * T, L) @ values).reshape(B, H, T, D)


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up (Shazeer 2020). gate_up: float32 [..., 2 F], the gate first; returns [..., F]."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    # exp of a large negative gate's opposite overflows to infinity, and gate / infinity is the right 0.
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up
