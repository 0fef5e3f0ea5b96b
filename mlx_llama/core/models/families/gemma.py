"""Gemma 2 and 3: norms on both sides, a scaled embedding, GELU, and windows."""

from collections.abc import Callable
from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layer_types import windows
from mlx_llama.core.models.layers import decoder

from .family import Family, factor


def complete_for(wide_layers: int) -> Callable[[Reader, dict[str, Any]], dict[str, Any]]:
    """Make `complete` of Gemma 2 or 3. llama.cpp scales attention by the width per head, not the
    head's size, in the model of `wide_layers` layers."""

    def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
        factors = {"embedding_multiplier": values["hidden_size"] ** 0.5}
        if read.is_gguf:  # llama.cpp's rule; config.json has `query_pre_attn_scalar`
            width = values["head_dim"]
            if values["num_hidden_layers"] == wide_layers:
                width = values["hidden_size"] // values["num_attention_heads"]
            factors["attention_multiplier"] = width**-0.5
        return factors

    return complete


def softcap(name: str, field: str, gguf: str, default: float | None) -> Field:
    return Field(name, field, gguf, float, 0, 1e12, gguf_default=default, nullable=True, zero=True)


SCALE = factor(
    "attention_multiplier",
    "query_pre_attn_scalar",
    "",
    default=256,
    decode=lambda x: x**-0.5,
    encode=lambda x: round(x**-2),
)
DEFAULTS = dict(
    num_key_value_heads=4, head_dim=256, bos_token_id=2, eos_token_id=1, tie_word_embeddings=True
)
# Shared with Gemma 3
SHARED: dict[str, Any] = dict(
    neutral={"use_bidirectional_attention": (False, "tokens see those before them alone")},
    attention_biases=(None, None),
    norm_offset=1.0,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    exceeds_float16=True,
    norm_placement="both",
    fixed={"attention_softcap": None},
    layers=decoder(
        lambda c, i: {
            "scale": c.own["attention_multiplier"],
            "softcap": c.own["attention_softcap"],
        }
    ),
    window="sliding_window",
)


FAMILIES = (
    # Gemma 2: norms on both sides, soft caps, a scaled embedding, GELU, windows in half the layers.
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        "gemma2",
        fields=(
            softcap("attention_softcap", "attn_logit_softcapping", "attn_logit_softcapping", 50.0),
            softcap("logits_softcap", "final_logit_softcapping", "final_logit_softcapping", 30.0),
            SCALE,
        ),
        defaults={
            "max_position_embeddings": 8192,
            **DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        types=windows(4096, 2, nullable=False, gguf_default=4096),
        gguf_pattern=2,
        complete=complete_for(wide_layers=46),
        **SHARED,
    ),
    # Gemma 3: Gemma 2, norms of query and key; five of six layers have a window and another rope.
    Family(
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
        types=windows(4096, 6, nullable=False),
        gguf_pattern=6,
        query_key_norm="head",
        theta=1e6,
        local_theta=("rope_local_base_freq", 1e4),
        complete=complete_for(wide_layers=62),
        **SHARED,
    ),
)
