"""EXAONE 4: OLMo 2's norms, of each head. The large size has windows in three of four layers."""

from typing import Any

from mlx_llama.core.models.fields import Reader

from .family import Family, Layers, Windows, choose_layers

_GGUF_LAYERS = 64  # llama.cpp gives windows to the model of that many layers


def windowed(read: Reader, values: dict[str, Any]) -> Layers:
    """Layers by `sliding_window_pattern`: letters, L for a window, or each n-th without."""
    count, pattern = values["num_hidden_layers"], read.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return tuple(i for i in range(count) if pattern[i % len(pattern)] == "L")
    return choose_layers(count, read.integer("sliding_window_pattern", 4))


def unrotated(read: Reader, values: dict[str, Any]) -> Layers:
    window, count = values["sliding_window"], values["num_hidden_layers"]
    sliding = values["sliding_layers"]
    if read.is_gguf and window and count != _GGUF_LAYERS:
        read.fail(
            "attention.sliding_window",
            window,
            f"0, since llama.cpp has windows in models of {_GGUF_LAYERS} layers alone",
        )
    if not (window if read.is_gguf else read.get("sliding_window", 4096)):
        return ()
    return tuple(
        i for i in range(count) if window is None or (sliding is not None and i not in sliding)
    )


def write(config: Any) -> dict[str, Any]:
    letters = "".join("L" if layer.mixer.window else "G" for layer in config.layers)
    return {"sliding_window_pattern": letters if "L" in letters else None}  # which mlx_lm reads


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
        fixed={"query_key_norm": "head", "norm_placement": "after"},
        windows=Windows(4096, windowed, is_free=True, pattern=4),
        unrotated=unrotated,
        write=write,
    ),
)
