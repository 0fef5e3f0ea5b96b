"""The layers of a Llama: each holds its weights and calls ops.

The stream x is [B, T, E], or [B, E] in a decode step, of the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_llama.core.models.spec import ExpertsSpec, LayerSpec

from . import ops
from .cache import View


@dataclass(frozen=True)
class Embedding:
    """weight: [V, E]."""

    weight: ops.Matrix

    def __call__(self, tokens: mx.array) -> mx.array:
        return ops.embed(tokens, self.weight)


@dataclass(frozen=True)
class Linear:
    """weight: [N, K], or a tuple of its blocks of rows; bias: [N] or None; adapters: that some rows add, or None."""

    weight: ops.Matrix | tuple[ops.Matrix, ...]
    bias: mx.array | None = None
    adapters: ops.Adapters | None = None

    def __call__(self, x: mx.array, view: View) -> mx.array:
        product = ops.linear(x, self.weight, self.bias)
        return product if self.adapters is None else ops.adapt(product, x, self.adapters, view)


@dataclass(frozen=True)
class RMSNorm:
    """weight: [E]."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array, delta: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """(x + delta, its norm); delta None for zero."""
        return ops.add_rms_norm(x, delta, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the cache. qkv: the three projections as one matrix [(H + 2 G) D, E]; out: [E, H D];
    query_norm, key_norm: [D] or None."""

    spec: LayerSpec
    qkv: Linear
    out: Linear
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None

    def __call__(self, x: mx.array, view: View, probe=None, last_only: bool = False) -> mx.array:
        """x: [B, T, E] or [B, E]. last_only: the output of the last position alone; all keys and values are stored."""
        spec, i = self.spec, self.spec.index
        heads = self.qkv(x, view)
        if self.query_norm is not None:
            heads = ops.norm_heads(heads, self.query_norm.weight, self.key_norm.weight, spec)
        if probe:
            for name, part in zip(("query", "key", "value"), ops.split_heads(heads, spec)):
                probe(f"{i}.{name}", part)
        query = ops.rope_and_store(heads, view, spec)
        if probe:
            probe(f"{i}.query_rope", query)
            probe(f"{i}.key_rope", view.new_keys(i))
        if last_only:
            query = ops.last_position(query)
        return self.out(ops.attend(query, view, spec), view)


@dataclass(frozen=True)
class Unnormed:
    """Stands where a layer has no norm."""

    def __call__(self, x: mx.array, delta: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """(x + delta, the same); delta None for zero."""
        total = ops.add(x, delta)
        return total, total


@dataclass(frozen=True)
class MLP:
    """A gated MLP (Shazeer 2020). gate_up: both projections as one matrix [2 F, E]; down: [E, F]."""

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    def __call__(self, x: mx.array, view: View) -> mx.array:
        gate_up = self.gate_up
        if gate_up.adapters is None:
            gated = ops.gated_linear(x, gate_up.weight, gate_up.bias, self.activation)
        else:
            gated = ops.gate(gate_up(x, view), self.activation)
        return self.down(gated, view)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of an MLP. router: [experts, E]; gate, up: [F, E] of each expert; down: [E, F]."""

    spec: ExpertsSpec
    router: Linear
    gate: ops.Stack
    up: ops.Stack
    down: ops.Stack
    activation: str = "silu"

    def __call__(self, x: mx.array, view: View) -> mx.array:
        return ops.experts(x, self.router(x, view), self.gate, self.up, self.down, self.spec, self.activation)


@dataclass(frozen=True)
class Block:
    """One layer: attention and MLP, each with norms before or after it, added to the stream."""

    attention_norm: RMSNorm | Unnormed
    attention: Attention
    ffn_norm: RMSNorm | Unnormed
    mlp: MLP | Experts
    post_attention_norm: RMSNorm | None = None
    post_ffn_norm: RMSNorm | None = None

    def __call__(self, x: mx.array, delta: mx.array | None, view: View, probe=None,
                 last_only: bool = False) -> tuple[mx.array, mx.array]:
        """x: the stream [B, T, E]; delta: its pending addition, None for zero. Returns both anew: the next norm adds them."""
        i = self.attention.spec.index
        x, normed = self.attention_norm(x, delta)
        if probe:
            if delta is not None:
                probe(f"{i - 1}.block", x)
            probe(f"{i}.attention_norm", normed)
        attended = self.attention(normed, view, probe, last_only)
        if probe:
            probe(f"{i}.attention", attended)
        if last_only:
            x = ops.last_position(x)
        x, ffn_normed = self.ffn_norm(x, self._adjust(attended, self.post_attention_norm))
        if probe:
            probe(f"{i}.ffn_norm", ffn_normed)
        ffn = self.mlp(ffn_normed, view)
        if probe:
            probe(f"{i}.ffn", ffn)
        return x, self._adjust(ffn, self.post_ffn_norm)

    def _adjust(self, delta: mx.array, norm: RMSNorm | None) -> mx.array:
        """`delta` as the stream takes it: behind its own norm, times the layer's multiplier."""
        if norm is not None:
            delta = ops.rms_norm(delta, norm.weight, norm.eps)
        factor = self.attention.spec.residual_multiplier
        return ops.scale(delta, factor) if factor != 1 else delta
