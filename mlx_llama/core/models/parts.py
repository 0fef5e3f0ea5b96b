"""The parts of a layer as data: sizes, and the names of tensors. core.llama computes them.

Names are modules of the checkpoint, without ".weight" and ".bias". Modules of one tuple have the
same input, so that a backend may concatenate their matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

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
class Angles:
    """A table of the angles by which heads are turned, and of a factor on them."""

    rope: Any  # rope_fields.RopeConfig
    turns: bool = True  # False: all angles are 0
    # heads are multiplied by 1 + scale * log(1 + n), n the whole lengths of the positions before
    # theirs, and of theirs with `counts_own`
    scale: float = 0.0
    length: int = 1
    counts_own: bool = False


@dataclass(frozen=True)
class KeyValues:
    """Layers whose keys and values have the same shape and window."""

    heads: int  # G
    head_dim: int  # D
    slots: tuple[int, ...]
    window: Window | None = None

    def first(self, length: int) -> int:
        """The first position that a query after `length` positions sees."""
        return max(0, self.window.first(length)) if self.window else 0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023) over keys and values by position."""

    index: int  # the layer's number, from 0
    slot: int  # number among the layers that keep keys and values, or that of `keys_of`
    # the query's alone with `keys_of`; the keys' twice where values are the keys before their norm
    qkv: tuple[str, ...]
    out: str
    heads: int  # H
    key_value_heads: int  # G
    head_dim: int  # D
    scale: float  # of query times key
    eps: float  # of the norms of heads
    # columns of the view's tables that turn the keys (Gemma 3 has others in layers with a window)
    angles: slice
    # those of the queries (others in Ministral 3, and in Llama 4 where it does not rotate)
    query_angles: slice
    softcap: float | None = None  # c of c * tanh(score / c)
    window: Window | None = None  # None: a token sees all before it
    rotates: bool = True  # False for a layer without rotary embedding (SmolLM3)
    # RMS norm of each head (Qwen3) or of all (OLMo 2)
    query_norm: str | None = None
    key_norm: str | None = None
    norms_rotated: bool = False  # these are of the rotated heads (Hunyuan)
    norms_heads: bool = False  # of each head, without weights (Llama 4)
    norms_values: bool = False  # of each value head, too, without weights (Gemma 4)
    # number of the layer whose keys and values it reads, which stores none; None: its own
    keys_of: int | None = None
    # its sigmoid multiplies the output before `out`, [H D] (Qwen3-Next)
    gate: str | None = None
    # a logit per head that takes a share of the softmax and has no value (gpt-oss), [H]
    sinks: str | None = None

    @cached_property
    def new_heads(self) -> int:
        """Key-value heads that it computes and stores."""
        return 0 if self.keys_of is not None else self.key_value_heads

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """The modules of its products, grouped by input."""
        return (self.qkv, (self.gate,), (self.out,)) if self.gate else (self.qkv, (self.out,))

    def rows(self) -> tuple[int, ...]:
        """Rows of the modules of `qkv`."""
        groups = self.new_heads
        return tuple(heads * self.head_dim for heads in (self.heads, groups, groups) if heads)


@dataclass(frozen=True)
class ShortConv:
    """A causal convolution of each channel over few positions, between two gates (LFM2;
    transformers' Lfm2ShortConv). State: the last inputs of the convolution.
    """

    index: int
    slot: int  # number among the layers with a recurrent state
    into: str  # [3 E, E]: the gate before, the gate after, and the input
    conv: str  # [E, 1, W]
    out: str
    size: int  # channels, E
    width: int  # positions, W, the new one included
    has_bias: bool = False  # of all three

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a row's state, float32."""
        return ((self.width - 1, self.size),)

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        return (self.into,), (self.out,)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the modules' weights, [out, in] of matrices."""
        size = self.size
        into, out = (3 * size, size), (size, size)
        return {self.into: into, self.conv: (size, 1, self.width), self.out: out}


@dataclass(frozen=True)
class MLP:
    """A gated MLP (Shazeer 2020), or one of xIELU without a gate."""

    gate_up: tuple[str, ...]  # without a gate, "up" alone
    down: str
    size: int  # hidden units, F
    activation: str = "silu"  # or "gelu_tanh", "clamped_swiglu", "xielu"
    # tensors of xIELU's numbers: alpha_p, alpha_n, beta, eps (Apertus)
    xielu: tuple[str, ...] = ()


@dataclass(frozen=True)
class Router:
    """Chooses experts for each token and their shares (Shazeer et al. 2017; with a bias and groups,
    DeepSeek-V3, arXiv 2412.19437).
    """

    module: str  # of the scores, [experts, E]
    used: int = 1  # experts of a token, those with the largest scores
    # A share is the "softmax" of all scores, or the score's "sigmoid" (Llama 4).
    scoring: str = "softmax"
    # tensor [experts] to add to the scores' sigmoids for the choice alone (GLM-4.5)
    bias: str | None = None
    normalises: bool = False  # divide the chosen experts' shares by their sum
    scale: float = 1.0  # on the shares after that
    groups: int = 1  # of neighbouring experts, ranked by the sum of their best two
    used_groups: int = 1  # those that a token may choose from
    scales_input: bool = False  # shares multiply the experts' inputs, not their outputs
    # tensor [E]: times 1 / sqrt(E), the weights of a norm of the scores' input (Gemma 4)
    norm: str | None = None
    expert_scale: str | None = None  # tensor [experts] that multiplies the shares at the end


@dataclass(frozen=True)
class Experts:
    """Gated MLPs, of which a router chooses some for each token, and one for all tokens."""

    router: Router
    gate: tuple[str, ...]  # each expert's module, by number
    up: tuple[str, ...]
    down: tuple[str, ...]
    # modules of all gates, ups and downs, [experts, N, K], in files that store them so
    stacks: tuple[str, str, str]
    size: int  # hidden units of an expert, F
    activation: str = "silu"
    shared: MLP | None = None  # for all tokens; its output is added
    # module [1, E] of a score whose sigmoid multiplies the shared MLP's output (Qwen2-MoE)
    shared_gate: str | None = None
    has_biases: bool = False  # biases of each expert's three matrices
    # Norms for each branch of a layer without `ffn_norm`: of the inputs of experts and shared MLP,
    # and of their outputs (Gemma 4)
    norms: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.gate)


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) behind a convolution of each
    channel, as in Qwen3-Next and Qwen3.5. State: the last inputs of the convolution, and a matrix
    for each value head.
    """

    index: int
    slot: int  # number among the layers with a recurrent state
    # of queries, keys and values, then the output's gate, the strengths of updates, and the decays
    into: tuple[str, str, str, str]
    conv: str  # [C, 1, W], C = 2 Hk Dk + Hv Dv
    decay: str  # tensor [Hv]: log of the rates
    decay_bias: str  # tensor [Hv]
    norm: str  # of each value head's output, [Dv]
    out: str
    key_heads: int  # Hk, each of which serves Hv / Hk value heads
    value_heads: int  # Hv
    key_size: int  # Dk
    value_size: int  # Dv
    hidden: int  # E
    width: int  # of the convolution, W
    eps: float  # of the norm
    # Value head n has key head n % Hk, as in llama.cpp's files of Qwen3.5; else n // (Hv / Hk).
    tiled: bool = False

    @property
    def channels(self) -> int:
        """C: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a row's state, float32."""
        matrices = self.value_heads, self.key_size, self.value_size
        return (self.width - 1, self.channels), matrices

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        return self.into, (self.out,)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the modules' weights, and of the two tensors that are no modules."""
        values, heads = self.value_heads * self.value_size, self.value_heads
        rows = self.channels, values, heads, heads
        shapes: dict[str, tuple[int, ...]] = {
            name: (count, self.hidden) for name, count in zip(self.into, rows)
        }
        shapes |= {self.conv: (self.channels, 1, self.width), self.norm: (self.value_size,)}
        return shapes | {self.out: (self.hidden, values)}

    def swaps(self) -> dict[str, tuple[np.ndarray | None, np.ndarray | None]]:
        """{tensor: (its rows, its columns) in the other order of value heads, int64, None for all
        as they are}.
        """
        sides = self.key_heads, self.value_heads // self.key_heads
        heads = np.arange(self.value_heads).reshape(sides[::-1] if self.tiled else sides).T
        values = np.arange(self.value_heads * self.value_size).reshape(self.value_heads, -1)
        heads, values = heads.reshape(-1), values[heads.reshape(-1)].reshape(-1)
        first = self.channels - len(values)
        channels = np.concatenate([np.arange(first), first + values])
        qkv, gate, strength, decay = (f"{name}.weight" for name in self.into)
        rows = {qkv: channels, f"{self.conv}.weight": channels, gate: values}
        rows |= dict.fromkeys((strength, decay, self.decay, self.decay_bias), heads)
        swaps: dict[str, tuple[np.ndarray | None, np.ndarray | None]] = {
            name: (order, None) for name, order in rows.items()
        }
        return swaps | {f"{self.out}.weight": (None, values)}


@dataclass(frozen=True)
class PerLayerInput:
    """A layer's own input, times a gate of the stream, projected, normed and added to the stream
    (Gemma 3n, Gemma 4).
    """

    index: int  # the layer's number
    gate: str  # [P, E]
    projection: str  # [E, P]
    norm: str  # of its output, [E]
    size: int  # P
    activation: str  # of the gate

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        return (self.gate,), (self.projection,)


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of all layers: of each token, an embedding and a projection of its own one."""

    embedding: str  # [V', layers P]
    projection: str  # [layers P, E]
    norm: str  # of each layer's part of the projection, [P]
    tokens: int  # V', at least the vocabulary
    size: int  # P
    hidden: int  # E
    layers: int
    eps: float


Recurrent = ShortConv | GatedDelta  # mixers with a state that can be cut at checkpoints alone
Mixer = Attention | Recurrent


@dataclass(frozen=True)
class Layer:
    """A mixer of positions and a feed-forward network, each with norms before or after it; a layer
    may lack either (Nemotron-NAS).
    """

    index: int  # from 0
    mixer: Mixer | None
    ffn: MLP | Experts | None
    attention_norm: str | None = None  # before the mixer
    ffn_norm: str | None = None
    # norm of the mixer's output, before it is added to the stream (EXAONE 4)
    post_attention_norm: str | None = None
    post_ffn_norm: str | None = None
    residual_multiplier: float = 1.0  # on what is added to the stream (Granite)
    input: PerLayerInput | None = None  # after the feed-forward network
    scalar: str | None = None  # tensor of a number that multiplies the stream at the end (Gemma 4)

    @property
    def norms(self) -> list[str]:
        """The norms of the stream and of what is added to it."""
        after = self.post_attention_norm, self.post_ffn_norm, self.input and self.input.norm
        inside = self.experts.norms if self.experts else ()
        return [name for name in (self.attention_norm, self.ffn_norm, *inside, *after) if name]

    @property
    def attention(self) -> Attention | None:
        """The mixer, if it is attention."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def experts(self) -> Experts | None:
        """The experts, if the layer has any."""
        return self.ffn if isinstance(self.ffn, Experts) else None

    @property
    def mlp(self) -> MLP | None:
        """The MLP of all tokens: the layer's, or the one beside its experts."""
        return self.ffn.shared if isinstance(self.ffn, Experts) else self.ffn

    def linears(self) -> Iterator[tuple[str, ...]]:
        """The modules of the layer's products but those of experts, grouped by input."""
        if self.mixer:
            yield from self.mixer.modules
        if isinstance(self.ffn, MLP):
            yield self.ffn.gate_up
            yield (self.ffn.down,)
        if self.input:
            yield from self.input.modules
