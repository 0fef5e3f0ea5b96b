"""LayerSpec: one layer as data. weights.py and layers.py of each backend read it, so an architecture is data too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its sizes, the names of its tensors, and its differences from Llama's layer.

    index: number of the layer, from 0. heads, key_value_heads, head_dim: H, G and D of grouped-query attention.
    eps: of the norms. Names are modules of the checkpoint, without ".weight" and ".bias"; those of one tuple are
    multiplied with the same input, so a backend may make them one matrix.
    query_norm, key_norm: RMS norms over each head before rotation (Qwen3), or None. rotates: False for a layer without
    rotary embedding. window: positions that a token sees, itself included; None for all before it.
    """

    index: int
    heads: int
    key_value_heads: int
    head_dim: int
    eps: float
    attention_norm: str
    qkv: tuple[str, ...]
    out: str
    ffn_norm: str
    gate_up: tuple[str, ...]
    down: str
    query_norm: str | None = None
    key_norm: str | None = None
    rotates: bool = True
    window: int | None = None

    @property
    def scale(self) -> float:
        """Factor on query times key."""
        return self.head_dim**-0.5
