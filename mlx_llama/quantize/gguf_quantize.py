"""Quantise to GGUF's block types as llama.cpp does, with or without an importance matrix
(ggml/src/ggml-quants.c).

Each function performs the operations of the C code in float32 and in the same order, for the same
bits as C without fused multiply-adds, and the same error as with them. Arrays hold a weight of each
group per row, float32 [group size, groups], so that sums add whole rows in the order of the C
loops. The gguf library quantises to simpler types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_llama.core.files.quantized import IQ4_VALUES

# {type: (weights whose mean square is added to each one's, 0 for a row; factor of the mean)}
_SPREADS = dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1"), (0, 1))
_SPREADS |= dict.fromkeys(("Q3_K", "Q4_K", "Q5_K", "IQ4_XS"), (256, 2)) | {"IQ4_NL": (32, 2)}

_PART = 1 << 16  # weights at a time: a few float32 arrays of this size fit an L2 cache
_EPSILON = np.float32(1e-15)  # GROUP_MAX_EPS: the largest magnitude of a group of zeros
IQ4_NUMBERS = IQ4_VALUES.astype(np.float32) - 128
IQ4_MIDPOINTS = (IQ4_NUMBERS[1:] + IQ4_NUMBERS[:-1]) / 2
# Index of the nearest of IQ4_NUMBERS by floor(2 x) + 254: midpoints are multiples of 0.5
_NEAREST = np.searchsorted(IQ4_MIDPOINTS, np.arange(-254, 255) / 2, side="right").astype(np.uint8)
_NEAREST_VALUE = IQ4_NUMBERS[_NEAREST]


Weights = np.ndarray | None  # [n, K], of the squared errors; None for the format's own
# The largest code; of the codes' ranges to try: the first's excess, further ones, their distance
Grid = tuple[int, float, int, float]


def quantize(
    rows: np.ndarray, kind: str, importance: np.ndarray | None = None, search: Search | None = None
) -> np.ndarray:
    """Quantise rows float32 [n, K], whole blocks, to uint8 [n, bytes per row]. kind: a type.
    importance: of each column, mean squares of its inputs, float32 [K]; None for the same. Weights
    beyond the range of float16 scales give infinite scales. search: None for NumPy's.
    """
    from gguf.quants import GGMLQuantizationType, quantize as quantize_plain

    def blocks(part: np.ndarray) -> np.ndarray:
        if quantiser is None:
            return quantize_plain(part, GGMLQuantizationType[kind])
        weights = None if importance is None else _weigh(part, importance, kind)
        return quantiser(part, weights, search).reshape(len(part), -1)

    quantiser = (_QUANTISERS if importance is None else _WEIGHED).get(kind)
    search = search or Search()
    step = max(1, _PART // rows.shape[1])
    with np.errstate(all="ignore"):
        parts = [blocks(rows[start : start + step]) for start in range(0, len(rows), step)]
    return np.concatenate(parts)


def _groups(rows: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(-1, size).T)


def _sum(values: np.ndarray) -> np.ndarray:
    """Sum over the first axis in order; np.add.reduce adds a single column pairwise."""
    return np.add.reduce(values) if values.shape[1] > 1 else np.add.accumulate(values)[-1]


def _weigh(rows: np.ndarray, importance: np.ndarray, kind: str) -> np.ndarray:
    """Weights of the squared errors, float32 [n, K]: large weights count more."""
    if kind not in _SPREADS:
        return np.broadcast_to(importance, rows.shape)
    size, factor = _SPREADS[kind]
    size = size or rows.shape[1]
    squares = _groups(rows * rows, size)
    mean = _sum(squares) * np.float32(factor) / np.float32(size)
    spread = rows * rows + np.repeat(mean, size).reshape(rows.shape)
    return importance * np.sqrt(spread)


def _half(values: np.ndarray) -> np.ndarray:
    """float32 [B] -> the bytes of float16, uint8 [B, 2]."""
    return values.astype(np.float16)[:, None].view(np.uint8)


def _widen(half: np.ndarray) -> np.ndarray:
    """The bytes of float16, uint8 [B, 2] -> float32 [B, 1]."""
    return half.view(np.float16).astype(np.float32)


def _requantize(
    x: np.ndarray,
    scales: np.ndarray,
    before: Callable[[np.ndarray], np.ndarray],
    low: int,
    high: int,
    mins: np.ndarray | None = None,
) -> np.ndarray:
    """Codes [size, G] under the rounded scales and mins [B, groups of a block]; where a scale is
    zero, `before` of those groups' indices, the codes of the search.
    """
    scales = scales.reshape(-1)
    codes = x / scales if mins is None else (x + mins.reshape(-1)) / scales
    _round(codes, low, high)
    at = np.flatnonzero(scales == 0)
    codes[:, at] = before(at)
    return codes


def _round(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """Round to the nearest code, in place."""
    np.rint(values, out=values)
    return np.clip(values, low, high, out=values)


# The searches run on NumPy's arrays, or on symbols that become machine code (search.py):
# `words` has their arithmetic, x and weights have a row for each weight of a group, a column for
# each group. Temporaries are changed in place, which is faster in NumPy.


def fit_min(
    words: Any, x: Any, weights: Any, ranges: Sequence[Any], grid: Grid
) -> Sequence[np.ndarray]:
    """The search of `_search_min`; returns scales, minima, and the codes' inverse scales and
    origins. ranges: the lowest and highest of each group.
    """
    (low, high), (top, first, steps, delta) = ranges, grid
    number, total = words.number, words.total
    if weights is None:
        weights = words.abs(x) + words.sqrt(total(x * x) / number(len(x)))
    sum_w, sum_x = total(weights), total(weights * x)

    def measure(codes: Any, scale: Any, minimum: Any) -> Any:
        error = codes * scale
        error += minimum
        error -= x
        error *= error
        error *= weights
        return total(error)

    def quantise(inverse: Any, origin: Any) -> Any:
        codes = x - origin
        codes *= inverse
        return words.round(codes, 0, top)

    def improve(i: Any, best: Sequence) -> Sequence:
        origin = best[2]  # as in llama.cpp, codes count from the best minimum so far
        inverse = (number(first) + i * number(delta) + number(top)) / (high - origin)
        codes = quantise(inverse, origin)
        weighted = weights * codes
        sum_l, sum_l2 = total(weighted), total(weighted * codes)
        weighted *= x
        sum_xl = total(weighted)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        is_above = minimum > number(0)
        scale = words.select(is_above, sum_xl / sum_l2, scale)
        minimum = words.select(is_above, number(0), minimum)
        error = measure(codes, scale, minimum)
        is_better = (determinant > number(0)) & (error < best[0])
        trial = error, scale, minimum, inverse, origin
        return [words.select(is_better, new, old) for new, old in zip(trial, best)]

    # The codes are those of inverse * (x - origin).
    inverse = number(top) / (high - low)
    scale = number(1) / inverse
    error = measure(quantise(inverse, low), scale, low)
    return words.repeat(steps + 1, improve, [error, scale, low, inverse, low])[1:]


def _search_min(
    x: np.ndarray, grid: Grid, search: Search, weights: Weights = None
) -> tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """make_qkx2_quants with the weights of quantize_row_q4_K_ref: scales [G], minus the minima [G],
    and a function of groups' indices [n] that returns their codes [size, n]. weights: in place of
    those weights, for make_qkx3_quants.
    """
    top = grid[0]
    low, high = np.minimum(x.min(0), np.float32(0)), x.max(0)
    # equal values, or a width whose inverse overflows
    is_flat = ~np.isfinite(np.float32(top) / (high - low))
    scale, minimum, best, best_origin = search.run(fit_min, x, weights, (low, high), grid)
    scale[is_flat] = best[is_flat] = best_origin[is_flat] = 0

    def before(at: np.ndarray) -> np.ndarray:
        return _round((x[:, at] - best_origin[at]) * best[at], 0, top)

    return scale, -np.where(is_flat, low, minimum), before


def _fit_positive(
    values: np.ndarray, weights: np.ndarray, top: int, search: Search
) -> tuple[np.ndarray, np.ndarray]:
    """make_qp_quants: a scale [B] and codes uint8 [n, B] of values that are not negative [n, B]."""
    largest = values.max(0)
    is_zero = ~(largest >= _EPSILON)

    def measure(offset: float) -> tuple[np.ndarray, np.ndarray]:
        inverse = (np.float32(offset) + np.float32(top)) / largest
        codes = np.minimum(np.rint(inverse * values), top)
        difference = values - np.float32(1) / inverse * codes
        return inverse, np.add.accumulate(weights * difference * difference)[-1]

    best, error = measure(0)
    for i in (*range(-4, 0), *range(1, 5)):
        inverse, trial = measure(np.float32(0.1) * np.float32(i))
        is_better = trial < error
        best, error = np.where(is_better, inverse, best), np.where(is_better, trial, error)
    codes = np.minimum(np.rint(best * values), top)
    scale, *changed = search.run(descend, values, weights, (codes,), (-np.inf, top))
    codes = np.where(is_zero, 0, np.stack(changed)).astype(np.int32).astype(np.uint8)
    return np.where(is_zero, np.float32(0), scale), codes


def descend(
    words: Any, x: Any, weights: Any, start: Sequence[Any], limits: tuple[float, float]
) -> Sequence[np.ndarray]:
    """Change single codes while the best scale's error falls; returns scales, then codes. The part
    that make_q3_quants and make_qp_quants share. start: the codes; limits: the least and greatest.
    """
    (codes,), (low, high) = start, limits
    number, weighted = words.number, weights * x
    sums = words.total(weighted * codes), words.total(weights * codes * codes)

    def improve(_: Any, state: Sequence) -> Sequence:
        sum_lx, sum_l2, *codes = state
        for i, code in enumerate(codes):
            rest_lx = sum_lx - weighted[i] * code
            rest_l2 = sum_l2 - weights[i] * code * code
            new = words.round(x[i] * rest_l2 / rest_lx, low, high)
            new_lx, new_l2 = rest_lx + weighted[i] * new, rest_l2 + weights[i] * new * new
            is_better = (rest_lx > number(0)) & ((new < code) | (new > code))
            is_better &= (new_l2 if np.isfinite(low) else rest_l2) > number(0)  # as either does
            is_better &= new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            codes[i] = words.select(is_better, new, code)
            sum_lx = words.select(is_better, new_lx, sum_lx)
            sum_l2 = words.select(is_better, new_l2, sum_l2)
        return [sum_lx, sum_l2, *codes]

    sum_lx, sum_l2, *codes = words.repeat(5, improve, [*sums, *codes])
    return [words.select(sum_l2 > number(0), sum_lx / sum_l2, number(0)), *codes]


def _sum_weights(weights: np.ndarray, groups: int) -> np.ndarray:
    """Sums of each group's weights [size, G], contiguous [groups of a block, B]."""
    return np.ascontiguousarray(_sum(weights).reshape(-1, groups).T)


def _with_min(
    rows: np.ndarray, top: int, first: float, steps: int, weights: Weights, search: Search
) -> tuple[np.ndarray, np.ndarray]:
    """Head of a Q4_K or Q5_K block (half d, dmin; uint8 scales[12]) [B, 16]; codes [B, 256]."""
    x, head, six_bits, sums = _groups(rows, 32), [], [], None
    if weights is None:
        scales, mins, before = _search_min(x, (top, first, steps, 0.1), search)
    else:
        weights = _groups(weights, 32)
        scales, mins, before = _search_min(x, (top, -0.9, 36, 0.05), search, weights)
        sums = _sum_weights(weights, 8)
    for values in (scales, mins):
        values = np.ascontiguousarray(values.reshape(-1, 8).T)
        if sums is not None:
            scale, codes = _fit_positive(values, sums, 63, search)
        else:
            largest = np.maximum(values.max(0), np.float32(0))
            inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
            # A negative scale wraps around as in C.
            codes = np.rint(inverse * values).astype(np.int32).astype(np.uint8)
            scale, codes = largest / np.float32(63), np.minimum(codes, 63)
        six_bits.append(codes.T)
        head.append(_half(scale))
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


def _pack_bits(bits: np.ndarray) -> np.ndarray:
    """Bits [B, 256] -> uint8 [B, 32]: bit i of byte j is number 32 i + j."""
    return np.packbits(bits.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits [B, 256] -> uint8 [B, 128]: those of two runs of 32 share a run of bytes."""
    runs = codes.reshape(-1, 4, 2, 32)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(-1, 128)


def _q4_k(rows: np.ndarray, weights: Weights, search: Search) -> np.ndarray:
    head, codes = _with_min(rows, 15, -1.0, 20, weights, search)  # uint8 head[16], qs[128]
    return np.concatenate([head, _pack_nibbles(codes)], axis=1)


def _q5_k(rows: np.ndarray, weights: Weights, search: Search) -> np.ndarray:
    head, codes = _with_min(rows, 31, -0.5, 15, weights, search)  # uint8 head[16], qh[32], qs[128]
    return np.concatenate([head, _pack_bits(codes >> 4), _pack_nibbles(codes & 15)], axis=1)


def _largest(values: np.ndarray, axis: int) -> np.ndarray:
    """The value of largest magnitude along an axis, with its sign; the first of equal ones."""
    values = np.moveaxis(values, axis, 0)
    low, high = values.min(0), values.max(0)
    largest = np.where(high > -low, high, low)
    at = np.flatnonzero(~((high > -low) | (high < -low)))  # equal, or not numbers
    largest[at] = values[np.abs(values[:, at]).argmax(0), at]
    return largest


def fit_scales(
    words: Any, x: Any, weights: Any, others: Sequence[Any], constants: tuple[int | None]
) -> Sequence[np.ndarray]:
    """Search inverse scales for the least squared error weighted by x * x; returns scales and the
    inverse scales that gave the best values.

    The part that make_qx_quants and quantize_row_iq4_nl_impl share. others: the groups'
    largest values. constants: top, for codes -top .. top - 1, or None for IQ4_NUMBERS. weights: in
    place of x * x.
    """
    (largest,), (top,) = others, constants
    number, total = words.number, words.total
    weights = x * x if weights is None else weights
    weighted_x = weights * x

    def attempt(inverse: Any, best: Sequence, is_first: bool = False) -> Sequence:
        scaled = x * inverse
        codes = words.nearest(scaled) if top is None else words.round(scaled, -top, top - 1)
        weighted = weights * codes
        sum_lx = total(weighted * x if top is None else weighted_x * codes)
        weighted *= codes
        sum_l2 = total(weighted)
        scale = sum_lx / sum_l2
        is_better = sum_l2 > number(0)
        if not is_first:
            is_better &= sum_lx * sum_lx > best[2] * sum_l2
        trial = inverse, scale, scale * sum_lx
        return [words.select(is_better, new, old) for new, old in zip(trial, best)]

    def improve(i: Any, best: Sequence) -> Sequence:
        if top is None:
            return attempt((i + number(IQ4_NUMBERS[0] - 7)) / largest, best)
        tenths = words.select(i < number(9), i - number(9), i - number(8))
        return attempt((number(0) - (tenths * number(0.1) + number(top))) / largest, best)

    if top is None:
        start = number(1) / ((number(0) - largest) / number(IQ4_NUMBERS[0]))
    else:
        start = number(-top) / largest
    best = attempt(start, (start, number(0), number(0)), is_first=True)
    return words.repeat(15 if top is None else 18, improve, best)[1::-1]


def _fit_symmetric(
    x: np.ndarray, top: int, search: Search, weights: np.ndarray | None = None
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """make_qx_quants: scales [G], zero for groups of zeros, and a function of groups' indices that
    returns their codes, -top .. top - 1.
    """
    largest = _largest(x, 0)
    scales, best = search.run(fit_scales, x, weights, (largest,), (top,))
    is_zero = np.abs(largest) < _EPSILON

    def before(at: np.ndarray) -> np.ndarray:
        return np.where(is_zero[at], -top, _round(x[:, at] * best[at], -top, top - 1))

    return np.where(is_zero, np.float32(0), scales), before


def _symmetric(rows: np.ndarray, weights: np.ndarray, search: Search, top: int) -> np.ndarray:
    """Q4_0 or Q5_0, by `top` 8 or 16: half d; uint8 qh[4] of Q5_0, qs[16]."""
    x = _groups(rows, 32)
    scales, find = _fit_symmetric(x, top, search, _groups(weights, 32))
    return _pack_32([_half(scales)], find(np.arange(x.shape[1])) + top, has_high=top > 8)


def _with_bias(rows: np.ndarray, weights: np.ndarray, search: Search, top: int) -> np.ndarray:
    """Q4_1 or Q5_1, by `top` 15 or 31: half d, m; uint8 qh[4] of Q5_1, qs[16]."""
    x = _groups(rows, 32)
    scales, mins, find = _search_min(x, (top, -0.9, 36, 0.05), search, _groups(weights, 32))
    return _pack_32([_half(scales), _half(-mins)], find(np.arange(x.shape[1])), has_high=top > 15)


def _pack_32(head: list[np.ndarray], codes: np.ndarray, has_high: bool) -> np.ndarray:
    """Blocks of codes [32, B] behind their scales; has_high: with a fifth bit."""
    codes = codes.astype(np.uint8).T
    if has_high:
        head.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
        codes &= 15
    return np.concatenate([*head, codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _q3_k(rows: np.ndarray, weights: Weights, search: Search) -> np.ndarray:
    # uint8 hmask[32], qs[64], scales[12]; half d
    x = _groups(rows, 16)
    before: Callable[[np.ndarray], np.ndarray]
    if weights is None:
        largest = _largest(x, 0)
        is_zero, squares = ~(np.abs(largest) >= _EPSILON), x * x
        codes = np.clip(np.rint(np.float32(-4) / largest * x), -4, 3)
        codes[:, is_zero] = 0
        scales, *changed = search.run(descend, x, squares, (codes,), (-4, 3))
        codes = np.stack(changed)
        codes[:, is_zero], scales[is_zero] = -4, 0
        levels = scales.reshape(-1, 16).T
        largest = _largest(levels, 0)
        inverse = np.float32(-32) / largest
        six_bits = (np.clip(np.rint(inverse * levels), -32, 31) + 32).astype(np.uint8)
        d = np.float32(1) / inverse
        is_zero = largest == 0
        six_bits[:, is_zero], d[is_zero] = 0, 0
        before = functools.partial(codes.take, axis=1)
    else:
        weights = _groups(weights, 16)
        scales, before = _fit_symmetric(x, 4, search, weights)
        levels = np.ascontiguousarray(scales.reshape(-1, 16).T)
        d, find = _fit_symmetric(levels, 32, search, _sum_weights(weights, 16))
        six_bits = (find(np.arange(len(d))) + 32).astype(np.uint8)
    half = _half(d)
    sub_scales = six_bits.T.astype(np.float32) - 32
    codes = _requantize(x, _widen(half) * sub_scales, before, -4, 3)
    codes = (codes.T + np.float32(4)).astype(np.uint8).reshape(-1, 256)
    low = _pack_pairs((codes & 3).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    nibbles = six_bits[:8] & 15 | (six_bits[8:] & 15) << 4
    high = _pack_pairs((six_bits >> 4).reshape(4, 4, -1), 0)
    return np.concatenate([_pack_bits(codes >> 2), low, nibbles.T, high.T, half], axis=1)


def _pack_pairs(codes: np.ndarray, axis: int) -> np.ndarray:
    """Codes of 2 bits, four along an axis -> bytes without it."""
    parts = np.moveaxis(codes, axis, 0)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def _q6_k(rows: np.ndarray, weights: Weights, search: Search) -> np.ndarray:
    # uint8 ql[128], qh[64]; int8 scales[16]; half d
    x = _groups(rows, 16)
    scales, before = _fit_symmetric(
        x, 32, search, None if weights is None else _groups(weights, 16)
    )
    scales = scales.reshape(-1, 16)
    largest = _largest(scales, 1)
    inverse = np.float32(-128) / largest
    d = _half(np.float32(1) / inverse)
    eight_bits = np.minimum(np.rint(inverse[:, None] * scales), 127).astype(np.int8)
    codes = _requantize(x, _widen(d) * eight_bits, before, -32, 31)
    codes = (codes.T + np.float32(32)).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = _pack_pairs(codes >> 4, 2).reshape(-1, 64)
    blocks = np.concatenate([low.reshape(-1, 128), high, eight_bits.view(np.uint8), d], axis=1)
    blocks[np.abs(largest) < _EPSILON] = 0
    return blocks


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Entries of a table of those nearest in IQ4_NUMBERS, the last for NaN; overwrites `values`."""
    values *= np.float32(2)
    np.fmin(values, np.float32(254), out=values)
    np.fmax(values, np.float32(-254), out=values)
    np.floor(values, out=values)
    values += np.float32(254)
    return table.take(values.astype(np.intp))


def _fit_iq4(x: np.ndarray, weights: Weights, search: Search) -> np.ndarray:
    """Scales [G] of quantize_row_iq4_nl_impl."""
    largest = _largest(x, 0)
    weights = None if weights is None else _groups(weights, 32)
    scales, _ = search.run(fit_scales, x, weights, (largest,), (None,))
    return np.where(np.abs(largest) < _EPSILON, np.float32(0), scales)


def _pack_iq4(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes of the values nearest to x / scales, as bytes uint8 [G, 16]."""
    inverse = np.where(scales != 0, np.float32(1) / scales, np.float32(0))
    codes = _nearest(inverse * x, _NEAREST)
    return (codes[:16] | codes[16:] << 4).T


def _iq4_nl(rows: np.ndarray, weights: Weights, search: Search) -> np.ndarray:
    x = _groups(rows, 32)  # half d; uint8 qs[16]
    scales = _fit_iq4(x, weights, search)
    return np.concatenate([_half(scales), _pack_iq4(x, scales)], axis=1)


def _iq4_xs(rows: np.ndarray, weights: Weights, search: Search) -> np.ndarray:
    # half d; uint16 scales_h; uint8 scales_l[4], qs[128]
    x = _groups(rows, 32)
    scales = _fit_iq4(x, weights, search).reshape(-1, 8)
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


class _Words:
    """The arithmetic of searches on NumPy's arrays."""

    number, abs, sqrt, select, total, round = np.float32, np.abs, np.sqrt, np.where, _sum, _round

    @staticmethod
    def nearest(values: np.ndarray) -> np.ndarray:
        """The nearest of IQ4_NUMBERS."""
        return _nearest(values, _NEAREST_VALUE)

    @staticmethod
    def repeat(count: int, body: Callable[..., Sequence], state: Sequence) -> Sequence:
        """`state` after body(i, state) for each i."""
        for i in range(count):
            state = body(np.float32(i), state)
        return state


@dataclass(frozen=True)
class Search:
    """Runs searches of groups' scales in NumPy."""

    def run(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        x: np.ndarray,
        weights: Weights,
        others: tuple[np.ndarray, ...],
        constants: tuple[float | None, ...],
    ) -> Sequence[np.ndarray]:
        """The rows [G] that a search returns. x, weights: [size, G]; others,
        constants: its further parameters.
        """
        return function(_Words, x, weights, others, constants)


_QUANTISERS: dict[str, Callable[..., np.ndarray]] = dict(
    Q3_K=_q3_k, Q4_K=_q4_k, Q5_K=_q5_k, Q6_K=_q6_k, IQ4_NL=_iq4_nl, IQ4_XS=_iq4_xs
)
# those that weigh errors, the gguf library's among them
_WEIGHED: dict[str, Callable[..., np.ndarray]] = {
    **_QUANTISERS,
    "Q4_0": functools.partial(_symmetric, top=8),
    "Q4_1": functools.partial(_with_bias, top=15),
    "Q5_0": functools.partial(_symmetric, top=16),
    "Q5_1": functools.partial(_with_bias, top=31),
}
