"""Small models for the tests of the compiled path, and their answers."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from making import config_checkpoint, make_checkpoint
from making_gguf import make_gguf, random_blocks

from cpu_fallback.model import Llama
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import GatedDelta, Mixer
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
        num_hidden_layers=4,
        full_attn_idxs=[1],
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
    ),
    # the last layer's mixer is attention, or a gated delta rule
    "gated delta rules": dict(
        kinds="bfloat16", architectures=["Qwen3ForCausalLM"], num_hidden_layers=4, **SIX_HEADS
    ),
    "gated delta rules, 3 layers": dict(
        kinds="bfloat16", architectures=["Qwen3ForCausalLM"], num_hidden_layers=3, **SIX_HEADS
    ),
}
LENGTH = 37
TOKENS = np.random.default_rng(1).integers(0, 384, (3, LENGTH)).astype(np.int32)


@functools.cache
def files(case: str) -> Path:
    """Make the model's files; returns their path."""
    fields = dict((MODELS | HYBRIDS)[case])
    kinds = fields.pop("kinds")
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


class Gated(LlamaConfig):
    """Qwen3 with a gate of attention's output, and gated delta rules in place of its other layers'
    attention, of odd sizes.
    """

    def _mixer(self, i: int, layer: str) -> Mixer:
        if i % 2:
            return dataclasses.replace(super()._mixer(i, layer), gate=f"{layer}self_attn.gate")
        names = f"{layer}linear_attn."
        return GatedDelta(
            index=i,
            slot=0,
            into=tuple(f"{names}in_{name}" for name in ("qkv", "z", "b", "a")),
            conv=f"{names}conv1d",
            decay=f"{names}A_log",
            decay_bias=f"{names}dt_bias",
            norm=f"{names}norm",
            out=f"{names}out_proj",
            key_heads=2,
            value_heads=6,
            key_size=11,
            value_size=52,
            hidden=self.hidden_size,
            width=4,
            eps=self.rms_norm_eps,
        )


@functools.cache
def checkpoint(case: str) -> Checkpoint:
    stored = open_checkpoint(files(case))
    if not case.startswith("gated delta rules"):
        return stored
    config = Gated(
        **{
            field.name: getattr(stored.config, field.name)
            for field in dataclasses.fields(LlamaConfig)
        }
    )
    random, tensors = np.random.default_rng(5), {}
    for name, shape in config.tensor_shapes().items():
        numbers = random.normal(0, 1, shape).astype(np.float32)
        if len(shape) == 2:
            numbers /= shape[1] ** 0.5
        tensors[name] = 1 + numbers / 4 if name.endswith("norm.weight") else numbers
    return config_checkpoint(config, Path(tempfile.mkdtemp()), tensors, "bfloat16")


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
