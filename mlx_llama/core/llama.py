"""The Llama (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288), for all backends.

Each layer holds its weights and the backend's `ops` (ops.py), which it is built with. The stream x
is [B, T, E] in the model's dtype. The view decides what is stored and who listens to probes.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from .models import parts
from .models.config import LlamaConfig
from .ops import Array, DeltaWeights, ExpertStacks, Matrix, Ops, View


@dataclass(frozen=True)
class Embedding:
    """weight: [V, E]."""

    ops: Ops
    weight: Matrix

    def __call__(self, tokens: Array) -> Array:
        return self.ops.embed(tokens, self.weight)


@dataclass(frozen=True)
class Linear:
    """weight: [N, K], or a tuple of its blocks; bias: [N]; adapters: of some sequences."""

    ops: Ops
    weight: Matrix
    bias: Array | None = None
    adapters: Any = None

    def __call__(self, x: Array, view: View) -> Array:
        product = self.ops.linear(x, self.weight, self.bias)
        return product if self.adapters is None else self.ops.adapt(product, x, self.adapters, view)


@dataclass(frozen=True)
class SummedLinear(Linear):
    """A Linear with some columns of its matrix; `ranks` sum all processes' products."""

    ranks: Any = None

    def __call__(self, x: Array, view: View) -> Array:
        return self.ranks.sum(super().__call__(x, view))


@dataclass(frozen=True)
class RMSNorm:
    """weight: [E]."""

    ops: Ops
    weight: Array
    eps: float

    def __call__(self, x: Array, delta: Array | None = None) -> tuple[Array, Array]:
        """(x + delta, its norm); delta None for zero."""
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps)


@dataclass(frozen=True)
class Unnormed:
    """Stands where a layer has no norm."""

    ops: Ops

    def __call__(self, x: Array, delta: Array | None = None) -> tuple[Array, Array]:
        """(x + delta, the same); delta None for zero."""
        total = self.ops.add(x, delta)
        return total, total


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over the cache."""

    ops: Ops
    spec: parts.Attention
    qkv: Linear  # [(H + 2 G) D, E], the projections as one matrix; G = 0 with another's keys
    out: Linear  # [E, H D]
    query_norm: RMSNorm | None = None  # [D], or [H D] and [G D]
    key_norm: RMSNorm | None = None
    query_scale: Array | None = None  # [D], of the rotated queries
    sinks: Array | None = None  # [H]
    gate: Linear | None = None  # [H D, E]

    @property
    def products(self) -> tuple[Linear, ...]:
        return (self.qkv, self.gate, self.out) if self.gate else (self.qkv, self.out)

    def __call__(self, x: Array, view: View, last_only: bool = False) -> Array:
        """x: [B, T, E]. last_only: only the last position's output; all keys are stored."""
        ops, spec = self.ops, self.spec
        heads = self.qkv(x, view)
        if self.query_norm is not None:
            key_weight = self.key_norm.weight if self.key_norm else None
            heads = ops.norm_heads(heads, self.query_norm.weight, key_weight, spec)
        view.probe_heads(heads, spec, ops)
        query = ops.rope_and_store(heads, view, spec)
        if self.query_scale is not None:
            query = ops.scale_heads(query, self.query_scale, spec)
        view.probe_rotated(query, spec)
        if last_only:  # a layer that reads another's keys may have it alone
            query = ops.last_position(query)
        mixed = ops.attend(query, view, spec, self.sinks)
        if self.gate is not None:
            mixed = ops.gate_output(
                mixed, self.gate(ops.last_position(x) if last_only else x, view)
            )
        return self.out(mixed, view)


@dataclass(frozen=True)
class Recurrence:
    """A mixer with a recurrent state."""

    ops: Ops
    spec: Any
    into: Linear  # [3 E, E] of ShortConv, [C + Hv Dv + 2 Hv, E] of GatedDelta
    out: Linear  # [E, E], [E, Hv Dv]

    @property
    def products(self) -> tuple[Linear, ...]:
        return self.into, self.out


@dataclass(frozen=True)
class ShortConv(Recurrence):
    """A convolution of each channel over few positions, between two gates (LFM2)."""

    weight: Array  # [E, W]
    bias: Array | None  # [E]

    def __call__(self, x: Array, view: View, last_only: bool = False) -> Array:
        """As of Attention; the state takes in all positions."""
        mixed = self.ops.short_conv(self.into(x, view), view, self.spec, self.weight, self.bias)
        return self.out(self.ops.last_position(mixed) if last_only else mixed, view)


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """The gated delta rule: a linear recurrence in place of attention (Qwen3-Next, Qwen3.5)."""

    weights: DeltaWeights

    def __call__(self, x: Array, view: View, last_only: bool = False) -> Array:
        """As of Attention; the state takes in all positions."""
        mixed = self.ops.gated_delta(self.into(x, view), view, self.spec, self.weights)
        return self.out(self.ops.last_position(mixed) if last_only else mixed, view)


@dataclass(frozen=True)
class MLP:
    """A gated MLP (Shazeer 2020)."""

    ops: Ops
    gate_up: Linear  # [2 F, E], both projections as one matrix; [F, E] without a gate
    down: Linear  # [E, F]
    activation: str = "silu"
    xielu: tuple[float, ...] = ()  # numbers as of `Ops.xielu`, in place of a gate

    def __call__(self, x: Array, view: View) -> Array:
        gate_up = self.gate_up
        if self.xielu:
            gated = self.ops.xielu(gate_up(x, view), *self.xielu)
        elif gate_up.adapters is None:
            gated = self.ops.gated_linear(x, gate_up.weight, gate_up.bias, self.activation)
        else:
            gated = self.ops.gate(gate_up(x, view), self.activation)
        return self.down(gated, view)


@dataclass(frozen=True)
class Experts:
    """Experts in place of an MLP, or beside one."""

    ops: Ops
    router: Linear  # [experts, E]
    stacks: ExpertStacks
    shared: MLP | None = None  # for all tokens
    shared_gate: Linear | None = None  # [1, E], of its output
    norms: tuple[RMSNorm, ...] = ()  # of the inputs of router, experts and MLP; of both outputs

    def __call__(self, x: Array, view: View) -> Array:
        ops = self.ops
        scored, inputs, common = [norm(x)[1] for norm in self.norms[:3]] or (x, x, x)
        mixed = ops.experts(inputs, self.router(scored, view), self.stacks)
        if self.shared is None:
            return mixed
        shared = self.shared(common, view)
        if self.shared_gate is not None:
            shared = ops.gate_output(shared, self.shared_gate(x, view))
        outputs = zip((mixed, shared), self.norms[3:])
        normed = [ops.rms_norm(x, norm.weight, norm.eps) for x, norm in outputs]
        return ops.add(*(normed or (mixed, shared)))


@dataclass(frozen=True)
class LayerInputs:
    """The inputs that layers have beside the stream (Gemma 3n, Gemma 4)."""

    ops: Ops
    spec: parts.LayerInputs
    embedding: Embedding  # [V', layers P]
    projection: Linear  # [layers P, E]
    norm: RMSNorm  # [P]

    def __call__(self, tokens: Array, x: Array, view: View) -> Array:
        """x: the embedded tokens [B, T, E]; returns [B, T, layers P]."""
        embedded, projected = self.embedding(tokens), self.projection(x, view)
        return self.ops.layer_inputs(embedded, projected, self.norm.weight, self.spec)


@dataclass(frozen=True)
class PerLayerInput:
    """A layer's input times a gate of the stream, projected and normed."""

    ops: Ops
    spec: parts.PerLayerInput
    gate: Linear  # [P, E]
    projection: Linear  # [E, P]
    norm: RMSNorm

    def __call__(self, x: Array, inputs: Array, view: View) -> Array:
        gated = self.ops.gate_input(self.gate(x, view), inputs, self.spec)
        return self.ops.rms_norm(self.projection(gated, view), self.norm.weight, self.norm.eps)


@dataclass(frozen=True)
class Block:
    """Mixer and MLP, with norms before or after each; a layer may lack either (None)."""

    ops: Ops
    spec: parts.Layer
    attention_norm: RMSNorm | Unnormed
    mixer: Attention | ShortConv | GatedDelta | None
    ffn_norm: RMSNorm | Unnormed
    mlp: MLP | Experts | None
    post_attention_norm: RMSNorm | None = None
    post_ffn_norm: RMSNorm | None = None
    input: PerLayerInput | None = None
    scalar: float = 1.0  # multiplies the stream

    def __call__(
        self, x: Array, delta: Array | None, inputs: Array | None, view: View, last_only: bool
    ) -> tuple[Array, Array | None]:
        """x: the stream [B, T, E]; delta: what the next norm adds, None for zero. Returns both."""
        i = self.spec.index
        if self.mixer is not None:
            x, normed = self.attention_norm(x, delta)
            view.probe("attention_norm", normed, i)
            mixed = self.mixer(normed, view, last_only)
            view.probe("attention", mixed, i)
            delta = self._adjust(mixed, self.post_attention_norm)
        elif last_only:
            x, delta = self.ops.add(x, delta), None
        if last_only:
            x = self.ops.last_position(x)
        if self.mlp is not None:
            x, normed = self.ffn_norm(x, delta)
            view.probe("ffn_norm", normed, i)
            ffn = self.mlp(normed, view)
            view.probe("ffn", ffn, i)
            delta = self._adjust(ffn, self.post_ffn_norm)
        if self.input is not None:
            delta = self.input(x := self.ops.add(x, delta), inputs, view)
        if self.scalar != 1:
            x, delta = self.ops.scale(self.ops.add(x, delta), self.scalar), None
        view.probe_sum("block", x, delta, i, self.ops)
        return x, delta

    def _adjust(self, delta: Array, norm: RMSNorm | None) -> Array:
        """`delta` as the stream takes it: behind its own norm, times the layer's multiplier."""
        if norm is not None:
            delta = self.ops.rms_norm(delta, norm.weight, norm.eps)
        factor = self.spec.residual_multiplier
        return self.ops.scale(delta, factor) if factor != 1 else delta


@dataclass(frozen=True)
class Decoder:
    """Embedding, blocks, final norm and projection to the vocabulary."""

    ops: Ops
    config: LlamaConfig
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear
    inputs: LayerInputs | None = None

    def over(self, ops: Ops) -> Decoder:
        """The same layers and weights over another implementation of the vocabulary."""
        return _replace_ops(self, ops)

    def __call__(self, tokens: Array, view: View, all_positions: bool) -> Array:
        """Logits after `tokens` [B, T]: [B, T, V], or [B, 1, V] of the last position."""
        ops, c = self.ops, self.config
        x, delta = self.embedding(tokens), None
        if c.embedding_multiplier != 1:
            x = ops.scale(x, c.embedding_multiplier)
        view.probe("embedding", x)
        inputs = self.inputs(tokens, x, view) if self.inputs else None
        # The last layer with a state keeps all positions', but computes the last output alone.
        last = len(self.blocks) if view.count == 1 or all_positions else c.last_state
        for i, block in enumerate(self.blocks):
            x, delta = block(x, delta, inputs, view, last_only=i == last)
        _, normed = self.norm(x, delta)
        logits = self.head(normed, view)
        if c.logits_multiplier != 1:
            logits = ops.scale(logits, c.logits_multiplier)
        if c.logits_softcap:
            logits = ops.softcap(logits, c.logits_softcap)
        view.probe("norm", normed)
        view.probe("logits", logits)
        return logits


def _replace_ops(part: Any, ops: Ops) -> Any:
    """A layer, or a tuple of layers or norms, over other ops; anything else as it is."""
    if isinstance(part, tuple) and part and all(hasattr(each, "ops") for each in part):
        return tuple(_replace_ops(each, ops) for each in part)
    if not is_dataclass(part) or isinstance(part, type) or not hasattr(part, "ops"):
        return part
    changed = {name: _replace_ops(value, ops) for name, value in vars(part).items()}
    return replace(part, **changed | {"ops": ops})
