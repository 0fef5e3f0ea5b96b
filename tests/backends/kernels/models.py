"""Small models for the tests of the compiled path, and their answers."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from making import config_fields, make_checkpoint
from making_gguf import make_gguf, random_blocks

from cpu_fallback.model import Llama
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.options import LoadOptions

WIDE = dict(hidden_size=256, intermediate_size=512)
SIX_HEADS = dict(hidden_size=72, num_attention_heads=6, num_key_value_heads=3, head_dim=20)
# fields of config.json; kinds: the matrices' dtype or GGUF type, or types by module
MODELS: dict[str, dict] = {
    "odd widths": dict(
        kinds="float32",
        hidden_size=40,
        intermediate_size=100,
        num_attention_heads=5,
        num_key_value_heads=1,
        vocab_size=1003,
    ),
    "head 20": dict(kinds="bfloat16", **SIX_HEADS, tie_word_embeddings=True),
    "head 36": dict(
        kinds="float16",
        hidden_size=72,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=36,
        attention_bias=True,
        mlp_bias=True,
    ),
    "head 80, a window": dict(
        kinds="float32",
        architectures=["MistralForCausalLM"],
        hidden_size=64,
        head_dim=80,
        sliding_window=7,
    ),
    "head 128, dynamic rope": dict(
        kinds="float32",
        head_dim=128,
        rope_scaling=dict(rope_type="dynamic", factor=4.0),
        max_position_embeddings=16,
    ),
    "Q4_K_M": dict(
        kinds={"default": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"}, **WIDE
    ),
    "many formats": dict(
        kinds={
            "default": "Q5_0",
            "k_proj": "Q8_0",
            "v_proj": "F16",
            "o_proj": "IQ4_NL",
            "gate_proj": "Q4_1",
            "up_proj": "F32",
            "lm_head": "BF16",
        },
        num_attention_heads=8,
        num_key_value_heads=1,
        **WIDE,
    ),
    "qwen3, head 20": dict(kinds="bfloat16", architectures=["Qwen3ForCausalLM"], **SIX_HEADS),
    "qwen3, head 64": dict(kinds="float32", architectures=["Qwen3ForCausalLM"], head_dim=64),
    "Q8_0 tied": dict(kinds="Q8_0", tie_word_embeddings=True, vocab_size=384, **WIDE),
}
DELTAS = dict(
    kinds="bfloat16",
    architectures=["Qwen3_5ForCausalLM"],
    model_type="qwen3_5_text",
    partial_rotary_factor=0.4,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=11,
    linear_value_head_dim=52,
    **SIX_HEADS,
)
# Models with recurrent states
HYBRIDS: dict[str, dict] = {
    "short convolutions": dict(
        kinds="float32",
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        hidden_size=40,
        intermediate_size=100,
        num_attention_heads=5,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
    ),
    # the last layer's mixer is attention, or a gated delta rule
    "gated delta rules": dict(DELTAS, layer_types=["linear_attention", "full_attention"] * 2),
    "gated delta rules, tiled": dict(
        DELTAS, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
}
LENGTH = 37
TOKENS = np.random.default_rng(1).integers(0, 384, (3, LENGTH)).astype(np.int32)


@functools.cache
def files(case: str) -> Path:
    """Make the model's files; returns their path."""
    fields = dict((MODELS | HYBRIDS)[case])
    kinds = fields.pop("kinds")
    if case in HYBRIDS:
        fields |= dict(num_hidden_layers=len(fields["layer_types"]), tensors={})
        config, random = LlamaConfig.from_dict(config_fields(**fields)), np.random.default_rng(0)
        for name, shape in config.stored_shapes().items():  # as transformers reads them
            numbers = random.normal("norm" in name, 0.1, shape)
            fields["tensors"][name] = numbers.astype(np.float32)
    home = Path(tempfile.mkdtemp())
    if isinstance(kinds, str) and kinds.startswith(("float", "bfloat")):
        return make_checkpoint(home / "model", dtype=kinds, tokenizer=False, **fields)
    by_name = kinds if isinstance(kinds, dict) else {"default": kinds}
    with mock.patch("making_gguf.random_blocks", centred_blocks):
        make_gguf(
            home / "model.gguf",
            kinds=lambda name: by_name.get(name.split(".")[-2], by_name["default"]),
            **fields,
        )
    return home / "model.gguf"


def centred_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Random weights with mean 0, as a model's: with another, rounding errors would grow from layer
    to layer.
    """
    blocks = random_blocks(kind, rows, columns, rng)
    if kind == "Q4_K":  # dmin, 7.5 times d
        scales = blocks.reshape(-1, 144)[:, :4].copy().view(np.float16)
        scales[:, 1] = 7.5 * scales[:, 0]
        blocks.reshape(-1, 144)[:, :4] = scales.view(np.uint8)
    return blocks


@functools.cache
def checkpoint(case: str) -> Checkpoint:
    stored = open_checkpoint(files(case))
    if case != "gated delta rules, tiled":
        return stored
    config = dataclasses.replace(stored.config, own={**stored.config.own, "tiled": True})
    return dataclasses.replace(stored, config=config)


def load(case: str, dtype: str = "float32", **options) -> Llama:
    return Llama.load(checkpoint(case), LoadOptions(dtype=dtype, **options))


@functools.cache
def model(case: str, threads: int = 1, activation_bits: int = 32) -> Llama:
    return load(
        case,
        "float32" if activation_bits == 32 else "auto",
        threads=threads,
        activation_bits=activation_bits,
    )


@functools.cache
def plain(case: str) -> Llama:
    """The model on NumPy arrays."""
    return load(case, compile=False)


def answer(
    llama: Llama,
    tokens: np.ndarray = TOKENS,
    cuts: tuple[int, ...] = (),
    all_positions: bool = True,
    capacity: int | None = None,
    probe=None,
):
    """(logits float32 [B, T, V], computed in pieces that end at `cuts`, cache)."""
    cache = llama.make_cache(capacity or tokens.shape[1], len(tokens))
    parts, begin = [], 0
    for end in (*cuts, tokens.shape[1]):
        logits = llama.forward(
            tokens[:, begin:end], begin, cache, all_positions=all_positions, probe=probe
        )
        parts.append(logits if all_positions else logits[:, None])
        begin = end
    return np.concatenate(parts, axis=1), cache
