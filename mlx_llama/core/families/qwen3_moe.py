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
        *expert_fields("num_experts", 128, 8, "moe_intermediate_size"),
        Field("norm_topk_prob", "norm_topk_prob", kind=bool, default=False),
    ),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "bos_token_id": None,
        "eos_token_id": None,
        "moe_intermediate_size": 768,
    },
    neutral={"mlp_only_layers": ([], _EVERY_LAYER), "decoder_sparse_step": (1, _EVERY_LAYER)},
    attention_biases=(None, None),
    fixed={"query_key_norm": "head"},
    experts=Experts(),
    windows=Windows(4096, is_switched=True),
)
