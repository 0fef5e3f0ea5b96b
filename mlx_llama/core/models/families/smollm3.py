"""SmolLM3: each fourth layer has no rotary embedding, and the window, which is off by default."""

from typing import Any

from mlx_llama.core.models.fields import Reader

from .family import Family, Layers, Windows

_EVERY = 4  # default of `no_rope_layer_interval`, and llama.cpp's


def unrotated(read: Reader, values: dict[str, Any]) -> Layers:
    """Zeros of `no_rope_layers`, else every `no_rope_layer_interval`-th layer."""
    flags, count = read.get("no_rope_layers", None), values["num_hidden_layers"]
    if flags in (None, []) or read.is_gguf:
        every = _EVERY if read.is_gguf else read.integer("no_rope_layer_interval", _EVERY)
        return tuple(range(every - 1, count, every))
    if not isinstance(flags, list) or len(flags) < count or not all(x in (0, 1) for x in flags):
        expected = f"a list of {count} numbers, 0 for a layer without rotary embedding, else 1"
        read.fail("no_rope_layers", flags, expected)
    return tuple(i for i in range(count) if not flags[i])


def write(config: Any) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(i not in config.unrotated_layers) for i in range(len(config.layers))]
    }


FAMILIES = (
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        "smollm3",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        attention_biases=(None, None),
        mlp_bias=None,
        permuted=True,
        windows=Windows(None, unrotated, is_switched=True, is_free=True),
        unrotated=unrotated,
        theta=2e6,
        write=write,
    ),
)
