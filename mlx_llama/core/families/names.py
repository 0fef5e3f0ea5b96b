"""Tensor names and row order of GGUF files. core/files reads and writes by them. Names are those of
the gguf library's tensor name map (gguf.get_tensor_name_map).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.models.spec import NORM_NAMES

_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?(\w+(?:\.\d{1,4})?)\.(weight|bias)", re.ASCII)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)", re.ASCII)
_EXPERT = re.compile(r"\.experts\.\d+\.", re.ASCII)

# {GGUF's name: Hugging Face's}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QUERY_KEY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_BARE = "self_attn.sinks"  # a tensor that is no module: GGUF's name has a suffix, this has none
_PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True)
class Experts:
    """Modules of a mixture of experts, in place of each layer's MLP."""

    block: str = ""  # in a layer, if it is not the MLP's
    gate: str = "gate_proj"  # of each expert
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    stack: str = "switch_mlp"  # module of the stacks of all experts
    # Rows of gates and ups "in turn" or as "halves" of one tensor of all (fused_experts.py)
    fused_rows: str = ""
    shared: str = ""  # an MLP for all tokens
    scoring: str = "softmax"  # as in ExpertsSpec
    scales_input: bool = False


def fused_experts(rows: str, **more: Any) -> Experts:
    """Experts whose files have one tensor of all gates and ups, in transformers' names."""
    return Experts(router="router", stack="experts", fused_rows=rows, **more)


class GGUFNames:
    """Tensor names of a family, translated both ways.

    layers: {GGUF's name: Hugging Face's} of a layer's modules, without "blk.N.", "model.layers.N."
    and the suffixes. permuted: modules whose rows llama.cpp's converter reorders, so that the two
    rows of a rotary pair are neighbours; Hugging Face keeps them half a head apart. experts:
    {GGUF's name: Hugging Face's} of the modules of one expert, whose number replaces "#". Files
    have stacks "NAME_exps" of them; until 2024 they had "NAME.0" and so on.
    """

    def __init__(self, family: Any):  # a Family, whose file imports this one
        experts, fused = family.experts, {} if family.splits else family.fused
        single = {parts[0]: whole for whole, parts in fused.items() if len(parts) == 1}
        joined = {part for parts in fused.values() for part in parts} - single.keys()
        layers = {
            name: module.replace("mlp.", f"{family.mlp}.")
            for name, module in _LAYERS.items()
            if module not in joined
        }
        layers |= {_FUSED[whole]: whole for whole, parts in fused.items() if len(parts) > 1}
        before, after = NORM_NAMES[family.fixed.get("norm_placement", "before")]
        layers |= dict(zip(("attn_norm", "ffn_norm"), before or ()))
        layers |= dict(zip(("post_attention_norm", "post_ffw_norm"), after or ()))
        if family.fixed.get("query_key_norm"):
            layers |= _QUERY_KEY_NORMS
        layers = {name: single.get(module, module) for name, module in layers.items()}
        self.layers, self.experts = layers, {}
        self.permuted = _PERMUTED if family.permuted else ()
        if experts:
            block = experts.block or family.mlp
            if all(field.name != "expert_step" for field in family.fields):  # no plain MLPs
                layers = {name: module for name, module in layers.items() if "mlp." not in module}
            self.layers = layers | {"ffn_gate_inp": f"{block}.{experts.router}"}
            for part in ("gate", "up", "down"):
                if experts.shared:
                    self.layers[f"ffn_{part}_shexp"] = f"{block}.{experts.shared}.{part}_proj"
                self.layers[f"ffn_{part}_exps"] = f"{block}.{experts.stack}.{part}_proj"
                self.experts[f"ffn_{part}"] = f"{block}.experts.#.{getattr(experts, part)}"
        kept = {k: v for k, v in self.layers.items() if v not in family.renamed.values()}
        self.layers = kept | dict(family.renamed)
        stacks = ((f"{name}_exps", module) for name, module in self.experts.items())
        pairs = (*self.layers.items(), *_MODEL.items(), *stacks)
        self._inverse = {module: name for name, module in pairs}

    def hugging_face(self, name: str) -> str | None:
        """ "blk.3.ffn_up.weight" -> "model.layers.3.mlp.up_proj.weight"; None for unknown names."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        layer, module, suffix = match.groups()
        if layer is None:
            return f"{_MODEL[module]}.{suffix}" if module in _MODEL else None
        module, _, expert = module.partition(".")
        theirs = self.experts.get(module) if expert else self.layers.get(module)
        if theirs and theirs.endswith(_BARE):
            return f"model.layers.{layer}.{theirs}"
        return theirs and f"model.layers.{layer}.{theirs.replace('#', expert)}.{suffix}"

    def gguf(self, name: str) -> str:
        """The inverse of `hugging_face`; an expert's stack. Raises KeyError for unknown names."""
        module, _, suffix = (f"{name}.weight" if name.endswith(_BARE) else name).rpartition(".")
        match = _LAYER.fullmatch(module)
        prefix = f"blk.{match[1]}." if match else ""
        ours = self._inverse[_EXPERT.sub(".experts.#.", match[2]) if match else module]
        return f"{prefix}{ours}.{suffix}"

    def is_permuted(self, name: str) -> bool:
        """True if llama.cpp's converter reorders the tensor's rows. name: Hugging Face's."""
        return name.rpartition(".")[0].endswith(self.permuted)
