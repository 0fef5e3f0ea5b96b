"""Parts of stored tensors have the numbers of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from making import make_checkpoint
from making_gguf import LOW_BIT, make_gguf

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.mlx_folder import write_mlx

LAYER = "model.layers.0."
MATRICES = (
    LAYER + "self_attn.q_proj.weight",
    LAYER + "self_attn.k_proj.weight",
    LAYER + "mlp.down_proj.weight",
)


def check(checkpoint) -> None:
    for name in MATRICES:
        whole = checkpoint.tensors[name]
        wanted, (rows, columns), unit = whole.float32(), whole.shape, whole.column_unit
        half, cut = rows // 2, columns // unit // 2 * unit
        nbytes = 0
        for span in ((0, half), (half, rows)):
            part = whole.part(name, *span)
            assert part.shape == (span[1] - span[0], columns) and np.array_equal(
                part.float32(), wanted[slice(*span)]
            ), name
            nbytes += part.nbytes
            part.release()
            assert np.array_equal(part.float32(), wanted[slice(*span)]), (
                "after its pages were released"
            )
        assert nbytes == whole.nbytes
        for span in ((0, cut), (cut, columns)) if cut else ():
            part = whole.columns(*span)
            assert part.shape == (rows, span[1] - span[0])
            assert np.array_equal(part.float32(), wanted[:, slice(*span)]), name
            assert part.nbytes * columns == whole.nbytes * (span[1] - span[0])
        both = whole.part(name, half, rows).columns(0, cut) if cut else None
        assert both is None or np.array_equal(both.float32(), wanted[half:, :cut])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense(dtype, tmp_path):
    checkpoint = open_checkpoint(
        make_checkpoint(tmp_path / "toy", dtype=dtype, attention_bias=True)
    )
    check(checkpoint)
    bias = checkpoint.tensors[LAYER + "self_attn.q_proj.bias"]
    assert np.array_equal(bias.part("bias", 16, 48).float32(), bias.float32()[16:48])


@pytest.mark.parametrize("kind", ["F32", "F16", *LOW_BIT])
def test_gguf_whose_query_rows_are_permuted(kind, tmp_path):
    make_gguf(
        tmp_path / "toy.gguf",
        kinds=kind,
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_size=512,
        intermediate_size=512,
    )
    check(open_checkpoint(tmp_path / "toy.gguf"))


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_mlx(bits, tmp_path):
    folder = make_checkpoint(tmp_path / "toy", intermediate_size=128)
    write_mlx(open_checkpoint(folder), tmp_path / "low", bits=bits, group_size=32)
    check(open_checkpoint(tmp_path / "low"))


def test_nothing_is_read(tmp_path):
    """Taking a part touches no numbers."""
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "toy"))
    weight = checkpoint.tensors[MATRICES[2]]
    part = weight.columns(0, 32)
    assert np.shares_memory(part.bits, weight.bits)
