"""Qwen2, Qwen3 and their mixtures of experts: Llama with biases or norms of queries and keys."""

from collections.abc import Callable
from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layer_types import Types, read_switched, read_types
from mlx_llama.core.models.layers import decoder

from .family import Experts, Family, expert_fields, size

_SHARED = "shared_expert_intermediate_size"
DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_window_layers": 28,
}


def types_for(
    slides: Callable[[int, int], bool], is_fixed: bool = False
) -> Callable[[Reader, dict[str, Any]], Types]:
    """Make `types`. slides: (layer, config.json's `max_window_layers`) -> it has the window."""

    def types(read: Reader, values: dict[str, Any]) -> Types:
        window, limit = read_switched(read, values, 4096), 0
        if window:
            limit = read.integer("max_window_layers", DEFAULTS["max_window_layers"], low=0)
        layers = range(values["num_hidden_layers"])
        return read_types(read, window, [slides(i, limit) for i in layers], is_fixed)

    return types


last_layers = types_for(lambda i, limit: i >= limit)
even_layers = types_for(lambda i, limit: i < limit and i % 2 == 0)


_EVERY_LAYER = "every layer is a mixture of experts here"
_EXPERTS_EVERYWHERE = {
    "mlp_only_layers": ([], _EVERY_LAYER),
    "decoder_sparse_step": (1, _EVERY_LAYER),
}
_NORMALISES = Field("norm_topk_prob", "norm_topk_prob", kind=bool, default=False)


FAMILIES = (
    # Qwen2 and 2.5: biases of query, key and value, and windows that are off by default.
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        "qwen2",
        defaults=DEFAULTS,
        attention_biases=(True, False),
        types=last_layers,
        window="sliding_window",
    ),
    # Qwen3: Qwen2 with norms of each head's query and key in place of biases.
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        defaults={**DEFAULTS, "head_dim": 128},
        attention_biases=(None, None),
        query_key_norm="head",
        types=last_layers,
        window="sliding_window",
    ),
    # Qwen3-MoE: Qwen3 with a mixture of experts in each layer.
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "qwen3moe",
        fields=(
            *expert_fields("num_experts", 128, 8, "moe_intermediate_size"),
            _NORMALISES,
        ),
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "bos_token_id": None,
            "eos_token_id": None,
            "moe_intermediate_size": 768,
        },
        neutral=_EXPERTS_EVERYWHERE,
        attention_biases=(None, None),
        query_key_norm="head",
        fixed={"norm_topk_prob": True},  # in GGUF
        experts=Experts(),
        types=types_for(lambda i, limit: True, is_fixed=True),
        window="sliding_window",
    ),
    # Qwen2-MoE and 1.5-MoE: Qwen2 with experts and a shared expert behind a gate.
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        "qwen2moe",
        fields=(
            *expert_fields("num_experts", 60, 4, "moe_intermediate_size"),
            size(_SHARED, "expert_shared_feed_forward_length", 22, default=5632),
            _NORMALISES,
        ),
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "bos_token_id": None,
            "eos_token_id": None,
            "moe_intermediate_size": 1408,
        },
        neutral=_EXPERTS_EVERYWHERE | {"qkv_bias": (True, "all files have these biases")},
        attention_biases=(True, False),
        fixed={"norm_topk_prob": False},  # in GGUF
        experts=Experts(shared="shared_expert", shared_gate="shared_expert_gate"),
        types=even_layers,
        layers=decoder(routes=lambda c, i: {"shared_size": c.own[_SHARED]}),
        window="sliding_window",
    ),
)
