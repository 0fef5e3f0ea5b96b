"""ERNIE 4.5, the models without experts: Llama with rotation of neighbours."""

from .family import Family

FAMILY = Family(
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
)
