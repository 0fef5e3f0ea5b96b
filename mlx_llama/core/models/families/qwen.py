"""Qwen2, Qwen3 and their mixtures of experts: Llama with biases or norms of queries and keys."""

from typing import Any

from mlx_llama.core.models.fields import Field, Reader

from .family import Experts, Family, Layers, Windows, expert_fields, size

_SHARED = "shared_expert_intermediate_size"
DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_window_layers": 28,
}


def last_layers(read: Reader, values: dict[str, Any]) -> Layers:
    count = values["num_hidden_layers"]
    full = read.integer("max_window_layers", DEFAULTS["max_window_layers"], low=0)
    return tuple(range(min(full, count), count))


def even_layers(read: Reader, values: dict[str, Any]) -> Layers:
    count = values["num_hidden_layers"]
    windowed = read.integer("max_window_layers", DEFAULTS["max_window_layers"], low=0)
    return tuple(range(0, min(windowed, count), 2))


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
        windows=Windows(4096, last_layers, is_switched=True),
    ),
    # Qwen3: Qwen2 with norms of each head's query and key in place of biases.
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        defaults={**DEFAULTS, "head_dim": 128},
        attention_biases=(None, None),
        fixed={"query_key_norm": "head"},
        windows=Windows(4096, last_layers, is_switched=True),
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
        fixed={"query_key_norm": "head"},
        experts=Experts(),
        windows=Windows(4096, is_switched=True),
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
        windows=Windows(4096, even_layers, is_switched=True),
    ),
)
