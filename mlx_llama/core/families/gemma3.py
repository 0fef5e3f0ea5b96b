"""Gemma 3: Gemma 2, norms of query and key; five of six layers have a window and another rope."""

from .family import Family
from .gemma2 import DEFAULTS, SCALE, SHARED, complete_for, softcap
from .windows import Windows

FAMILY = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    "gemma3",
    wrapper=("Gemma3ForConditionalGeneration", "gemma3"),
    fields=(
        softcap("attention_softcap", "attn_logit_softcapping", "", None),
        softcap("logits_softcap", "final_logit_softcapping", "final_logit_softcapping", None),
        SCALE,
    ),
    defaults={
        "max_position_embeddings": 131072,
        **DEFAULTS,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    windows=Windows(4096, is_free=True, is_required=True, pattern=6),
    fixed={"norm_placement": "both", "query_key_norm": "head"},
    theta=1e6,
    local_theta=("rope_local_base_freq", 1e4),
    complete=complete_for(wide_layers=62),
    **SHARED,
)
