"""Llama 1 to 3.3, and models of the same arithmetic: TinyLlama, Yi, SmolLM2."""

from .family import Family

FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        "llama",
        aliases=("LLaMAForCausalLM",),  # in the first conversions of Llama 1
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
        attention_biases=(None, None),
        mlp_bias=None,
        permuted=True,
    ),
)
