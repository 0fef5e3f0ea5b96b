"""Llama 4 (text): chunked attention, each fourth layer without rotation and chunks, and experts."""

from collections.abc import Iterator
from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layer_types import Types, read_pattern, read_types, read_window
from mlx_llama.core.models.layers import attention, block, experts, mlp
from mlx_llama.core.models.parts import Angles, Layer, Router, Window

from .family import Family, expert_fields, flag, fused_experts, size
from .smollm3 import read_rotated, write

# llama.cpp has no fields for these, and no norms of heads in the model of 128 experts.
_CHUNK, _FLOOR, _SCALE, _NORM, _UNNORMED = 8192, 8192, 0.1, "without weights", 128
_KIND, _STEP = "chunked_attention", "interleave_moe_layer_step"  # in both kinds of files


def types(read: Reader, values: dict[str, Any]) -> Types:
    """By default the rotated layers attend to chunks; in GGUF all rotate without chunks."""
    name = "attention.sliding_window" if read.is_gguf else "attention_chunk_size"
    window, rotates = read_window(read, _CHUNK, _CHUNK, name=name), read_rotated(read, values)
    if read.is_gguf and window not in (None, _CHUNK):
        read.fail(name, window, f"0 or {_CHUNK}, llama.cpp's chunk")
    slides = read_pattern(read, len(rotates), 4) if read.is_gguf and window else rotates
    found = read_types(read, window, slides, kind=_KIND, field=name)
    whole = read.is_gguf and window is None
    return found | {"no_rope_layers": [1] * len(rotates) if whole else rotates}


def layers(config: Any) -> Iterator[Layer]:
    own, size = config.own, config.sliding_window
    for i, (kind, rotates) in enumerate(zip(config.layer_types, own["no_rope_layers"])):
        more: dict[str, Any] = {"norms_heads": bool(own["query_key_norm"] and rotates)}
        if kind == _KIND:
            more["window"] = Window(size, is_chunk=True)
        if not rotates and own["temperature_scale"]:
            more |= {"angles": config.tables[-2], "query_angles": config.tables[-1]}
        elif not rotates:
            more["rotates"] = False
        mixer = attention(config, i, query_norm=None, key_norm=None, **more)
        ffn: Any = mlp(config, i)
        if (i + 1) % own["expert_step"] == 0:
            ffn = experts(config, i, config.moe_intermediate_size, normalises=False)
        yield block(config, i, mixer, ffn)


def angles(config: Any) -> tuple[Angles, ...]:
    """No rotation, and that times the factor of queries."""
    scale, floor = config.own["temperature_scale"], config.own["temperature_floor"]
    still = Angles(config.rope, turns=False)
    factor = Angles(config.rope, turns=False, scale=scale, length=floor, counts_own=True)
    return (still, factor) if scale else ()


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
        types=types,
        layers=layers,
        angles=angles,
        window="attention_chunk_size",
        gguf_pattern=4,
        complete=complete,
        fixed={
            "temperature_scale": _SCALE,
            "temperature_floor": _FLOOR,
            "expert_step": 1,
            "query_key_norm": None,
        },
        theta=5e5,
        write=write,
    ),
)
