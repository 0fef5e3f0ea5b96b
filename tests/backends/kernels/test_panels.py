"""Panels, read by the description of layouts.py, have the bits of the reference dequantisers."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest
from gguf.quants import IQ4_NL, MXFP4
from making_gguf import LOW_BIT, dequantise, random_blocks

from backends.kernels.calls import Library
from backends.kernels.weights import (
    FLOATS,
    KINDS,
    TARGETS,
    columns,
    gguf_weight,
    random_matrix,
    tensor_of,
)
from cpu_fallback.kernels import panels
from cpu_fallback.kernels.layouts import FIELDS, GROUP, ROWS, WIDTHS, FloatLayout, LowBitLayout
from cpu_fallback.kernels.panels import Panels, Plan, Slab, allocate_arena
from cpu_fallback.kernels.target import available, build_target


@functools.cache
def library(name: str) -> Library:
    rng, wanted = np.random.default_rng(0), []
    for kind in KINDS if name == available()[0] else ("float32", "bfloat16", *LOW_BIT):
        for k in (None, 512):
            tensor = random_matrix(kind, 1, rng, k).tensor
            layout = panels.weight_layout(tensor)
            wanted.append(("fill", layout, Plan(tensor, layout).source))
    return Library(build_target(name), dict.fromkeys(wanted))


def read_floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    return raw.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)


def read(panels: Panels) -> np.ndarray:
    """Dequantise panels from their bytes: float32 [16 panels, columns]."""
    plan, layout = panels.plan, panels.plan.layout
    raw = panels.array()
    if isinstance(layout, FloatLayout):
        values = read_floats(raw.reshape(-1), layout.dtype).reshape(plan.panels, plan.columns, ROWS)
        return values.transpose(0, 2, 1).reshape(-1, plan.columns)
    width = WIDTHS[layout.scale_dtype]

    def part(name: str, groups: int, nbytes: int) -> np.ndarray:
        return np.ascontiguousarray(
            raw[:, :, layout.offsets[name] :][:, :, : groups * ROWS * nbytes]
        )

    def scales(name: str) -> np.ndarray:
        """[panels, blocks, scale groups, 16]"""
        groups = layout.scale_groups
        if not layout.two_level:
            return read_floats(part(name, groups, width), layout.scale_dtype).reshape(
                plan.panels, plan.blocks, groups, ROWS
            )
        outer = read_floats(part(f"super_{name}", 1, width), layout.scale_dtype).reshape(
            plan.panels, plan.blocks, 1, ROWS
        )
        if layout.packs_subs:
            low = part("subs", 12, 1).reshape(plan.panels, plan.blocks, 3, 4, ROWS)
            last = low[:, :, 0] >> 6 | low[:, :, 1] >> 6 << 2 | low[:, :, 2] >> 6 << 4
            every = np.concatenate([low & 63, last[:, :, None]], axis=2)
            inner = every[:, :, :2] if name == "scales" else every[:, :, 2:]
        else:
            inner = part(name, groups, 1).view(np.int8 if name == "scales" else np.uint8)
        return outer * inner.reshape(plan.panels, plan.blocks, groups, ROWS).astype(np.float32)

    vectors = part("codes", layout.groups, layout.bits * 4)
    vectors = vectors.reshape(plan.panels, plan.blocks, layout.groups, layout.bits, ROWS, 4)
    codes = np.zeros((plan.panels, plan.blocks, layout.groups, 8, ROWS, 4), np.uint8)
    for k, fields in enumerate(FIELDS[layout.bits]):
        for at, lowest, bits, place in fields:
            codes[:, :, :, k] |= (vectors[:, :, :, at] >> lowest & ((1 << bits) - 1)) << place
    if layout.table:
        kind = IQ4_NL if layout.table == "iq4" else MXFP4
        codes = np.array(kind.kvalues)[codes] + layout.offset
    if layout.is_e4m3:
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    codes = codes.transpose(0, 4, 1, 2, 3, 5).reshape(ROWS * plan.panels, plan.columns)

    def of_rows(values: np.ndarray) -> np.ndarray:
        return np.repeat(
            values.transpose(0, 3, 1, 2).reshape(ROWS * plan.panels, -1), layout.group_size, axis=1
        )

    values = (codes.astype(np.float32) - np.float32(layout.offset)) * of_rows(scales("scales"))
    return values + of_rows(scales("biases")) if layout.has_biases else values


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("k", [None, 512], ids=["odd", "whole"])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_panels_hold_the_matrix(name, k, rows):
    for kind in KINDS if name == available()[0] else ("float32", "bfloat16", *LOW_BIT):
        source = random_matrix(kind, rows, np.random.default_rng(rows), k)
        panels = library(name).fill(source.tensor)
        values = read(panels)
        np.testing.assert_array_equal(
            values[:rows, : source.exact.shape[1]], source.exact.astype(np.float32), err_msg=kind
        )
        assert (values[rows:] == 0).all() and (values[:, source.exact.shape[1] :] == 0).all(), kind
        straight = kind in LOW_BIT and (k == 512 or columns(kind) == 512)
        assert panels.plan.source == (kind if straight else "")


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0", "IQ4_NL", "bfloat16"])
def test_slabs_of_any_size_make_the_same_panels(kind, monkeypatch):
    source = random_matrix(kind, 100, np.random.default_rng(1), 512)
    whole = library(available()[0]).fill(source.tensor).array()
    monkeypatch.setattr(panels, "_SLAB", 2 * ROWS * 512)
    np.testing.assert_array_equal(library(available()[0]).fill(source.tensor).array(), whole)


# Bytes of a row of 512 in panels beyond those in the file: sub scales of 4 bits, or of 6 without
# biases, become bytes; scales of 8 bits bfloat16
WIDER = {"Q2_K": 2 * 16, "Q3_K": 2 * 4, "Q8_K": -2 * (32 - 4), "IQ4_XS": 2 * 2}
WIDER |= {"MXFP4": 16, "NVFP4": 32, "mlx mxfp4": 16, "mlx nvfp4": 32, "mlx mxfp8": 16}


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_takes_its_stored_width(kind):
    """Exceptions: Q8_K's sums are dropped, and a block is padded by up to 64 bytes."""
    tensor = random_matrix(kind, 16, np.random.default_rng(2), 512).tensor
    plan = Plan(tensor, panels.weight_layout(tensor))
    more = plan.nbytes - tensor.nbytes - 16 * WIDER.get(kind, 0)
    assert 0 <= more < 64 * plan.blocks and (more == 0 or kind not in FLOATS)


def test_rows_out_of_order_and_their_padding():
    rng = np.random.default_rng(3)
    blocks, order = random_blocks("Q6_K", 21, 256, rng), rng.permutation(21)
    panels = library(available()[0]).fill(gguf_weight(blocks, "Q6_K", order))
    np.testing.assert_array_equal(read(panels)[:21], dequantise(blocks, "Q6_K")[order])


def bad_tensors():
    rng = np.random.default_rng(4)
    blocks = random_blocks("Q4_0", 16, 512, rng)
    yield "refers to rows outside", gguf_weight(blocks, "Q4_0", np.arange(1, 17))
    yield "refers to rows outside", gguf_weight(blocks, "Q4_0", np.arange(-1, 15))
    short = gguf_weight(blocks, "Q4_0")
    short.blocks = blocks[:, :-18]
    yield "cannot be filled from", short
    tensor = tensor_of(rng.standard_normal((16, 512), np.float32), "float32")
    yield (
        "cannot be filled from",
        dataclasses.replace(tensor, values=tensor.bits.astype(np.float64)),
    )
    yield (
        "cannot be filled from",
        dataclasses.replace(tensor, values=tensor.bits.astype(np.float16)),
    )


@pytest.mark.parametrize("message,tensor", bad_tensors())
def test_wrong_arrays_are_refused(message, tensor):
    with pytest.raises(ValueError, match=message):
        library(available()[0]).fill(tensor)


def test_panels_outside_the_arena_are_refused():
    tensor = tensor_of(np.zeros((32, 512), np.float32), "float32")
    plan = Plan(tensor, panels.weight_layout(tensor))
    kernel = lambda *_: pytest.fail("called")  # noqa: E731
    for arena, first, last in (
        (allocate_arena(plan.nbytes - 64), 0, 2),
        (allocate_arena(plan.nbytes), 1, 3),
        (allocate_arena(plan.nbytes), -1, 1),
    ):
        with pytest.raises(ValueError, match="not all in the arena"):
            Slab(Panels(plan, arena, 0), first, last).fill(kernel)
    arena = allocate_arena(256)
    assert [arena.take(100), arena.take(100)] == [0, 128] and arena.address % 64 == 0
    with pytest.raises(MemoryError):
        arena.take(64)


def test_blocks_are_aligned():
    """A span is a multiple of a block, and parts are aligned for the kernels' loads."""
    for kind in KINDS:
        layout = panels.weight_layout(random_matrix(kind, 1, np.random.default_rng(5), 512).tensor)
        assert layout.block_bytes % 64 == 0 and 256 % layout.block == 0
        assert layout.block % GROUP == 0
        if isinstance(layout, LowBitLayout):
            assert layout.offsets["codes"] % 64 == 0
    assert [columns(kind) for kind in FLOATS] == [72] * 3
