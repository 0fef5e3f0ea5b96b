"""Seed-OSS: Llama with biases of query, key and value, and wide heads."""

from .family import Family

FAMILY = Family(
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
        "attention_out_bias": (False, "no file has this bias, and llama.cpp has no place for it")
    },
    attention_biases=(None, False),
    renamed={"post_attention_norm": "post_attention_layernorm"},
)
