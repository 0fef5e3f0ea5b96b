"""Packing of activations, sums of squares, rotary embedding and attention, against NumPy."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from making import make_checkpoint
from safetensors.numpy import load_file, save_file

from backends.kernels.calls import Library, read_records
from cpu_fallback.kernels import layouts
from cpu_fallback.kernels.layouts import BFLOAT16, FLOAT, GROUP, SPAN, ActivationLayout
from cpu_fallback.kernels.target import Target, available, build_target
from cpu_fallback.pages import dequantise, quantise
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint

WIDTH = SPAN * GROUP
SOURCES = ("plain", "norm", "silu")
SIZES = (8, 16, 20, 36, 64, 80, 128, 256)  # head_dim
TOKENS = (1, 3)
OFFSETS = (0, 8, 128, -128)  # of weights


def x_layouts(target: Target) -> list[ActivationLayout]:
    kinds = ((8, 8), *((16, offset) for offset in OFFSETS))
    return [FLOAT, *(layouts.activation_layout(bits, target.dot, offset) for bits, offset in kinds)]


@functools.cache
def library(name: str) -> Library:
    target = build_target(name)
    wanted = [
        ("pack", x_layout, source, single)
        for x_layout in x_layouts(target)
        for source in SOURCES
        for single in (True, False)
        if source == "plain" or x_layout in (FLOAT, x_layouts(target)[1])
    ]
    wanted += [("pack", BFLOAT16, source, single) for source in SOURCES for single in (True, False)]
    wanted += [
        ("sum_of_squares",),
        *(("rotate", size) for size in (*SIZES, 34)),
        *(("attend", size) for size in SIZES),
    ]
    wanted += [
        (kind, size, bits) for kind in ("store", "attend") for size in SIZES for bits in (8, 16)
    ]
    return Library(target, wanted)


@pytest.fixture(params=available())
def kernels(request) -> Library:
    return library(request.param)


def test_floats_are_packed_unchanged(kernels):
    rng = np.random.default_rng(1)
    for tokens in (*TOKENS, *kernels.target.tiles(low_bit=False)):
        a = rng.standard_normal((tokens, 2 * WIDTH), np.float32)
        np.testing.assert_array_equal(
            read_records(FLOAT, kernels.pack(FLOAT, "plain", tokens, a), tokens)["codes"], a
        )


def test_bfloat16_is_rounded_as_by_ml_dtypes(kernels):
    rng = np.random.default_rng(1)
    for tokens in (*TOKENS, *kernels.target.tiles(low_bit=False)):
        # subnormal, infinite and NaN too
        a = rng.integers(0, 1 << 32, (tokens, 2 * WIDTH), np.uint32).view(np.float32)
        a[0, :4] = np.inf, -np.inf, 3.4e38, np.nan
        with np.errstate(all="ignore"):
            cases = [
                (source, x.astype(ml_dtypes.bfloat16).astype(np.float32))
                for source, x in (("plain", a), ("norm", a * a))
            ]
        for source, wanted in cases:
            fields = read_records(
                BFLOAT16,
                kernels.pack(BFLOAT16, source, tokens, a, a, np.ones(tokens, np.float32)),
                tokens,
            )
            np.testing.assert_array_equal(fields["codes"], wanted)


def test_norm_is_multiplied_in_this_order(kernels):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((3, WIDTH), np.float32) for _ in range(2))
    factor = rng.uniform(0.1, 10, 3).astype(np.float32)
    got = read_records(FLOAT, kernels.pack(FLOAT, "norm", 3, a, b, factor), 3)["codes"]
    np.testing.assert_array_equal(got, a * factor[:, None] * b)


def quantised(x_layout: ActivationLayout, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes [T, K], scale [T, spans]): the largest magnitude of a span becomes the limit."""
    spans = a.reshape(len(a), -1, WIDTH)
    top = np.abs(spans).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(x_layout.limit), top, out=np.zeros_like(top), where=top > 1e-30)
    codes = np.rint(spans * inverse).astype(np.int32).reshape(a.shape)
    return codes, top[..., 0] * np.float32(1 / x_layout.limit)


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20, 1e-29])
def test_codes_scales_and_sums(kernels, size):
    rng = np.random.default_rng(3)
    for x_layout in x_layouts(kernels.target)[1:]:
        for tokens in (*TOKENS, *kernels.target.tiles(low_bit=True)):
            a = rng.standard_normal((tokens, 3 * WIDTH), np.float32) * np.float32(size)
            a[-1, WIDTH : 2 * WIDTH] = 0  # a span of zeros
            a[0, 5] = -np.abs(a[0, :WIDTH]).max() * 1.5
            fields = read_records(x_layout, kernels.pack(x_layout, "plain", tokens, a), tokens)
            codes, scale = quantised(x_layout, a)
            np.testing.assert_array_equal(fields["codes"], codes)
            np.testing.assert_array_equal(fields["scale"], scale)
            assert fields["codes"].min() == -x_layout.limit
            assert np.abs(fields["codes"]).max() == x_layout.limit
            error = np.abs(codes * np.repeat(scale.astype(np.float64), WIDTH, axis=1) - a)
            assert (error <= 0.51 * np.repeat(scale, WIDTH, axis=1)).all()
            halves = codes.reshape(tokens, -1, 2, 16).sum(axis=3)
            np.testing.assert_array_equal(fields["half_sums"], halves)
            np.testing.assert_array_equal(fields["sum"], halves.sum(axis=2))
            np.testing.assert_array_equal(fields["offset_half_sums"], -x_layout.offset * halves)
            np.testing.assert_array_equal(
                fields["offset_sum"], -x_layout.offset * halves.sum(axis=2)
            )


def test_tiny_activations_become_zero(kernels):
    a = np.full((1, WIDTH), 1e-40, np.float32)
    a[0, 7] = -9e-31
    for x_layout in x_layouts(kernels.target)[1:]:
        fields = read_records(x_layout, kernels.pack(x_layout, "plain", 1, a), 1)
        assert (fields["codes"] == 0).all() and 0 <= fields["scale"][0, 0] < 1e-30


def test_non_finite_activations_spoil_their_span_only(kernels):
    rng = np.random.default_rng(4)
    for x_layout in x_layouts(kernels.target)[1:]:
        for bad in (np.nan, -np.nan, np.inf, -np.inf):
            a = rng.standard_normal((3, 3 * WIDTH), np.float32)
            clean = read_records(x_layout, kernels.pack(x_layout, "plain", 3, a), 3)
            a[1, WIDTH + 9] = bad
            fields = read_records(x_layout, kernels.pack(x_layout, "plain", 3, a), 3)
            assert not np.isfinite(fields["scale"][1, 1])
            fields["scale"][1, 1] = clean["scale"][1, 1]
            np.testing.assert_array_equal(fields["scale"], clean["scale"])
            same = np.ones_like(a, bool)
            same[1, WIDTH : 2 * WIDTH] = False
            np.testing.assert_array_equal(fields["codes"][same], clean["codes"][same])
    a = np.zeros((1, WIDTH), np.float32)
    a[0, :3] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(
        read_records(FLOAT, kernels.pack(FLOAT, "plain", 1, a), 1)["codes"], a
    )


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Errors in units of the last place of float32."""
    return np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


def test_silu_and_its_exponential_are_within_three_ulps(kernels):
    x = np.concatenate(
        [
            np.linspace(-86, 40, 100 * WIDTH),
            np.linspace(-1e-3, 1e-3, 4 * WIDTH),
            np.linspace(-3, 3, 40 * WIDTH),
        ]
    )
    x = x.astype(np.float32)[None]
    got = read_records(FLOAT, kernels.pack(FLOAT, "silu", 1, x, np.ones_like(x)), 1)["codes"]
    wide = x.astype(np.float64)
    assert ulps(got, wide / (1 + np.exp(-wide))).max() < 3


def test_silu_of_extreme_values(kernels):
    x, up = (np.zeros((1, WIDTH), np.float32) for _ in range(2))
    up[...] = 2
    x[0, :8] = 100, 1e30, 3e38, -90, -200, -1e20, 1e-42, -0.0
    got = read_records(FLOAT, kernels.pack(FLOAT, "silu", 1, x, up), 1)["codes"][0]
    np.testing.assert_array_equal(got[:3], np.array([200, 2e30, np.inf], np.float32))
    assert (np.abs(got[3:8]) < 1e-15).all() and (got[8:] == 0).all()


def test_packing_norms_and_silu_equals_packing_their_floats(kernels):
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((3, 2 * WIDTH), np.float32) for _ in range(2))
    x = np.ascontiguousarray(read_records(FLOAT, kernels.pack(FLOAT, "silu", 3, a, b), 3)["codes"])
    wide = a.astype(np.float64)
    np.testing.assert_allclose(x, wide / (1 + np.exp(-wide)) * b, rtol=1e-6, atol=1e-30)
    x_layout = x_layouts(kernels.target)[1]
    np.testing.assert_array_equal(
        kernels.pack(x_layout, "silu", 3, a, b), kernels.pack(x_layout, "plain", 3, x)
    )
    factor = rng.uniform(0.5, 2, 3).astype(np.float32)
    np.testing.assert_array_equal(
        kernels.pack(x_layout, "norm", 3, a, b, factor),
        kernels.pack(x_layout, "plain", 3, a * factor[:, None] * b),
    )


@pytest.mark.parametrize("groups", [1, 2, 8, 64, 257])
def test_sum_of_squares(kernels, groups):
    a = np.random.default_rng(6).standard_normal(groups * GROUP, np.float32) * np.float32(3)
    wanted = (a.astype(np.float64) ** 2).sum()
    assert abs(kernels.sum_of_squares(a) - wanted) <= (groups + 6) * 2.0**-24 * wanted
    assert kernels.sum_of_squares(np.full(32, 2e19, np.float32)) == np.inf
    assert kernels.sum_of_squares(np.zeros(32, np.float32)) == 0


@pytest.mark.parametrize("size", [*SIZES, 34])
def test_rotary_embedding(kernels, size):
    rng = np.random.default_rng(7)
    x = rng.standard_normal(size, np.float32)
    angles = rng.uniform(0, 6, size // 2)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[: size // 2], x[size // 2 :]
    wanted = np.concatenate([first * cosine - second * sine, second * cosine + first * sine])
    np.testing.assert_array_equal(kernels.rotate(x, cosine, sine), wanted)
    turned = (first + 1j * second.astype(np.float64)) * np.exp(1j * angles)
    np.testing.assert_allclose(wanted, np.concatenate([turned.real, turned.imag]), atol=1e-6)


def attention(query, keys, values, first, end):
    """Attention in float64, by its definition."""
    query, keys, values = (
        x.astype(np.float64) for x in (query, keys[first:end], values[first:end])
    )
    scores = query @ keys.T / np.sqrt(query.shape[1])
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True) @ values


@pytest.mark.parametrize("size", SIZES)
def test_attention(kernels, size):
    rng = np.random.default_rng(8)
    ends = [1, 2, 15, 16, 17, 63, 64, 65, 129, 300]
    for end in ends:
        keys, values = (rng.standard_normal((end, size), np.float32) for _ in range(2))
        for first in {0, end - 1, end // 3, max(0, end - 64)}:
            for heads in (1, 2, 3, 4, 5, 7, 8) if end in (17, 65) else (int(rng.integers(1, 9)),):
                query = rng.standard_normal((heads, size), np.float32) * np.float32(2)
                got = kernels.attend(query, keys, values, first, end)
                np.testing.assert_allclose(
                    got, attention(query, keys, values, first, end), atol=4e-6, rtol=0
                )


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_attention_reads_few_bits_as_numpy_does(kernels, size, bits):
    """Codes and scales are those of pages.quantise to the bit, numbers NumPy's float16. Attention
    is that of their products in float64, or has the bits of float32 keys and values.
    """
    rng = np.random.default_rng(12)
    for end, heads in ((1, 1), (17, 5), (64, 3), (65, 4), (129, 2)):
        keys, values = (
            rng.standard_normal((end, size), np.float32) * np.float32(3) for _ in range(2)
        )
        # a group of zeros, a scale below float16's smallest, subnormal numbers
        keys[0], values[-1, :3] = 0, 1e-9 if bits == 8 else 1e-7
        if bits == 16:  # ties to even, the largest that is not infinite
            values[-1, 3:6] = 1 + 2**-11, 1 + 3 * 2**-11, 65519
        query = rng.standard_normal((heads, size), np.float32)
        for first in {0, max(0, end - 20)}:
            got, stored, scales = kernels.store_and_attend(query, keys, values, first, end, bits)
            exact = [np.zeros_like(keys), np.zeros_like(values)]
            for part, numbers in enumerate((keys[first:], values[first:])):
                if bits == 16:
                    codes = numbers.astype(np.float16)
                    exact[part][first:] = codes
                else:
                    codes, wanted_scales = quantise(numbers)
                    np.testing.assert_array_equal(scales[part, first:], wanted_scales)
                    exact[part][first:] = dequantise(codes, wanted_scales)
                    error = np.abs(exact[part][first:] - numbers).max()
                    assert error <= np.abs(numbers).max() / 127 * 0.51 + 1e-9
                np.testing.assert_array_equal(stored[part, first:], codes)
            if bits == 16:
                np.testing.assert_array_equal(got, kernels.attend(query, *exact, first, end))
            else:
                wanted = attention(query, *exact, first, end)
                np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=0)


def test_nan_is_stored_as_nan(kernels):
    keys, values = np.ones((3, 64), np.float32), np.ones((3, 64), np.float32)
    query = np.ones((1, 64), np.float32)
    values[1, 40] = np.nan
    got, _, scales = kernels.store_and_attend(query, keys, values, 0, 3)
    assert np.isnan(scales[1, 1]).tolist() == [False, True] and np.isfinite(got[0, :32]).all()
    assert np.isnan(got[0, 32:]).all()


def test_each_head_gets_the_same_bits_however_many_share_a_key(kernels):
    rng = np.random.default_rng(9)
    query, keys, values = (
        rng.standard_normal(shape, np.float32) for shape in ((7, 36), (90, 36), (90, 36))
    )
    together = kernels.attend(query, keys, values, 5, 90)
    for h in range(7):
        np.testing.assert_array_equal(
            kernels.attend(query[h : h + 1], keys, values, 5, 90)[0], together[h]
        )


def test_attention_is_sharp_where_scores_are_far_apart(kernels):
    """Scores of hundreds, positive and negative; probabilities below the smallest float32 become
    zero or tiny.
    """
    rng = np.random.default_rng(10)
    keys, values = np.zeros((40, 16), np.float32), rng.standard_normal((40, 16), np.float32)
    keys[:, 0] = np.linspace(-900, 900, 40)
    keys[17] = keys[39]
    query = np.zeros((2, 16), np.float32)
    query[0, 0], query[1, 0] = 4, -4
    got = kernels.attend(query, keys, values, 0, 40)
    np.testing.assert_allclose(got[0], (values[17] + values[39]) / 2, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got[1], values[0], rtol=1e-6, atol=1e-7)


def test_softmax_is_within_four_ulps(kernels):
    """Attention to two positions, of which one has value 1, is its softmax."""
    for score in np.linspace(-80, 0, 161).astype(np.float32):
        keys, values = np.zeros((2, 16), np.float32), np.zeros((2, 16), np.float32)
        keys[1, 0], values[1] = score, 1
        query = np.zeros((1, 16), np.float32)
        query[0, 0] = 4  # divided by the root of 16
        exact = np.exp(np.float64(score)) / (1 + np.exp(np.float64(score)))
        assert ulps(kernels.attend(query, keys, values, 0, 2)[0, 0], np.array(exact)) < 4


def test_nan_in_one_head_stays_there(kernels):
    rng = np.random.default_rng(11)
    query, keys, values = (
        rng.standard_normal(shape, np.float32) for shape in ((5, 20), (30, 20), (30, 20))
    )
    clean = kernels.attend(query, keys, values, 0, 30)
    query[2, 3] = np.nan
    got = kernels.attend(query, keys, values, 0, 30)
    assert np.isnan(got[2]).all()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(got[others], clean[others])


def test_a_softcap_keeps_nan(tmp_path):
    """Else the logits of damaged weights would be finite: minus the cap, all of them."""
    fields = dict(architectures=["Gemma2ForCausalLM"], model_type="gemma2", head_dim=16)
    fields |= dict(hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh")
    folder = make_checkpoint(tmp_path / "m", tie_word_embeddings=True, **fields)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    llama = select("cpu").load(open_checkpoint(folder), "float32")
    assert llama.runner is not None
    assert np.isnan(llama.forward(np.array([[3, 9]]), 0, llama.make_cache(8))).all()
