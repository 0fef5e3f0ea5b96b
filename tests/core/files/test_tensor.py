"""Tensors: views of the file, and bfloat16 as torch rounds and widens it."""

import mmap
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
from making import make_checkpoint, to_bfloat16

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.tensor import NUMBERS, Tensor, encode

PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def test_every_bfloat16_widens_to_torchs_bits():
    """All 65536 patterns, NaN's payloads included."""
    tensor = Tensor("x", "bfloat16", PATTERNS.shape, PATTERNS)
    expected = torch.from_numpy(PATTERNS).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(tensor.float32().view(np.uint32), expected.view(np.uint32))
    assert tensor.array.dtype == ml_dtypes.bfloat16 and np.shares_memory(tensor.array, PATTERNS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_16_bits_is_torchs(dtype):
    """Nearest even: random bit patterns, both neighbours of every tie, subnormal and infinite
    numbers; NaN stays NaN.
    """
    width = 16 if dtype == "bfloat16" else 13  # bits that are rounded away
    grid = np.arange(0, 1 << 32, 1 << width, np.uint32)
    half = np.uint32(1 << (width - 1))
    random = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)
    ties = grid + half
    values = np.concatenate([random, grid, ties - np.uint32(1), ties, ties + np.uint32(1)]).view(
        np.float32
    )
    with np.errstate(all="raise"):
        rounded = encode(values, dtype)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    nan = np.isnan(values)
    assert nan.sum() > 1000 and np.isinf(values).sum() == 2 and rounded.dtype == NUMBERS[dtype]
    np.testing.assert_array_equal(
        rounded.view(np.uint16)[~nan], expected.view(torch.uint16).numpy()[~nan]
    )
    assert np.isnan(rounded[nan].astype(np.float32)).all()
    if dtype == "bfloat16":
        np.testing.assert_array_equal(to_bfloat16(values[~nan]), rounded.view(np.uint16)[~nan])


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("order", [None, np.array([2, 0, 1])], ids=["misaligned", "permuted"])
def test_a_copied_tensor_is_its_view_in_another_order(order, dtype):
    bits = np.arange(12, dtype=np.uint16 if dtype == "bfloat16" else dtype).reshape(3, 4)
    view = Tensor("x", dtype, (3, 4), bits)
    raw = np.frombuffer(b" " + bits.tobytes(), np.uint8)[1:]
    shifted = np.ndarray((3, 4), bits.dtype, raw)
    copied = Tensor("x", dtype, (3, 4), shifted if order is None else bits, order=order)
    expected = view.float32() if order is None else view.float32()[order]
    np.testing.assert_array_equal(copied.float32(), expected)
    assert copied.array.dtype == NUMBERS[dtype] and copied.nbytes == bits.nbytes
    assert not copied.bits.flags.writeable and not np.shares_memory(copied.bits, bits)


def test_bits_are_the_files_pages_and_read_only(tmp_path):
    opened = open_checkpoint(make_checkpoint(tmp_path / "m", dtype="bfloat16"))
    for tensor in opened.tensors.values():
        assert not tensor.bits.flags.writeable and not tensor.bits.flags.owndata
        root = tensor.bits
        while isinstance(root.base, np.ndarray):
            root = root.base
        base = root.base.obj if isinstance(root.base, memoryview) else root.base
        assert isinstance(base, mmap.mmap)
        with pytest.raises(ValueError):
            tensor.bits[...] = 0


def test_a_view_outlives_everything_else(tmp_path):
    opened = open_checkpoint(make_checkpoint(tmp_path / "m"))
    tensor = opened.tensors["model.norm.weight"]
    expected, bits = tensor.float32(), tensor.bits
    del opened, tensor
    shutil.rmtree(tmp_path / "m")
    np.testing.assert_array_equal(bits, expected)
