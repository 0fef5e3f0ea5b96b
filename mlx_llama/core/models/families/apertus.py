"""Apertus: MLPs without a gate, of xIELU, and norms of query and key."""

from typing import Any

from mlx_llama.core.models.fields import Reader

from .family import Family


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """Refuse a config.json without a rope, where transformers takes Llama 3's and mlx_lm none."""
    names = () if read.is_gguf else ("rope_parameters", "rope_scaling")
    if names and all(read.get(name, None) is None for name in names):
        read.fail("rope_scaling", None, "the parameters of the rope")
    return {}


def write_rope(config: Any) -> dict[str, Any]:
    """Name a plain rope, since null stands for another type by default."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}


FAMILIES = (
    Family(
        "ApertusForCausalLM",
        "apertus",
        "apertus",
        defaults={
            "max_position_embeddings": 65536,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
        },
        neutral={
            "post_norm": (False, "norms come before attention and MLP here"),
            "qk_norm": (True, "transformers' class always has these norms"),
        },
        complete=complete,
        write=write_rope,
        attention_biases=(None, None),
        query_key_norm="head",
        activation=("hidden_act", "xielu"),
        fused={
            "attention_layernorm": ("input_layernorm",),
            "feedforward_layernorm": ("post_attention_layernorm",),
        },
        exceeds_float16=True,  # squares in the MLP
        theta=12e6,
    ),
)
