"""Llama 4 (text): chunked attention, each fourth layer without rotation and chunks, and experts."""

from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.parts import Router

from . import smollm3
from .family import Family, Layers, Windows, expert_fields, flag, fused_experts, size

# llama.cpp has no fields for these, and no norms of heads in the model of 128 experts.
_CHUNK, _FLOOR, _SCALE, _NORM, _UNNORMED = 8192, 8192, 0.1, "without weights", 128
_STEP = "interleave_moe_layer_step"  # in both kinds of files


def rotated(read: Reader, values: dict[str, Any]) -> Layers:
    still = smollm3.unrotated(read, values)
    return tuple(i for i in range(values["num_hidden_layers"]) if i not in still)


def unrotated(read: Reader, values: dict[str, Any]) -> Layers:
    rotates = read.is_gguf and values["sliding_window"] is None
    return () if rotates else smollm3.unrotated(read, values)


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """Norms of heads, factors of unrotated layers' queries, and the experts' layers."""
    result: dict[str, Any] = {}
    is_scaled = read.get("attn_temperature_tuning", True)  # 4 in the first files
    if read.is_gguf:
        result["query_key_norm"] = None if values["num_experts"] == _UNNORMED else _NORM
        is_scaled = read.get("attention.sliding_window", _CHUNK)
    if not is_scaled or not values.get("temperature_scale", _SCALE):
        result |= {"temperature_scale": 0.0, "temperature_floor": 1}
    layers, count = read.get("moe_layers", None), values["num_hidden_layers"]
    if layers is not None:
        steps = [step for step in range(1, count + 1) if layers == [*range(step - 1, count, step)]]
        if not steps:
            read.fail("moe_layers", layers, "the numbers of every layer, every other, and so on")
        result["expert_step"] = steps[0] if steps else 1
    return result


FAMILIES = (
    Family(
        "Llama4ForCausalLM",
        "llama4_text",
        "llama4",
        wrapper=("Llama4ForConditionalGeneration", "llama4"),
        fields=(
            size("intermediate_size", "feed_forward_length", 22, "intermediate_size_mlp"),
            *expert_fields("num_local_experts", 16, 1, "intermediate_size"),
            size("expert_step", _STEP, 12, _STEP, default=1, placeholder=1),
            flag("query_key_norm", "use_qk_norm", _NORM, default=True),
            Field("temperature_scale", "attn_scale", "", float, -1e-9, 1e12, default=_SCALE),
            size("temperature_floor", "", 30, "floor_scale", default=_FLOOR),
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
        },
        attention_biases=(None, None),
        experts=fused_experts(
            "halves",
            "feed_forward",
            shared="shared_expert",
            router=Router("router", scoring="sigmoid", scales_input=True),
        ),
        mlp="feed_forward",
        interleaved=True,
        windows=Windows(
            _CHUNK,
            rotated,
            is_free=True,
            pattern=4,
            gguf_default=_CHUNK,
            is_chunk=True,
            field="attention_chunk_size",
            kind="chunked_attention",
        ),
        unrotated=unrotated,
        complete=complete,
        fixed={
            "temperature_scale": _SCALE,
            "temperature_floor": _FLOOR,
            "norm_topk_prob": False,
        },
        theta=5e5,
        write=smollm3.write,
    ),
)
