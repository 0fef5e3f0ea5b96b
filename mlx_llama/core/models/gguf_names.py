"""Tensor names and row order of GGUF files, by architecture. core/files reads and writes by them.

Names are those of the gguf library's tensor name map (gguf.get_tensor_name_map).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?(\w+(?:\.\d{1,4})?)\.(weight|bias)", re.ASCII)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)", re.ASCII)
_EXPERT = re.compile(r"\.experts\.\d+\.", re.ASCII)

# {GGUF's name: Hugging Face's}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class GGUFNames:
    """Translate the tensor names of one architecture, both ways.

    layers: {GGUF's name: Hugging Face's} of a layer's modules, without "blk.N.", "model.layers.N." and the suffixes.
    permuted: modules whose rows llama.cpp's converter reorders, so that the two rows of a rotary pair are neighbours;
    Hugging Face keeps them half a head apart. experts: {GGUF's name: Hugging Face's} of the modules of one expert, whose
    number replaces "#". Files have stacks "NAME_exps" of them; until 2024 they had "NAME.0" and so on.
    """

    layers: Mapping[str, str]
    permuted: tuple[str, ...] = ()
    experts: Mapping[str, str] = field(default_factory=dict)

    def hugging_face(self, name: str) -> str | None:
        """"blk.3.ffn_up.weight" -> "model.layers.3.mlp.up_proj.weight"; None for an unknown name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        layer, module, suffix = match.groups()
        if layer is None:
            return f"{_MODEL[module]}.{suffix}" if module in _MODEL else None
        module, _, expert = module.partition(".")
        found = self.experts.get(module) if expert else self.layers.get(module)
        return found and f"model.layers.{layer}.{found.replace('#', expert)}.{suffix}"

    def gguf(self, name: str) -> str:
        """The inverse of `hugging_face`; for an expert's module the stack's name.

        Raises:
            KeyError: the architecture has no such tensor.
        """
        module, _, suffix = name.rpartition(".")
        match = _LAYER.fullmatch(module)
        prefix = f"blk.{match[1]}." if match else ""
        return f"{prefix}{self._inverse[_EXPERT.sub('.experts.#.', match[2]) if match else module]}.{suffix}"

    def is_permuted(self, name: str) -> bool:
        """True if llama.cpp's converter reorders the rows of the tensor with this Hugging Face name."""
        return name.rpartition(".")[0].endswith(self.permuted)

    @cached_property
    def _inverse(self) -> dict[str, str]:
        stacks = ((f"{ours}_exps", theirs) for ours, theirs in self.experts.items())
        return {theirs: ours for ours, theirs in (*self.layers.items(), *_MODEL.items(), *stacks)}


PLAIN = GGUFNames(_LAYERS)
HEAD_NORMS = GGUFNames(_LAYERS | _HEAD_NORMS)
NORMS_AFTER = GGUFNames({name: ours for name, ours in _LAYERS.items() if not name.endswith("_norm")} | _HEAD_NORMS | {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"})
NORMS_BOTH = GGUFNames(_LAYERS | _HEAD_NORMS | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm"})
FUSED = GGUFNames({name: ours for name, ours in _LAYERS.items() if name[-2:] not in ("_q", "_k", "_v", "te", "up")} | {
    "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
LLAMA = GGUFNames(_LAYERS, permuted=("self_attn.q_proj", "self_attn.k_proj"))


def _with_experts(names: Mapping[str, str], block: str) -> dict[str, str]:
    """`names` with a router and stacks of experts in place of the MLP."""
    kept = {name: ours for name, ours in names.items() if not ours.startswith("mlp.")}
    return kept | {"ffn_gate_inp": f"{block}.gate"} | {
        f"ffn_{part}_exps": f"{block}.switch_mlp.{part}_proj" for part in ("gate", "up", "down")}


MIXTRAL = GGUFNames(_with_experts(_LAYERS, "block_sparse_moe"), LLAMA.permuted,
                    {f"ffn_{part}": f"block_sparse_moe.experts.#.{ours}" for part, ours in (
                        ("gate", "w1"), ("up", "w3"), ("down", "w2"))})
QWEN3_EXPERTS = GGUFNames(_with_experts(_LAYERS | _HEAD_NORMS, "mlp"), (),
                          {f"ffn_{part}": f"mlp.experts.#.{part}_proj" for part in ("gate", "up", "down")})
