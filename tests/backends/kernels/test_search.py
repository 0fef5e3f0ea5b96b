"""Compiled searches of quantisers, against blocks recorded from llama.cpp, and against NumPy's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data.make_blocks import KINDS, WEIGHED, make_importance, make_weights

from cpu_fallback.kernels import VARIABLE
from mlx_llama.quantize.gguf_quantize import Search, quantize
from mlx_llama.quantize.search import CompiledSearch, find_search

RECORDED = Path(__file__).parents[2] / "data" / "gguf-blocks.npz"
CASES = [(kind, False) for kind in KINDS] + [(kind, True) for kind in WEIGHED]


@pytest.fixture(scope="module")
def search(target) -> Search:
    return CompiledSearch(target)


@pytest.mark.parametrize("kind, is_weighed", CASES)
def test_blocks_are_those_recorded_from_llama_cpp(kind, is_weighed, search):
    recorded = np.load(RECORDED)
    weights, importance = recorded["weights"], make_importance(0) if is_weighed else None
    wanted = recorded[f"{kind} weighed" if is_weighed else kind]
    assert np.array_equal(quantize(weights, kind, importance, search), wanted)
    # fewer groups than lanes
    assert np.array_equal(quantize(weights[:1], kind, importance, search), wanted[:1])


@pytest.mark.parametrize("kind, is_weighed", CASES)
@pytest.mark.parametrize("factor", [1, -1e-18, 1e12, 1e20])
def test_blocks_of_any_magnitude_are_those_of_numpy(factor, kind, is_weighed, search):
    weights = make_weights(2, seed=4) * np.float32(factor)
    importance = make_importance(2) if is_weighed else None
    blocks = quantize(weights, kind, importance, search)
    assert np.array_equal(blocks, quantize(weights, kind, importance))


def test_the_command_compiles_searches_if_it_can(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_search() != Search()
    monkeypatch.setenv(VARIABLE, "numpy")
    assert find_search() == Search()
