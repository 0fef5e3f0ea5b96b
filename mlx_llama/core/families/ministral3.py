"""Ministral 3: yarn, and queries scaled by their position."""

from .family import Family, factor
from .windows import Windows

FAMILY = Family(
    "Ministral3ForCausalLM",
    "ministral3",
    "mistral3",
    wrapper=("Mistral3ForConditionalGeneration", "mistral3"),
    # config.json has the factor among those of the rope: models/rope_fields.py
    fields=(factor("query_beta", "", "attention.temperature_scale"),),
    defaults=dict(
        max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5
    ),
    windows=Windows(),
    theta=1e6,
    scales_queries=True,
    permuted=True,
)
