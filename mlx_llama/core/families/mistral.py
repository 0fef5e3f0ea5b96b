"""Mistral, with a window in all layers (first release), and the text part of Mistral Small 3.1."""

from .family import Family
from .windows import Windows

FAMILY = Family(
    "MistralForCausalLM",
    "mistral",
    "llama",
    wrapper=("Mistral3ForConditionalGeneration", "mistral3"),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    windows=Windows(4096),
    permuted=True,
)
