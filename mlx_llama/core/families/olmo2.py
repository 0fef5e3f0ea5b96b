"""OLMo 2: norms after attention and MLP, and of the whole query and key."""

from typing import Any

from .family import Family

SHARED: dict[str, Any] = {
    "defaults": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "bos_token_id": None,
        "eos_token_id": 50279,
        "rms_norm_eps": 1e-5,
    },
    "attention_biases": (None, None),
    "fixed": {"query_key_norm": "whole", "norm_placement": "after"},
}
FAMILY = Family("Olmo2ForCausalLM", "olmo2", "olmo2", **SHARED)
