"""LayerSpec: one layer as data, read by core.llama and each backend's weights.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from mlx_llama.core.system.forks import cached_property

# {LlamaConfig.norm_placement: modules of norms (before attention and MLP), (after them)}
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
    """Gated MLPs, of which a router chooses some for each token (Shazeer et al. 2017)."""

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
    has_biases: bool = False  # biases of each expert's three matrices

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.gate)


def _shared(name: str) -> Any:
    """An attribute of the config under another name; looked up once."""
    return cached_property(attrgetter(f"config.{name}"))


@dataclass(frozen=True)
class LayerSpec:
    """One layer: the names of its tensors, and what may differ between layers. Names are modules of
    the checkpoint, without ".weight" and ".bias". Modules of one tuple have the same input, so a
    backend may concatenate their matrices.
    """

    config: Any = field(compare=False, repr=False)  # LlamaConfig, whose file imports this one
    index: int  # number of the layer, from 0
    attention_norm: str | None  # before attention, None for no norm
    qkv: tuple[str, ...]
    out: str
    ffn_norm: str | None  # before the MLP
    # empty for a mixture of experts; of an MLP without a gate, "up" alone
    gate_up: tuple[str, ...]
    down: str  # likewise
    # RMS norm of each head (Qwen3) or of all (OLMo 2)
    query_norm: str | None
    key_norm: str | None
    norms_heads: bool  # likewise of each head, without weights (Llama 4)
    rotates: bool  # False for a layer without rotary embedding (SmolLM3)
    # columns of the view's tables that turn the keys (Gemma 3 has others in layers with a window)
    angles: slice
    # those of the queries (others in Ministral 3, and in Llama 4 where it does not rotate)
    query_angles: slice
    window: Window | None  # None: a token sees all before it
    # norm of attention's output, before it is added to the stream (EXAONE 4)
    post_attention_norm: str | None
    post_ffn_norm: str | None  # norm of the MLP's output
    # tensors of xIELU's numbers: alpha_p, alpha_n, beta, eps (Apertus)
    xielu: tuple[str, ...]
    # a logit per head that takes a share of the softmax and has no value (gpt-oss), [H]
    sinks: str | None
    experts: ExpertsSpec | None  # in place of the MLP

    @property
    def norms(self) -> list[str]:
        """The norms of the stream and of what is added to it."""
        before, after = (self.attention_norm, self.ffn_norm), self.post_attention_norm
        return [name for name in (*before, after, self.post_ffn_norm) if name]

    # the same in all layers
    heads = _shared("num_attention_heads")  # H of grouped-query attention
    key_value_heads = _shared("num_key_value_heads")  # G
    head_dim = _shared("head_dim")  # D
    eps = _shared("rms_norm_eps")
    scale = _shared("attention_scale")
    softcap = _shared("attention_softcap")
    activation = _shared("activation")
    residual_multiplier = _shared("residual_multiplier")
