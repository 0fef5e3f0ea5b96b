"""Granite 3: factors on the embedding, the residual stream, attention and the logits."""

from typing import Any

from mlx_llama.core.models.reader import Reader

from .family import Family, factor
from .windows import Layers

FACTORS = (
    factor("embedding_multiplier", "embedding_multiplier", "embedding_scale"),
    factor("residual_multiplier", "residual_multiplier", "residual_scale"),
    factor("attention_multiplier", "attention_multiplier", "attention.scale"),
    # Both kinds of files have a divisor.
    factor(
        "logits_multiplier",
        "logits_scaling",
        "logit_scale",
        decode=lambda x: 1 / x,
        encode=lambda x: 1 / x,
    ),
)


def unrotated(read: Reader, values: dict[str, Any]) -> Layers:
    """All layers if a GGUF file says that rotation was not trained, as in Granite 4."""
    rotates = not read.is_gguf or read.boolean("rope.scaling.finetuned", True)
    return () if rotates else tuple(range(values["num_hidden_layers"]))


FAMILY = Family(
    "GraniteForCausalLM",
    "granite",
    "granite",
    fields=FACTORS,
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
    attention_biases=(None, None),
    mlp_bias=None,
    permuted=True,
    unrotated=unrotated,
)
