"""SmolLM3: each fourth layer has no rotary embedding, and the window, which is off by default."""

from typing import Any

from mlx_llama.core.models.reader import Reader

from .family import Family
from .windows import Layers, Windows

_EVERY = 4  # default of `no_rope_layer_interval`, and llama.cpp's


def read_unrotated(read: Reader, count: int) -> Layers:
    """Zeros of `no_rope_layers`, else every `no_rope_layer_interval`-th layer."""
    flags = read.get("no_rope_layers", None)
    if flags in (None, []) or read.is_gguf:
        every = _EVERY if read.is_gguf else read.integer("no_rope_layer_interval", _EVERY)
        return tuple(range(every - 1, count, every))
    if (
        not isinstance(flags, list)
        or len(flags) < count
        or any(flag not in (0, 1) for flag in flags)
    ):
        read.fail(
            "no_rope_layers",
            flags,
            f"a list of {count} numbers, 0 for a layer without rotary embedding, else 1",
        )
    return tuple(i for i in range(count) if not flags[i])


def unrotated(read: Reader, values: dict[str, Any]) -> Layers:
    return read_unrotated(read, values["num_hidden_layers"])


def write(config: Any) -> dict[str, Any]:
    return {"no_rope_layers": [int(spec.rotates) for spec in config.layers]}


FAMILY = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    "smollm3",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "sliding_window": None,
    },
    attention_biases=(None, None),
    mlp_bias=None,
    permuted=True,
    windows=Windows(read_unrotated, is_switched=True, is_free=True),
    unrotated=unrotated,
    theta=2e6,
    write=write,
)
