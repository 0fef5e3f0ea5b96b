"""The table of architectures: one entry for each family that is Llama with differences.

Defaults of config.json's fields and the meaning of each difference are those of transformers 5 (models/NAME); names and
conventions of GGUF files are llama.cpp's (src/llama-arch.cpp, src/llama-model.cpp, convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import gguf_names
from .gguf_names import GGUFNames


@dataclass(frozen=True)
class Architecture:
    """Differences of a family from LlamaForCausalLM.

    name: in config.json's `architectures`; aliases: other spellings of it. model_type: in config.json. gguf:
    `general.architecture` of its GGUF files, names: of their tensors. defaults: of config.json's fields that
    transformers fills in.
    qkv_bias: True if query, key and value have biases; None for the config's `attention_bias`. out_bias, mlp_bias: the
    same for the output projection (None: `attention_bias`) and the MLP (None: `mlp_bias`).
    query_key_norm: RMS norms over each head of query and key.
    window: layers with a sliding window: "none", "all" (`sliding_window`) or "from" (`use_sliding_window`, from layer
    `max_window_layers` on).
    """

    name: str
    model_type: str
    gguf: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    qkv_bias: bool | None = False
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    query_key_norm: bool = False
    names: GGUFNames = gguf_names.PLAIN
    window: str = "none"


_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32, "bos_token_id": None,
         "eos_token_id": None, "max_window_layers": 28}
_TABLE = (
    Architecture(
        "LlamaForCausalLM", "llama", "llama", aliases=("LLaMAForCausalLM",),  # in the first conversions of Llama 1
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
        qkv_bias=None, out_bias=None, mlp_bias=None, names=gguf_names.LLAMA,
    ),
    Architecture(
        "MistralForCausalLM", "mistral", "llama", window="all", names=gguf_names.LLAMA,
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    ),
    Architecture("Qwen2ForCausalLM", "qwen2", "qwen2", defaults=_QWEN, qkv_bias=True, window="from"),
    Architecture("Qwen3ForCausalLM", "qwen3", "qwen3", defaults={**_QWEN, "head_dim": 128}, qkv_bias=None, out_bias=None,
                 query_key_norm=True, names=gguf_names.HEAD_NORMS, window="from"),
)

ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in _TABLE}
BY_SPELLING = ARCHITECTURES | {alias: one for one in _TABLE for alias in one.aliases}
BY_MODEL_TYPE = {one.model_type: one for one in _TABLE}
BY_GGUF = {one.gguf: one for one in reversed(_TABLE)}  # "llama" is Llama, not Mistral


def find_gguf(name: object) -> Architecture | None:
    """The architecture of a GGUF file's `general.architecture`; None for an unsupported one."""
    return BY_GGUF.get(name) if isinstance(name, str) else None
