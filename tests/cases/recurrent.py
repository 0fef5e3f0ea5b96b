"""Mixers with a recurrent state, of any sizes."""

from __future__ import annotations

from mlx_llama.core.models.parts import GatedDelta, ShortConv


def delta(
    groups: int, heads: int, key: int, value: int, width: int = 4, hidden: int = 36
) -> GatedDelta:
    """Of layer 0. groups: of keys; heads: of values; key, value: their sizes."""
    name = "model.layers.0.linear_attn."
    return GatedDelta(
        index=0,
        slot=0,
        into=tuple(f"{name}in_{part}" for part in ("qkv", "z", "b", "a")),
        conv=f"{name}conv",
        decay=f"{name}A_log",
        decay_bias=f"{name}dt_bias",
        norm=f"{name}norm",
        out=f"{name}out",
        key_heads=groups,
        value_heads=heads,
        key_size=key,
        value_size=value,
        hidden=hidden,
        width=width,
        eps=1e-6,
    )


def conv(size: int, width: int = 3, has_bias: bool = False) -> ShortConv:
    """Of layer 1."""
    name = "model.layers.1.conv."
    parts = (f"{name}in_proj", f"{name}conv", f"{name}out_proj")
    return ShortConv(1, 0, *parts, size, width, has_bias)
