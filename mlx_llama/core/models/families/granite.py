"""Granite 3 and 4: Llama with factors on the embedding, the stream, attention and the logits."""

from typing import Any

from mlx_llama.core.models.fields import Reader
from mlx_llama.core.models.layers import decoder
from mlx_llama.core.models.parts import Router

from .family import Experts, Family, expert_fields, factor, size

_BLOCK = "block_sparse_moe"
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


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """The factors where GGUF lacks them; its files say that Granite 4 has no rotation."""
    usual = {"attention_multiplier": values["head_dim"] ** -0.5, "residual_multiplier": 1.0}
    rotates = not read.is_gguf or read.boolean("rope.scaling.finetuned", True)
    return {name: values.get(name, value) for name, value in usual.items()} | {"rotates": rotates}


def complete_hybrid(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """Refuse layers with a recurrent state, of which transformers' default has none else."""
    kinds = read.get("layer_types", None)
    for i, kind in enumerate(kinds if isinstance(kinds, list) else ["mamba"]):
        if kind not in ("attention", "full_attention"):
            reason = "since this package lacks state spaces (granite-4.0-micro has none)"
            read.fail(f"layer_types[{i}]", kind, f"'attention', {reason}")
    rotates = read.get("position_embedding_type", None) == "rope"
    return complete(read, values) | {"rotates": rotates}


LAYERS = decoder(
    attends=lambda c, i: {"scale": c.own["attention_multiplier"], "rotates": c.own["rotates"]},
    adds=lambda c, i: {"residual_multiplier": c.own["residual_multiplier"]},
)

FAMILIES = (
    # Granite 3: factors on the embedding, the residual stream, attention and the logits.
    Family(
        "GraniteForCausalLM",
        "granite",
        "granite",
        fields=FACTORS,
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
        attention_biases=(None, None),
        mlp_bias=None,
        permuted=True,
        complete=complete,
        layers=LAYERS,
    ),
    # Granite 3 with a mixture of experts in each layer.
    Family(
        "GraniteMoeForCausalLM",
        "granitemoe",
        "granitemoe",
        fields=(
            *expert_fields("num_local_experts", 8, 2, "intermediate_size", "feed_forward_length"),
            *FACTORS,
        ),
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
        attention_biases=(None, None),
        experts=Experts(
            _BLOCK,
            gate="w1",
            up="w3",
            down="w2",
            router=Router("router.layer"),
            fused=(f"{_BLOCK}.input_linear.weight", f"{_BLOCK}.output_linear.weight"),
            aliases={
                f"{_BLOCK}.router.weight": f"{_BLOCK}.router.layer.weight",
                f"{_BLOCK}.experts.gate_up_proj": f"{_BLOCK}.input_linear.weight",
                f"{_BLOCK}.experts.down_proj": f"{_BLOCK}.output_linear.weight",
            },
        ),
        permuted=True,
        complete=complete,
        layers=LAYERS,
    ),
    # Granite 4 of attention alone: Granite 3, whose MLP is named as the expert of all tokens.
    Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        "granite",
        fields=(
            size(
                "intermediate_size",
                "feed_forward_length",
                22,
                "shared_intermediate_size",
                default=1024,
            ),
            *FACTORS,
        ),
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
        neutral={"num_local_experts": (0, "experts beside the shared one are not supported")},
        complete=complete_hybrid,
        layers=LAYERS,
        attention_biases=(None, None),
        fused={
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_mlp.output_linear": ("mlp.down_proj",),
        },
        splits=True,
        permuted=True,
    ),
)
