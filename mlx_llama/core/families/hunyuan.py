"""Hunyuan 1 without experts: norms of query and key after rotation, and a stretched base."""

from .family import Family

FAMILY = Family(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    "hunyuan-dense",
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": None, "rms_norm_eps": 1e-5},
    neutral={
        "use_qk_norm": (True, "transformers' class always has these norms"),
        "use_cla": (False, "layers that share keys and values are not supported"),
    },
    fixed={"query_key_norm": "rotated"},
    fused={
        "self_attn.query_layernorm": ("self_attn.q_norm",),
        "self_attn.key_layernorm": ("self_attn.k_norm",),
    },
    stretches_theta=True,
)
