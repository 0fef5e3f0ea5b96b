"""The layers of a Llama: each holds its weights and calls ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_llama.core.models.config import LlamaConfig

from . import ops
from .cache import Cache


@dataclass(frozen=True)
class Embedding:
    """weight: [V, E]."""

    weight: ops.Matrix

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        return ops.embed(self.weight, tokens)


@dataclass(frozen=True)
class Linear:
    """weight: [N, K], or parts of it below each other; bias: [N] or None."""

    weight: ops.Matrix | tuple[ops.Matrix, ...]
    bias: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """weight: [E]."""

    weight: np.ndarray
    eps: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the cache. qkv: the three projections as one matrix [(H + 2 G) D, E]; out: [E, H D]."""

    config: LlamaConfig
    layer: int
    qkv: Linear
    out: Linear

    def __call__(self, x: np.ndarray, cache: Cache, probe=None, last: bool = False) -> np.ndarray:
        """x: [B, T, E]. last: of the last position only; all keys and values are stored."""
        B, T, _ = x.shape
        H, G, D = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        heads = self.qkv(x).reshape(B, T, H + 2 * G, D).transpose(0, 2, 1, 3)  # [B, H + 2 G, T, D]
        query, key, value = heads[:, :H], heads[:, H:H + G], heads[:, H + G:]
        if probe:
            probe(f"{self.layer}.query", query)
            probe(f"{self.layer}.key", key)
            probe(f"{self.layer}.value", value)
        query = ops.rope(query, cache.rope)
        key = ops.rope(key, cache.rope)
        if probe:
            probe(f"{self.layer}.query_rope", query)
            probe(f"{self.layer}.key_rope", key)
        keys, values = cache.append(self.layer, key, value)
        mask = cache.mask
        if last:
            query, mask, T = query[:, :, -1:], mask[-1:] if isinstance(mask, np.ndarray) else None, 1
        mixed = ops.attention(query, keys, values, D**-0.5, mask)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(B, T, H * D))


@dataclass(frozen=True)
class MLP:
    """SwiGLU. gate_up: both projections as one matrix [2 F, E]; down: [E, F]."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.down(ops.swiglu(self.gate_up(x)))


@dataclass(frozen=True)
class Block:
    """One layer: attention and MLP, each behind a norm and added to the stream."""

    attention_norm: RMSNorm
    attention: Attention
    ffn_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: np.ndarray, cache: Cache, probe=None, last: bool = False) -> np.ndarray:
        i = self.attention.layer
        normed = self.attention_norm(x)
        attended = self.attention(normed, cache, probe, last)
        x = (x[:, -1:] if last else x) + attended
        ffn_normed = self.ffn_norm(x)
        ffn = self.mlp(ffn_normed)
        x = x + ffn
        if probe:
            probe(f"{i}.attention_norm", normed)
            probe(f"{i}.attention", attended)
            probe(f"{i}.ffn_norm", ffn_normed)
            probe(f"{i}.ffn", ffn)
            probe(f"{i}.block", x)
        return x
