"""Qwen2 and 2.5: biases of query, key and value, and windows that are off by default."""

from typing import Any

from mlx_llama.core.models.reader import Reader

from .family import Family
from .windows import Layers, Windows

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


FAMILY = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    "qwen2",
    defaults=DEFAULTS,
    attention_biases=(True, False),
    windows=Windows(4096, last_layers, is_switched=True),
)
