"""config.json of the families as the hub has them, judged by transformers; and their features that
are refused, by name.
"""

import copy
import dataclasses
import math

import numpy as np
import pytest
from making import shared_arithmetic

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.families import FAMILIES
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig, RopeConfig
from mlx_llama.core.models.reader import Reader
from mlx_llama.core.models.spec import Window

FACTORS = {
    "short_factor": np.linspace(1, 2, 48).tolist(),
    "long_factor": np.linspace(1, 60, 48).tolist(),
}
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 36,
    "vocab_size": 128256,
    "rope_theta": 5000000.0,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": 128012,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "layer_types": ["full_attention"] * 36,
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 40,
    "vocab_size": 49159,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}
PHI4 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 200064,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", **FACTORS},
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "rms_norm_eps": 1e-5,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "vocab_size": 256000,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": [1, 107],
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "vocab_size": 262144,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
}
LLAMA4 = {  # text_config of meta-llama/Llama-4-Scout-17B-16E
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "vocab_size": 202048,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 10485760,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [],
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
}
EXAONE_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MODELS = {
    "SmolLM3-3B": SMOLLM3,
    "granite-3.3-2b-instruct": GRANITE,
    "OLMo-2-0425-1B": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 16,
        "vocab_size": 100352,
        "rope_theta": 500000,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "Olmo-3-7B-Instruct": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 100278,
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
        "max_position_embeddings": 65536,
        "sliding_window": 4096,
        "attention_bias": False,
        "eos_token_id": 100257,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "EXAONE-4.0-1.2B": {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 30,
        "vocab_size": 102400,
        "rope_theta": 1000000,
        "rope_scaling": EXAONE_ROPE,
        "max_position_embeddings": 65536,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "layer_types": ["full_attention"] * 30,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 361,
        "tie_word_embeddings": True,
    },
    "EXAONE-4.0-32B": {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 64,
        "vocab_size": 102400,
        "rope_theta": 1000000,
        "rope_scaling": EXAONE_ROPE,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 361,
        "tie_word_embeddings": False,
    },
    "Phi-3-mini-4k-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32064,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "original_max_position_embeddings": 4096,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    "Phi-4-mini-instruct": PHI4,
    "gemma-2-2b-it": GEMMA2,
    "gemma-3-1b-it": GEMMA3,
    "gemma-3-1b-it, scaled as gemma-3-4b-it": GEMMA3
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "Ministral-8B with windows": {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "vocab_size": 131072,
        "rope_theta": 1e8,
        "sliding_window": 32768,
        "max_position_embeddings": 131072,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9,
    },
    "Llama 4 Scout": LLAMA4,
    "Llama 4 Maverick": LLAMA4
    | {
        "max_position_embeddings": 1048576,
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "moe_layers": list(range(1, 48, 2)),
        "use_qk_norm": False,
        "rope_scaling": None,
    },
    "Mixtral 8x7B": {  # mistralai/Mixtral-8x7B-Instruct-v0.1
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "router_aux_loss_coef": 0.02,
        "torch_dtype": "bfloat16",
    },
    "Qwen3 30B-A3B": {  # Qwen/Qwen3-30B-A3B
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 48,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "Seed-OSS-36B-Instruct": {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 64,
        "vocab_size": 155136,
        "rope_theta": 1e7,
        "rope_scaling": {"rope_type": "default"},
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    "GLM-4-9B-0414": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 40,
        "vocab_size": 151552,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 32768,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [151329, 151336, 151338],
        "pad_token_id": 151329,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "ERNIE-4.5-0.3B-PT": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 18,
        "vocab_size": 103424,
        "rope_theta": 500000,
        "rope_scaling": None,
        "max_position_embeddings": 131072,
        "use_bias": False,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "granite-4.0-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "num_hidden_layers": 40,
        "vocab_size": 100352,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "logits_scaling": 10,
        "residual_multiplier": 0.22,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "position_embedding_type": "rope",
        "layer_types": ["attention"] * 40,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 128,
        "mamba_d_head": 40,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "pad_token_id": 100256,
        "tie_word_embeddings": True,
    },
    "Hunyuan-7B-Instruct": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 32,
        "vocab_size": 128167,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "mlp_bias": False,
        "use_qk_norm": True,
        "use_cla": False,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 127960,
        "tie_word_embeddings": True,
    },
    "gpt-oss 20B": {  # openai/gpt-oss-20b
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 24,
        "vocab_size": 201088,
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "tie_word_embeddings": False,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    },
    "Apertus-8B-Instruct-2509": {
        "architectures": ["ApertusForCausalLM"],
        "model_type": "apertus",
        "hidden_act": "xielu",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 131072,
        "rope_theta": 12000000,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
            "type": "llama3",
        },
        "max_position_embeddings": 65536,
        "attention_bias": False,
        "mlp_bias": False,
        "post_norm": False,
        "qk_norm": True,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 68,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
    },
}
MIXTRAL, QWEN3_MOE = MODELS["Mixtral 8x7B"], MODELS["Qwen3 30B-A3B"]
GPT_OSS = MODELS["gpt-oss 20B"]


@pytest.mark.parametrize("name", MODELS)
def test_the_config_means_what_transformers_reads(name):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
        HunYuanDenseV1RotaryEmbedding,
    )

    raw = MODELS[name]
    # which it changes
    ours = LlamaConfig.from_dict(raw)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    is_llama4 = theirs.model_type == "llama4_text"
    assert ours.intermediate_size == (
        theirs.intermediate_size_mlp if is_llama4 else theirs.intermediate_size
    )
    for field in (
        "vocab_size hidden_size num_attention_heads num_key_value_heads rms_norm_eps "
        "max_position_embeddings tie_word_embeddings bos_token_id"
    ).split():
        assert getattr(ours, field) == getattr(theirs, field), field
    kinds = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"]
        * theirs.num_hidden_layers
    )
    windows = {
        "sliding_attention": lambda: Window(theirs.sliding_window),
        "chunked_attention": lambda: Window(theirs.attention_chunk_size, is_chunk=True),
    }
    assert [spec.window for spec in ours.layers] == [
        windows[kind]() if kind in windows else None for kind in kinds
    ]
    # only layers with a window rotate
    is_hybrid = theirs.model_type == "exaone4" and theirs.sliding_window
    rotates = [i not in ours.unrotated_layers for i in range(ours.num_hidden_layers)]
    assert (
        rotates == [kind == "sliding_attention" for kind in kinds]
        if is_hybrid
        else [
            bool(flag) for flag in getattr(theirs, "no_rope_layers", [1] * theirs.num_hidden_layers)
        ]
    )
    if (parameters := theirs.rope_parameters).get("rope_type") == "longrope":
        for length in (4096, 4097):
            wanted, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", length)
            frequencies, ours_factor = rope.inverse_frequencies(ours, length)
            np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
            assert ours_factor == pytest.approx(factor)
    elif "full_attention" in parameters:
        assert [(table.type, table.theta, table.factor) for table in ours.ropes] == [
            (theirs["rope_type"], theirs["rope_theta"], theirs.get("factor"))
            for theirs in (parameters["full_attention"], parameters["sliding_attention"])
        ]
        assert {(spec.window is not None, spec.angles.start) for spec in ours.layers} == {
            (True, ours.rotary_dim // 2),
            (False, 0),
        }
    elif "alpha" in parameters:
        wanted, _ = HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters(theirs)
        found, _ = rope.inverse_frequencies(ours)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)
    else:
        assert ours.rope.type == parameters["rope_type"]
        assert ours.rope.theta == parameters["rope_theta"]
        if parameters["rope_type"] == "yarn":
            wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
            found, ours_factor = rope.inverse_frequencies(ours)
            np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)
            assert ours_factor == pytest.approx(factor)
    assert ours.rotary_dim == int(ours.head_dim * parameters.get("partial_rotary_factor", 1))


def test_factors_of_the_families():
    granite, gemma = LlamaConfig.from_dict(GRANITE), LlamaConfig.from_dict(GEMMA2)
    assert (granite.embedding_multiplier, granite.logits_multiplier) == (12, 1 / 8)
    assert {(spec.scale, spec.residual_multiplier) for spec in granite.layers} == {(0.015625, 0.22)}
    assert (gemma.embedding_multiplier, gemma.norm_offset, gemma.logits_softcap) == (48, 1, 30)
    assert {(spec.scale, spec.softcap, spec.activation) for spec in gemma.layers} == {
        (1 / 16, 50, "gelu_tanh")
    }
    # query_pre_attn_scalar of gemma-2-9b, gemma-2-27b and gemma-3-27b on the hub; their GGUF files
    # do not name it
    names = ("hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers")
    for name, sizes, scalar in (
        ("Gemma2", (3584, 16, 256, 42), 256),
        ("Gemma2", (4608, 32, 128, 46), 144),
        ("Gemma3", (5376, 32, 128, 62), 168),
    ):
        read = Reader({}, "model.gguf", is_gguf=True)
        factors = FAMILIES[f"{name}ForCausalLM"].complete(read, dict(zip(names, sizes)))
        assert factors["attention_multiplier"] == scalar**-0.5


def test_experts_of_the_families():
    mixtral, qwen = LlamaConfig.from_dict(MIXTRAL), LlamaConfig.from_dict(QWEN3_MOE)
    few, other = mixtral.layers[31].experts, qwen.layers[47].experts
    assert (few.count, few.used, few.normalises, mixtral.mlp_size) == (8, 2, True, 14336)
    assert (other.count, other.used, other.normalises, qwen.mlp_size) == (128, 8, True, 768)
    scout, maverick = (MODELS[f"Llama 4 {name}"] for name in ("Scout", "Maverick"))
    layers = LlamaConfig.from_dict(maverick).layers
    assert [spec.experts is None for spec in layers] == [True, False] * 24
    experts = layers[1].experts
    assert (experts.count, experts.used, experts.scoring, experts.scales_input) == (
        128,
        1,
        "sigmoid",
        True,
    )
    for fields, weights in ((scout, 107_769_861_120), (maverick, 400_711_848_960)):
        shapes = LlamaConfig.from_dict(fields).tensor_shapes()
        assert sum(math.prod(shape) for shape in shapes.values()) == weights
    # the model card's 46.7 B
    assert sum(math.prod(shape) for shape in mixtral.tensor_shapes().values()) == 46_702_792_704
    assert sum(math.prod(shape) for shape in qwen.tensor_shapes().values()) == 30_532_122_624
    gpt_oss = LlamaConfig.from_dict(GPT_OSS)
    # 20.91 B by the model card
    assert sum(math.prod(shape) for shape in gpt_oss.tensor_shapes().values()) == 20_914_757_184
    assert (
        not LlamaConfig.from_dict(QWEN3_MOE | {"norm_topk_prob": False})
        .layers[0]
        .experts.normalises
    )


def test_the_text_part_of_gemma_3_4b_takes_the_defaults_that_its_config_leaves_out():
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    config = LlamaConfig.from_dict(raw)
    assert config.vocab_size == 262208 and config.num_attention_heads == 8
    assert config.num_key_value_heads == 4 and config.head_dim == 256
    assert [(table.type, table.theta, table.factor) for table in config.ropes] == [
        ("linear", 1e6, 8),
        ("default", 1e4, None),
    ]
    assert (config.eos_token_ids, config.dtype, config.is_text_part) == ((1, 106), "bfloat16", True)


# Beside sizes, what conversion/NAME.py of llama.cpp writes for models above
LLAMA4_GGUF = {"expert_used_count": 1, "expert_feed_forward_length": 8192}
CONVERTED = {
    "Llama 4 Scout": (
        "llama4",
        LLAMA4_GGUF | {"rope.freq_base": 5e5, "interleave_moe_layer_step": 1, "expert_count": 16},
    ),
    "Llama 4 Maverick": (
        "llama4",
        LLAMA4_GGUF | {"rope.freq_base": 5e5, "interleave_moe_layer_step": 2, "expert_count": 128},
    ),
    "Olmo-3-7B-Instruct": (
        "olmo2",
        {
            "attention.sliding_window": 4096,
            "attention.sliding_window_pattern": [True, True, True, False] * 8,
            "rope.freq_base": 500000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 8192,
            "rope.scaling.yarn_attn_factor": 1.2079441541679836,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
    ),
    "EXAONE-4.0-1.2B": ("exaone4", {"rope.freq_base": 1e6}),
    "Hunyuan-7B-Instruct": (
        "hunyuan-dense",
        {
            "context_length": 262144,
            "rope.freq_base": 11158839.925,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 262144,
        },
    ),
    "EXAONE-4.0-32B": (
        "exaone4",
        {
            "rope.freq_base": 1e6,
            "attention.sliding_window": 4096,
            "attention.sliding_window_pattern": [True, True, True, False] * 16,
        },
    ),
}


def test_a_converted_granite_4_is_a_granite_3():
    config = LlamaConfig.from_dict(MODELS["granite-4.0-micro"])
    fields = {
        "context_length": 131072,
        "embedding_length": 2560,
        "block_count": 40,
        "feed_forward_length": 8192,
        "expert_shared_feed_forward_length": 8192,
        "attention.head_count": 40,
        "attention.head_count_kv": [8] * 40,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 100352,
        "attention.scale": 0.015625,
        "embedding_scale": 12.0,
        "logit_scale": 10.0,
        "residual_scale": 0.22,
        "rope.freq_base": 1e7,
        "rope.scaling.finetuned": True,
        "ssm.inner_size": 5120,
    }
    for rotates in (True, False):
        metadata = {f"granite.{key}": value for key, value in fields.items()}
        metadata |= {"general.architecture": "granite", "granite.rope.scaling.finetuned": rotates}
        again = LlamaConfig.from_gguf(metadata, {}, {}, "bfloat16", "model.gguf")
        assert again.layers == tuple(
            dataclasses.replace(spec, rotates=rotates) for spec in config.layers
        )
        assert shared_arithmetic(again) == shared_arithmetic(config)
        assert (again.embedding_multiplier, again.logits_multiplier) == (12, 0.1)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_means_the_same_model(name):
    config, (family, fields) = LlamaConfig.from_dict(MODELS[name]), CONVERTED[name]
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    } | fields
    metadata = {"general.architecture": family} | {
        f"{family}.{key}": value for key, value in fields.items()
    }
    # The converter writes a llama3 rope as a tensor of divisors.
    plain = dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))
    ratios = rope.inverse_frequencies(plain)[0] / rope.inverse_frequencies(config)[0]
    divisors = {"": tuple(ratios)} if config.rope.type == "llama3" else {}
    again = LlamaConfig.from_gguf(metadata, {}, divisors, "bfloat16", "model.gguf")
    assert (again.architecture, again.layers) == (config.architecture, config.layers)
    assert shared_arithmetic(again) == shared_arithmetic(config)
    for table in range(len(config.ropes)):
        for frequencies, wanted in zip(
            rope.inverse_frequencies(again, table=table),
            rope.inverse_frequencies(config, table=table),
        ):
            np.testing.assert_allclose(frequencies, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            SMOLLM3 | {"no_rope_layers": [1, 0]},
            "no_rope_layers is .1, 0., expected a list of 36 numbers",
        ),
        (
            SMOLLM3 | {"no_rope_layer_interval": 0, "no_rope_layers": None},
            "no_rope_layer_interval is 0",
        ),
        (
            MODELS["EXAONE-4.0-32B"] | {"sliding_window_pattern": "LLLX"},
            "sliding_window_pattern is 'LLLX', expected a whole number",
        ),
        (GRANITE | {"logits_scaling": 0}, "logits_scaling is 0, expected a number above 0"),
        (GRANITE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1"),
        (PHI4 | {"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01"),
        (
            PHI4
            | {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
            "rope_scaling.short_factor is .*48 numbers above 0",
        ),
        (
            PHI4 | {"rope_scaling": {"type": "longrope", "short_factor": FACTORS["short_factor"]}},
            "long_factor is missing",
        ),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', expected one of"),
        (
            GEMMA2 | {"sliding_window": None},
            "sliding_window is None, expected a whole number from 1",
        ),
        (
            GEMMA2 | {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True, expected false",
        ),
        (
            GEMMA2 | {"layer_types": ["chunked_attention"] * 26},
            r"layer_types\[0\] is 'chunked_attention'",
        ),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "chunked": {}}},
            "rope_parameters.chunked",
        ),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "bert"}},
            "text_config.model_type is 'bert'",
        ),
        (
            {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"},
            "it needs two sizes of heads, keys that layers share .*: load Gemma 3, which runs",
        ),
        ({"model_type": "gemma3n"}, "it needs AltUp, laurel, .*: load Gemma 3, which runs"),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            "it needs layers with a recurrent state, .*: load Qwen3, which runs",
        ),
        ({"model_type": "lfm2_moe"}, "it needs layers with convolutions, .*: load SmolLM3"),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
            "Qwen2MoeForCausalLM",
        ),
        (
            MIXTRAL | {"num_experts_per_tok": 9},
            r"num_experts_per_tok is 9, expected at most num_local_experts \(8\)",
        ),
        (
            LLAMA4 | {"moe_layers": [0, 1, 3]},
            "moe_layers is .0, 1, 3., expected the numbers of every layer, every other",
        ),
        (
            LLAMA4 | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type is 'yarn', expected another type, since Llama4ForCausalLM norms",
        ),
        (
            MODELS["Hunyuan-7B-Instruct"] | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type is 'yarn', expected another type, since HunYuanDenseV1ForCausalLM norms",
        ),
        (
            MIXTRAL | {"num_local_experts": 0},
            "num_local_experts is 0, expected a whole number from 1 to 4096",
        ),
        (
            QWEN3_MOE | {"mlp_only_layers": [0, 1]},
            r"mlp_only_layers is .0, 1., expected \[\], since every layer is a mixture",
        ),
        (GPT_OSS | {"swiglu_limit": 9.0}, "swiglu_limit is 9.0, expected 7.0, since the constants"),
        (
            GPT_OSS | {"hidden_act": "gelu"},
            "hidden_act is 'gelu', expected \"silu\", since the gate",
        ),
        (GPT_OSS | {"layer_types": ["chunked_attention"] * 24}, r"layer_types\[0\] is 'chunked"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1"),
        (QWEN3_MOE | {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', expected true or false"),
        (
            MODELS["Seed-OSS-36B-Instruct"] | {"attention_out_bias": True},
            "attention_out_bias is True, expected false",
        ),
        (MODELS["ERNIE-4.5-0.3B-PT"] | {"use_bias": True}, "use_bias is True, expected false"),
        (
            MODELS["granite-4.0-micro"] | {"layer_types": [*["mamba"] * 39, "attention"]},
            r"layer_types\[0\] is 'mamba', expected 'attention', since layers with a recurrent",
        ),
        (MODELS["granite-4.0-micro"] | {"layer_types": None}, "layer_types.0. is 'mamba'"),
        (
            MODELS["granite-4.0-micro"] | {"num_local_experts": 62},
            "num_local_experts is 62, expected 0, since experts beside the shared one",
        ),
        (MODELS["Hunyuan-7B-Instruct"] | {"use_qk_norm": False}, "use_qk_norm is False"),
        (MODELS["Apertus-8B-Instruct-2509"] | {"rope_scaling": None}, "rope_scaling is None"),
        (MODELS["Apertus-8B-Instruct-2509"] | {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        (GRANITE | {"hidden_act": "xielu"}, "hidden_act is 'xielu', expected one of"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_a_bad_or_unsupported_field_is_named(fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LlamaConfig.from_dict(fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, needed", [("gemma4", "two sizes of heads"), ("qwen35", "recurrent state")]
)
def test_a_gguf_file_of_a_model_that_does_not_run_says_what_is_missing(name, needed):
    with pytest.raises(
        ConfigError, match=f"general.architecture is '{name}', .*{needed}"
    ) as caught:
        LlamaConfig.from_gguf({"general.architecture": name}, {}, {}, "float16", "model.gguf")
    assert "which runs" in str(caught.value) and "\n" not in str(caught.value)
