"""Attention of one token over the pages of its row."""

from __future__ import annotations

import numpy as np

from ..pages import PAGE
from .emit import LANES, Function, Value, Variable, f32, f32s, i32, i32s, i64, kernel
from .norms import apply_softcap
from .paging import load_part, page_layout, widen_rows

HEADS_AT_ONCE = 4
PIECE = 64  # dimensions of a head summed in registers together
HIDDEN = -3e38  # score of a position that is not visible


@kernel
def attend(
    f: Function,
    query,  # float32 [heads][D], the heads that share this key head
    pages,  # addresses of the row's pages, int64, ...
    page_step,  # ... this many bytes apart
    # Offsets of the key head in a page: float32, float16 or int8 [PAGE][D padded with zeros to
    # whole vectors], and for int8 float16 [PAGE][groups].
    keys,
    values,
    key_scales,
    value_scales,
    out,  # as query; may be padded to whole vectors
    first,
    end,  # visible positions
    heads,
    scores,  # scratch: for each head 4 bytes per position, from first's block of 16 to end's
    scores_bytes,  # from one head's scores to the next
    scale: f32,
    # The attention that follows, whose keys are prefetched; next_pages 0: they are cached.
    next_pages,
    next_keys,
    next_first,
    next_end,
    sinks,  # float32 [heads] if has_sinks
    *,
    head_dim: int,
    cache_bits: int | None = None,
    cap: float | None = None,
    has_sinks: bool = False,
) -> None:
    """softmax(scale q k^T) v of one token and one key head, for the query heads that share it. cap:
    softcap of the scores; sinks: as in core.ops.

    Narrow numbers are widened once for all heads, 16 keys or a page of values at a time, which stay
    in the L1 cache.
    """
    layout = page_layout(head_dim, cache_bits)
    row_bytes, scale_bytes = layout.row_bytes, 2 * layout.groups
    chunks = -(-head_dim // LANES)
    score = _score_block(f.module, head_dim, cap)
    pieces = range(0, chunks * LANES, PIECE)
    mixers = {
        count: {
            piece: _mix(f.module, head_dim, min(PIECE, head_dim - piece), count) for piece in pieces
        }
        for count in (HEADS_AT_ONCE, 1)
    }
    widen = widen_rows(f.module, layout) if cache_bits else None
    wide_bytes = 4 * layout.width  # a row of numbers
    scratch = f.allocate_stack(PAGE * wide_bytes) if cache_bits else None

    def load_rows(numbers: Value, scales: Value, index: Value, count: Value | int) -> Value:
        """Address of `count` rows from position `index` of a page, as float32."""
        numbers = numbers + index * row_bytes
        if scratch is None:
            return numbers
        f.call(widen, numbers, scales + index * scale_bytes, count, scratch)
        return scratch

    def prefetch_share(rows: Value, count: Value, h: Value, served: int) -> None:
        """Prefetch a share of `count` rows with `served` heads: spread loads wait less."""
        lines = (count * row_bytes + 63) // 64
        share = (lines + (heads - 1)) // heads
        with f.loop(((h + served) * share).minimum(lines), h * share) as line:
            f.prefetch(rows + line * 64, 64)

    prefetches = next_pages.compare("!=", 0)
    start = first // LANES * LANES
    blocks = (end - start + (LANES - 1)) // LANES
    with f.loop(blocks) as b:
        position = start + b * LANES
        page, index = f.load(i64, pages, position // PAGE * page_step), position % PAGE
        rows = load_rows(page + keys, page + key_scales, index, LANES)
        ahead = page + values + index * row_bytes
        ahead_count = prefetches.select((end - position).minimum(LANES), 0)
        with f.loop(heads) as h:
            prefetch_share(ahead, ahead_count, h, 1)
            target = scores + h * scores_bytes + b * (4 * LANES)
            f.call(score, query + h * (4 * head_dim), rows, position, first, end, target, scale)
    with f.loop(heads) as h:
        row = scores + h * scores_bytes
        top = Variable(f, f.constant(f32s, HIDDEN))
        with f.loop(blocks) as b:
            top.set(f.larger(f.load(f32s, row, b * (4 * LANES)), top.get()))  # skips NaN
        largest = f.reduce_max(top.get())
        if has_sinks:
            sink = f.load(f32, sinks + h * 4)
            largest = f.larger(sink, largest)
        largest = largest.splat()
        sums = Variable(f, f.zero(f32s))
        with f.loop(blocks) as b:
            value = f.load(f32s, row, b * (4 * LANES))
            value = value.compare(">", -2e38).select(f.exp(value - largest), 0.0)
            f.store(value, row, b * (4 * LANES))
            sums.set(sums.get() + value)
        total = f.reduce_sum(sums.get())
        if has_sinks:
            total = total + f.exp(sink.splat() - largest).extract_lane(0)
        share = (f.constant(f32, 1.0) / total).splat()
        with f.loop(blocks) as b:
            f.store(f.load(f32s, row, b * (4 * LANES)) * share, row, b * (4 * LANES))
        outputs, whole = out + h * (4 * head_dim), head_dim // LANES * LANES
        for d in (*range(0, whole, LANES), *range(whole, head_dim)):
            f.store(f.zero(f32s if d < whole else f32), outputs, 4 * d)
    # A page's values are read for all heads before the next page's.
    with f.loop((end + (PAGE - 1)) // PAGE, first // PAGE) as number:
        begin, page = number * PAGE, f.load(i64, pages, number * page_step)
        begin = begin.compare(">", first).select(begin, first)
        count, index = (number * PAGE + PAGE).minimum(end) - begin, begin % PAGE
        rows = load_rows(page + values, page + value_scales, index, count)
        shares = scores + (begin - start) * 4
        ahead_number = number - first // PAGE + next_first // PAGE
        ahead_count = (next_end - ahead_number * PAGE).minimum(PAGE)
        ahead_count = (prefetches & ahead_count.compare(">", 0)).select(ahead_count, 0)
        ahead = Variable(f, next_keys)
        with f.if_then(ahead_count.compare("!=", 0)):
            ahead.set(f.load(i64, next_pages, ahead_number * page_step) + next_keys)
        grouped = heads // HEADS_AT_ONCE * HEADS_AT_ONCE
        shared = f.constant(i64, 0), grouped, HEADS_AT_ONCE
        for start_head, end_head, at_once in (shared, (grouped, heads, 1)):
            with f.loop(end_head, start_head, at_once) as h:
                prefetch_share(ahead.get(), ahead_count, h, at_once)
                for piece in pieces:
                    mix, weights = mixers[at_once][piece], shares + h * scores_bytes
                    target = out + h * (4 * head_dim) + 4 * piece
                    f.call(mix, weights, scores_bytes, rows + 4 * piece, count, target)


@kernel
def _score_block(
    f: Function,
    query,
    keys,
    position,
    first,
    end,
    out,
    scale: f32,
    *,
    head_dim: int,
    cap: float | None = None,
) -> None:
    """Scores of a query head for 16 rows of keys; HIDDEN outside first .. end - 1."""
    sums: list[Value] = []
    # Keys are padded with zeros.
    parts = [load_part(f, query, d, head_dim) for d in range(0, head_dim, LANES)]
    for j in range(LANES):
        row = keys + 4 * LANES * len(parts) * j if j else keys
        products = f.load(f32s, row) * parts[0]
        for c in range(1, len(parts)):
            products = f.fma(f.load(f32s, row, 4 * LANES * c), parts[c], products)
        sums.append(products)
    # Reduce 16 vectors to a vector of their sums by adding pairs of lanes of pairs of vectors, four
    # times: twice within quarters, then whole quarters, so that every shuffle is one instruction.
    for size, lanes in (
        (1, [0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30]),
        (4, [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]),
    ):
        for _ in range(2):
            sums = [
                a.shuffle(lanes, b) + a.shuffle([lane + size for lane in lanes], b)
                for a, b in zip(sums[::2], sums[1::2])
            ]
    scores = sums[0] * scale.splat()
    if cap:
        scores = apply_softcap(f, scores, f.constant(f32s, float(np.float32(cap))))
    lanes = position.truncate(i32).splat() + f.constant(i32s, list(range(LANES)))
    hidden = f.constant(f32s, HIDDEN)
    scores = lanes.compare("<", end.truncate(i32).splat()).select(scores, hidden)
    scores = lanes.compare(">=", first.truncate(i32).splat()).select(scores, hidden)
    f.store(scores, out)


@kernel
def _mix(
    f: Function, shares, shares_bytes, values, count, out, *, head_dim: int, dims: int, heads: int
) -> None:
    """out[h][d] += sum over positions of shares[h][position] * values[position][d], of `dims`
    numbers of a head.
    """
    row_bytes = -(-head_dim // LANES) * LANES * 4
    full, tail = dims // LANES, dims % LANES

    def addresses(h: int) -> list[Value]:
        """Addresses of a head's output vectors."""
        first = out + 4 * head_dim * h if h else out
        return [(first + 4 * LANES * c if c else first) for c in range(full + bool(tail))]

    sums = []
    for h in range(heads):
        for c, at in enumerate(addresses(h)):
            sums.append(Variable(f, load_part(f, at, 0, LANES if c < full else tail)))
    width = full + bool(tail)
    with f.loop(count) as i:
        row = values + i * row_bytes
        numbers = [f.load(f32s, row, 4 * LANES * c) for c in range(width)]
        for h in range(heads):
            share = f.load(f32, (shares + shares_bytes * h if h else shares) + i * 4).splat()
            for c in range(width):
                total = sums[h * width + c]
                total.set(f.fma(share, numbers[c], total.get()))
    for h in range(heads):
        for c, at in enumerate(addresses(h)):
            value = sums[h * width + c].get()
            if c < full:
                f.store(value, at)
            else:
                for e in range(tail):
                    f.store(value.extract_lane(e), at, 4 * e)
