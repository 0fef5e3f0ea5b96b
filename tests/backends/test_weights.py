"""Weights keep their stored width in memory; widening is exact and blockwise."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from making import make_checkpoint

from backends.conftest import matrices_of
from cpu_fallback import ops, weights
from cpu_fallback.model import Llama
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import LoadOptions

STORED = {"float32": 4, "float16": 2, "bfloat16": 2}


def named_matrices(model) -> dict:
    """The CPU model's matrices by module name."""
    groups = (group for layer in model.config.layers for group in layer.linears())
    names = itertools.chain(*groups)
    named = dict(zip((*names, "lm_head"), matrices_of(model), strict=True))
    return named | {"model.embed_tokens": model.decoder.embedding.weight}


@pytest.mark.parametrize("dtype", STORED)
def test_the_cpu_copies_nothing_but_into_panels(dtype, tmp_path, monkeypatch):
    """NumPy's matrices are the file's pages; compiled, each has one copy in panels, at its stored
    width, with rows and columns padded to 16 and 32. The table of a large vocabulary is mapped."""
    checkpoint = open_checkpoint(
        make_checkpoint(tmp_path / "m", dtype=dtype, vocab_size=389, intermediate_size=100)
    )
    for name, part in named_matrices(Llama.load(checkpoint, LoadOptions(compile=False))).items():
        assert np.shares_memory(part, checkpoint.tensors[f"{name}.weight"].bits)
        assert not part.flags.writeable
    model = Llama.load(checkpoint)
    if "NumPy" in model.notices[0]:
        return  # it gives the reason
    named, stored = named_matrices(model), checkpoint.tensors["model.embed_tokens.weight"].bits
    table = named.pop("model.embed_tokens")  # small: copied, so that nothing stays mapped
    assert not np.shares_memory(table, stored) and np.array_equal(table, stored)
    monkeypatch.setattr(weights.facts, "SMALL_TABLE", stored.nbytes - 1)
    other = named_matrices(Llama.load(checkpoint))["model.embed_tokens"]
    assert np.shares_memory(other, stored)
    for name, panels in named.items():
        rows, columns = checkpoint.tensors[f"{name}.weight"].shape
        filled = -(-rows // 16) * 16 * -(-columns // 32) * 32
        assert panels.plan.tensor.name == f"{name}.weight" and panels.shape == (rows, columns)
        assert panels.nbytes == panels.array().nbytes == STORED[dtype] * filled


def test_widening_is_exact():
    torch = pytest.importorskip("torch")
    every = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    wanted = torch.from_numpy(every).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(ops.widen(every), wanted)
    wanted = torch.from_numpy(every).view(torch.float16).float().numpy()
    np.testing.assert_array_equal(ops.widen(every.view(np.float16)), wanted)
    finite = every.view(np.float16)[:, :][np.isfinite(every.view(np.float16))]
    np.testing.assert_array_equal(
        ops.widen(finite).view(np.int32), finite.astype(np.float32).view(np.int32)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_sixteen_bit_product_needs_no_widened_matrix(dtype, rows):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((3001, 1024), np.float32)
    weight = (
        wide.astype(np.float16)
        if dtype == "float16"
        else (wide.view(np.uint32) >> 16).astype(np.uint16)
    )
    x = rng.standard_normal((1, rows, 1024), np.float32)
    tracemalloc.start()
    got = ops.linear(x, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < weight.size * 4 / 8
    exact = x.astype(np.float64) @ ops.widen(weight).T.astype(np.float64)
    assert np.abs(got - exact).max() / np.abs(exact).max() < 1e-5
