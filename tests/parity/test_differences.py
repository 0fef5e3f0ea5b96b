"""Differences and agreement, against NumPy's formulas on small arrays and against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mlx_llama.parity import differences as core


def test_differences_by_hand():
    """Against NumPy's own formulas on arrays small enough to see."""
    wanted = np.array([[3.0, 4.0], [0.0, 10.0]], np.float32)
    difference = core.measure_difference(
        "x", wanted + np.array([[0.0, 0.5], [0.0, 0.0]], np.float32), wanted
    )
    assert (difference.max_abs, difference.mean_abs, difference.worst) == (0.5, 0.125, 0)
    np.testing.assert_allclose(difference.positions, [0.1, 0])
    assert difference.relative == pytest.approx(0.5 / np.sqrt(125))
    broken = core.measure_difference("x", np.full_like(wanted, np.nan), wanted)
    assert math.isinf(broken.peak) and math.isinf(broken.max_abs)


def test_agreement_is_torchs():
    rng = np.random.default_rng(0)
    wanted, actual = rng.standard_normal((2, 5, 40)).astype(np.float32)
    a = core.measure_agreement(actual, wanted)
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (wanted, actual))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert a.kl_mean == pytest.approx(float(kl.mean()))
    assert a.kl_max == pytest.approx(float(kl.max()))
    tops = [torch.topk(torch.from_numpy(x), core.TOP).indices.tolist() for x in (wanted, actual)]
    assert a.top5 == pytest.approx(np.mean([len({*x} & {*y}) / core.TOP for x, y in zip(*tops)]))
    first = int(np.flatnonzero(wanted.argmax(1) != actual.argmax(1))[0])
    two = torch.topk(torch.from_numpy(wanted[first]).double(), 2).values
    assert a.first_difference == first and a.margins[0] == pytest.approx(float(two[0] - two[1]))


def test_agreement_of_the_same_logits():
    logits = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    same = core.measure_agreement(logits, logits.copy())
    assert same.kl_max == 0 and same.top5 == 1 and same.first_difference is None
    assert same.margins is None and same.choices is None


def test_one_wrong_row_counts_among_many_right_ones():
    wanted = np.ones((1000, 4), np.float32)
    actual = wanted.copy()
    actual[700, 2] = 1.5
    difference = core.measure_difference("x", actual, wanted)
    assert difference.worst == 700 and difference.peak == pytest.approx(0.25)
    assert difference.relative < 0.01


def test_rounding_of_a_row_of_zeros_is_no_large_error():
    """Its error is relative to the other rows."""
    wanted = np.array([[1, 1], [0, 0]], np.float32)
    actual = wanted + np.float32(1e-7)
    assert core.measure_difference("x", actual, wanted).peak < 1e-3
    assert math.isinf(core.relative_errors(actual - wanted, np.zeros(2))[1])


def test_arrays_of_zeros_are_the_same():
    zeros = np.zeros((2, 3), np.float32)
    assert core.measure_difference("x", zeros, zeros).report() == {
        "probe": "x",
        "max_abs": 0,
        "mean_abs": 0,
        "relative": 0,
        "cosine": 1,
        "worst_position": 0,
        "worst_relative": 0,
        "positions": [0, 0],
    }


@pytest.mark.parametrize(
    "logits, tolerance, expected",
    [
        ([1.0, 5.0, 4.9999, -3.0], 1e-4, True),
        ([1.0, 5.0, 4.9999, -3.0], 1e-6, False),
        ([5.0, 5.0, 5.0, 5.0], 0, True),
    ],
)
def test_ties(logits, tolerance, expected):
    assert core.is_tie(np.array(logits, np.float32), 1, 2, tolerance) is expected


def test_a_margin_is_the_distance_of_the_two_likeliest():
    assert core.margin(np.array([1, 5, 4, -3], np.float32)) == 1
    assert math.isinf(core.margin(np.zeros(1)))


def test_log_softmax_is_torchs_for_large_logits():
    logits = np.array([[1000.0, 999.0, -1000.0], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(
        core.log_softmax(logits), torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    )
