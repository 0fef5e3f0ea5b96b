"""Blocks that we quantise, against recorded blocks of llama.cpp and its quantiser here; gguf's
dequantiser reads both.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from data.make_blocks import KINDS, WEIGHED, make_importance, make_weights, quantize_by_llama_cpp

from mlx_llama.core.files.quantized import GGUF_FORMATS
from mlx_llama.quantize.gguf_quantize import quantize

DATA = Path(__file__).parents[1] / "data"


def error(blocks: np.ndarray, weights: np.ndarray, kind: str) -> np.ndarray:
    """Mean squared error of each row, after gguf's own dequantiser."""
    return ((gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]) - weights) ** 2).mean(
        1, dtype=np.float64
    )


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_recorded_from_llama_cpp(kind):
    recorded = np.load(DATA / "gguf-blocks.npz")
    weights = recorded["weights"]
    assert np.array_equal(quantize(weights, kind), recorded[kind])
    # no sum depends on how many rows there are
    assert np.array_equal(quantize(weights[:1], kind), recorded[kind][:1])
    assert np.array_equal(quantize(np.asfortranarray(weights), kind), recorded[kind])
    # several parts, the last of them shorter
    many = 1 + 2 * 65536 // weights.size + 1
    assert np.array_equal(
        quantize(np.tile(weights, (many, 1)), kind), np.tile(recorded[kind], (many, 1))
    )


@pytest.mark.parametrize("kind", WEIGHED)
def test_blocks_with_an_importance_are_those_recorded_from_llama_cpp(kind):
    recorded = np.load(DATA / "gguf-blocks.npz")
    weights, importance = recorded["weights"], make_importance(0)
    assert np.array_equal(quantize(weights, kind, importance), recorded[f"{kind} weighed"])
    assert np.array_equal(quantize(weights[:1], kind, importance), recorded[f"{kind} weighed"][:1])


@pytest.mark.parametrize("kind", WEIGHED)
def test_an_importance_lowers_the_error_that_it_weighs(kind):
    weights, importance = make_weights(32, seed=3)[:32], make_importance(1)
    number = gguf.GGMLQuantizationType[kind]
    plain, weighed = (
        (importance * (gguf.quants.dequantize(blocks, number) - weights) ** 2).sum()
        for blocks in (quantize(weights, kind), quantize(weights, kind, importance))
    )
    assert weighed < 0.97 * plain


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_llama_cpp_here(kind):
    """Equal, or where its compiler fused multiply-adds, of the same error."""
    pytest.importorskip(
        "llama_cpp", reason='llama.cpp is the judge here: pip install -e ".[peers]"'
    )
    weights = make_weights(16, seed=1)
    ours, theirs = quantize(weights, kind), quantize_by_llama_cpp(weights, kind)
    assert (ours == theirs).mean() > 0.9
    for rows in np.split(np.arange(len(weights)), 7):
        np.testing.assert_allclose(
            *(error(blocks[rows], weights[rows], kind).mean() for blocks in (ours, theirs)),
            rtol=0.01,
        )


@pytest.mark.parametrize("kind", [*KINDS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_scales_of_large_weights_are_infinite(kind):
    layout = GGUF_FORMATS[kind]
    blocks = quantize(np.full((1, layout.block_size), 3e9, np.float32), kind)
    with np.errstate(all="ignore"):
        scaling = layout.scaling(blocks).values()
    assert not all(np.isfinite(values).all() for values in scaling)


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_have_less_error(kind):
    weights = make_weights(4, seed=2)[:4]
    # Q6_K: scales of -128 and 128, which is one too many
    weights[0] = np.where(np.arange(256) < 16, 1, -1)
    relative = np.sqrt(error(quantize(weights, kind), weights, kind) / (weights**2).mean(1))
    bits = {"Q6_K": 6, "Q5_K": 5, "Q3_K": 3}.get(kind, 4)
    assert (relative < 1.3 * 2.0**-bits).all()
