"""Attention of one token over the pages of its row."""

from __future__ import annotations

import numpy as np

from ..pages import PAGE
from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i32, i32s, i64, kernel
from .norms import apply_softcap
from .paging import load_part, page_layout, widen_rows

ATTEND = {
    "query": i64,  # float32 [heads][D], the heads that share this key head
    "pages": i64,  # addresses of the row's pages, int64
    # Offsets of the key head in a page: float32, float16 or int8 [PAGE][D padded with zeros to
    # whole vectors], ...
    "keys": i64,
    "values": i64,
    "key_scales": i64,
    "value_scales": i64,  # ... and for int8 float16 [PAGE][groups]
    "out": i64,  # as query; may be padded to whole vectors
    "first": i64,
    "end": i64,  # visible positions
    "heads": i64,
    "scores": i64,  # scratch: for each head 4 bytes per position, from first's block of 16 to end's
    "scores_bytes": i64,  # from one head's scores to the next
    "scale": f32,
    # The attention that follows, whose keys are prefetched; next_pages 0: they are in a cache
    # already.
    "next_pages": i64,
    "next_keys": i64,
    "next_first": i64,
    "next_end": i64,
}
HEADS_AT_ONCE = 4
PIECE = 64  # dimensions of a head summed in registers together
HIDDEN = -3e38  # score of a position that is not visible


@kernel
def attend(
    module: Module,
    head_dim: int,
    cache_bits: int | None = None,
    public: bool = False,
    cap: float | None = None,
) -> Function:
    """softmax(scale q k^T) v of one token and one key head, for the query heads that share it. cap:
    softcap of the scores.

    Narrow numbers are widened once for all heads, 16 keys or a page of values at a time, which stay
    in the L1 cache.
    """
    layout = page_layout(head_dim, cache_bits)
    row_bytes, scale_bytes = layout.row_bytes, 2 * layout.groups
    chunks = -(-head_dim // LANES)
    score = _score_block(module, head_dim, cap)
    pieces = range(0, chunks * LANES, PIECE)
    mixers = {
        count: {piece: _mix(module, head_dim, piece, count) for piece in pieces}
        for count in (HEADS_AT_ONCE, 1)
    }
    widen = widen_rows(module, layout) if cache_bits else None
    f = Function(module, f"attend_{head_dim}_{cache_bits}", ATTEND, public=public)
    wide_bytes = 4 * layout.width  # of a row of numbers
    scratch = f.allocate_stack(PAGE * wide_bytes) if cache_bits else None

    def load_rows(numbers: Value, scales: Value, index: Value, count: Value | int) -> Value:
        """Address of `count` rows from position `index` of a page, as float32."""
        numbers = numbers + index * row_bytes
        if scratch is None:
            return numbers
        f.call(widen, numbers, scales + index * scale_bytes, count, scratch)
        return scratch

    def prefetch_share(rows: Value, count: Value, h: Value, heads: int) -> None:
        """Prefetch the part of `count` rows that falls to `heads` heads from h on, since spread
        loads wait less.
        """
        lines = (count * row_bytes + 63) // 64
        share = (lines + (f.heads - 1)) // f.heads
        with f.loop(((h + heads) * share).minimum(lines), h * share) as line:
            f.prefetch(rows + line * 64, 64)

    prefetches = f.next_pages.compare("!=", 0)
    start = f.first // LANES * LANES
    blocks = (f.end - start + (LANES - 1)) // LANES
    with f.loop(blocks) as b:
        position = start + b * LANES
        page, index = f.load(i64, f.pages, position // PAGE * 8, 8), position % PAGE
        keys = load_rows(page + f.keys, page + f.key_scales, index, LANES)
        ahead, ahead_count = (
            page + f.values + index * row_bytes,
            prefetches.select((f.end - position).minimum(LANES), 0),
        )
        with f.loop(f.heads) as h:
            prefetch_share(ahead, ahead_count, h, 1)
            f.call(
                score,
                f.query + h * (4 * head_dim),
                keys,
                position,
                f.first,
                f.end,
                f.scores + h * f.scores_bytes + b * (4 * LANES),
                f.scale,
            )
    with f.loop(f.heads) as h:
        row = f.scores + h * f.scores_bytes
        top = Variable(f, f.constant(f32s, HIDDEN))
        with f.loop(blocks) as b:
            top.set(f.larger(f.load(f32s, row, b * (4 * LANES), 4), top.get()))  # skips NaN
        largest = f.reduce_max(top.get()).splat()
        sums = Variable(f, f.zero(f32s))
        with f.loop(blocks) as b:
            value = f.load(f32s, row, b * (4 * LANES), 4)
            value = value.compare(">", -2e38).select(f.exp(value - largest), 0.0)
            f.store(value, row, b * (4 * LANES), 4)
            sums.set(sums.get() + value)
        share = (f.constant(f32, 1.0) / f.reduce_sum(sums.get())).splat()
        with f.loop(blocks) as b:
            f.store(f.load(f32s, row, b * (4 * LANES), 4) * share, row, b * (4 * LANES), 4)
        out, whole = f.out + h * (4 * head_dim), head_dim // LANES * LANES
        for d in (*range(0, whole, LANES), *range(whole, head_dim)):
            f.store(f.zero(f32s if d < whole else f32), out, 4 * d, 4)
    # A page's values are read for all heads before the next page's.
    with f.loop((f.end + (PAGE - 1)) // PAGE, f.first // PAGE) as number:
        begin, page = number * PAGE, f.load(i64, f.pages, number * 8, 8)
        begin = begin.compare(">", f.first).select(begin, f.first)
        count, index = (number * PAGE + PAGE).minimum(f.end) - begin, begin % PAGE
        values = load_rows(page + f.values, page + f.value_scales, index, count)
        shares = f.scores + (begin - start) * 4
        ahead_number = number - f.first // PAGE + f.next_first // PAGE
        ahead_count = (f.next_end - ahead_number * PAGE).minimum(PAGE)
        ahead_count = (prefetches & ahead_count.compare(">", 0)).select(ahead_count, 0)
        ahead = Variable(f, f.next_keys)
        with f.if_then(ahead_count.compare("!=", 0)):
            ahead.set(f.load(i64, f.next_pages, ahead_number * 8, 8) + f.next_keys)
        grouped = f.heads // HEADS_AT_ONCE * HEADS_AT_ONCE
        for start_head, end_head, at_once in (
            (f.constant(i64, 0), grouped, HEADS_AT_ONCE),
            (grouped, f.heads, 1),
        ):
            with f.loop(end_head, start_head, at_once) as h:
                prefetch_share(ahead.get(), ahead_count, h, at_once)
                for piece in pieces:
                    f.call(
                        mixers[at_once][piece],
                        shares + h * f.scores_bytes,
                        f.scores_bytes,
                        values + 4 * piece,
                        count,
                        f.out + h * (4 * head_dim) + 4 * piece,
                    )
    return f.finish()


@kernel
def _score_block(module: Module, head_dim: int, cap: float | None = None) -> Function:
    """Scores of a query head for 16 rows of keys; HIDDEN outside first .. end - 1."""
    f = Function(
        module,
        f"score_block_{head_dim}",
        {
            "query": i64,
            "keys": i64,
            "position": i64,
            "first": i64,
            "end": i64,
            "out": i64,
            "scale": f32,
        },
    )
    sums: list[Value] = []
    # Keys are padded with zeros.
    query = [load_part(f, f.query, d, head_dim) for d in range(0, head_dim, LANES)]
    for j in range(LANES):
        row = f.keys + 4 * LANES * len(query) * j if j else f.keys
        products = f.load(f32s, row, 0, 4) * query[0]
        for c in range(1, len(query)):
            products = f.fma(f.load(f32s, row, 4 * LANES * c, 4), query[c], products)
        sums.append(products)
    # Reduce 16 vectors to a vector of their sums by adding pairs of lanes of pairs of vectors, four
    # times: twice within quarters of vectors, then whole quarters, so that every shuffle is one
    # instruction.
    for size, lanes in (
        (1, [0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30]),
        (4, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]),
    ):
        for _ in range(2):
            sums = [
                a.shuffle(lanes, b) + a.shuffle([lane + size for lane in lanes], b)
                for a, b in zip(sums[::2], sums[1::2])
            ]
    scores = sums[0] * f.scale.splat()
    if cap:
        scores = apply_softcap(f, scores, f.constant(f32s, float(np.float32(cap))))
    lanes = f.position.truncate(i32).splat() + f.constant(i32s, list(range(LANES)))
    hidden = f.constant(f32s, HIDDEN)
    scores = lanes.compare("<", f.end.truncate(i32).splat()).select(scores, hidden)
    scores = lanes.compare(">=", f.first.truncate(i32).splat()).select(scores, hidden)
    f.store(scores, f.out, 0, 4)
    return f.finish()


@kernel
def _mix(module: Module, head_dim: int, piece: int, heads: int) -> Function:
    """out[h][d] += sum over `count` positions of shares[h][position] * values[position][d]; d:
    PIECE from `piece` on.
    """
    row_bytes, dims = -(-head_dim // LANES) * LANES * 4, min(PIECE, head_dim - piece)
    full, tail = dims // LANES, dims % LANES
    f = Function(
        module,
        f"mix_{head_dim}_{piece}_{heads}",
        {"shares": i64, "shares_bytes": i64, "values": i64, "count": i64, "out": i64},
    )

    def addresses(h: int) -> list[Value]:
        """Addresses of a head's output vectors."""
        out = f.out + 4 * head_dim * h if h else f.out
        return [(out + 4 * LANES * c if c else out) for c in range(full + bool(tail))]

    sums = []
    for h in range(heads):
        for c, at in enumerate(addresses(h)):
            sums.append(Variable(f, load_part(f, at, 0, LANES if c < full else tail)))
    width = full + bool(tail)
    with f.loop(f.count) as i:
        row = f.values + i * row_bytes
        values = [f.load(f32s, row, 4 * LANES * c, 4) for c in range(width)]
        for h in range(heads):
            share = f.load(
                f32, f.shares + f.shares_bytes * h + i * 4 if h else f.shares + i * 4, 0, 4
            ).splat()
            for c in range(width):
                total = sums[h * width + c]
                total.set(f.fma(share, values[c], total.get()))
    for h in range(heads):
        for c, at in enumerate(addresses(h)):
            value = sums[h * width + c].get()
            if c < full:
                f.store(value, at, 0, 4)
            else:
                for e in range(tail):
                    f.store(value.extract_lane(e), at, 4 * e, 4)
    return f.finish()
