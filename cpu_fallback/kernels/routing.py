"""Kernels of a mixture of experts: the choice of experts, and the order in which rows meet them.

Each token is used by several experts; such a pair is an assignment, number token * used + place. Rows of the experts' inputs
and outputs are sorted by expert and lie in tiles: an expert's whole ones, then one with as many slots as the smallest size
that holds the rest. An expert's matrix is read once for each of its tiles; others are not touched.
"""

from __future__ import annotations

import math

from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i64

# Words of a tile's record. The record before the first tile's has the number of tiles.
TILE = {name: index for index, name in enumerate(("expert", "row", "count", "slots"))}

CHOOSE = {"scores": i64, "scores_bytes": i64, "tokens": i64, "experts": i64, "used": i64, "normalises": i64, "chosen": i64,
          "shares": i64}
SORT = {"chosen": i64, "assignments": i64, "experts": i64, "counts": i64, "tiles": i64, "order": i64, "rows": i64}
COMBINE = {"outputs": i64, "outputs_bytes": i64, "rows": i64, "shares": i64, "used": i64, "vectors": i64, "out": i64,
           "accumulate": i64}


def most_rows(assignments: int, experts: int, full: int) -> int:
    """Rows that the tiles of so many assignments take at most."""
    return min(assignments * 2, assignments + experts * (full - 1)) + full


def choose(module: Module, public: bool = False) -> Function:
    """The `used` experts with the largest scores of each token, the first of equal ones, and their softmax.

    scores: float32 [tokens][experts]; chosen: int64 [tokens][used], largest first; shares: float32 likewise, of all experts'
    softmax, or if it `normalises` of the chosen ones'.
    """
    f = Function(module, "choose_experts", CHOOSE, public=public)
    with f.loop(f.tokens) as token:
        scores, at = f.scores + token * f.scores_bytes, token * f.used
        last, last_index = Variable(f, f.constant(f32, math.inf)), Variable(f, f.constant(i64, -1))
        largest, total = Variable(f, f.zero(f32)), Variable(f, f.zero(f32))
        with f.loop(f.used) as place:
            best, index = Variable(f, f.constant(f32, -math.inf)), Variable(f, f.constant(i64, 0))
            with f.loop(f.experts) as i:
                score = f.load(f32, scores, i * 4, 4)
                is_next = score.compare("==", last.get()) & i.compare(">", last_index.get())
                is_better = (score.compare("<", last.get()) | is_next) & score.compare(">", best.get())
                best.set(is_better.select(score, best.get()))
                index.set(is_better.select(i, index.get()))
            largest.set(place.compare("==", 0).select(best.get(), largest.get()))
            last.set(best.get())
            last_index.set(index.get())
            power = _exp(f, best.get() - largest.get())
            total.set(total.get() + power)
            f.store(index.get(), f.chosen + (at + place) * 8, 0, 8)
            f.store(power, f.shares + (at + place) * 4, 0, 4)
        with f.if_then(f.normalises.compare("==", 0)):
            total.set(f.zero(f32))
            with f.loop(f.experts) as i:
                total.set(total.get() + _exp(f, f.load(f32, scores, i * 4, 4) - largest.get()))
        with f.loop(f.used) as place:
            share = f.shares + (at + place) * 4
            f.store(f.load(f32, share, 0, 4) / total.get(), share, 0, 4)
    return f.finish()


def _exp(f: Function, x: Value) -> Value:
    return f.exp(x.splat()).extract_lane(0)


def sort(module: Module, sizes: tuple[int, ...], public: bool = False) -> Function:
    """Sort assignments by expert, in tiles of these sizes, powers of two from 1 on.

    chosen: int64 [assignments]; counts: int64 [experts], for the kernel's use; tiles: int64 [1 + assignments][4]; order: the
    assignment of each row; rows: the row of each assignment.
    """
    f = Function(module, "sort_assignments", SORT, public=public)
    full = sizes[-1]
    with f.loop(f.experts) as expert:
        f.store(f.zero(i64), f.counts + expert * 8, 0, 8)
    with f.loop(f.assignments) as i:
        count = f.counts + f.load(i64, f.chosen, i * 8, 8) * 8
        f.store(f.load(i64, count, 0, 8) + 1, count, 0, 8)
    row, number = Variable(f, f.zero(i64)), Variable(f, f.zero(i64))
    with f.loop(f.experts) as expert:
        left = Variable(f, f.load(i64, f.counts, expert * 8, 8))
        f.store(row.get(), f.counts + expert * 8, 0, 8)
        with f.forever() as break_if:
            break_if(left.get().compare("<=", 0))
            count = left.get().minimum(full)
            slots = f.constant(i64, full)
            for size in reversed(sizes[:-1]):
                slots = count.compare("<=", size).select(f.constant(i64, size), slots)
            number.set(number.get() + 1)
            record = f.tiles + number.get() * (8 * len(TILE))
            for name, value in (("expert", expert), ("row", row.get()), ("count", count), ("slots", slots)):
                f.store(value, record, 8 * TILE[name], 8)
            row.set(row.get() + slots)
            left.set(left.get() - count)
    f.store(number.get(), f.tiles, 0, 8)
    with f.loop(f.assignments) as i:
        place = f.counts + f.load(i64, f.chosen, i * 8, 8) * 8
        at = f.load(i64, place, 0, 8)
        f.store(at + 1, place, 0, 8)
        f.store(at, f.rows + i * 8, 0, 8)
        f.store(i, f.order + at * 8, 0, 8)
    return f.finish()


def combine(module: Module, public: bool = False) -> Function:
    """out = sum of the shares of one token's rows of `outputs` (+ out, if accumulate), float32 [vectors][16].

    rows: int64 [used]; shares: float32 [used].
    """
    f = Function(module, "combine_experts", COMBINE, public=public)
    with f.loop(f.vectors) as i:
        at = i * (4 * LANES)
        total = Variable(f, f.zero(f32s))
        with f.loop(f.used) as place:
            row = f.outputs + f.load(i64, f.rows, place * 8, 8) * f.outputs_bytes
            total.set(f.fma(f.load(f32s, row, at, 4), f.load(f32, f.shares, place * 4, 4).splat(), total.get()))
        with f.if_then(f.accumulate.compare("!=", 0)):
            total.set(total.get() + f.load(f32s, f.out, at, 4))
        f.store(total.get(), f.out, at, 4)
    return f.finish()
