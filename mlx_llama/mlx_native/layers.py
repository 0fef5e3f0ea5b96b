"""The layers of a Llama: each holds its weights and calls ops."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_llama.core.models.config import LlamaConfig

from . import ops
from .cache import Cache
from .quantized import QuantizedMatrix


@dataclass(frozen=True)
class Embedding:
    """weight: [V, E]."""

    weight: mx.array | QuantizedMatrix

    def __call__(self, tokens: mx.array) -> mx.array:
        return ops.embed(self.weight, tokens)


@dataclass(frozen=True)
class Linear:
    """weight: [N, K], or a tuple of its blocks of rows; bias: [N] or None."""

    weight: mx.array | QuantizedMatrix | tuple[mx.array | QuantizedMatrix, ...]
    bias: mx.array | None = None

    def __post_init__(self):
        # Turned over once: a view, and one operation less in every step. Whoever builds the model evaluates it.
        object.__setattr__(self, "_columns", self.weight.T if isinstance(self.weight, mx.array) else None)

    def __call__(self, x: mx.array) -> mx.array:
        if self._columns is not None:
            return ops._columns_product(x, self._columns, self.bias)
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """weight: [E]."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the cache. qkv: the three projections as one matrix [(H + 2 G) D, E]; out: [E, H D]."""

    config: LlamaConfig
    layer: int
    qkv: Linear
    out: Linear

    def __call__(self, x: mx.array, cache: Cache, probe=None, last: bool = False) -> mx.array:
        """x: [B, T, E], or [1, E] for one token of one sequence, which takes fewer operations. last: of the last position
        only; all keys and values are stored."""
        B, T = x.shape[:-1] if x.ndim == 3 else (1, 1)
        H, G, D = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        # [B, H + 2 G, T, D]: where there is one token its heads already lie so
        heads = (self.qkv(x).reshape(B, H + 2 * G, 1, D) if T == 1
                 else self.qkv(x).reshape(B, T, H + 2 * G, D).transpose(0, 2, 1, 3))
        value = heads[:, H + G:]
        turned = ops.rope(heads[:, :H + G], cache.rope)
        query, key = turned[:, :H], turned[:, H:]
        if probe:
            probe(f"{self.layer}.query", heads[:, :H])
            probe(f"{self.layer}.key", heads[:, H:H + G])
            probe(f"{self.layer}.value", value)
            probe(f"{self.layer}.query_rope", query)
            probe(f"{self.layer}.key_rope", key)
        keys, values = cache.append(self.layer, key, value)
        mask = cache.mask
        if last:
            query, mask, T = query[:, :, -1:], mask[-1:] if isinstance(mask, mx.array) else None, 1
        mixed = ops.attention(query, keys, values, D**-0.5, mask)
        mixed = mixed if T == 1 else mixed.transpose(0, 2, 1, 3)
        return self.out(mixed.reshape(*x.shape[:-2], T, H * D))


@dataclass(frozen=True)
class MLP:
    """SwiGLU. gate_up: both projections as one matrix [2 F, E]; down: [E, F]."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(ops.swiglu(self.gate_up(x)))


@dataclass(frozen=True)
class Block:
    """One layer: attention and MLP, each behind a norm and added to the stream."""

    attention_norm: RMSNorm
    attention: Attention
    ffn_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: mx.array, cache: Cache, probe=None, last: bool = False) -> mx.array:
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
