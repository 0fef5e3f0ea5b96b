"""Products of panels with activations, against float64 products with reference dequantisers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

import ml_dtypes
import numpy as np
import pytest
from making_gguf import HALVES, LOW_BIT, dequantise, random_blocks

from backends.kernels.calls import Library, Memory, write_bfloat16, write_floats, write_records
from backends.kernels.weights import (
    FEW,
    FLOATS,
    KINDS,
    Matrix,
    float_judge,
    gguf_weight,
    mlx_judge,
    mlx_weight,
    of_target,
    random_float_weight,
    random_matrix,
    tensor_of,
    with_sizes,
)
from cpu_fallback.kernels import layouts, panels, products, unpacked
from cpu_fallback.kernels.layouts import BFLOAT16, FLOAT, GROUP, SPAN, ActivationLayout
from cpu_fallback.kernels.panels import Panels, Plan
from cpu_fallback.kernels.target import Target, available, build_target

BITS = (8, 16, 32)
SPAN_WIDTH = SPAN * GROUP  # inputs whose codes share a scale
ROWS = 37  # three panels, the last one padded
# Tested in every tile; LLVM takes seconds for float activations against low-bit weights, so one
# such kind
TILED = {
    8: ("Q4_0",),
    16: ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "mlx 6 64 bfloat16"),
    32: (*FLOATS, "Q4_0", "mlx mxfp8"),
}


# On other targets than the best one: each way to unpack codes once
OTHERS = ("bfloat16", "Q4_0", "Q3_K", "Q6_K", "IQ4_XS", "mlx mxfp8", "mlx 6 64 bfloat16")


def kinds(name: str) -> tuple[str, ...]:
    """Kinds tested on a target: all on the best one, a few where qemu runs it."""
    if name != available()[0]:
        return OTHERS
    return FEW if "MLX_LLAMA_TEST_ARM" in os.environ else KINDS


def x_layout_for(kind: str, bits: int, target: Target) -> ActivationLayout:
    if kind in (*FLOATS, "mlx mxfp8"):
        return FLOAT
    return x_layout_for_layout(panels.weight_layout(matrix(kind).tensor), bits, target)


def x_layout_for_layout(
    layout: layouts.LowBitLayout, bits: int, target: Target
) -> ActivationLayout:
    return layouts.activation_layout(bits, target.dot, products.dot_offset(target, layout))


def tokens_for(kind: str, bits: int, target: Target) -> list[int]:
    """Numbers of tokens to test."""
    few = [1, 3] if bits == 16 or kind in FEW else [1]
    return [*few, *target.tiles(low_bit=bits != 32)[1:]] if kind in TILED.get(bits, ()) else few


@functools.cache
def matrix(kind: str, whole: bool = False) -> Matrix:
    """whole: with rows of whole blocks."""
    return random_matrix(kind, ROWS, np.random.default_rng(len(kind)), 512 if whole else None)


def several_panels(target: Target, layout: layouts.Layout) -> list[tuple[int, int]]:
    """(tokens, panels) of each kernel of several panels."""
    counts = [
        (tokens, products.panels_at_once(target, layout, tokens))
        for tokens in target.tiles(low_bit=False)
    ]
    return [(tokens, several) for tokens, several in counts if several > 1]


@functools.cache
def library(name: str, kind: str) -> Library:
    """All products of a kind of matrix."""
    target, wanted = build_target(name), []
    for tensor in (matrix(kind, whole).tensor for whole in (False, True)):
        layout = panels.weight_layout(tensor)
        wanted.append(("fill", layout, Plan(tensor, layout).source))
        for bits in BITS:
            x_layout = x_layout_for(kind, bits, target)
            wanted += [
                ("product", layout, x_layout, tokens) for tokens in tokens_for(kind, bits, target)
            ]
    if kind in (*FLOATS, "mlx mxfp8"):
        wanted += [
            ("product", layout, FLOAT, tokens, several)
            for tokens, several in several_panels(target, layout)
        ]
    return Library(target, dict.fromkeys(wanted))


@functools.cache
def filled(name: str, kind: str, whole: bool = False) -> Panels:
    return library(name, kind).fill(matrix(kind, whole).tensor)


def filled_columns(panels: Panels) -> int:
    """Inputs of packed activations, a multiple of the span."""
    return -(-panels.plan.columns // SPAN_WIDTH) * SPAN_WIDTH


def activations(
    x_layout: ActivationLayout,
    panels: Panels,
    tokens: int,
    rng: np.random.Generator,
    limits: bool = False,
):
    """(function that packs some of the tokens, their values float64 [tokens, columns]). limits:
    largest codes only.

    Inputs beyond the matrix's columns are random: they must have no effect.
    """
    columns = filled_columns(panels)
    if x_layout.kind == "float":
        x = rng.standard_normal((tokens, columns), np.float32)
        return lambda some: write_floats(x[some]), x[:, : panels.plan.columns].astype(np.float64)
    codes = rng.integers(-x_layout.limit, x_layout.limit + 1, (tokens, columns))
    if limits:
        codes = np.where(codes < 0, -x_layout.limit, x_layout.limit)
    scale = (rng.uniform(0.5, 2, (tokens, columns // SPAN_WIDTH)) / x_layout.limit).astype(
        np.float32
    )
    x = codes * np.repeat(scale.astype(np.float64), SPAN_WIDTH, axis=1)
    return lambda some: write_records(x_layout, codes[some], scale[some]), x[
        :, : panels.plan.columns
    ]


def rounding(panels: Panels, x_layout: ActivationLayout) -> float:
    """Error bound relative to the sum of the terms' magnitudes: half an ulp for every operation of
    a sum.
    """
    operations = (
        panels.plan.columns if x_layout.kind == "float" else 2 * panels.plan.columns // 16 + 3
    )
    return (operations + 2) * 2.0**-24


def pad_like(array: np.ndarray, panels: Panels) -> np.ndarray:
    """Pad with zeros like the panels."""
    padded = np.zeros((16 * panels.plan.panels, panels.plan.columns))
    padded[: array.shape[0], : array.shape[1]] = array
    return padded


def check(
    compiled: Library,
    source: Matrix,
    panels: Panels,
    x_layout: ActivationLayout,
    tokens: int,
    rng: np.random.Generator,
    limits: bool = False,
):
    write, x = activations(x_layout, panels, tokens, rng, limits)
    got = compiled.product(panels, x_layout, write(slice(None)), tokens)
    bound = np.abs(x) @ pad_like(source.size, panels).T * rounding(panels, x_layout)
    assert (np.abs(got - x @ pad_like(source.exact, panels).T) <= bound + 1e-37).all()
    assert (got[:, panels.plan.rows :] == 0).all()


def each(tested: Iterable[str] = KINDS):
    """Run a test for each target and kind."""
    pairs = [(name, kind) for kind in tested for name in available() if kind in kinds(name)]
    return pytest.mark.parametrize("name,kind", [of_target(*pair) for pair in pairs])


@pytest.mark.slow
@each()
@pytest.mark.parametrize("whole", [False, True], ids=["odd", "whole"])
def test_product(name, kind, whole):
    rng, target = np.random.default_rng(1), build_target(name)
    for bits in BITS:
        x_layout = x_layout_for(kind, bits, target)
        for tokens in tokens_for(kind, bits, target):
            for limits in (False, True):
                panels = filled(name, kind, whole)
                check(
                    library(name, kind), matrix(kind, whole), panels, x_layout, tokens, rng, limits
                )


@each()
def test_one_token_and_many_give_the_same_bits(name, kind):
    rng, target, panels = np.random.default_rng(2), build_target(name), filled(name, kind)
    for bits in BITS:
        x_layout = x_layout_for(kind, bits, target)
        for tokens in tokens_for(kind, bits, target)[1:]:
            write, _ = activations(x_layout, panels, tokens, rng)
            together = library(name, kind).product(panels, x_layout, write(slice(None)), tokens)
            for t in range(tokens):
                alone = library(name, kind).product(panels, x_layout, write(slice(t, t + 1)), 1)
                np.testing.assert_array_equal(together[t], alone[0])


@each()
def test_bias_and_accumulation(name, kind):
    rng, target, panels = np.random.default_rng(3), build_target(name), filled(name, kind)
    for bits in BITS:
        x_layout = x_layout_for(kind, bits, target)
        for tokens in tokens_for(kind, bits, target)[:2]:
            records = activations(x_layout, panels, tokens, rng)[0](slice(None))
            plain = library(name, kind).product(panels, x_layout, records, tokens)
            bias = rng.standard_normal(plain.shape[1], np.float32)
            before = rng.standard_normal(plain.shape, np.float32)
            for first, two in ((bias, None), (None, before), (bias, before)):
                got = library(name, kind).product(panels, x_layout, records, tokens, first, two)
                wanted = plain + (0 if first is None else first)
                np.testing.assert_array_equal(got, wanted + (0 if two is None else two))


@each((*FLOATS, "mlx mxfp8"))
def test_several_panels_at_once_give_the_same_bits(name, kind):
    rng = np.random.default_rng(4)
    source = random_matrix(kind, 16 * products.PANELS_AT_ONCE * 2 - 3, rng)
    panels = library(name, kind).fill(source.tensor)
    bias = rng.standard_normal(16 * panels.plan.panels, np.float32)
    cases = several_panels(build_target(name), panels.plan.layout)
    assert cases[0][0] == 1 and all(products.PANELS_AT_ONCE % several == 0 for _, several in cases)
    for tokens, several in cases:
        records = activations(FLOAT, panels, tokens, rng)[0](slice(None))
        before = np.stack([bias] * tokens)
        single = library(name, kind).product(panels, FLOAT, records, tokens, bias, before)
        together = library(name, kind).product(
            panels, FLOAT, records, tokens, bias, before, several=several
        )
        np.testing.assert_array_equal(single, together)


@pytest.mark.parametrize("name", [name for name in available() if build_target(name).dot == "vnni"])
@pytest.mark.parametrize("kind", [*LOW_BIT, "mlx 6 64 bfloat16", "mlx 3 128 float16"])
@pytest.mark.parametrize("bits", [8, 16])
def test_codes_unpacked_once_give_the_same_bits(name, kind, bits):
    """Of tile by tile; two strips, the second one short."""
    rng, target = np.random.default_rng(9), build_target(name)
    source = random_matrix(kind, 16 * 5, np.random.default_rng(10))
    layout = panels.weight_layout(source.tensor)
    x_layout = x_layout_for_layout(layout, bits, target)
    fill = ("fill", layout, Plan(source.tensor, layout).source)
    kernels_here = Library(
        target, [fill, ("product", layout, x_layout, target.tile), ("unpacked", layout, x_layout)]
    )
    matrix, tiles = kernels_here.fill(source.tensor), unpacked.STRIP + 3
    records = [
        activations(x_layout, matrix, target.tile, rng)[0](slice(None)) for _ in range(tiles)
    ]
    bias = rng.standard_normal(16 * matrix.plan.panels, np.float32)
    before = rng.standard_normal((tiles * target.tile, len(bias)), np.float32)
    together = Memory((tiles * len(records[0]),), np.uint8, values=np.concatenate(records)).array
    for addends in ((None, None), (bias, None), (None, before), (bias, before)):
        got = kernels_here.unpacked(matrix, x_layout, together, tiles, *addends)
        for i, part in enumerate(records):
            rows = slice(i * target.tile, (i + 1) * target.tile)
            extra = (
                addends[0],
                None if addends[1] is None else np.ascontiguousarray(addends[1][rows]),
            )
            wanted = kernels_here.product(matrix, x_layout, part, target.tile, *extra)
            np.testing.assert_array_equal(got[rows], wanted[:, : got.shape[1]])


@pytest.mark.skipif(
    not any(build_target(name).bf16 for name in available()), reason="no avx512_bf16 here"
)
def test_bfloat16_times_bfloat16():
    """Against float64; one token and many, several panels and one give the same bits."""
    rng, target = np.random.default_rng(11), build_target(available()[0])
    source = random_matrix("bfloat16", 16 * products.PANELS_AT_ONCE * 2 - 3, rng)
    layout = panels.weight_layout(source.tensor)
    fill = ("fill", layout, Plan(source.tensor, layout).source)
    kernels = [
        ("product", layout, BFLOAT16, *loops)
        for loops in (
            (1,),
            (3,),
            *((t,) for t in target.tiles(low_bit=False)[1:]),
            *several_panels(target, layout),
        )
    ]
    compiled = Library(target, dict.fromkeys([fill, *kernels]))
    matrix = compiled.fill(source.tensor)
    columns = filled_columns(matrix)
    x = rng.standard_normal((16, columns), np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    exact = x[:, : matrix.plan.columns].astype(np.float64) @ pad_like(source.exact, matrix).T
    size = np.abs(x[:, : matrix.plan.columns]).astype(np.float64) @ pad_like(source.size, matrix).T
    alone = np.concatenate(
        [compiled.product(matrix, BFLOAT16, write_bfloat16(x[t : t + 1]), 1) for t in range(16)]
    )
    assert (np.abs(alone - exact) <= size * rounding(matrix, FLOAT)).all()
    for _, _, _, tokens, *several in kernels:
        got = compiled.product(
            matrix,
            BFLOAT16,
            write_bfloat16(x[:tokens]),
            tokens,
            several=several[0] if several else 1,
        )
        np.testing.assert_array_equal(got, alone[:tokens])


def extreme(kind: str) -> Matrix:
    """Rows of largest, smallest and random codes, with large, tiny, subnormal, zero and negative
    scales.
    """
    rng = np.random.default_rng(5)
    if kind in FLOATS:
        top = 65504.0 if kind == "float16" else 3e38 * 2.0**-20
        values = np.array([0.0, -0.0, top, -top, 6e-8, -1e-40, 1.2e-38, 1.0], np.float32)
        tensor = tensor_of(rng.choice(values, (ROWS, 64)), kind)
        return with_sizes(tensor, tensor.float32())
    if kind in ("mlx nvfp4", "mlx mxfp8"):
        weight = random_float_weight(kind.removeprefix("mlx "), ROWS, 512, rng)
        every = [0, 1, 8, 126] if kind == "mlx nvfp4" else [0, 1, 127, 150]
        weight.scales[:] = rng.choice(np.array(every, np.uint8), weight.scales.shape)
        return with_sizes(weight, float_judge(weight))
    if kind.startswith("mlx"):
        _, bits, group, dtype = kind.split()
        bits, group = int(bits), int(group)
        values = [0.0, -0.0, 2.0**-24, -0.3333, 200.0]
        packed = np.stack(
            [np.full(2 * group * bits // 32, fill, np.uint32) for fill in (0, 0xFFFFFFFF)] * 19
        )[:ROWS]
        scales, biases = (rng.choice(np.array(values, np.float32), (ROWS, 2)) for _ in range(2))
        weight = mlx_weight(packed, scales, biases, bits, group, dtype)
        return with_sizes(weight, mlx_judge(weight))
    blocks = random_blocks(kind, ROWS, 512, rng)
    size = blocks.shape[1] // (512 // gguf_weight(blocks, kind).layout.block_size)
    every = blocks.reshape(-1, size)
    fills = rng.integers(0, 3, len(every))
    every[fills == 1], every[fills == 2] = 0, 255
    if kind == "Q8_K":
        scales = rng.choice(np.array([0, -0.0, 1e-40, -1e-30, 1.0, 1e30], np.float32), len(every))
        every[:, :4] = scales[:, None].view(np.uint8)
    if kind == "MXFP4":
        every[:, 0] = rng.choice(np.array([0, 1, 2, 127, 150], np.uint8), len(every))
    for at in HALVES.get(kind, ()):
        scales = rng.choice(
            np.array([0.0, -0.0, 6e-8, -6.1e-5, -1.0, 0.3333, 65504.0], np.float16), len(every)
        )
        every[:, at : at + 2] = scales[:, None].view(np.uint8)
    return with_sizes(gguf_weight(blocks, kind), dequantise(blocks, kind))


@each(FEW)
def test_extreme_weights(name, kind):
    rng, target, source = np.random.default_rng(6), build_target(name), extreme(kind)
    assert np.isfinite(source.exact).all() and source.size.max() > 30
    panels = library(name, kind).fill(source.tensor)
    for bits in BITS:
        x_layout = x_layout_for(kind, bits, target)
        for limits in (False, True):
            check(library(name, kind), source, panels, x_layout, 3, rng, limits)


# the scales of the others are finite
@each(kind for kind in FEW if kind not in ("MXFP4", "NVFP4", "mlx nvfp4", "mlx mxfp8"))
def test_non_finite_values_stay_in_their_row_and_token(name, kind):
    """An infinite or NaN scale, activation or weight spoils its own results alone."""
    rng, target = np.random.default_rng(7), build_target(name)
    source = random_matrix(kind, ROWS, np.random.default_rng(8))
    clean = library(name, kind).fill(source.tensor)
    spoilt = library(name, kind).fill(spoil(source, kind, 5))
    for bits in BITS:
        x_layout = x_layout_for(kind, bits, target)
        records = activations(x_layout, clean, 3, rng)[0](slice(None))
        wanted, got = (
            library(name, kind).product(panels, x_layout, records, 3) for panels in (clean, spoilt)
        )
        others = np.arange(wanted.shape[1]) != 5
        np.testing.assert_array_equal(got[:, others], wanted[:, others])
        assert not np.isfinite(got[:, 5]).any()
        # the second token's first input or span
        if x_layout.kind == "float":
            records.view(np.float32)[1] = np.nan
        else:
            records[x_layout.at("scale", 3) :].view(np.float32)[1] = np.inf
        got = library(name, kind).product(clean, x_layout, records, 3)
        np.testing.assert_array_equal(got[[0, 2]], wanted[[0, 2]])
        assert not np.isfinite(got[1, :ROWS]).any()


def spoil(source: Matrix, kind: str, row: int):
    """Copy the matrix with a NaN or infinity in one row."""
    tensor = source.tensor
    if kind in FLOATS:
        bits = tensor.bits.copy()
        bits[row, 3] = 0x7FC0 if kind == "bfloat16" else np.nan
        return type(tensor)("a.weight", tensor.dtype, tensor.shape, bits)
    if kind.startswith("mlx"):
        _, bits, group, dtype = kind.split()
        scales = tensor.scales.copy()
        scales[row, 0] = 0x7FC0 if dtype == "bfloat16" else np.nan
        return type(tensor)("a.weight", int(bits), int(group), tensor.packed, scales, tensor.biases)
    blocks, at = tensor.blocks.copy(), int(tensor.order[row])
    if kind == "Q8_K":
        blocks[at, :4] = np.array([np.nan], np.float32).view(np.uint8)
    else:
        first = HALVES[kind][0]
        blocks[at, first : first + 2] = np.array([np.nan], np.float16).view(np.uint8)
    return gguf_weight(blocks, kind, tensor.order)
