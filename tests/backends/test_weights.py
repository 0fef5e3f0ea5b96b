"""Weights keep their stored width in memory; widening is exact and blockwise."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from cpu_fallback import ops
from making import make_checkpoint
from mlx_llama.core.checkpoint import open_checkpoint


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_keep_their_width(dtype, backend, tmp_path):
    model = backend.load(open_checkpoint(make_checkpoint(tmp_path / "m", dtype=dtype)), "auto")
    stored = {"float32": 4, "float16": 2, "bfloat16": 2}[dtype]
    for block in model.blocks:
        for layer in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
            assert layer.weight.nbytes == stored * np.prod(tuple(layer.weight.shape))
    assert model.embedding.weight.nbytes == stored * 384 * 64


def test_widening_is_exact():
    torch = pytest.importorskip("torch")
    every = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    wanted = torch.from_numpy(every).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(ops.widen(every), wanted)
    wanted = torch.from_numpy(every).view(torch.float16).float().numpy()
    np.testing.assert_array_equal(ops.widen(every.view(np.float16)), wanted)
    finite = every.view(np.float16)[:, :][np.isfinite(every.view(np.float16))]
    np.testing.assert_array_equal(ops.widen(finite).view(np.int32), finite.astype(np.float32).view(np.int32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_sixteen_bit_product_needs_no_widened_matrix(dtype, rows):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((3001, 1024), np.float32)
    weight = wide.astype(np.float16) if dtype == "float16" else (wide.view(np.uint32) >> 16).astype(np.uint16)
    x = rng.standard_normal((1, rows, 1024), np.float32)
    tracemalloc.start()
    got = ops.linear(x, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < weight.size * 4 / 8
    exact = x.astype(np.float64) @ ops.widen(weight).T.astype(np.float64)
    assert np.abs(got - exact).max() / np.abs(exact).max() < 1e-5
