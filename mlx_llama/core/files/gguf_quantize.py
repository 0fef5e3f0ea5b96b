"""Quantise to GGUF's block types as llama.cpp does without an importance matrix
(ggml/src/ggml-quants.c).

Each function performs the operations of the C code in float32 and in the same order, for the same
bits as C without fused multiply-adds, and the same error as with them. Arrays hold a weight of each
group per row, float32 [group size, groups], so that sums add whole rows in the order of the C
loops. The gguf library quantises to simpler types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .quantized import IQ4_VALUES

# {type: (bytes of a block, slice of its float16 scales)} (ggml/src/ggml-common.h)
SCALES = {
    "Q4_0": (18, slice(0, 2)),
    "Q5_0": (22, slice(0, 2)),
    "Q5_1": (24, slice(0, 4)),
    "Q8_0": (34, slice(0, 2)),
    "Q4_K": (144, slice(0, 4)),
    "Q5_K": (176, slice(0, 4)),
    "Q6_K": (210, slice(208, 210)),
    "IQ4_NL": (18, slice(0, 2)),
    "IQ4_XS": (136, slice(0, 2)),
}

_EPSILON = np.float32(1e-15)  # GROUP_MAX_EPS: the largest magnitude of a group of zeros
_VALUES = IQ4_VALUES.astype(np.float32) - 128
# Index of the nearest of _VALUES by floor(2 x) + 254, x in [-127, 127]: their midpoints are
# multiples of 0.5
_NEAREST = np.searchsorted(
    (_VALUES[1:] + _VALUES[:-1]) / 2, np.arange(-254, 255) / 2, side="right"
).astype(np.uint8)


def quantize(rows: np.ndarray, kind: str) -> np.ndarray:
    """Quantise rows float32 [n, K], K a multiple of the block size, to blocks uint8 [n, bytes per
    row].

    kind: of SCALES. Weights beyond the range of float16 scales give infinite scales.
    """
    from gguf.quants import GGMLQuantizationType, quantize as quantize_plain

    with np.errstate(all="ignore"):
        if kind in _QUANTISERS:
            return _QUANTISERS[kind](np.ascontiguousarray(rows, np.float32)).reshape(len(rows), -1)
        return quantize_plain(rows, GGMLQuantizationType[kind])


def _groups(rows: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(-1, size).T)


def _add_rows(values: np.ndarray) -> np.ndarray:
    """Sum over the first axis in order, while np.sum may add pairwise."""
    total = values[0].copy()
    for row in values[1:]:
        total += row
    return total


def _half(values: np.ndarray) -> np.ndarray:
    """float32 [B] -> the bytes of float16, uint8 [B, 2]."""
    return values.astype(np.float16)[:, None].view(np.uint8)


def _widen(half: np.ndarray) -> np.ndarray:
    """The bytes of float16, uint8 [B, 2] -> float32 [B, 1]."""
    return half.view(np.float16).astype(np.float32)


def _requantize(
    x: np.ndarray,
    scales: np.ndarray,
    before: np.ndarray,
    low: int,
    high: int,
    mins: np.ndarray | None = None,
) -> np.ndarray:
    """Codes [size, G] under the rounded scales and mins [B, groups of a block]; `before` where a
    scale is zero.
    """
    shifted = x if mins is None else x + mins.reshape(-1)
    scales = scales.reshape(-1)
    return np.where(scales != 0, np.clip(np.rint(shifted / scales), low, high), before)


def _search_min(
    x: np.ndarray, top: int, first: float, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """make_qkx2_quants with the weights of quantize_row_q4_K_ref: scales [G], minus the minima [G],
    codes as x.
    """
    top, first, step = np.float32(top), np.float32(first), np.float32(0.1)
    weights = np.sqrt(_add_rows(x * x) / np.float32(32)) + np.abs(x)
    low, high = np.minimum(x.min(0), np.float32(0)), x.max(0)
    sum_w, sum_x = _add_rows(weights), _add_rows(weights * x)

    def codes_at(inverse: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(inverse * (x - minimum)), 0, top)

    def error_of(codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        difference = scale * codes
        difference += minimum
        difference -= x
        difference *= difference
        difference *= weights
        return _add_rows(difference)

    inverse = top / (high - low)
    is_flat = ~np.isfinite(inverse)  # equal values, or a width whose inverse overflows
    scale, minimum = np.float32(1) / inverse, low
    best = codes_at(inverse, minimum)
    least = error_of(best, scale, minimum)
    for i in range(steps + 1):
        # As in llama.cpp, codes count from the best minimum so far.
        codes = codes_at((first + step * np.float32(i) + top) / (high - minimum), minimum)
        weighted = weights * codes
        sum_l = _add_rows(weighted)
        sum_l2 = _add_rows(weighted * codes)
        weighted *= x
        sum_xl = _add_rows(weighted)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        is_above = new_minimum > 0
        new_scale = np.where(is_above, sum_xl / sum_l2, new_scale)
        new_minimum = np.where(is_above, np.float32(0), new_minimum)
        error = error_of(codes, new_scale, new_minimum)
        is_better = (determinant > 0) & (error < least)
        np.copyto(best, codes, where=is_better)
        least, scale, minimum = (
            np.where(is_better, new, old)
            for new, old in ((error, least), (new_scale, scale), (new_minimum, minimum))
        )
    best[:, is_flat] = 0
    return np.where(is_flat, np.float32(0), scale), -np.where(is_flat, low, minimum), best


def _with_min(
    rows: np.ndarray, top: int, first: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """The head of a Q4_K or Q5_K block (half d, dmin; uint8 scales[12]), uint8 [B, 16]; codes uint8
    [B, 256].
    """
    x = _groups(rows, 32)
    scales, mins, before = _search_min(x, top, first, steps)
    head, six_bits = [], []
    for values in (scales.reshape(-1, 8), mins.reshape(-1, 8)):
        largest = np.maximum(values.max(1), np.float32(0))
        inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
        # A negative scale wraps around as in C.
        six_bits.append(
            np.minimum(np.rint(inverse[:, None] * values).astype(np.int32).astype(np.uint8), 63)
        )
        head.append(_half(largest / np.float32(63)))
    scale_codes, min_codes = six_bits
    packed = np.concatenate(
        [
            scale_codes[:, :4] | scale_codes[:, 4:] >> 4 << 6,
            min_codes[:, :4] | min_codes[:, 4:] >> 4 << 6,
            scale_codes[:, 4:] & 15 | (min_codes[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    codes = _requantize(
        x, _widen(head[0]) * scale_codes, before, 0, top, _widen(head[1]) * min_codes
    )
    return np.concatenate([*head, packed], axis=1), codes.T.astype(np.uint8).reshape(-1, 256)


def _q4_k(rows: np.ndarray) -> np.ndarray:  # uint8 head[16], qs[128]
    head, codes = _with_min(rows, 15, -1.0, 20)
    codes = codes.reshape(-1, 4, 2, 32)
    return np.concatenate([head, (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)], axis=1)


def _q5_k(rows: np.ndarray) -> np.ndarray:  # uint8 head[16], qh[32], qs[128]
    head, codes = _with_min(rows, 31, -0.5, 15)
    high = np.packbits((codes >> 4).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    codes = (codes & 15).reshape(-1, 4, 2, 32)
    return np.concatenate(
        [head, high, (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)], axis=1
    )


def _largest(values: np.ndarray, axis: int) -> np.ndarray:
    """The value of largest magnitude along an axis, with its sign; the first of equal
    magnitudes.
    """
    at = np.expand_dims(np.abs(values).argmax(axis), axis)
    return np.take_along_axis(values, at, axis).squeeze(axis)


def _fit_scales(
    x: np.ndarray,
    trials: Iterable[np.ndarray],
    quantise: Callable[[np.ndarray], np.ndarray],
    x_first: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Search inverse scales for the least squared error weighted by x * x; returns scales [G] and
    values [size, G].

    The part that make_qx_quants and quantize_row_iq4_nl_impl share. x_first: order of the factors
    of a product.
    """
    weights, trials = x * x, iter(trials)
    weighted_x = weights * x

    def sums(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values = quantise(inverse * x)
        weighted = weights * values
        return (
            values,
            _add_rows(weighted_x * values if x_first else weighted * x),
            _add_rows(weighted * values),
        )

    best, sum_lx, sum_l2 = sums(next(trials))
    scale = np.where(sum_l2 > 0, sum_lx / sum_l2, np.float32(0))
    least = scale * sum_lx
    for inverse in trials:
        values, sum_lx, sum_l2 = sums(inverse)
        is_better = (sum_l2 > 0) & (sum_lx * sum_lx > least * sum_l2)
        np.copyto(best, values, where=is_better)
        scale = np.where(is_better, sum_lx / sum_l2, scale)
        least = np.where(is_better, scale * sum_lx, least)
    return scale, best


def _q6_k(rows: np.ndarray) -> np.ndarray:  # uint8 ql[128], qh[64]; int8 scales[16]; half d
    x = _groups(rows, 16)
    largest = _largest(x, 0)
    offsets = (np.float32(0.1) * np.float32(i) for i in (0, *range(-9, 0), *range(1, 10)))
    scales, before = _fit_scales(
        x,
        (-(np.float32(32) + offset) / largest for offset in offsets),
        lambda values: np.clip(np.rint(values), -32, 31),
        x_first=True,
    )
    is_zero = np.abs(largest) < _EPSILON
    scales = np.where(is_zero, np.float32(0), scales).reshape(-1, 16)
    before[:, is_zero] = -32
    largest = _largest(scales, 1)
    inverse = np.float32(-128) / largest
    d = _half(np.float32(1) / inverse)
    eight_bits = np.minimum(np.rint(inverse[:, None] * scales), 127).astype(np.int8)
    codes = _requantize(x, _widen(d) * eight_bits, before, -32, 31)
    codes = (codes.T + np.float32(32)).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = (
        codes[:, :, 0] >> 4
        | codes[:, :, 1] >> 4 << 2
        | codes[:, :, 2] >> 4 << 4
        | codes[:, :, 3] >> 4 << 6
    )
    blocks = np.concatenate(
        [low.reshape(-1, 128), high.reshape(-1, 64), eight_bits.view(np.uint8), d], axis=1
    )
    blocks[np.abs(largest) < _EPSILON] = 0
    return blocks


def _nearest(values: np.ndarray) -> np.ndarray:
    """Indices uint8 into _VALUES (best_index_int8; NaN gives the last)."""
    doubled = np.fmax(np.fmin(values * np.float32(2), np.float32(254)), np.float32(-254))
    return _NEAREST[np.floor(doubled).astype(np.intp) + 254]


def _fit_iq4(x: np.ndarray) -> np.ndarray:
    """Scales [G] of quantize_row_iq4_nl_impl."""
    largest = _largest(x, 0)
    first = np.float32(1) / (-largest / _VALUES[0])
    trials = [first, *((np.float32(i) + _VALUES[0]) / largest for i in range(-7, 8))]
    scales, _ = _fit_scales(x, trials, lambda values: _VALUES[_nearest(values)], x_first=False)
    return np.where(np.abs(largest) < _EPSILON, np.float32(0), scales)


def _pack_iq4(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes of the values nearest to x / scales, as bytes uint8 [G, 16]."""
    codes = _nearest(np.where(scales != 0, np.float32(1) / scales, np.float32(0)) * x)
    return (codes[:16] | codes[16:] << 4).T


def _iq4_nl(rows: np.ndarray) -> np.ndarray:  # half d; uint8 qs[16]
    x = _groups(rows, 32)
    scales = _fit_iq4(x)
    return np.concatenate([_half(scales), _pack_iq4(x, scales)], axis=1)


def _iq4_xs(rows: np.ndarray) -> np.ndarray:  # half d; uint16 scales_h; uint8 scales_l[4], qs[128]
    x = _groups(rows, 32)
    scales = _fit_iq4(x).reshape(-1, 8)
    d = -_largest(scales, 1) / np.float32(32)
    inverse = np.where(d != 0, np.float32(1) / d, np.float32(0))
    six_bits = np.clip(np.rint(inverse[:, None] * scales), -32, 31)
    packed = _pack_iq4(x, (d[:, None] * six_bits).reshape(-1)).reshape(-1, 128)
    six_bits = (six_bits + 32).astype(np.uint16)
    low = six_bits.astype(np.uint8) & 15
    high = ((six_bits >> 4) << 2 * np.arange(8, dtype=np.uint16)).sum(1, dtype=np.uint16)
    return np.concatenate(
        [_half(d), high[:, None].view(np.uint8), low[:, ::2] | low[:, 1::2] << 4, packed], axis=1
    )


_QUANTISERS = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}
