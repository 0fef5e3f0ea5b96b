"""LayerSpec: one layer as data, read by core.llama and each backend's weights.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# LlamaConfig.norm_placement: (norms before attention and MLP, norms after them), with transformers'
# names of modules: Llama; OLMo 2 and EXAONE 4; Gemma 2; GLM-4.
NORM_NAMES: dict[str, tuple[tuple[str, str] | None, tuple[str, str] | None]] = {
    "before": (("input_layernorm", "post_attention_layernorm"), None),
    "after": (None, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "both, as in GLM": (
        ("input_layernorm", "post_attention_layernorm"),
        ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
}
NUMBERS_OF_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


@dataclass(frozen=True)
class Window:
    """Positions that a token sees: the last `size`, itself included (Mistral 7B, arXiv 2310.06825),
    or those since the last multiple of `size` (chunked attention, Llama 4).
    """

    size: int
    is_chunk: bool = False

    def first(self, position: Any) -> Any:
        """The first visible position, at most 0 for all. position: a number or array."""
        return position // self.size * self.size if self.is_chunk else position + 1 - self.size


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in a layer: gated MLPs, of which a router chooses some for each token
    (Shazeer et al. 2017).
    """

    router: str  # module of the scores, [experts, E]
    gate: tuple[str, ...]  # each expert's module, by number
    up: tuple[str, ...]
    down: tuple[str, ...]
    # modules of all gates, ups and downs, [experts, N, K], in files that store them so
    stacks: tuple[str, str, str]
    used: int  # experts of a token
    normalises: bool  # divide the chosen experts' shares by their sum
    # A share is the "softmax" of the scores, or the score's "sigmoid" (Llama 4).
    scoring: str = "softmax"
    scales_input: bool = False  # shares multiply the experts' inputs, not their outputs
    # modules gate, up and down of an MLP for all tokens, which is added
    shared: tuple[str, str, str] | None = None
    has_biases: bool = False  # of each expert's three matrices

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.gate)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its sizes, the names of its tensors, and its differences from Llama's layer.

    Names are modules of the checkpoint, without ".weight" and ".bias". Modules of one tuple have
    the same input, so a backend may concatenate their matrices.
    """

    index: int  # number of the layer, from 0
    heads: int  # H of grouped-query attention
    key_value_heads: int  # G
    head_dim: int  # D
    eps: float  # of the norms
    attention_norm: str | None  # before attention, None for no norm
    qkv: tuple[str, ...]
    out: str
    ffn_norm: str | None  # before the MLP
    # empty for a mixture of experts; of an MLP without a gate, "up" alone
    gate_up: tuple[str, ...]
    down: str  # likewise
    # RMS norm of each head (Qwen3) or of all (OLMo 2)
    query_norm: str | None = None
    key_norm: str | None = None
    norms_heads: bool = False  # likewise of each head, without weights (Llama 4)
    norms_rotated: bool = False  # these norms come after the rotation, not before it (Hunyuan)
    rotates: bool = True  # False for a layer without rotary embedding (SmolLM3)
    window: Window | None = None  # None: a token sees all before it
    # of attention's output, before it is added to the stream (EXAONE 4)
    post_attention_norm: str | None = None
    post_ffn_norm: str | None = None  # of the MLP's output
    attention_multiplier: float | None = None  # on query times key, None for 1 / sqrt(D)
    residual_multiplier: float = 1.0  # on what is added to the stream (Granite)
    # of the gate; or "gelu_tanh", "clamped_swiglu"; "xielu" in an MLP without a gate
    activation: str = "silu"
    # tensors of xIELU's numbers: alpha_p, alpha_n, beta, eps (Apertus)
    xielu: tuple[str, ...] = ()
    # leading dimensions of a head that are rotated, None for all (Phi-4)
    rotary_dim: int | None = None
    rope: int = 0  # number of its table of angles (Gemma 3's sliding layers have another)
    softcap: float | None = None  # c of c * tanh(score / c) on the scores (Gemma 2)
    # table of the queries, None for `rope` (Ministral 3; Llama 4 where it does not rotate)
    query_rope: int | None = None
    # a logit per head that takes a share of the softmax and has no value (gpt-oss), [H]
    sinks: str | None = None
    experts: ExpertsSpec | None = None  # in place of the MLP

    @property
    def scale(self) -> float:
        """Factor on query times key."""
        return (
            self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier
        )

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
