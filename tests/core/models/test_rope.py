"""Rope frequencies of every type against transformers' own formulas."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from making import config_fields
from transformers import LlamaConfig as TheirConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.rope import inverse_frequencies, length_dependent, tables

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def scaled(kind, factor=None, original=None, **more):
    """A field rope_scaling."""
    if original:
        more["original_max_position_embeddings"] = original
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **more}}


MSCALE = dict(mscale=1.0, mscale_all_dim=0.7, beta_fast=16, beta_slow=2)
VARIANTS = {
    "default": {},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
    "llama3": scaled("llama3", original=8192, **LLAMA3) | {"rope_theta": 5e5},
    "llama3-short": scaled("llama3", original=64, **LLAMA3),
    "llama3-no-original": scaled("llama3", **LLAMA3),
    "yarn": scaled("yarn", 4.0, 64),
    "yarn-old-key": {
        "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    },
    "yarn-no-original": scaled("yarn", 4.0),
    "yarn-null-factor": scaled("yarn", None, 64),
    "yarn-factor": scaled("yarn", 4.0, 2048, attention_factor=0.75),
    "yarn-mscale": scaled("yarn", 40.0, 4096, **MSCALE),
    "yarn-mscale-alone": scaled("yarn", 40.0, 512, mscale=2.0),
    "yarn-untruncated": scaled("yarn", 4.0, 2048, truncate=False),
    "yarn-outer-original": scaled("yarn", 4.0, 64) | {"original_max_position_embeddings": 1024},
}


def both(variant: str, **fields):
    raw = config_fields(**{"head_dim": 64, **VARIANTS[variant], **fields})
    return LlamaConfig.from_dict(raw), TheirConfig(**json.loads(json.dumps(raw)))


def judge(theirs: TheirConfig, seq_len: int | None = None) -> tuple[np.ndarray, float]:
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            theirs, torch.device("cpu"), seq_len=seq_len
        )
    return frequencies.numpy(), float(factor)


@pytest.mark.parametrize("head_dim", [4, 64, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_and_factor(variant, head_dim):
    ours, theirs = both(variant, head_dim=head_dim)
    frequencies, factor = inverse_frequencies(ours)
    expected, expected_factor = judge(theirs)
    assert frequencies.dtype == np.float64 and frequencies.shape == (head_dim // 2,)
    # theirs are float32, with float32's rounding in every step
    np.testing.assert_allclose(frequencies, expected, rtol=2e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("seq_len", [None, 1, 63, 64, 65, 100, 640])
def test_dynamic_follows_the_length(seq_len):
    ours, theirs = both("dynamic")
    frequencies, _ = inverse_frequencies(ours, seq_len)
    np.testing.assert_allclose(frequencies, judge(theirs, seq_len)[0], rtol=2e-6)
    same = np.array_equal(frequencies, inverse_frequencies(ours, None)[0])
    assert same == (seq_len is None or seq_len <= 64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_dynamic_depends_on_the_length(variant):
    ours, _ = both(variant)
    changes = not np.array_equal(
        inverse_frequencies(ours, 1)[0], inverse_frequencies(ours, 10**6)[0]
    )
    assert length_dependent(ours) == changes == (variant == "dynamic")


@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_are_transformers_cos_and_sin(variant):
    ours, theirs = both(variant)
    cos, sin = tables(ours, 5, 40, seq_len=45)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (40, 32)
    x, positions = torch.zeros(1, 1, dtype=torch.float32), torch.arange(5, 45)[None]
    their_cos, their_sin = LlamaRotaryEmbedding(theirs)(x, positions)
    np.testing.assert_allclose(cos, their_cos[0, :, :32].numpy(), atol=3e-5)
    np.testing.assert_allclose(sin, their_sin[0, :, :32].numpy(), atol=3e-5)


def test_far_positions_stay_exact():
    ours, _ = both("default")
    cos, sin = tables(ours, 10**6, 1)
    # pair 0 turns by exactly one radian per position
    assert cos[0, 0] == np.float32(math.cos(10**6)) and sin[0, 0] == np.float32(math.sin(10**6))
    assert Fraction(inverse_frequencies(ours)[0][0]) == 1
