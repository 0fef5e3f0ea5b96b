"""Angles of rotary position embeddings, computed in float64 for all backends.

Pair i of a head is rotated by position * frequency[i]. Element i is paired with element i +
head_dim/2, as in Hugging Face's checkpoints. Formulas follow transformers' modeling_rope_utils.py,
which computes them in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .config import LlamaConfig


def inverse_frequencies(
    config: LlamaConfig, seq_len: int | None = None, table: int = 0
) -> tuple[np.ndarray, float]:
    """The angle per position of every pair, in radians, float64 [rotary_dim / 2]; the factor on cos
    and sin, 1.0 except for types "yarn" (arXiv 2309.00071) and "longrope".

    seq_len: tokens in the sequence so far, new ones included, for type "dynamic"; the cache's
    capacity for type "longrope", which has one table for a context of the trained length and one
    for a longer one. table: of config.angles.
    """
    # Any: a RopeConfig has all parameters of its type, here and below.
    rope: Any = config.angles[table].rope
    dim = rope.dim or config.head_dim
    # NTK-aware scaling: the base grows with the sequence past the trained length
    if rope.type == "dynamic":
        trained = config.max_position_embeddings
        length = max(seq_len or trained, trained)
        stretch = (rope.factor * length / trained) - (rope.factor - 1)
        return plain_frequencies(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0
    frequencies = plain_frequencies(rope.theta, dim)
    if rope.divisors is not None:
        frequencies = frequencies / np.array(rope.divisors)
    if rope.type == "longrope":
        is_long = seq_len is not None and seq_len > rope.original_max_position_embeddings
        factors = np.array(rope.long_factor if is_long else rope.short_factor)
        return frequencies / factors, rope.attention_factor
    if rope.type == "proportional":
        frequencies[int(rope.share * dim / 2 + 1e-9) :] = 0
    if rope.type in ("linear", "proportional"):
        return frequencies / (rope.factor or 1), 1.0
    if rope.type == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.type == "yarn":
        return _yarn(frequencies, rope, dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def plain_frequencies(theta: float, dim: int) -> np.ndarray:
    """Frequencies of rope type "default", float64 [dim / 2], of `dim` rotated dimensions."""
    return theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def length_dependent(config: LlamaConfig) -> bool:
    """True if the frequencies change as the sequence grows (type "dynamic")."""
    return config.rope.type == "dynamic"


def max_context(config: LlamaConfig) -> int:
    """Maximum positions of a context. Types "dynamic" and "linear" multiply max_position_embeddings
    by the factor, since it may be the number before scaling.
    """
    is_stretched = config.rope.type in ("dynamic", "linear")
    factor = (config.rope.factor or 1) if is_stretched else 1
    return int(config.max_position_embeddings * factor)


def tables(
    config: LlamaConfig, positions_start: int, count: int, seq_len: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines for `count` positions from `positions_start` on, attention factor included:
    float32 [count, table_width], several tables side by side, of angles in float64.
    """
    positions = np.arange(positions_start, positions_start + count, dtype=np.float64)
    cosines, sines = [], []
    for number, table in enumerate(config.angles):
        frequencies, factor = inverse_frequencies(config, seq_len, number)
        angles = positions[:, None] * frequencies * table.turns
        parts = [(turn(angles) * factor).astype(np.float32) for turn in (np.cos, np.sin)]
        if table.scale:
            lengths = (positions + table.counts_own) // table.length
            factors = 1 + table.scale * np.log1p(lengths)[:, None]
            parts = [(part * factors).astype(np.float32) for part in parts]
        cosines.append(parts[0])
        sines.append(parts[1])
    return np.concatenate(cosines, axis=1), np.concatenate(sines, axis=1)


def _llama3(frequencies: np.ndarray, rope: Any) -> np.ndarray:
    """Divide low frequencies by the factor, keep high ones, blend those between (Llama 3.1)."""
    trained, low = rope.original_max_position_embeddings, rope.low_freq_factor
    high = rope.high_freq_factor
    turns = trained * frequencies / (2 * math.pi)  # within the trained context
    # Llama 4 Scout has low == high: none are blended.
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else 1.0 * (turns > low)
    return frequencies * (blend + (1.0 - blend) / rope.factor)


def _yarn(frequencies: np.ndarray, rope: Any, dim: int) -> np.ndarray:
    trained, fast, slow = rope.original_max_position_embeddings, rope.beta_fast, rope.beta_slow

    def find_pair(turns: float) -> float:
        """Index of the pair that makes this number of turns within the trained context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = find_pair(fast), find_pair(slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against a division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return frequencies * ((1.0 - ramp) + ramp / rope.factor)


def _yarn_attention_factor(rope: Any) -> float:
    factor = rope.factor

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
