"""GLM-4.5 and its Air: leading dense layers, then experts chosen by sigmoids, a bias and groups."""

from collections.abc import Iterator
from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layers import attention, block, experts, mlp
from mlx_llama.core.models.parts import Layer, Router

from .family import Experts, Family, expert_fields, factor, flag, size, skip_next_layers

_ONE: dict[str, Any] = {"default": 1, "gguf_default": 1, "zero": True, "placeholder": 1}
_NONE: dict[str, Any] = {"low": 0, "gguf_default": 0, "placeholder": 0}
_NEXT = "num_nextn_predict_layers"


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """Check the groups; leave out the layers of multi-token prediction, which GGUF counts too."""
    experts, groups = values["num_experts"], values["n_group"]
    used_groups = values["topk_group"]
    if experts % groups or experts < 2 * groups:
        name = "expert_group_count" if read.is_gguf else "n_group"
        read.fail(name, groups, f"a divisor of {experts} experts, with at least 2 in a group")
    elif not values["num_experts_per_tok"] * groups <= used_groups * experts <= groups * experts:
        name = "expert_group_used_count" if read.is_gguf else "topk_group"
        chosen = values["num_experts_per_tok"]
        read.fail(name, used_groups, f"at most {groups} groups, with at least {chosen} experts")
    is_normed = any(name.endswith("self_attn.q_norm.weight") for name in read.shapes)
    norm = {"query_key_norm": "head" if is_normed else None} if read.is_gguf else {}
    return norm | skip_next_layers(read, values)


def layers(config: Any) -> Iterator[Layer]:
    own = config.own
    for i in range(config.num_hidden_layers):
        ffn: Any = mlp(config, i)
        if i >= own["first_k_dense_replace"]:
            ffn = experts(
                config,
                i,
                config.moe_intermediate_size * own["n_shared_experts"],
                scale=own["routed_scaling_factor"],
                groups=own["n_group"],
                used_groups=own["topk_group"],
            )
        yield block(config, i, attention(config, i), ffn)


FAMILIES = (
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        "glm4moe",
        fields=(
            *expert_fields("n_routed_experts", 128, 8, "moe_intermediate_size"),
            size("n_shared_experts", "expert_shared_count", 8, default=1, placeholder=1),
            size("first_k_dense_replace", "leading_dense_block_count", 12, default=1, **_NONE),
            size("n_group", "expert_group_count", 12, **_ONE),
            size("topk_group", "expert_group_used_count", 12, **_ONE),
            factor("routed_scaling_factor", "routed_scaling_factor", "expert_weights_scale"),
            Field(
                "norm_topk_prob",
                "norm_topk_prob",
                "expert_weights_norm",
                bool,
                default=True,
                gguf_default=False,
            ),
            flag("query_key_norm", "use_qk_norm", "head", default=False),
            # our files lack them
            size(_NEXT, "nextn_predict_layers", 8, default=1, encode=lambda count: 0, **_NONE),
        ),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
            "moe_intermediate_size": 1408,
            "partial_rotary_factor": 0.5,
        },
        attention_biases=(None, False),
        fixed={"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        complete=complete,
        layers=layers,
        experts=Experts(
            router=Router("gate", scoring="sigmoid", bias="gate.e_score_correction_bias"),
            shared="shared_experts",
        ),
        renamed={"post_attention_norm": "post_attention_layernorm"},
        partial_rotation=True,
    ),
)
