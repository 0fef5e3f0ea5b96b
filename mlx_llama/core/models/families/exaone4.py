"""EXAONE 4: OLMo 2's norms, of each head. The large size has windows in three of four layers."""

from typing import Any

from mlx_llama.core.models.fields import Reader
from mlx_llama.core.models.layer_types import Types, read_pattern, read_types, read_window
from mlx_llama.core.models.layers import SLIDING, decoder

from .family import Family

_GGUF_LAYERS = 64  # llama.cpp gives windows to the model of that many layers
_PATTERN = "sliding_window_pattern"  # letters, L for a window, or a number


def types(read: Reader, values: dict[str, Any]) -> Types:
    count, window = values["num_hidden_layers"], read_window(read, 4096)
    if read.is_gguf and window and count != _GGUF_LAYERS:
        read.fail(
            "attention.sliding_window",
            window,
            f"0, since llama.cpp has windows in models of {_GGUF_LAYERS} layers alone",
        )
    letters = read.get(_PATTERN, 4)
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
        slides = [letters[i % len(letters)] == "L" for i in range(count)]
    else:
        slides = read_pattern(read, count, 4) if window else [False] * count
    return read_types(read, window, slides) | {"rotates_all": window is None}


def write(config: Any) -> dict[str, Any]:
    letters = "".join("L" if kind == SLIDING else "G" for kind in config.layer_types)
    return {_PATTERN: letters if "L" in letters else None}  # which mlx_lm reads


FAMILIES = (
    Family(
        "Exaone4ForCausalLM",
        "exaone4",
        "exaone4",
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        query_key_norm="head",
        norm_placement="after",
        types=types,
        # in models with windows, layers without one do not rotate
        layers=decoder(
            lambda c, i: {"rotates": c.own["rotates_all"] or c.layer_types[i] == SLIDING}
        ),
        window="sliding_window",
        gguf_pattern=4,
        write=write,
    ),
)
