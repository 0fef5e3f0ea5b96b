"""Rows of a low-bit embedding have the bits of the reference dequantiser, and of NumPy's."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from making_gguf import LOW_BIT

from backends.kernels.calls import Library
from backends.kernels.models import TOKENS, model
from backends.kernels.weights import TARGETS, random_matrix
from cpu_fallback.kernels import panels
from cpu_fallback.kernels.target import build_target

COLUMNS = 512


@functools.cache
def library(name: str) -> Library:
    tensors = [random_matrix(kind, 1, np.random.default_rng(0), COLUMNS).tensor for kind in LOW_BIT]
    return Library(
        build_target(name),
        [("embed", panels.weight_layout(tensor), tensor.format) for tensor in tensors],
    )


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", LOW_BIT)
def test_rows_are_dequantised(name, kind):
    matrix = random_matrix(kind, 40, np.random.default_rng(2), COLUMNS)
    for ids in ([7], [39, 0, 0], list(range(20, 36))):
        got = library(name).embed(matrix.tensor, np.array(ids))
        np.testing.assert_array_equal(got, matrix.exact[ids].astype(np.float32))
        np.testing.assert_array_equal(
            got.view(np.int32), matrix.tensor.take(np.array(ids)).view(np.int32)
        )


@pytest.mark.parametrize(
    "case,is_compiled",
    [("Q4_K_M", True), ("Q8_0 tied", True), ("many formats", True), ("head 36", False)],
)
@pytest.mark.parametrize("count", [1, 16, 37])
def test_the_stream_begins_with_the_tokens_embeddings(case, is_compiled, count):
    llama = model(case)
    runner, tokens = llama.runner, TOKENS[0, :count]
    assert bool(runner.code.embed) == is_compiled
    stream = runner.workspace.hidden.array
    stream[...] = np.nan
    runner.embed(tokens)
    np.testing.assert_array_equal(
        stream[:count, : llama.config.hidden_size], llama.decoder.embedding(tokens[None])[0]
    )
    assert np.isnan(stream[count:]).all() and np.isnan(stream[:, llama.config.hidden_size :]).all()
    stream[...] = 0
