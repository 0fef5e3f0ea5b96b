"""Mistral, Ministral and Mixtral: Llama with windows, scaled queries, or experts."""

from typing import Any

from mlx_llama.core.models.layer_types import windows
from mlx_llama.core.models.layers import decoder
from mlx_llama.core.models.parts import Angles

from .family import Experts, Family, expert_fields, factor


def angles(config: Any) -> tuple[Angles, ...]:
    """The rope's, times a factor of the queries' positions."""
    beta, trained = config.own["query_beta"], config.rope.original_max_position_embeddings
    return (Angles(config.rope, scale=beta, length=trained),) if beta else ()


FAMILIES = (
    # Mistral, with a window in all layers (first release), and the text part of Mistral Small 3.1.
    Family(
        "MistralForCausalLM",
        "mistral",
        "llama",
        wrapper=("Mistral3ForConditionalGeneration", "mistral3"),
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
        types=windows(4096, is_fixed=True),
        window="sliding_window",
        permuted=True,
    ),
    # Ministral: windows in some layers.
    Family(
        "MinistralForCausalLM",
        "ministral",
        "llama",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
        types=windows(4096),
        window="sliding_window",
        permuted=True,
    ),
    # Ministral 3: yarn, and queries scaled by their position.
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        "mistral3",
        wrapper=("Mistral3ForConditionalGeneration", "mistral3"),
        # config.json has the factor among those of the rope: models/rope_fields.py
        fields=(factor("query_beta", "", "attention.temperature_scale"),),
        defaults=dict(
            max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5
        ),
        types=windows(None, is_fixed=True),
        window="sliding_window",
        fixed={"query_beta": 0.0},
        layers=decoder(lambda c, i: {"query_angles": c.tables[-1]}),
        angles=angles,
        theta=1e6,
        scales_queries=True,
        permuted=True,
    ),
    # Mixtral: Mistral with a mixture of experts in each layer.
    Family(
        "MixtralForCausalLM",
        "mixtral",
        "llama",
        gguf_mark="expert_count",
        fields=expert_fields("num_local_experts", 8, 2, "intermediate_size", "feed_forward_length"),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        experts=Experts(
            "block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            aliases={"mlp.gate.weight": "block_sparse_moe.gate.weight"},
        ),
        types=windows(None, is_fixed=True),
        window="sliding_window",
        theta=1e6,
        permuted=True,
    ),
)
