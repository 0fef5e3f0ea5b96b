"""Families that are Llama with settings alone, without a rule of their own."""

from .family import Family

FAMILIES = (
    # Seed-OSS: Llama with biases of query, key and value, and wide heads.
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        "seed_oss",
        defaults={
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 0,
            "attention_bias": True,
        },
        neutral={
            "attention_out_bias": (
                False,
                "no file has this bias, and llama.cpp has no place for it",
            )
        },
        attention_biases=(None, False),
        renamed={"post_attention_norm": "post_attention_layernorm"},
    ),
    # GLM-4 (0414): norms before and after, a fused MLP, and neighbours rotated in half of a head.
    Family(
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
        norm_placement="both, as in GLM",
        fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
        interleaved=True,
        partial_rotation=True,
    ),
    # ERNIE 4.5, the models without experts: Llama with rotation of neighbours.
    Family(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        "ernie4_5",
        aliases=("Ernie4_5_ForCausalLM",),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        neutral={"use_bias": (False, "no file has biases, and llama.cpp has no place for them")},
        interleaved=True,
        theta=5e5,
    ),
    # Hunyuan 1 without experts: norms of query and key after rotation, and a stretched base.
    Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        "hunyuan-dense",
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
        },
        neutral={
            "use_qk_norm": (True, "transformers' class always has these norms"),
            "use_cla": (False, "layers that share keys and values are not supported"),
        },
        query_key_norm="rotated",
        fused={
            "self_attn.query_layernorm": ("self_attn.q_norm",),
            "self_attn.key_layernorm": ("self_attn.k_norm",),
        },
        stretches_theta=True,
    ),
)
