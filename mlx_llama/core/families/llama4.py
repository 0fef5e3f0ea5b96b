"""Llama 4 (text): chunked attention; every fourth layer rotates nothing and sees all; experts with
a shared one in every layer or every other.
"""

from typing import Any

from mlx_llama.core.models.reader import Reader

from .family import Family, expert_fields, size
from .names import Experts
from .smollm3 import read_unrotated
from .windows import Layers, Windows

_CHUNK, _FLOOR, _SCALE = 8192, 8192, 0.1  # llama.cpp has no fields for them
_STEP = "interleave_moe_layer_step"  # in both kinds of files
_UNNORMED = 128  # experts of the model whose heads llama.cpp does not norm


def rotated(read: Reader, count: int) -> Layers:
    still = read_unrotated(read, count)
    return tuple(i for i in range(count) if i not in still)


def unrotated(read: Reader, values: dict[str, Any]) -> Layers:
    window = values["sliding_window"]
    if read.is_gguf and window is None:
        return ()
    if window not in (None, _CHUNK) and read.is_gguf:
        read.fail("attention.sliding_window", window, f"0 or {_CHUNK}, llama.cpp's chunk")
    return read_unrotated(read, values["num_hidden_layers"])


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """The experts' layers, the norms of heads, and the factor of unrotated layers' queries."""
    norm = "without weights"
    if read.is_gguf:
        normed = values["num_experts"] != _UNNORMED
        scales = read.get("attention.sliding_window", _CHUNK) != 0
        scale, floor = _SCALE, _FLOOR
    else:
        normed = read.boolean("use_qk_norm", True)
        scales = bool(read.get("attn_temperature_tuning", True))  # 4 in the first files
        scale, floor = read.number("attn_scale", _SCALE), read.integer("floor_scale", _FLOOR)
    more = {"query_key_norm": norm if normed else None, "expert_step": values["expert_step"]}
    if scales:
        more |= {"temperature_scale": scale, "temperature_floor": floor}
    layers, count = read.get("moe_layers", None), values["num_hidden_layers"]
    if layers is None or read.is_gguf:
        return more
    step = layers[0] + 1 if isinstance(layers, list) and layers and type(layers[0]) is int else 1
    if layers != list(range(step - 1, count, step)):
        read.fail("moe_layers", layers, "the numbers of every layer, every other, and so on")
    return more | {"expert_step": step}


def write(config: Any) -> dict[str, Any]:
    rotated = [int(i not in config.unrotated_layers) for i in range(config.num_hidden_layers)]
    return {
        "no_rope_layers": rotated,
        "use_qk_norm": config.query_key_norm is not None,
        "attn_temperature_tuning": bool(config.temperature_scale),
        "attn_scale": config.temperature_scale or _SCALE,
        "floor_scale": config.temperature_floor,
    }


FAMILY = Family(
    "Llama4ForCausalLM",
    "llama4_text",
    "llama4",
    wrapper=("Llama4ForConditionalGeneration", "llama4"),
    fields=(
        size("intermediate_size", "feed_forward_length", 22, "intermediate_size_mlp"),
        *expert_fields(
            "num_local_experts",
            "intermediate_size",
            "expert_feed_forward_length",
            alias="num_experts",
        ),
        size("expert_step", _STEP, 12, _STEP, default=1, placeholder=1),
    ),
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": _CHUNK,
    },
    attention_biases=(None, None),
    experts=Experts(
        "feed_forward",
        router="router",
        stack="experts",
        fused_rows="halves",
        shared="shared_expert",
        is_everywhere=False,
        scoring="sigmoid",
        scales_input=True,
    ),
    mlp="feed_forward",
    interleaved=True,
    windows=Windows(rotated, is_free=True, pattern=4, gguf_default=_CHUNK, is_chunk=True),
    unrotated=unrotated,
    complete=complete,
    theta=5e5,
    write=write,
)
