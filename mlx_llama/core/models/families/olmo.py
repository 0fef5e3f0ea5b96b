"""OLMo 2 and 3: norms after attention and MLP, and of the whole query and key; and OLMoE."""

from typing import Any

from mlx_llama.core.models.fields import Field
from mlx_llama.core.models.layer_types import windows

from .family import Experts, Family, expert_fields

SHARED: dict[str, Any] = {
    "defaults": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "bos_token_id": None,
        "eos_token_id": 50279,
        "rms_norm_eps": 1e-5,
    },
    "attention_biases": (None, None),
    "query_key_norm": "whole",
    "norm_placement": "after",
}


FAMILIES = (
    # OLMo 2: norms after attention and MLP, and of the whole query and key.
    Family("Olmo2ForCausalLM", "olmo2", "olmo2", **SHARED),
    # OLMo 3: OLMo 2 with a window in three of four layers; the rope of the others alone is scaled.
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        "olmo2",
        gguf_mark="attention.sliding_window",
        **SHARED,
        types=windows(4096, 4, nullable=False),
        window="sliding_window",
        gguf_pattern=4,
        theta=5e5,
        local_theta=("rope_theta", None),
    ),
    # OLMoE: Llama's norms, those of the whole query and key, and a mixture of experts.
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        "olmoe",
        fields=(
            *expert_fields("num_experts", 64, 8, "intermediate_size", "feed_forward_length"),
            Field("norm_topk_prob", "norm_topk_prob", kind=bool, default=False),
        ),
        defaults=SHARED["defaults"] | {"max_position_embeddings": 4096},
        neutral={"clip_qkv": (None, "queries, keys and values are not clipped here")},
        query_key_norm="whole",
        fixed={"norm_topk_prob": False},  # in GGUF
        experts=Experts(),
    ),
)
