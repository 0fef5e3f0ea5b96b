"""The vocabulary of the forward (llama.py), a backend's `ops`: one word per operation.

A vocabulary may have several implementations of one word: plain arrays, kernels, symbols that are
lowered to a program. All give the same numbers up to rounding. Shapes: B sequences, T new positions
of each, E the stream's width, H query heads and G key heads of D numbers, F the MLP's width, V
tokens. An implementation may leave out the axis T of a single position. Arrays are float, in the
model's dtype; norms, softmax and the sums of products accumulate in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .models.parts import (
    Attention,
    Experts,
    GatedDelta,
    LayerInputs,
    PerLayerInput,
    Router,
    ShortConv,
)

Array = Any  # the backend's own
Probe = Callable[[str, Array], None]
Matrix = Any  # [N, K], at its stored width; a tuple of matrices stands for their rows concatenated
Stack = Any  # matrices [N, K] of all experts, by number
Biases = tuple[Array, Array, Array]  # all experts' gates, ups and downs, [experts, N]


class ExpertStacks(NamedTuple):
    """The gated MLPs of all experts. gate, up: [F, E] of each; down: [E, F]."""

    gate: Stack
    up: Stack
    down: Stack
    spec: Experts
    biases: Biases | tuple[None, None, None] = (None, None, None)
    router_bias: Array | None = None  # float32 [experts], as spec.router.bias
    expert_scale: Array | None = None  # float32 [experts], as spec.router.expert_scale


class DeltaWeights(NamedTuple):
    """Weights of `gated_delta`."""

    conv: Array  # [C, W]
    rate: Array  # float32 [Hv]: -exp of the stored numbers, the decays per unit of time
    bias: Array  # float32 [Hv], of the units of time
    norm: Array  # [Dv]


# numbers of the gate "clamped_swiglu"
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
LEAST_SUM = 1e-20  # added to the sum of a token's sigmoids that divides them, as in DeepSeek-V3


class View:
    """One forward's view of a cache; base of the backends' views."""

    count: int  # new positions of each sequence
    listener: Probe | None = None  # called with each probe
    new_keys: Callable[[Attention], Array]  # keys of the new positions as stored, [B, G, T, D]
    # the states of the rows before the new positions, float32 [B, *shape] each, by slot
    recurrent: Callable[[int], tuple[Array, ...]]
    keep: Callable[[int, tuple[Array, ...]], None]  # those after them

    def probe(self, name: str, x: Array, layer: int | None = None) -> None:
        """Show x to the listener as `name`, in a layer as `layer.name`."""
        if self.listener is not None:
            self.listener(name if layer is None else f"{layer}.{name}", x)

    def probe_sum(self, name: str, x: Array, delta: Array, layer: int, ops: Ops) -> None:
        """Show x + delta."""
        if self.listener is not None:
            self.probe(name, ops.add(x, delta), layer)

    def probe_heads(self, heads: Array, spec: Attention, ops: Ops) -> None:
        """Show query, key and value [B, H or G, T, D] of heads as split_heads takes them."""
        if self.listener is not None:
            names = ("query", "key", "value")[: 3 if spec.new_heads else 1]
            for name, part in zip(names, ops.split_heads(heads, spec)):
                self.probe(name, part, spec.index)

    def probe_rotated(self, query: Array, spec: Attention) -> None:
        """Show the rotated query and the keys as they were stored."""
        if self.listener is not None:
            self.probe("query_rope", query, spec.index)
            if spec.new_heads:
                self.probe("key_rope", self.new_keys(spec), spec.index)


class Ops(Protocol):
    """One function per word, as in a module."""

    def embed(self, tokens: Array, weight: Matrix) -> Array:
        """Rows of the embedding. tokens: int32 [B, T]; weight: [V, E]; returns [B, T, E]."""

    def linear(self, x: Array, weight: Matrix, bias: Array | None = None) -> Array:
        """x @ weight.T + bias. x: [..., K]; weight: [N, K], never widened as a whole; bias: [N];
        returns [..., N].
        """

    def gated_linear(
        self, x: Array, weight: Matrix, bias: Array | None = None, activation: str = "silu"
    ) -> Array:
        """gate(linear(x, weight, bias), activation). weight: [2 F, K]; returns [..., F]."""

    def gate(self, gate_up: Array, activation: str) -> Array:
        """activation(gate) * up (Shazeer 2020). gate_up: [..., 2 F], gate first; returns [..., F].

        activation: "silu"; "gelu_tanh" (Hendrycks and Gimpel 2016); or "clamped_swiglu" (gpt-oss):
        gate sigmoid(1.702 gate) (up + 1), after the gate is limited to 7 and up to 7 either way.
        """

    def xielu(self, x: Array, positive: float, negative: float, beta: float, eps: float) -> Array:
        """xIELU (Huang and Schlag 2024): positive x**2 + beta x above 0, else negative
        (exp(min(x, eps)) - 1 - x) + beta x. x: [..., F]; returns the same shape.
        """

    def experts(self, x: Array, scores: Array, stacks: ExpertStacks) -> Array:
        """Outputs of each token's experts, gated MLPs, summed by shares (Shazeer et al. 2017).

        x: [B, T, E]; scores: of the router, [B, T, experts]. parts.Router says how they choose
        experts and become shares. These multiply the outputs or, if the spec says so, the inputs.
        Returns [B, T, E].
        """

    def adapt(self, product: Array, x: Array, adapters: Any, view: View) -> Array:
        """Add (x @ a.T) @ b.T to each row's product, by the row's adapter (LoRA, Hu et al. 2021).

        product: [B, T, N], which may change; x: [B, T, K]; view: has each row's adapter's number.
        """

    def add_rms_norm(
        self, x: Array, delta: Array | None, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        """(x + delta, its RMS norm times weight). x, delta (or None): [..., E]; weight: [E]."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x**2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""

    def add(self, x: Array, delta: Array | None) -> Array:
        """x + delta, of one shape; delta None for zero."""

    def scale(self, x: Array, factor: float) -> Array:
        """x * factor. x: any shape."""

    def softcap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap), which keeps x within cap (Gemma 2). x: any shape."""

    def norm_heads(
        self, heads: Array, query_weight: Array, key_weight: Array | None, spec: Attention
    ) -> Array:
        """RMS norms of queries and keys of heads [B, T, (H + 2 G) D]; returns the same shape.

        Weights: [D] for a norm of each head (Qwen3), [H D] and [G D] for one of all heads (OLMo 2);
        None without new keys. `norms_values`: of each value head, too, without weights.
        """

    def scale_heads(self, query: Array, weight: Array, spec: Attention) -> Array:
        """Multiply each head by weights [D]. query: [B, H, T, D], which may change."""

    def split_heads(self, heads: Array, spec: Attention) -> tuple[Array, Array, Array]:
        """Query [B, H, T, D], key and value [B, G, T, D] of heads [B, T, (H + 2 G) D]; G is the
        number of new heads, 0 in a layer that reads another's keys.
        """

    def rope_and_store(self, heads: Array, view: View, spec: Attention) -> Array:
        """Rotate queries and keys (Su et al. 2021, Hugging Face's layout); store keys and values.

        heads: [B, T, (H + 2 G) D], as of split_heads, without new heads also of the last position
        alone; returns the queries [B, H, T, D].
        """

    def attend(
        self, query: Array, view: View, spec: Attention, sinks: Array | None = None
    ) -> Array:
        """Attention to the view; a key head serves H / G query heads (Ainslie et al. 2023).

        query: [B, H, T, D], of all new positions or of the last one; sinks: [H], a logit per head
        that adds exp(sink) to the softmax's denominator, or None; returns [B, T, H D].
        """

    def short_conv(
        self, x: Array, view: View, spec: ShortConv, weight: Array, bias: Array | None = None
    ) -> Array:
        """c * conv(b * x), where conv sums each channel's last W inputs times its weights (LFM2).

        x: [B, T, 3 E], of b, c and x; weight: [E, W], the new position's last; bias: [E]. The last
        W - 1 inputs of a row are its state. Returns [B, T, E].
        """

    def gated_delta(self, x: Array, view: View, spec: GatedDelta, weights: DeltaWeights) -> Array:
        """The gated delta rule (Yang et al. 2024), as transformers' Qwen3NextGatedDeltaNet.

        x: [B, T, C + Hv Dv + 2 Hv], of queries, keys and values before their convolution, the
        gate, the strengths and the decays. Each value head has a matrix S [Dk, Dv], its state. For
        each position, with unit vectors q / sqrt(Dk) and k: S *= exp(rate softplus(decay + bias)),
        S += k (sigmoid(strength) (v - k S)), and q S is the output, normed, times silu(gate). All
        in float32, position by position, so that bits do not depend on T. Returns [B, T, Hv Dv].
        """

    def gate_output(self, x: Array, score: Array) -> Array:
        """x * sigmoid(score). x: [B, T, n]; score: the same shape, or [B, T, 1]."""

    def layer_inputs(
        self, embedded: Array, projected: Array, weight: Array, spec: LayerInputs
    ) -> Array:
        """(norm(projected / sqrt(E)) + embedded * sqrt(P)) / sqrt(2), with a norm of each layer's P
        numbers (Gemma 3n). embedded, projected: [B, T, layers P]; weight: [P].
        """

    def gate_input(self, gate: Array, inputs: Array, spec: PerLayerInput) -> Array:
        """activation(gate) * the layer's inputs. gate: [B, T, P], or of the last position; inputs:
        [B, T, layers P]; returns gate's shape.
        """

    def last_position(self, x: Array) -> Array:
        """The last position alone: [B, 1, E] of x [B, T, E], or [B, H, 1, D] of [B, H, T, D]."""


class Words(Protocol):
    """Functions of a backend's arrays.py that the plain words below need. A number takes the other
    operand's dtype.
    """

    float32: Callable[[Array], Array]
    cast_as: Callable[[Array, Array], Array]  # (x, like): x in the dtype of `like`
    where: Callable[..., Array]  # (condition, x, y)
    clip: Callable[..., Array]  # (x, low, high); None: no bound
    smallest: Callable[[Array], Array]  # of the last axis, which is kept
    tanh: Callable[[Array], Array]
    expm1: Callable[[Array], Array]
    halves: Callable[[Array], tuple[Array, Array]]  # halves of the last axis
    swish: Callable[[Array, Array], Array]  # (x, z): x sigmoid(z)
    exp: Callable[[Array], Array]
    softplus: Callable[[Array], Array]  # log(1 + exp(x))
    gelu: Callable[[Array], Array]  # by the tanh approximation
    join: Callable[[Sequence[Array]], Array]  # along the positions of [B, T, n]
    # over the last axis of [T, n]:
    sigmoid: Callable[[Array], Array]
    softmax: Callable[[Array], Array]
    top: Callable[[Array, int], tuple[Array, Array]]  # the largest numbers and their places
    take: Callable[[Array, Array], Array]  # x[i, places[i, j]]


# Plain words, written once over the words of arrays or over others of their vocabulary


def add(x: Array, delta: Array | None) -> Array:
    return x if delta is None else x + delta


def scale(x: Array, factor: float) -> Array:
    return x * factor


def last_position(x: Array) -> Array:
    return x[..., -1:, :]


def scale_heads(query: Array, weight: Array, spec: Attention) -> Array:
    return query * weight


def split_heads(heads: Array, spec: Attention) -> tuple[Array, Array, Array]:
    H, G = spec.heads, spec.new_heads
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


def layer_inputs(
    ops: Any, embedded: Array, projected: Array, weight: Array, spec: LayerInputs
) -> Array:
    """`ops`: the vocabulary of `rms_norm`."""
    layers = (projected * spec.hidden**-0.5).reshape((*projected.shape[:-1], -1, spec.size))
    normed = ops.rms_norm(layers, weight, spec.eps).reshape(projected.shape)
    return (normed + embedded * spec.size**0.5) * 2**-0.5


def gate_input(words: Any, gate: Array, inputs: Array, spec: PerLayerInput) -> Array:
    start = spec.index * spec.size
    ours = inputs[..., -gate.shape[-2] :, start : start + spec.size]
    return (words.swish(gate, gate) if spec.activation == "silu" else words.gelu(gate)) * ours


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


def gate_output(words: Any, x: Array, score: Array) -> Array:
    return words.swish(x, score)


def convolve(words: Any, x: Array, history: Array, weight: Array) -> tuple[Array, Array]:
    """(the sums of each channel's last W inputs times its weights, the last W - 1 inputs).

    x: float32 [B, T, C]; history: [B, W - 1, C], the inputs before; weight: [C, W]. Sums run in the
    same order whatever B and T are.
    """
    inputs, count = words.join([history, x]), x.shape[1]
    terms = [inputs[:, i : i + count] * weight[:, i] for i in range(weight.shape[1])]
    return sum(terms[1:], terms[0]), inputs[:, count:]


def short_conv(
    words: Any, x: Array, view: View, spec: ShortConv, weight: Array, bias: Array | None = None
) -> Array:
    before, after, inputs = (x[..., i * spec.size : (i + 1) * spec.size] for i in range(3))
    (history,) = view.recurrent(spec.slot)
    gated = words.float32(before * inputs)
    mixed, history = convolve(words, gated, history, words.float32(weight))
    view.keep(spec.slot, (history,))
    mixed = words.cast_as(mixed if bias is None else mixed + words.float32(bias), x)
    return after * mixed


def gated_delta(words: Any, x: Array, view: View, spec: GatedDelta, weights: DeltaWeights) -> Array:
    batch, count, ends = x.shape[0], x.shape[1], [0]
    groups, shared = spec.key_heads, spec.value_heads // spec.key_heads
    heads, key_heads = (
        ((shared, groups), (1, groups)) if spec.tiled else ((groups, shared), (groups, 1))
    )
    keys, values = groups * spec.key_size, spec.value_heads * spec.value_size
    for size in (keys, keys, values, values, spec.value_heads, spec.value_heads):
        ends.append(ends[-1] + size)
    wide = words.float32(x)
    history, state = view.recurrent(spec.slot)
    channels = wide[..., : ends[3]]
    mixed, history = convolve(words, channels, history, words.float32(weights.conv))
    mixed = words.swish(mixed, mixed)
    spans = list(itertools.pairwise(ends))
    query, key, value = (mixed[..., start:end] for start, end in spans[:3])
    gate, strength, decay = (wide[..., start:end] for start, end in spans[3:])
    query, key = (
        unit * ((unit * unit).sum(-1)[..., None] + 1e-6) ** -0.5
        for unit in (part.reshape(batch, count, *key_heads, -1) for part in (query, key))
    )
    query = query * spec.key_size**-0.5
    value = value.reshape(batch, count, *heads, -1)
    decay = words.exp(weights.rate * words.softplus(decay + weights.bias))
    decay, strength = (
        part.reshape(batch, count, *heads, 1) for part in (decay, words.sigmoid(strength))
    )
    state, outputs = state.reshape(batch, *heads, spec.key_size, -1), []
    for t in range(count):
        k, q = key[:, t, ..., None], query[:, t, ..., None]
        state = state * decay[:, t, ..., None]
        delta = (value[:, t] - (state * k).sum(-2)) * strength[:, t]
        state = state + k * delta[..., None, :]
        outputs.append((state * q).sum(-2)[:, None])
    view.keep(spec.slot, (history, state.reshape(batch, spec.value_heads, spec.key_size, -1)))
    mixed = words.join(outputs)
    mixed = mixed * ((mixed * mixed).mean(-1)[..., None] + spec.eps) ** -0.5
    mixed = (mixed * words.float32(weights.norm)).reshape(batch, count, -1)
    return words.cast_as(mixed * words.swish(gate, gate), x)


def choose_experts(
    words: Any,
    scores: Array,
    router: Router,
    bias: Array | None = None,
    expert_scale: Array | None = None,
) -> tuple[Array, Array]:
    """The chosen experts, integers [T, used], and their shares, float32. scores: [T, experts]."""
    scores = words.float32(scores)
    if bias is None and router.groups == 1:
        largest, chosen = words.top(scores, router.used)
    else:
        chosen = words.top(_rank_experts(words, scores, router, bias), router.used)[1]
        largest = words.take(scores, chosen)
    if router.scoring == "sigmoid":
        shares = words.sigmoid(largest)
        if router.normalises:  # a sum of 0 gives shares of 0
            shares = shares / (shares.sum(axis=-1, keepdims=True) + LEAST_SUM)
    elif router.normalises:
        shares = words.softmax(largest)
    else:
        shares = words.take(words.softmax(scores), chosen)
    shares = shares if expert_scale is None else shares * expert_scale[chosen]
    return chosen, shares if router.scale == 1 else shares * router.scale


def _rank_experts(words: Any, scores: Array, router: Router, bias: Array | None) -> Array:
    """Sigmoids of the scores plus the bias, minus infinity outside the best groups."""
    ranks = words.sigmoid(scores)
    ranks = ranks if bias is None else ranks + bias
    if router.groups == 1:
        return ranks
    members = ranks.reshape(len(ranks) * router.groups, -1)
    sums = words.top(members, 2)[0].sum(axis=-1).reshape(len(ranks), -1)
    is_kept = sums >= words.smallest(words.top(sums, router.used_groups)[0])
    return words.where(is_kept.reshape(-1, 1), members, -math.inf).reshape(ranks.shape)
