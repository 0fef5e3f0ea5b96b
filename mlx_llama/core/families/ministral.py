"""Ministral: windows in some layers."""

from .family import Family
from .windows import Windows

FAMILY = Family(
    "MinistralForCausalLM",
    "ministral",
    "llama",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    windows=Windows(4096, is_free=True),
    permuted=True,
)
