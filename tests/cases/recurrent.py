"""Mixers with a recurrent state, of any sizes."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
from making import config_checkpoint, config_fields

from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import GatedDelta, ShortConv


def delta(
    groups: int, heads: int, key: int, value: int, width: int = 4, hidden: int = 36
) -> GatedDelta:
    """Of layer 0. groups: of keys; heads: of values; key, value: their sizes."""
    name = "model.layers.0.linear_attn."
    return GatedDelta(
        index=0,
        slot=0,
        into=tuple(f"{name}in_{part}" for part in ("qkv", "z", "b", "a")),
        conv=f"{name}conv",
        decay=f"{name}A_log",
        decay_bias=f"{name}dt_bias",
        norm=f"{name}norm",
        out=f"{name}out",
        key_heads=groups,
        value_heads=heads,
        key_size=key,
        value_size=value,
        hidden=hidden,
        width=width,
        eps=1e-6,
    )


def conv(size: int, width: int = 3, has_bias: bool = False) -> ShortConv:
    """Of layer 1."""
    name = "model.layers.1.conv."
    parts = (f"{name}in_proj", f"{name}conv", f"{name}out_proj")
    return ShortConv(1, 0, *parts, size, width, has_bias)


def make_hybrid(dtype: str = "float32") -> Checkpoint:
    """A model of three layers: the gated delta rule, a short convolution, attention."""
    fields = dict(hidden_size=36, num_attention_heads=3, num_key_value_heads=1, head_dim=12)
    fields |= dict(vocab_size=67, num_hidden_layers=3, intermediate_size=40)
    config = LlamaConfig.from_dict(config_fields(max_position_embeddings=1024, **fields))
    mixers = (
        delta(1, 2, 8, 12),
        dataclasses.replace(conv(36, has_bias=True), slot=1),
        dataclasses.replace(config.attentions[2], slot=0),
    )
    layers = tuple(
        map(lambda layer, mixer: dataclasses.replace(layer, mixer=mixer), config.layers, mixers)
    )
    # No family has them all: in place of what these properties would compute
    vars(config).update(layers=layers, attentions=mixers[2:])
    rng = np.random.default_rng(0)
    tensors = {
        name: (0.3 * rng.standard_normal(shape) + ("norm" in name)).astype(np.float32)
        for name, shape in config.tensor_shapes().items()
    }
    return config_checkpoint(config, Path(tempfile.mkdtemp()), tensors, dtype)
