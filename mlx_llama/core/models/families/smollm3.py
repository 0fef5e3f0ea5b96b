"""SmolLM3: each fourth layer has no rotary embedding, and the window, which is off by default."""

from typing import Any

from mlx_llama.core.models.fields import Reader
from mlx_llama.core.models.layer_types import Types, all_but_each, read_switched, read_types
from mlx_llama.core.models.layers import decoder

from .family import Family

_EVERY = 4  # default of `no_rope_layer_interval`, and llama.cpp's


def read_rotated(read: Reader, values: dict[str, Any]) -> list[bool]:
    """By layer, `no_rope_layers`, else all but every `no_rope_layer_interval`-th layer."""
    flags, count = read.get("no_rope_layers", None), values["num_hidden_layers"]
    if flags in (None, []) or read.is_gguf:
        every = _EVERY if read.is_gguf else read.integer("no_rope_layer_interval", _EVERY)
        return all_but_each(every, count)
    if not isinstance(flags, list) or len(flags) < count or not all(x in (0, 1) for x in flags):
        expected = f"a list of {count} numbers, 0 for a layer without rotary embedding, else 1"
        read.fail("no_rope_layers", flags, expected)
    return list(map(bool, flags[:count]))


def types(read: Reader, values: dict[str, Any]) -> Types:
    rotates = read_rotated(read, values)
    window = read_switched(read, values, None)
    return read_types(read, window, [not x for x in rotates]) | {"no_rope_layers": rotates}


def write(config: Any) -> dict[str, Any]:
    return {"no_rope_layers": list(map(int, config.own["no_rope_layers"]))}


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
        types=types,
        layers=decoder(lambda c, i: {"rotates": c.own["no_rope_layers"][i]}),
        window="sliding_window",
        theta=2e6,
        write=write,
    ),
)
