"""Words of the vocabulary (ops.py) that are written once, over the words of a backend's arrays.py
or over other words of its vocabulary. Kernels may replace them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .models.spec import ExpertsSpec, LayerSpec
from .ops import SWIGLU_ALPHA, SWIGLU_LIMIT, Array, Matrix


class Words(Protocol):
    """Functions of a backend's arrays, as in a module. A number takes the other operand's dtype."""

    float32: Callable[[Array], Array]
    cast_as: Callable[[Array, Array], Array]  # (x, like): x in the dtype of `like`
    where: Callable[..., Array]  # (condition, x, y)
    clip: Callable[..., Array]  # (x, low, high); None: no bound
    tanh: Callable[[Array], Array]
    expm1: Callable[[Array], Array]
    halves: Callable[[Array], tuple[Array, Array]]  # halves of the last axis
    swish: Callable[[Array, Array], Array]  # (x, z): x sigmoid(z)
    gelu: Callable[[Array], Array]  # by the tanh approximation
    # over the last axis of [T, n]:
    sigmoid: Callable[[Array], Array]
    softmax: Callable[[Array], Array]
    top: Callable[[Array, int], tuple[Array, Array]]  # the largest numbers and their places
    take: Callable[[Array, Array], Array]  # x[i, places[i, j]]


def add(x: Array, delta: Array | None) -> Array:
    return x if delta is None else x + delta


def scale(x: Array, factor: float) -> Array:
    return x * factor


def last_position(x: Array) -> Array:
    return x[..., -1:, :]


def scale_heads(query: Array, weight: Array, spec: LayerSpec) -> Array:
    return query * weight


def split_heads(heads: Array, spec: LayerSpec) -> tuple[Array, Array, Array]:
    H, G = spec.heads, spec.key_value_heads
    parts = heads.reshape(len(heads), -1, H + 2 * G, spec.head_dim).swapaxes(1, 2)
    return parts[:, :H], parts[:, H : H + G], parts[:, H + G :]


def add_rms_norm(
    ops: Any, x: Array, delta: Array | None, weight: Array, eps: float
) -> tuple[Array, Array]:
    """`ops`: the vocabulary of `rms_norm`."""
    total = add(x, delta)
    return total, ops.rms_norm(total, weight, eps)


def gated_linear(
    ops: Any, x: Array, weight: Matrix, bias: Array | None = None, activation: str = "silu"
) -> Array:
    """`ops`: the vocabulary of `linear` and `gate`."""
    return ops.gate(ops.linear(x, weight, bias), activation)


def gate(words: Any, gate_up: Array, activation: str) -> Array:
    gate, up = words.halves(gate_up)
    if activation == "clamped_swiglu":
        gate, up = words.clip(gate, None, SWIGLU_LIMIT), words.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return words.swish(gate, SWIGLU_ALPHA * gate) * (up + 1)
    return (words.swish(gate, gate) if activation == "silu" else words.gelu(gate)) * up


def gelu(words: Any, x: Array) -> Array:
    """x (1 + tanh(u)) / 2 = x sigmoid(2 u)."""
    return words.swish(x, 1.5957691216 * (x + 0.044715 * x * x * x))


def xielu(words: Any, x: Array, positive: float, negative: float, beta: float, eps: float) -> Array:
    """As in core.ops, in float32."""
    wide = words.float32(x)
    below = words.expm1(words.clip(wide, None, eps)) - wide
    curve = words.where(wide > 0, positive * wide * wide, negative * below)
    return words.cast_as(curve + beta * wide, x)


def softcap(words: Any, x: Array, cap: float) -> Array:
    return words.tanh(x / cap) * cap


def choose_experts(words: Any, scores: Array, spec: ExpertsSpec) -> tuple[Array, Array]:
    """The `used` experts of largest score, integers [T, used], and their shares, float32."""
    scores = words.float32(scores)
    largest, chosen = words.top(scores, spec.used)
    if spec.scoring == "sigmoid":
        return chosen, words.sigmoid(largest)
    if spec.normalises:
        return chosen, words.softmax(largest)
    return chosen, words.take(words.softmax(scores), chosen)
