"""Kernels of a mixture of experts: the choice of experts, and the order of rows by expert.

Several experts compute each token; a pair of token and expert is an assignment, number token * used
+ place. Rows of the experts' inputs and outputs are sorted by expert and lie in tiles: full tiles,
then the smallest tile that holds the rest. An expert's matrix is read once for each of its tiles;
other experts are not read.
"""

from __future__ import annotations

import math

from mlx_llama.core.models.parts import Router
from mlx_llama.core.ops import LEAST_SUM

from .emit import LANES, Function, Value, Variable, f32, f32s, i64
from .records import Operation

# Shares: a softmax over all experts or over the chosen ones; each score's sigmoid, or divided by
# the sum of the chosen ones
_ALL, _CHOSEN, _SIGMOID, _NORMALISED = range(4)
# Words of a tile's record: the first row, rows with a token, and all rows. A first record has the
# number of tiles.
TILE = {name: index for index, name in enumerate(("expert", "row", "count", "size"))}


def max_rows(assignments: int, experts: int, full: int) -> int:
    """Maximum number of rows in the tiles of `assignments`. full: rows of a full tile."""
    return min(assignments * 2, assignments + experts * (full - 1)) + full


def share_kind(router: Router) -> int:
    """The router's kind of shares, as an operand."""
    if router.scoring == "sigmoid":
        return _NORMALISED if router.normalises else _SIGMOID
    return _CHOSEN if router.normalises else _ALL


def route(f: Operation, sizes: tuple[int, ...], scales: bool = False) -> None:
    """Choose the `used` experts of largest score of each token, compute their shares, and sort the
    assignments by expert, in tiles of these sizes, powers of two from 1 on.

    scores: float32 [tokens][experts], rows scores_bytes apart, padded to vectors; sharing: of
    `share_kind`; bias: float32 [experts], padded, or 0; with a bias or several groups, the sigmoids
    of the scores plus the bias rank the experts in the used_groups best groups; ranks: scratch;
    chosen: int64 [tokens][used], largest first; shares: float32 [tokens][used], times scale, if
    `scales` also times expert_scale, float32 [experts];
    counts: int64 [experts], scratch; tiles: int64 [1 + assignments][4]; order: int64, the
    assignment of each row; rows: the row of each assignment.
    """
    with f.loop(f.hi, f.lo):
        tokens = f.load_context("tokens")
        _choose(f, tokens, scales)
        _sort(f, tokens * f.used, sizes)


def _choose(f: Operation, tokens: Value, scales: bool) -> None:
    scores, scores_bytes, experts, used = f.scores, f.scores_bytes, f.experts, f.used
    sharing, chosen, shares, scale = f.sharing, f.chosen, f.shares, f.load_float("scale")
    is_sigmoid, unit = sharing.compare(">=", _SIGMOID), f.constant(f32, 1.0)
    is_ranked = f.bias.compare("!=", 0) | f.groups.compare(">", 1)
    ranks_at = f.ranks
    with f.loop(tokens) as token:
        row, at = scores + token * scores_bytes, token * used
        ranks = Variable(f, row)
        with f.if_then(is_ranked):
            _rank(f, row)
            ranks.set(ranks_at)
        last, last_index = Variable(f, f.constant(f32, math.inf)), Variable(f, f.constant(i64, -1))
        largest, total = Variable(f, f.zero(f32)), Variable(f, f.zero(f32))
        with f.loop(used) as place:
            best, index = Variable(f, f.constant(f32, -math.inf)), Variable(f, f.constant(i64, 0))
            with f.loop(experts) as i:
                score = f.load(f32, ranks.get(), i * 4)
                is_next = score.compare("==", last.get()) & i.compare(">", last_index.get())
                is_better = score.compare("<", last.get()) | is_next
                is_better = is_better & score.compare(">", best.get())
                best.set(is_better.select(score, best.get()))
                index.set(is_better.select(i, index.get()))
            last.set(best.get())
            last_index.set(index.get())
            score = f.load(f32, row, index.get() * 4)
            largest.set(place.compare("==", 0).select(score, largest.get()))
            power = _exp(f, score - largest.get())
            power = is_sigmoid.select(unit / (_exp(f, f.zero(f32) - score) + unit), power)
            total.set(total.get() + power)
            f.store(index.get(), chosen + (at + place) * 8)
            f.store(power, shares + (at + place) * 4)
        with f.if_then(sharing.compare("==", _ALL)):
            total.set(f.zero(f32))
            with f.loop(experts) as i:
                total.set(total.get() + _exp(f, f.load(f32, row, i * 4) - largest.get()))
        total.set(is_sigmoid.select(total.get() + LEAST_SUM, total.get()))
        total.set(sharing.compare("==", _SIGMOID).select(unit, total.get()))
        with f.loop(used) as place:
            share = shares + (at + place) * 4
            value = f.load(f32, share) / total.get() * scale
            if scales:
                expert = f.load(i64, chosen + (at + place) * 8)
                value = value * f.load(f32, f.expert_scale, expert * 4)
            f.store(value, share)


def _rank(f: Operation, scores: Value) -> None:
    """ranks = sigmoid(scores) + bias, and minus infinity outside the best groups."""
    bias, ranks, experts, groups = f.bias, f.ranks, f.experts, f.groups
    used_groups, unit = f.used_groups, f.constant(f32, 1.0).splat()
    with f.loop((experts + (LANES - 1)) // LANES) as i:
        at = i * (4 * LANES)
        rank = Variable(f, unit / (f.exp(f.zero(f32s) - f.load(f32s, scores, at)) + unit))
        with f.if_then(bias.compare("!=", 0)):
            rank.set(rank.get() + f.load(f32s, bias, at))
        f.store(rank.get(), ranks, at)
    with f.if_then(groups.compare(">", 1)):
        size, sums = experts // groups, ranks + (experts + (LANES - 1)) // LANES * (4 * LANES)
        with f.loop(groups) as group:
            first, second = (Variable(f, f.constant(f32, -math.inf)) for _ in range(2))
            with f.loop(size) as i:
                rank = f.load(f32, ranks, (group * size + i) * 4)
                less = rank.compare("<", first.get()).select(rank, first.get())
                first.set(rank.compare(">", first.get()).select(rank, first.get()))
                second.set(less.compare(">", second.get()).select(less, second.get()))
            f.store(first.get() + second.get(), sums, group * 4)
        with f.loop(groups) as group:
            better, own = Variable(f, f.zero(i64)), f.load(f32, sums, group * 4)
            with f.loop(groups) as other:
                is_better = f.load(f32, sums, other * 4).compare(">", own)
                better.set(better.get() + is_better.select(f.constant(i64, 1), 0))
            with f.if_then(better.get().compare(">=", used_groups)), f.loop(size) as i:
                f.store(f.constant(f32, -math.inf), ranks, (group * size + i) * 4)


def _exp(f: Function, x: Value) -> Value:
    return f.exp(x.splat()).extract_lane(0)


def _sort(f: Operation, assignments: Value, sizes: tuple[int, ...]) -> None:
    chosen, experts, counts, tiles, order = f.chosen, f.experts, f.counts, f.tiles, f.order
    rows = f.rows
    full = sizes[-1]
    with f.loop(experts) as expert:
        f.store(f.zero(i64), counts + expert * 8)
    with f.loop(assignments) as i:
        count = counts + f.load(i64, chosen, i * 8) * 8
        f.store(f.load(i64, count) + 1, count)
    row, number = Variable(f, f.zero(i64)), Variable(f, f.zero(i64))
    with f.loop(experts) as expert:
        left = Variable(f, f.load(i64, counts, expert * 8))
        f.store(row.get(), counts + expert * 8)
        with f.forever() as break_if:
            break_if(left.get().compare("<=", 0))
            count = left.get().minimum(full)
            size = f.constant(i64, full)
            for smaller in reversed(sizes[:-1]):
                size = count.compare("<=", smaller).select(f.constant(i64, smaller), size)
            number.set(number.get() + 1)
            record = tiles + number.get() * (8 * len(TILE))
            for word, value in enumerate((expert, row.get(), count, size)):  # as in TILE
                f.store(value, record, 8 * word)
            row.set(row.get() + size)
            left.set(left.get() - count)
    f.store(number.get(), tiles)
    with f.loop(assignments) as i:
        place = counts + f.load(i64, chosen, i * 8) * 8
        at = f.load(i64, place)
        f.store(at + 1, place)
        f.store(at, rows + i * 8)
        f.store(i, order + at * 8)


def combine(f: Operation) -> None:
    """out = sum of shares times a token's rows of `outputs` (+ out, if accumulate). outputs: rows
    of float32 [vectors][16]; rows: int64 [tokens][used]; shares: float32 [tokens][used].
    """
    outputs, outputs_bytes, rows, shares = f.outputs, f.outputs_bytes, f.rows, f.shares
    used, vectors, out, out_bytes = f.used, f.vectors, f.out, f.out_bytes
    accumulates = f.accumulate.compare("!=", 0)
    with f.loop(f.hi, f.lo) as token, f.loop(vectors) as i:
        at, total = i * (4 * LANES), Variable(f, f.zero(f32s))
        with f.loop(used) as place:
            number = token * used + place
            row = outputs + f.load(i64, rows, number * 8) * outputs_bytes
            share = f.load(f32, shares, number * 4).splat()
            total.set(f.fma(f.load(f32s, row, at), share, total.get()))
        target = out + token * out_bytes
        with f.if_then(accumulates):
            total.set(total.get() + f.load(f32s, target, at))
        f.store(total.get(), target, at)


def gate_output(f: Operation) -> None:
    """out = x * sigmoid(score) (+ out, if accumulate). x: rows of float32 [vectors][16]; score: a
    float32 of each row.
    """
    x, x_bytes, score, score_bytes, vectors = f.x, f.x_bytes, f.score, f.score_bytes, f.vectors
    out, out_bytes, accumulates = f.out, f.out_bytes, f.accumulate.compare("!=", 0)
    with f.loop(f.hi, f.lo) as token:
        power = f.exp(f.zero(f32s) - f.load(f32, score + token * score_bytes).splat())
        share, target = f.constant(f32, 1.0).splat() / (power + 1.0), out + token * out_bytes
        with f.loop(vectors) as i:
            at = i * (4 * LANES)
            value = Variable(f, f.load(f32s, x + token * x_bytes, at) * share)
            with f.if_then(accumulates):
                value.set(value.get() + f.load(f32s, target, at))
            f.store(value.get(), target, at)
