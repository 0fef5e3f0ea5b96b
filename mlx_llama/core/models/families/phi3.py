"""Phi-3 and Phi-4-mini: fused projections, and rotation of a part of each head."""

from typing import Any

from mlx_llama.core.models.layer_types import windows

from .family import Family


def write(config: Any) -> dict[str, Any]:
    trained = config.rope.original_max_position_embeddings or config.max_position_embeddings
    return {"original_max_position_embeddings": trained}


FAMILIES = (
    Family(
        "Phi3ForCausalLM",
        "phi3",
        "phi3",
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": None,
            "eos_token_id": 32000,
            "rms_norm_eps": 1e-5,
        },
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        types=windows(None, is_fixed=True),
        window="sliding_window",
        partial_rotation=True,
        write=write,
    ),
)
