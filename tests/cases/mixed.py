"""A matrix of several formats."""

from __future__ import annotations

SHAPE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)


def mostly(kind: str, **others: str):
    """The type of each matrix: `kind`, or another for the modules in `others`."""
    return lambda name: others.get(name.split(".")[-2], kind)


# Mixes of Q4_K_M and Q5_K_M as in llama.cpp; then types with the same width, group or neither in
# fusable matrices
MIXED = {
    "Q4_K_M": mostly("Q4_K", v_proj="Q6_K", down_proj="Q6_K", lm_head="Q6_K"),
    "Q5_K_M": mostly("Q5_K", v_proj="Q6_K", down_proj="Q6_K", lm_head="Q6_K"),
    "Q2_K mix": mostly(
        "Q3_K", q_proj="Q2_K", k_proj="Q2_K", embed_tokens="Q2_K", gate_proj="Q4_K", lm_head="Q6_K"
    ),
    "widths": mostly("Q4_0", k_proj="Q4_1", v_proj="Q5_0", up_proj="Q5_1", lm_head="Q8_0"),
    "IQ4": mostly("IQ4_XS", v_proj="Q8_0", k_proj="IQ4_NL", up_proj="IQ4_NL", lm_head="Q6_K"),
    "NVFP4 with factors": "NVFP4",
    "plain ones": mostly("Q4_0", k_proj="F16", up_proj="F32", embed_tokens="F16", lm_head="BF16"),
}
