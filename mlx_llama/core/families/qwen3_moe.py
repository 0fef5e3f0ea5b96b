"""Qwen3-MoE: Qwen3 with a mixture of experts in each layer."""

from mlx_llama.core.models.reader import Field

from .family import Family, expert_fields
from .names import Experts
from .windows import Windows

_EVERY_LAYER = "every layer is a mixture of experts here"

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    "qwen3moe",
    fields=(
        *expert_fields(
            "num_experts",
            "moe_intermediate_size",
            "expert_feed_forward_length",
            alias="num_local_experts",
        ),
        Field("norm_topk_prob", "norm_topk_prob", kind=bool, default=False),
    ),
    defaults={
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_key_value_heads": 4,
        "bos_token_id": None,
        "eos_token_id": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    neutral={"mlp_only_layers": ([], _EVERY_LAYER), "decoder_sparse_step": (1, _EVERY_LAYER)},
    attention_biases=(None, None),
    fixed={"query_key_norm": "head"},
    experts=Experts("mlp"),
    windows=Windows(is_switched=True),
)
