"""gpt-oss: experts with biases and a clamped gate, attention sinks, windows in half the layers."""

from mlx_llama.core.models.layer_types import windows
from mlx_llama.core.models.layers import decoder

from .apertus import write_rope
from .family import Family, expert_fields, fused_experts

_CONSTANTS = "the constants of the gate are fixed here"

FAMILIES = (
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        "gpt-oss",
        fields=expert_fields("num_local_experts", 128, 4, "intermediate_size"),
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
            "attention_bias": True,
            "rope_parameters": {
                "rope_theta": 150000.0,
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        neutral={
            "hidden_act": ("silu", "the gate is a clamped SwiGLU"),
            "swiglu_alpha": (1.702, _CONSTANTS),
            "swiglu_limit": (7.0, _CONSTANTS),
        },
        attention_biases=(None, None),
        mlp_bias=True,
        write=write_rope,
        fixed={"activation": "clamped_swiglu"},
        layers=decoder(lambda c, i: {"sinks": f"model.layers.{i}.self_attn.sinks"}),
        experts=fused_experts("in turn"),
        renamed={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        },
        types=windows(128, 2),
        window="sliding_window",
        gguf_pattern=2,
        theta=150000.0,
        exceeds_float16=True,
        truncates_yarn=False,
    ),
)
