"""LayerSpec: one layer as data, read by core.llama and each backend's weights.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in a layer: gated MLPs, of which a router chooses some for each token (Shazeer et al. 2017).

    router: module of the scores, [experts, E]. gate, up, down: each expert's modules, by number. stacks: modules of all
    gates, ups and downs together, [experts, N, K], in files that store them so. used: experts of a token. normalises: divide
    the chosen experts' shares by their sum.
    """

    router: str
    gate: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]
    stacks: tuple[str, str, str]
    used: int
    normalises: bool

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.gate)


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
    (Granite). activation: of the gate, "silu" or "gelu_tanh". rotary_dim: leading dimensions of a head that are rotated,
    None for all (Phi-4). rope: number of its table of angles (Gemma 3's sliding layers have their own); query_rope: of the queries', None for `rope` (Ministral 3). softcap: of the
    scores, softcap * tanh(score / softcap), or None (Gemma 2). experts: in place of the MLP, whose names are then empty.
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
    rotary_dim: int | None = None
    rope: int = 0
    softcap: float | None = None
    query_rope: int | None = None
    experts: ExpertsSpec | None = None

    @property
    def scale(self) -> float:
        """Factor on query times key."""
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    @property
    def angles(self) -> slice:
        """Columns of the view's tables that the layer rotates by."""
        return self._columns(self.rope)

    @property
    def query_angles(self) -> slice:
        """As `angles`, for the queries."""
        return self._columns(self.rope if self.query_rope is None else self.query_rope)

    def _columns(self, table: int) -> slice:
        half = (self.rotary_dim or self.head_dim) // 2
        return slice(table * half, (table + 1) * half)
