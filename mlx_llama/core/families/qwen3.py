"""Qwen3: Qwen2 with norms of each head's query and key in place of biases."""

from .family import Family
from .qwen2 import DEFAULTS, last_layers
from .windows import Windows

FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    "qwen3",
    defaults={**DEFAULTS, "head_dim": 128},
    attention_biases=(None, None),
    fixed={"query_key_norm": "head"},
    windows=Windows(4096, last_layers, is_switched=True),
)
