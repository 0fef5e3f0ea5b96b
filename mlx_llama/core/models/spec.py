"""LayerSpec: one layer as data, read by weights.py and layers.py of each backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its sizes, the names of its tensors, and its differences from Llama's layer.

    index: number of the layer, from 0. heads, key_value_heads, head_dim: H, G and D of grouped-query attention.
    eps: of the norms. Names are modules of the checkpoint, without ".weight" and ".bias". Modules of one tuple have the
    same input, so a backend may concatenate their matrices.
    attention_norm, ffn_norm: before attention and MLP; post_attention_norm, post_ffn_norm: of their outputs, before they
    are added to the stream (EXAONE 4). None for no norm.
    query_norm, key_norm: RMS norms over each head before rotation (Qwen3), or None. rotates: False for a layer without
    rotary embedding (SmolLM3). window: positions that a token sees, itself included; None for all before it.
    attention_multiplier: on query times key, None for 1 / sqrt(D); residual_multiplier: on what is added to the stream
    (Granite). activation: of the gate, "silu" or "gelu_tanh".
    """

    index: int
    heads: int
    key_value_heads: int
    head_dim: int
    eps: float
    attention_norm: str | None
    qkv: tuple[str, ...]
    out: str
    ffn_norm: str | None
    gate_up: tuple[str, ...]
    down: str
    query_norm: str | None = None
    key_norm: str | None = None
    rotates: bool = True
    window: int | None = None
    post_attention_norm: str | None = None
    post_ffn_norm: str | None = None
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    activation: str = "silu"

    @property
    def scale(self) -> float:
        """Factor on query times key."""
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier
