"""Kernels of a mixture of experts: the choice of experts, and the order of rows by expert.

Several experts compute each token; a pair of token and expert is an assignment, number token * used
+ place. Rows of the experts' inputs and outputs are sorted by expert and lie in tiles: full tiles,
then the smallest tile that holds the rest. An expert's matrix is read once for each of its tiles;
other experts are not read.
"""

from __future__ import annotations

import math

from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i64

# Words of a tile's record: the first row, rows with a token, and all rows. A first record has the
# number of tiles.
TILE = {name: index for index, name in enumerate(("expert", "row", "count", "size"))}

CHOOSE = {
    "scores": i64,
    "scores_bytes": i64,  # float32 [tokens][experts], rows scores_bytes apart
    "tokens": i64,
    "experts": i64,
    "used": i64,
    "normalises": i64,  # 1: shares are a softmax over the chosen experts; 0: over all
    "chosen": i64,  # int64 [tokens][used], largest score first
    "shares": i64,  # float32 [tokens][used]
}
SORT = {
    "chosen": i64,  # int64 [assignments]
    "assignments": i64,
    "experts": i64,
    "counts": i64,  # int64 [experts], scratch
    "tiles": i64,  # int64 [1 + assignments][4]
    "order": i64,  # the assignment of each row
    "rows": i64,  # the row of each assignment
}
COMBINE = {
    "outputs": i64,
    "outputs_bytes": i64,  # rows of float32 [vectors][16]
    "rows": i64,  # int64 [used]
    "shares": i64,  # float32 [used]
    "used": i64,
    "vectors": i64,
    "out": i64,
    "accumulate": i64,
}


def max_rows(assignments: int, experts: int, full: int) -> int:
    """Maximum number of rows in the tiles of `assignments`. full: rows of a full tile."""
    return min(assignments * 2, assignments + experts * (full - 1)) + full


def choose(module: Module, public: bool = False) -> Function:
    """Choose the `used` experts with the largest scores of each token, the first among equals, and
    compute their shares.
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
                is_better = (score.compare("<", last.get()) | is_next) & score.compare(
                    ">", best.get()
                )
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
    """Sort assignments by expert, in tiles of these sizes, powers of two from 1 on."""
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
            size = f.constant(i64, full)
            for smaller in reversed(sizes[:-1]):
                size = count.compare("<=", smaller).select(f.constant(i64, smaller), size)
            number.set(number.get() + 1)
            record = f.tiles + number.get() * (8 * len(TILE))
            for name, value in (
                ("expert", expert),
                ("row", row.get()),
                ("count", count),
                ("size", size),
            ):
                f.store(value, record, 8 * TILE[name], 8)
            row.set(row.get() + size)
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
    """out = sum of shares times a token's rows of `outputs` (+ out, if accumulate), float32
    [vectors][16].
    """
    f = Function(module, "combine_experts", COMBINE, public=public)
    with f.loop(f.vectors) as i:
        at = i * (4 * LANES)
        total = Variable(f, f.zero(f32s))
        with f.loop(f.used) as place:
            row = f.outputs + f.load(i64, f.rows, place * 8, 8) * f.outputs_bytes
            total.set(
                f.fma(
                    f.load(f32s, row, at, 4),
                    f.load(f32, f.shares, place * 4, 4).splat(),
                    total.get(),
                )
            )
        with f.if_then(f.accumulate.compare("!=", 0)):
            total.set(total.get() + f.load(f32s, f.out, at, 4))
        f.store(total.get(), f.out, at, 4)
    return f.finish()
