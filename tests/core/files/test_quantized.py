"""Low-bit matrices against gguf's reference dequantiser and mx.dequantize, bit for bit."""

import itertools

import gguf
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from making_gguf import HALVES, LOW_BIT, dequantise, random_blocks

from mlx_llama.core.files.quantized import (
    GGUF_FORMATS,
    AffineWeight,
    FloatWeight,
    GGUFWeight,
    MLXWeight,
    Rows,
)
from mlx_llama.core.models.quantization import FLOAT_MODES

# zeros of both signs, the smallest and the largest subnormal, the smallest normal, ordinary ones,
# the largest of float16
EXTREME = np.array([0.0, -0.0, 6e-8, -6.1e-5, 6.1e-5, -1.0, 0.3333, 65504.0, -65504.0], np.float16)
MLX_BITS, MLX_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
MLX_DTYPES = ("float32", "float16", "bfloat16")


def gguf_weight(kind: str, blocks: np.ndarray, order: np.ndarray | None = None) -> GGUFWeight:
    weights, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    shape = (len(blocks), blocks.shape[1] // nbytes * weights)
    return GGUFWeight("a.weight", kind, shape, blocks, order)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal, the sign of zero included; any NaN equals any NaN."""
    assert ours.dtype == theirs.dtype == np.float32 and ours.shape == theirs.shape
    differ = (ours.view(np.uint32) != theirs.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(theirs))
    assert not differ.any(), (int(differ.sum()), ours[differ][:4], theirs[differ][:4])


def check_rows(weight: AffineWeight, rows: Rows, expected: np.ndarray) -> None:
    """Check shapes, dtypes and ranges of `Rows` against the weight's fields."""
    n, k = expected.shape
    assert rows.codes.dtype == np.uint8 and rows.codes.shape == (n, k)
    assert rows.codes.flags.c_contiguous
    assert int(rows.codes.max()) < 1 << weight.bits
    assert rows.offset == weight.offset and (rows.offset == 0 or rows.offset in (4, 8, 16, 32, 128))
    groups = (n, k // weight.group_size)
    assert rows.scales.dtype == np.float32 and rows.scales.shape == groups
    assert (rows.biases is not None) == weight.has_biases
    w = rows.codes.reshape(*groups, -1).astype(np.float32) - np.float32(rows.offset)
    with np.errstate(all="ignore"):
        w = rows.scales[..., None] * w
        if weight.has_biases:
            assert rows.biases.dtype == np.float32 and rows.biases.shape == groups
            w = w + rows.biases[..., None]
    assert_same_bits(w.reshape(n, k), expected)
    assert_same_bits(rows.float32(), expected)
    levels = (rows.super_scales, rows.sub_scales, rows.super_biases, rows.sub_biases)
    if not weight.two_level:
        assert levels == (None,) * 4
        return
    for above, below, product, kind in (
        (*levels[:2], rows.scales, np.int8),
        (*levels[2:], rows.biases, np.uint8),
    ):
        if product is None:
            assert above is None and below is None
            continue
        assert above.dtype == np.float16 and above.shape == (n, k // 256)
        assert below.dtype == kind and below.shape == groups
        with np.errstate(all="ignore"):
            formed = np.repeat(above.astype(np.float32), 256 // weight.group_size, axis=1) * below
        assert_same_bits(formed, product)


def test_every_type_of_the_reader_is_tested():
    assert set(GGUF_FORMATS) == set(LOW_BIT)
    for kind, layout in GGUF_FORMATS.items():
        assert (layout.block_size, layout.nbytes) == gguf.GGML_QUANT_SIZES[Type[kind]]


@pytest.mark.parametrize("kind", LOW_BIT)
def test_random_blocks(kind):
    """As the file has them and in another order: whole, in slabs, and row by row."""
    rng = np.random.default_rng(1)
    blocks, order = random_blocks(kind, 37, 768, rng), rng.permutation(37)
    decoded, ids = dequantise(blocks, kind), np.array([3, 36, 3, 0])
    for weight, expected in (
        (gguf_weight(kind, blocks), decoded),
        (gguf_weight(kind, blocks, order), decoded[order]),
    ):
        assert weight.shape == expected.shape and weight.nbytes == blocks.nbytes
        assert weight.format == kind and weight.dtype == "float16"
        wide = {"Q8_K": "float32", "MXFP4": "bfloat16", "NVFP4": "bfloat16"}
        assert weight.scale_dtype == wide.get(kind, "float16")
        assert_same_bits(weight.float32(), expected)
        check_rows(weight, weight.rows(0, 37), expected)
        for start, stop in ((0, 1), (5, 21), (36, 37), (7, 7)):
            assert_same_bits(weight.rows(start, stop).float32(), expected[start:stop])
        assert_same_bits(weight.take(ids), expected[ids])
        assert_same_bits(weight.take(ids[:0]), expected[:0])


@pytest.mark.parametrize("kind", LOW_BIT)
def test_any_bytes(kind):
    """Infinite scales and NaN give the reference's bits too."""
    shape = 64, GGUF_FORMATS[kind].nbytes * 8
    blocks = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantise(blocks, kind)
    assert_same_bits(gguf_weight(kind, blocks).float32(), expected)


@pytest.mark.parametrize("kind", LOW_BIT)
def test_extreme_blocks(kind):
    """Every pair of extreme scales with codes and sub scales all 0, all 1 and random."""
    nbytes = GGUF_FORMATS[kind].nbytes
    rng = np.random.default_rng(3)
    blocks = []
    for scales in itertools.product(EXTREME, repeat=2):
        for fill in (np.zeros(nbytes), np.full(nbytes, 255), rng.integers(0, 256, nbytes)):
            block = fill.astype(np.uint8)
            if kind == "Q8_K":
                wide = np.prod(scales, dtype=np.float32) if np.any(scales) else -1e-45
                block[:4] = np.array([wide], np.float32).view(np.uint8)
            if kind == "MXFP4":  # 2**-127, ..., 2**124
                block[0] = rng.choice([0, 1, 2, 127, 251])
            for at, scale in zip(HALVES.get(kind, ()), scales):
                block[at : at + 2] = np.array([scale]).view(np.uint8)
            blocks.append(block)
    blocks = np.stack(blocks)
    expected = dequantise(blocks, kind)
    assert np.isfinite(expected).all() and (expected == 0).any()
    assert np.abs(expected).max() > (1e3 if kind == "NVFP4" else 1e5)
    weight = gguf_weight(kind, blocks)
    assert_same_bits(weight.float32(), expected)
    check_rows(weight, weight.rows(0, len(blocks)), expected)


def float_codes(mode: str, rows: int, columns: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Every code and scale but NaN: uint32 words and uint8 scales."""
    bits, group = FLOAT_MODES[mode]
    packed = rng.integers(0, 256, (rows, columns * bits // 8), dtype=np.uint8)
    if mode == "mxfp8":
        packed[packed & 127 == 127] = 0
    scales = rng.integers(1, 127 if mode == "nvfp4" else 240, (rows, columns // group))
    return packed.view(np.uint32), scales.astype(np.uint8)


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_floating_point_codes(mode):
    rng = np.random.default_rng(10)
    packed, scales = float_codes(mode, 48, 384, rng)
    weight = FloatWeight("a.weight", mode, packed, scales)
    with mx.stream(mx.cpu):
        arrays = mx.array(packed), mx.array(scales)
        expected = np.array(mx.dequantize(*arrays, mode=mode, dtype=mx.float32))
    assert weight.shape == (48, 384) and weight.nbytes == packed.nbytes + scales.nbytes
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 400
    np.testing.assert_array_equal(weight.float32(), expected)
    np.testing.assert_array_equal(
        weight.part("b", 5, 40).columns(32, 96).take(np.array([3, 0])), expected[[8, 5], 32:96]
    )
    if mode != "mxfp8":
        check_rows(weight, weight.rows(0, 48), expected + np.float32(0))  # minus zero becomes zero
    picked = FloatWeight("a.weight", mode, packed, scales, np.arange(0, 48, 2))
    assert picked.shape == (24, 384) and picked.nbytes == weight.nbytes // 2
    np.testing.assert_array_equal(picked.part("b", 3, 9).float32(), expected[6:18:2])
    np.testing.assert_array_equal(picked.mlx_rows(0, 24)[0], packed[::2])


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
def test_blocks_as_mlx_packs_them(kind):
    blocks = random_blocks(kind, 24, 384, np.random.default_rng(12))
    blocks[5, :4], blocks[6, :4] = 127, 200  # for NVFP4 zero, and a sign that does not count
    order = np.random.default_rng(13).permutation(24)
    packed, scales = gguf_weight(kind, blocks, order).mlx_rows(0, 24)
    with mx.stream(mx.cpu):
        arrays = mx.array(packed), mx.array(scales)
        ours = np.array(mx.dequantize(*arrays, mode=kind.lower(), dtype=mx.float32))
    np.testing.assert_array_equal(ours, dequantise(blocks, kind)[order])
    part = gguf_weight(kind, blocks, order).mlx_rows(3, 20)
    np.testing.assert_array_equal(part[0], packed[3:20])
    np.testing.assert_array_equal(part[1], scales[3:20])


def test_scales_are_exact_in_their_dtype():
    """Also the smallest ones, which are subnormal."""
    for mode in FLOAT_MODES:
        scales = np.arange(256, dtype=np.uint8)[:, None]
        weight = FloatWeight("a.weight", mode, np.zeros((256, 8), np.uint32), scales)
        wide = weight.rows(0, 256).scales[: 127 if mode == "nvfp4" else 255]
        np.testing.assert_array_equal(wide.astype(ml_dtypes.bfloat16), wide)


def test_experts_of_gpt_oss():
    """As transformers dequantises them: neighbours in a byte, the first in its low bits."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(11)
    blocks = rng.integers(0, 256, (2, 24, 4, 16), dtype=np.uint8)
    scales = rng.integers(110, 130, (2, 24, 4), dtype=np.uint8)
    expected = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    ).transpose(1, 2)
    for expert in range(2):
        packed = blocks[expert].reshape(24, -1).view(np.uint32)
        weight = FloatWeight("a.weight", "mxfp4", packed, scales[expert])
        np.testing.assert_array_equal(weight.float32(), expected[expert].numpy())


def raw(x: mx.array) -> np.ndarray:
    """An MLX array as the file holds it."""
    return np.array(x.view(mx.uint16)) if x.dtype == mx.bfloat16 else np.array(x)


def mlx_judge(
    packed: np.ndarray, scales: mx.array, biases: mx.array, bits: int, group_size: int
) -> np.ndarray:
    wide = [x.astype(mx.float32) for x in (scales, biases)]
    return np.array(mx.dequantize(mx.array(packed), *wide, group_size=group_size, bits=bits))


@pytest.mark.parametrize("dtype", MLX_DTYPES)
@pytest.mark.parametrize("group_size", MLX_GROUPS)
@pytest.mark.parametrize("bits", MLX_BITS)
def test_matrices_quantised_by_mlx(bits, group_size, dtype):
    x = mx.array(np.random.default_rng(bits).standard_normal((24, 384), dtype=np.float32)).astype(
        getattr(mx, dtype)
    )
    packed, scales, biases = mx.quantize(x, group_size=group_size, bits=bits)
    weight = MLXWeight("a.weight", bits, group_size, np.array(packed), raw(scales), raw(biases))
    expected = mlx_judge(np.array(packed), scales, biases, bits, group_size)
    assert weight.shape == (24, 384) and weight.format == "affine"
    assert weight.dtype == weight.scale_dtype == dtype
    assert weight.nbytes == packed.nbytes + scales.nbytes + biases.nbytes
    assert_same_bits(weight.float32(), expected)
    check_rows(weight, weight.rows(0, 24), expected)
    assert_same_bits(weight.rows(5, 13).float32(), expected[5:13])
    assert_same_bits(weight.take(np.array([23, 0, 23])), expected[[23, 0, 23]])


@pytest.mark.parametrize("bits", MLX_BITS)
def test_extreme_mlx_matrices(bits):
    rng = np.random.default_rng(bits)
    values = np.array([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1.0, -0.3333, 1e30, -1e36], np.float32)
    scales, biases = (
        x.reshape(-1, 1) for x in np.array(list(itertools.product(values, repeat=2)), np.float32).T
    )
    for packed in (
        np.zeros((81, bits), np.uint32),
        np.full((81, bits), 0xFFFFFFFF, np.uint32),
        rng.integers(0, 1 << 32, (81, bits), dtype=np.uint32),
    ):
        expected = mlx_judge(packed, mx.array(scales), mx.array(biases), bits, 32)
        assert_same_bits(
            MLXWeight("a.weight", bits, 32, packed, scales, biases).float32(), expected
        )
