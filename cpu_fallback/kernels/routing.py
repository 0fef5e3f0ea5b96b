"""Kernels of a mixture of experts: the choice of experts, and the order of rows by expert.

Several experts compute each token; a pair of token and expert is an assignment, number token * used
+ place. Rows of the experts' inputs and outputs are sorted by expert and lie in tiles: full tiles,
then the smallest tile that holds the rest. An expert's matrix is read once for each of its tiles;
other experts are not read.
"""

from __future__ import annotations

import math

from .emit import LANES, Function, Value, Variable, f32, f32s, i64, kernel

# Shares: a softmax over all experts, over the chosen ones, or each score's sigmoid
SHARING = ("all", "chosen", "sigmoid")
# Words of a tile's record: the first row, rows with a token, and all rows. A first record has the
# number of tiles.
TILE = {name: index for index, name in enumerate(("expert", "row", "count", "size"))}


def max_rows(assignments: int, experts: int, full: int) -> int:
    """Maximum number of rows in the tiles of `assignments`. full: rows of a full tile."""
    return min(assignments * 2, assignments + experts * (full - 1)) + full


@kernel
def choose(
    f: Function,
    scores,  # float32 [tokens][experts], rows scores_bytes apart
    scores_bytes,
    tokens,
    experts,
    used,
    sharing,  # of SHARING
    chosen,  # int64 [tokens][used], largest score first
    shares,  # float32 [tokens][used]
) -> None:
    """Choose the `used` experts of largest score of each token, and compute their shares."""
    is_sigmoid, one = sharing.compare("==", SHARING.index("sigmoid")), f.constant(f32, 1.0)
    with f.loop(tokens) as token:
        row, at = scores + token * scores_bytes, token * used
        last, last_index = Variable(f, f.constant(f32, math.inf)), Variable(f, f.constant(i64, -1))
        largest, total = Variable(f, f.zero(f32)), Variable(f, f.zero(f32))
        with f.loop(used) as place:
            best, index = Variable(f, f.constant(f32, -math.inf)), Variable(f, f.constant(i64, 0))
            with f.loop(experts) as i:
                score = f.load(f32, row, i * 4)
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
            power = is_sigmoid.select(one / (_exp(f, f.zero(f32) - best.get()) + one), power)
            total.set(total.get() + power)
            f.store(index.get(), chosen + (at + place) * 8)
            f.store(power, shares + (at + place) * 4)
        with f.if_then(sharing.compare("==", SHARING.index("all"))):
            total.set(f.zero(f32))
            with f.loop(experts) as i:
                total.set(total.get() + _exp(f, f.load(f32, row, i * 4) - largest.get()))
        total.set(is_sigmoid.select(one, total.get()))
        with f.loop(used) as place:
            share = shares + (at + place) * 4
            f.store(f.load(f32, share) / total.get(), share)


def _exp(f: Function, x: Value) -> Value:
    return f.exp(x.splat()).extract_lane(0)


@kernel
def sort(
    f: Function,
    chosen,  # int64 [assignments]
    assignments,
    experts,
    counts,  # int64 [experts], scratch
    tiles,  # int64 [1 + assignments][4]
    order,  # the assignment of each row
    rows,  # the row of each assignment
    *,
    sizes: tuple[int, ...],
) -> None:
    """Sort assignments by expert, in tiles of these sizes, powers of two from 1 on."""
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
            for name, value in (
                ("expert", expert),
                ("row", row.get()),
                ("count", count),
                ("size", size),
            ):
                f.store(value, record, 8 * TILE[name])
            row.set(row.get() + size)
            left.set(left.get() - count)
    f.store(number.get(), tiles)
    with f.loop(assignments) as i:
        place = counts + f.load(i64, chosen, i * 8) * 8
        at = f.load(i64, place)
        f.store(at + 1, place)
        f.store(at, rows + i * 8)
        f.store(i, order + at * 8)


@kernel
def combine(
    f: Function,
    outputs,  # rows of float32 [vectors][16], outputs_bytes apart
    outputs_bytes,
    rows,  # int64 [used]
    shares,  # float32 [used]
    used,
    vectors,
    out,
    accumulate,
) -> None:
    """out = sum of shares times a token's rows of `outputs` (+ out, if accumulate)."""
    with f.loop(vectors) as i:
        at = i * (4 * LANES)
        total = Variable(f, f.zero(f32s))
        with f.loop(used) as place:
            row = outputs + f.load(i64, rows, place * 8) * outputs_bytes
            total.set(
                f.fma(f.load(f32s, row, at), f.load(f32, shares, place * 4).splat(), total.get())
            )
        with f.if_then(accumulate.compare("!=", 0)):
            total.set(total.get() + f.load(f32s, out, at))
        f.store(total.get(), out, at)
