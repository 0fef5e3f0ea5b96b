"""The layers of a Llama: each holds its weights and calls ops.

x and every other array is [B, T, ...] in the model's dtype; a captured decoded token is the same code over a StateView.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlx_llama.core.models.spec import LayerSpec

from . import ops
from .cache import View
from .kernels.state import StateView


@dataclass(frozen=True)
class Embedding:
    """weight: [V, E]."""

    weight: ops.Matrix

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return ops.embed(tokens, self.weight)


@dataclass(frozen=True)
class Linear:
    """weight: [N, K], or a tuple of its blocks of rows; bias: [N] or None."""

    weight: ops.Matrix | tuple[ops.Matrix, ...]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """weight: [E]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
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

    def __call__(self, x: torch.Tensor, view: View | StateView, probe=None, last_only: bool = False) -> torch.Tensor:
        """x: [B, T, E]. last_only: the output of the last position alone; all keys and values are stored."""
        spec, i = self.spec, self.spec.index
        heads = self.qkv(x)
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
        return self.out(ops.attend(query, view, spec))


@dataclass(frozen=True)
class MLP:
    """SwiGLU. gate_up: both projections as one matrix [2 F, E]; down: [E, F]."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(ops.gated_linear(x, self.gate_up.weight, self.gate_up.bias))


@dataclass(frozen=True)
class Block:
    """One layer: attention and MLP, each behind a norm and added to the stream."""

    attention_norm: RMSNorm
    attention: Attention
    ffn_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, view: View | StateView, probe=None,
                 last_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """x: the stream [B, T, E]; delta: what is still to be added to it. Returns both anew: the next norm adds them."""
        i = self.attention.spec.index
        x, normed = self.attention_norm(x, delta)
        if probe and delta is not None:
            probe(f"{i - 1}.block", x)
        attended = self.attention(normed, view, probe, last_only)
        if last_only:
            x = ops.last_position(x)
        x, ffn_normed = self.ffn_norm(x, attended)
        ffn = self.mlp(ffn_normed)
        if probe:
            probe(f"{i}.attention_norm", normed)
            probe(f"{i}.attention", attended)
            probe(f"{i}.ffn_norm", ffn_normed)
            probe(f"{i}.ffn", ffn)
        return x, ffn
