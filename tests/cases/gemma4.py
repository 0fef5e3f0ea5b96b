"""A small Gemma 4."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from making import config_checkpoint, config_fields

from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models.config import LlamaConfig


def make_gemma4(dtype: str = "float32", **fields: Any) -> Checkpoint:
    """Three layers: with a window; without, whose values are keys; one that reads the keys and
    values of that. fields: of its config.json.
    """
    sizes: dict[str, Any] = dict(vocab_size=67, vocab_size_per_layer_input=67)
    sizes |= dict(hidden_size=36, intermediate_size=40, hidden_size_per_layer_input=12)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2, num_global_key_value_heads=1)
    sizes |= dict(head_dim=20, global_head_dim=40, max_position_embeddings=512)
    config = LlamaConfig.from_dict(
        config_fields(
            architectures=["Gemma4ForCausalLM"],
            model_type="gemma4_text",
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            num_kv_shared_layers=1,
            sliding_window=11,
            attention_k_eq_v=True,
            use_double_wide_mlp=True,
            final_logit_softcapping=3.0,
            **sizes,
        )
        | fields
    )
    rng = np.random.default_rng(0)
    tensors = {
        name: (0.2 * rng.standard_normal(shape) + ("norm" in name)).astype(np.float32)
        for name, shape in config.tensor_shapes().items()
    }
    tensors |= {name: tensors[name] + 1 for name in tensors if name.endswith("scalar")}
    return config_checkpoint(config, Path(tempfile.mkdtemp()), tensors, dtype)
