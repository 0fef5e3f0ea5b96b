"""Models whose step MLX traces."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from making import make_checkpoint
from making_gguf import make_gguf

pytest.importorskip("mlx.core")

from mlx_llama.mlx_native.kernels.view import StepView

MODELS = {
    "float32": dict(),
    "bfloat16": dict(dtype="bfloat16"),
    "sliding": dict(architectures=["MistralForCausalLM"], sliding_window=7),
    "biases": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": dict(
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], head_dim=24, rms_norm_eps=1e-6),
    "LFM2": dict(
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
    ),
    "Qwen3.5": dict(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        layer_types=["linear_attention", "full_attention"],
        head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=10,
        linear_value_head_dim=14,
    ),
    # low-bit: groups with a kernel of MLX, groups of 16 by two products, and both in one matrix
    "Q4_0": dict(kinds="Q4_0"),
    "mixed": dict(
        kinds=lambda name: {"q_proj": "Q6_K", "down_proj": "Q6_K"}.get(name.split(".")[-2], "Q4_K")
    ),
}


def make_toy(length: int, fields: dict) -> Path:
    """A model for `length` positions: a folder, or with `kinds` a GGUF file of width 256."""
    path = Path(tempfile.mkdtemp()) / ("toy.gguf" if "kinds" in fields else "toy")
    if "kinds" not in fields:
        return make_checkpoint(path, max_position_embeddings=length, **fields)
    wide = dict(hidden_size=256, intermediate_size=512, max_position_embeddings=length)
    make_gguf(path, tokenizer=None, **wide, **fields)
    return path


def traces(monkeypatch) -> list:
    """A pair (slots, positions of their buffer) for each time that a step is traced or, untraced,
    run.
    """
    seen, original = [], StepView.__init__

    def counting(self, packing, token, position, tokens, *rest):
        seen.append(tokens.shape)
        original(self, packing, token, position, tokens, *rest)

    monkeypatch.setattr(StepView, "__init__", counting)
    return seen
