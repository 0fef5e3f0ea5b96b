"""GLM-4 (0414): norms before and after, a fused MLP, and neighbours rotated in half of a head."""

from .family import Family

FAMILY = Family(
    "Glm4ForCausalLM",
    "glm4",
    "glm4",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    attention_biases=(None, False),
    fixed={"norm_placement": "both, as in GLM"},
    fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    interleaved=True,
    partial_rotation=True,
)
