"""Tensor names and row order of GGUF files, by architecture. core/files reads and writes by them.

Names are those of the gguf library's tensor name map (gguf.get_tensor_name_map).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?(\w+)\.(weight|bias)", re.ASCII)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)", re.ASCII)

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
    Hugging Face keeps them half a head apart.
    """

    layers: Mapping[str, str]
    permuted: tuple[str, ...] = ()

    def hugging_face(self, name: str) -> str | None:
        """"blk.3.ffn_up.weight" -> "model.layers.3.mlp.up_proj.weight"; None for an unknown name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        layer, module, suffix = match.groups()
        if layer is None:
            return f"{_MODEL[module]}.{suffix}" if module in _MODEL else None
        return f"model.layers.{layer}.{self.layers[module]}.{suffix}" if module in self.layers else None

    def gguf(self, name: str) -> str:
        """The inverse of `hugging_face`.

        Raises:
            KeyError: the architecture has no such tensor.
        """
        module, _, suffix = name.rpartition(".")
        match = _LAYER.fullmatch(module)
        prefix = f"blk.{match[1]}." if match else ""
        return f"{prefix}{self._inverse[match[2] if match else module]}.{suffix}"

    def is_permuted(self, name: str) -> bool:
        """True if llama.cpp's converter reorders the rows of the tensor with this Hugging Face name."""
        return name.rpartition(".")[0].endswith(self.permuted)

    @cached_property
    def _inverse(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in (*self.layers.items(), *_MODEL.items())}


PLAIN = GGUFNames(_LAYERS)
HEAD_NORMS = GGUFNames(_LAYERS | _HEAD_NORMS)
LLAMA = GGUFNames(_LAYERS, permuted=("self_attn.q_proj", "self_attn.k_proj"))
