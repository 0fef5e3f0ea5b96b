"""Mixtral: Mistral with a mixture of experts in each layer."""

from .family import Family, expert_fields
from .names import Experts
from .windows import Windows

FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    "llama",
    gguf_mark="expert_count",
    fields=expert_fields("num_local_experts", 8, 2, "intermediate_size", "feed_forward_length"),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    experts=Experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    windows=Windows(),
    theta=1e6,
    permuted=True,
)
