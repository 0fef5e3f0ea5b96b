"""Triton kernels of decoded tokens, and of a prompt's rotations, gates and experts. Importing it
requires the package triton.

Values that change from token to token are read from device memory (state.py), so a captured step
needs nothing from the host. Each row of a batch has separate programs. The tests compare each
function with torch's operations:

    add_rms_norm   ops.add_rms_norm                 multiply, multiply_gated   ops.linear, ops.gated_linear
    norm_heads     ops.norm_heads                   rotate, gate               ops.rope, ops.gate
    store_rotated  ops.rope_and_store               attend                     ops.attend
    recent         Cache.recent                     add_noise                  sampling.gumbel added to the scores
    read_keys      View.new_keys                    adapt                      ops.adapt

Sums are float32, in an order that depends on the sizes and the row's position alone: bit-identical
in every run, whatever else is in the batch, at every capacity of the cache.
"""  # noqa: E501

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from mlx_llama.core.backends.positions import CACHE_GROUP
from mlx_llama.core.generation import rng
from mlx_llama.core.models.config import LlamaConfig

from . import draw, packed, state as fields
from .state import new_state, pack_row
from .storage import LARGEST_SCALE, Storage, stored_dtype

_STRIDE = tl.constexpr(fields.MAX_ROWS)
_POSITION, _NEXT, _TOKEN, _ALLOCATED, _TOKENS, _NUMBERS, _SCALES, _COSINES, _SINES, _ADAPTER = map(
    tl.constexpr,
    (
        fields.POSITION,
        fields.NEXT,
        fields.TOKEN,
        fields.ALLOCATED,
        fields.TOKENS,
        fields.NUMBERS,
        fields.SCALES,
        fields.COSINES,
        fields.SINES,
        fields.ADAPTER,
    ),
)
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_SEED_LOW, _SEED_HIGH, _IS_RANDOM = map(
    tl.constexpr, (draw.SEED_LOW, draw.SEED_HIGH, draw.IS_RANDOM)
)

_SAMPLES = 4  # maximum rows of x per program of `_multiply`
# rows of w per program of `_multiply`: small programs fill the last wave of a small matrix
_ROWS = 2
_TILE_ROWS, _TILE_COLUMNS = 32, 64  # rows and columns of w per iteration of `_multiply_tile`
_COLUMNS = 1024  # columns per iteration of `_multiply`: each thread loads 16 bytes of each row
_PIECES = 64  # minimum number of programs for the positions of a key head
# minimum number of programs for a row's attention: two for each of some 130 multiprocessors
_PROGRAMS = 256
_JOINED = 32  # pieces that `_join` sums per iteration
_LOG2_E = math.log2(math.e)
_TILE = 16384  # bytes of keys per iteration of `_attend`; shared memory holds a few tiles in flight
_ADAPTED = 8  # rows of an adapter's first matrix per program of `_shrink`
_BLOCK = 1024  # elements per program of the elementwise kernels


@triton.jit
def _field(state, index, row):
    """Load a row's field of the state."""
    return tl.load(state + index * _STRIDE + row)


@triton.jit
def _address(state, index, row, like):
    """The pointer in a row's field, to elements of `like`'s type; PyTorch aligns storage to 16
    bytes.
    """
    return tl.multiple_of(_field(state, index, row).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate))
    # gelu by tanh: tanh(z / 2) = 2 sigmoid(z) - 1
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-inner))


@triton.jit
def _add_rms_norm(x, delta, weight, total, normed, eps, E: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < E
    value = tl.load(x + row * E + e, mask=inside, other=0).to(tl.float32)
    if delta is not None:
        value += tl.load(delta + row * E + e, mask=inside, other=0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * E + e, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(value * value, axis=0) / E + eps)
    by = tl.load(weight + e, mask=inside, other=0).to(tl.float32)
    tl.store(normed + row * E + e, (value * scale * by).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads(
    heads, query_weight, key_weight, out, eps, H, G, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalise a head of queries or keys, or copy a head of values."""
    h = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64) * (H + 2 * G) * D + h * D
    d = tl.arange(0, BLOCK)
    inside = d < D
    value = tl.load(heads + at + d, mask=inside, other=0)
    if h < H + G:
        weight = query_weight
        if h >= H:
            weight = key_weight
        wide = value.to(tl.float32)
        scale = 1 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / D + eps)
        value = (wide * scale * tl.load(weight + d, mask=inside, other=0).to(tl.float32)).to(
            value.dtype
        )
    tl.store(out + at + d, value, mask=inside)


@triton.jit
def _multiply(
    x,
    w,
    bias,
    chosen,
    out,
    M,
    N,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[m, n] = w[n] @ x[m] + bias[n]; with ACTIVATION: of w[n] @ x[m], times w[N + n] @ x[m]. x:
    [M, K].

    A program multiplies TILE rows of x with each weight that it loads. Threads split the columns
    alone, so TILE does not change the order of a sum. chosen: int64 [M], for w[chosen[m] * N + n] @
    x[m // SHARED], with a TILE of 1; or None.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    tiles = tl.cdiv(M, TILE)  # neighbouring programs read the same rows of w
    m = (tl.program_id(0) % tiles * TILE + tl.arange(0, TILE))[:, None]
    n = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS))[None, :]
    row = tl.minimum(n, N - 1).to(tl.int64)[:, :, None]
    sample = tl.minimum(m, M - 1)[:, :, None]
    if chosen is not None:
        row += tl.load(chosen + sample) * N
    sample = sample // SHARED
    total = tl.zeros((TILE, ROWS, COLUMNS), tl.float32)
    other = tl.zeros((TILE, ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        k = (start + tl.arange(0, COLUMNS))[None, None, :]
        inside = k < K
        value = tl.load(x + sample * K + k, mask=inside, other=0).to(tl.float32)
        total += (
            tl.load(w + row * K + k, mask=inside, other=0, eviction_policy="evict_first").to(
                tl.float32
            )
            * value
        )
        if GATED:
            second = tl.load(
                w + (row + N) * K + k, mask=inside, other=0, eviction_policy="evict_first"
            )
            other += second.to(tl.float32) * value
    result = tl.sum(total, axis=2)
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    if GATED:
        up = tl.sum(other, axis=2)
        if bias is not None:
            up += tl.load(bias + N + n, mask=n < N, other=0).to(tl.float32)
        result = _activate(result, ACTIVATION) * up
    tl.store(out + m * N + n, result.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit(do_not_specialize=["M", "tiles"])
def _multiply_tile(
    x,
    w,
    chosen,
    members,
    out,
    M,
    tiles,
    N,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):
    """out[part, m, n] = w[n] @ x[m] over PART columns, on tensor cores. x: [M, K]; out: [parts, M,
    N].

    The order of a sum does not depend on TILE, the rows of x per program. chosen, members: of
    `packed.Groups`, for w[chosen[tile] * N + n] @ x[m // SHARED]; or None.
    """
    # neighbouring programs read the same rows of w
    tile, part = tl.program_id(0) % tiles, tl.program_id(1)
    m = tile * TILE + tl.arange(0, TILE)
    n = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    row, stop = tl.minimum(n, N - 1).to(tl.int64), tl.minimum(part * PART + PART, K)
    if members is not None:
        m = tl.load(members + tile * TILE + tl.arange(0, TILE)).to(tl.int32)
        row += tl.load(chosen + tile) * N
        stop = tl.where(tl.load(members + tile * TILE) < 0, 0, stop)  # of a tile without rows
        m = tl.where(m < 0, M, m)
    sample = tl.minimum(m, M - 1)  # those beyond M and N are not stored
    if SHARED > 1:
        sample = sample // SHARED
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(part * PART, stop, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        if K % COLUMNS:
            a = tl.load(
                w + row[:, None] * K + k[None, :],
                mask=(k < K)[None, :],
                other=0,
                eviction_policy="evict_first",
            )
            b = tl.load(x + sample[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0)
        else:
            a = tl.load(w + row[:, None] * K + k[None, :], eviction_policy="evict_first")
            b = tl.load(x + sample[None, :] * K + k[:, None])
        if packed.IS_INTERPRETED:  # the interpreter would multiply bfloat16's raw bits
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(
        out + (part * M + m)[None, :] * N + n[:, None],
        total,
        mask=(m < M)[None, :] & (n < N)[:, None],
    )


@triton.jit(do_not_specialize=["M"])
def _finish(sums, bias, out, M, N, COUNT, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out[m, n] = sums[:, m, n].sum() + bias[n], in order; with ACTIVATION: activation of that,
    times the same of N + n.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = N * 2 if GATED else N
    total = tl.zeros((BLOCK,), tl.float32)
    other = tl.zeros((BLOCK,), tl.float32)
    for part in range(COUNT):
        total += tl.load(sums + (part * M + m) * wide + n, mask=n < N, other=0)
        if GATED:
            other += tl.load(sums + (part * M + m) * wide + N + n, mask=n < N, other=0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
        if GATED:
            other += tl.load(bias + N + n, mask=n < N, other=0).to(tl.float32)
    if GATED:
        total = _activate(total, ACTIVATION) * other
    tl.store(out + m * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _combine(outputs, shares, out, E, USED: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(USED):
        row = tl.load(outputs + (t * USED + place) * E + e, mask=e < E, other=0).to(tl.float32)
        total += row * tl.load(shares + t * USED + place)
    tl.store(out + t * E + e, total.to(out.dtype.element_ty), mask=e < E)


@triton.jit
def _shrink(state, x, a, out, R, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[row, r] = a[adapter of the row, r] @ x[row], float32; nothing in a row without an
    adapter. R: a multiple of ROWS.
    """
    row = tl.program_id(1).to(tl.int64)
    adapter = _field(state, _ADAPTER, row)
    if adapter != 0:
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            value = tl.load(x + row * K + k, mask=k < K, other=0).to(tl.float32)
            place = (adapter * R + r)[:, None] * K + k[None, :]
            total += (
                tl.load(a + place, mask=k[None, :] < K, other=0).to(tl.float32) * value[None, :]
            )
        tl.store(out + row * R + r, tl.sum(total, axis=1))


@triton.jit
def _expand(
    state, inner, b, product, N, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """product[row, n] += b[adapter of the row, n] @ inner[row]; nothing in a row without an
    adapter.
    """
    row = tl.program_id(1).to(tl.int64)
    adapter = _field(state, _ADAPTER, row)
    if adapter != 0:
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        r = tl.arange(0, COLUMNS)
        inside = (n < N)[:, None] & (r < R)[None, :]
        value = tl.load(inner + row * R + r, mask=r < R, other=0)
        place = (adapter * N + n)[:, None] * R + r[None, :]
        total = tl.sum(
            tl.load(b + place, mask=inside, other=0).to(tl.float32) * value[None, :], axis=1
        )
        before = tl.load(product + row * N + n, mask=n < N, other=0).to(tl.float32)
        tl.store(product + row * N + n, (before + total).to(product.dtype.element_ty), mask=n < N)


@triton.jit
def _rotate(
    x,
    cosines,
    sines,
    out,
    H,
    T,
    batch_stride,
    head_stride,
    row_stride,
    table_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    source = (
        x
        + b.to(tl.int64) * batch_stride
        + h.to(tl.int64) * head_stride
        + t.to(tl.int64) * row_stride
        + d
    )
    target = out + ((b.to(tl.int64) * H + h) * T + t) * (2 * HALF) + d
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    angle = b * table_stride + t * HALF + d
    cosine, sine = (
        tl.load(cosines + angle, mask=inside, other=0),
        tl.load(sines + angle, mask=inside, other=0),
    )
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _head_address(
    state, layer, part, head, position, row, like, G, WIDTH: tl.constexpr, FIELD: tl.constexpr
):
    """The pointer to WIDTH elements of a key head (part 0) or value head (1) at a row's
    position.
    """
    line = ((2 * layer + part) * G + head) * _field(state, _ALLOCATED, row) + position
    return _address(state, FIELD, row, like) + line * WIDTH


@triton.jit
def _store_codes(
    state,
    layer,
    source,
    table,
    codes,
    scales,
    part,
    g,
    row,
    position,
    G,
    D: tl.constexpr,
    HALF: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTATES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a head of keys (part 0), rotated, or values (1) as storage.quantize does."""
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK)[:, None]
    d = group * GROUP + tl.arange(0, GROUP)[None, :]
    inside = d < D
    value = tl.load(source + d, mask=inside, other=0)
    if ROTATES:
        if part == 0:
            angle, turns = (
                position * STRIDE + OFFSET + tl.where(d < HALF, d, d - HALF),
                d < 2 * HALF,
            )
            cosine = tl.load(_address(state, _COSINES, row, table) + angle, mask=turns, other=1)
            sine = tl.load(_address(state, _SINES, row, table) + angle, mask=turns, other=0)
            other = tl.load(
                source + tl.where(d < HALF, d + HALF, d - HALF), mask=turns, other=0
            ).to(tl.float32)
            other = tl.where(d < HALF, -other, other)
            value = (value.to(tl.float32) * cosine + other * sine).to(value.dtype)
    wide = value.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)[:, None]
    scale = tl.minimum(tl.div_rn(largest, largest * 0 + 127), _LARGEST_SCALE).to(tl.float16)
    by = scale.to(tl.float32)
    code = tl.div_rn(wide, tl.where(by > 0, by, 1))
    # rounds to even: 1.5 * 2**23 has no fraction
    code = tl.where(by > 0, (code + 12582912.0) - 12582912.0, 0)
    code = tl.minimum(tl.maximum(code, -127), 127)
    tl.store(
        _head_address(state, layer, part, g, position, row, codes, G, D, _NUMBERS) + d,
        code.to(tl.int8),
        mask=inside,
    )
    target = _head_address(state, layer, part, g, position, row, scales, G, GROUPS, _SCALES)
    tl.store(target + group, scale, mask=group < GROUPS)


@triton.jit(do_not_specialize=["layer"])
def _store_rotated(
    state,
    layer,
    heads,
    query,
    table,
    codes,
    scales,
    H,
    G,
    D: tl.constexpr,
    HALF: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    ROTATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Rotate a head of queries or keys, and store keys and values. codes, scales: tensors of the
    stored types (None: no codes).

    HALF pairs are rotated by angles OFFSET (queries: QUERY) and following of a position's STRIDE;
    REST: block size of the other dimensions.
    """
    h, row = tl.program_id(0), tl.program_id(1)
    position = _field(state, _POSITION, row)
    source = heads + (row * (H + 2 * G) + h) * D
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    first = tl.load(source + d, mask=inside, other=0)
    second = tl.load(source + HALF + d, mask=inside, other=0)
    if ROTATES:
        if h < H + G:
            angle = position * STRIDE + tl.where(h < H, QUERY, OFFSET) + d
            cosine = tl.load(_address(state, _COSINES, row, table) + angle, mask=inside, other=0)
            sine = tl.load(_address(state, _SINES, row, table) + angle, mask=inside, other=0)
            a, b = first.to(tl.float32), second.to(tl.float32)
            first = (a * cosine - b * sine).to(first.dtype)
            second = (b * cosine + a * sine).to(first.dtype)
    rest = 2 * HALF + tl.arange(0, REST)
    if h < H:
        turned = query + (row * H + h) * D
        tl.store(turned + d, first, mask=inside)
        tl.store(turned + HALF + d, second, mask=inside)
        if D > 2 * HALF:
            tl.store(turned + rest, tl.load(source + rest, mask=rest < D, other=0), mask=rest < D)
    else:
        part, g = (h - H) // G, (h - H) % G
        if scales is None:
            target = _head_address(state, layer, part, g, position, row, codes, G, D, _NUMBERS)
            tl.store(target + d, first, mask=inside)
            tl.store(target + HALF + d, second, mask=inside)
            if D > 2 * HALF:
                tl.store(
                    target + rest, tl.load(source + rest, mask=rest < D, other=0), mask=rest < D
                )
        else:
            _store_codes(
                state,
                layer,
                source,
                table,
                codes,
                scales,
                part,
                g,
                row,
                position,
                G,
                D,
                HALF,
                STRIDE,
                OFFSET,
                ROTATES,
                BLOCKS,
                GROUP,
            )


@triton.jit
def _share(state, row, window, PIECES: tl.constexpr, KEYS: tl.constexpr):
    """(first visible position, last + 1, positions per piece), int32."""
    end = _field(state, _NEXT, row).to(tl.int32)
    first = end * 0
    if window > 0:
        first = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - first, PIECES), KEYS) * KEYS
    return first, end, share


@triton.jit
def _weigh(score, seen, top, factor, cap):
    """(new maximum, factor for the previous sums, weights) of scores [R, KEYS]. factor, cap: of
    `_attend`.
    """
    if cap is not None:
        # cap * tanh(score / cap)
        score = (cap - 2 * cap / (tl.exp(2 * score * factor / cap) + 1)) / factor
    score = tl.where(seen[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    # a fused multiply-add and a power of two
    weight = tl.exp2(score * factor - (higher * factor)[:, None])
    return higher, tl.exp2((top - higher) * factor)[:, None], weight


@triton.jit(do_not_specialize=["layer"])
def _attend(
    state,
    layer,
    query,
    stored,
    sums,
    tops,
    parts,
    factor,
    window,
    cap,
    G,
    R: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of a key head's R query heads to a piece of a row's positions: softmax's maximum,
    sum and weighted values.

    stored: a tensor of the type of keys and values; factor: scale of the scores; cap: their
    softcap, or None; both times log2(e).
    """
    g, piece, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, share = _share(state, row, window, PIECES, KEYS)
    start = first + piece * share
    if start < end:
        count = tl.minimum(share, end - start)
        keys = _head_address(state, layer, 0, g, start, row, stored, G, D, _NUMBERS)
        values = _head_address(state, layer, 1, g, start, row, stored, G, D, _NUMBERS)
        r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        head = (row * G + g) * R + r
        queries = tl.load(
            query + head[:, None] * D + d[None, :],
            mask=(r < R)[:, None] & (d < D)[None, :],
            other=0,
        )
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, KEYS), tl.float32)
        mixed = tl.zeros((ROWS, WIDTH), tl.float32)
        for at in range(0, count, KEYS):
            column = at + tl.arange(0, KEYS)
            seen = column < count
            key = tl.load(
                keys + column[None, :] * D + d[:, None],
                mask=seen[None, :] & (d < D)[:, None],
                other=0,
            )
            score = tl.dot(queries, key.to(queries.dtype), input_precision="ieee")
            top, kept, weight = _weigh(score, seen, top, factor, cap)
            value = tl.load(
                values + column[:, None] * D + d[None, :],
                mask=seen[:, None] & (d < D)[None, :],
                other=0,
            )
            total = total * kept + weight
            mixed = mixed * kept + tl.dot(
                weight.to(queries.dtype), value.to(queries.dtype), input_precision="ieee"
            )
        place = head.to(tl.int64) * PIECES + piece
        tl.store(tops + place, top * factor, mask=r < R)
        tl.store(sums + place, tl.sum(total, axis=1), mask=r < R)
        tl.store(
            parts + place[:, None] * D + d[None, :], mixed, mask=(r < R)[:, None] & (d < D)[None, :]
        )


@triton.jit
def _scaled(number, scale, KEYS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """Numbers [KEYS, GROUPS * WORDS] times the scales [KEYS, GROUPS] of their groups."""
    grouped = tl.reshape(number, (KEYS, GROUPS, WORDS)) * scale[:, :, None]
    return tl.reshape(grouped, (KEYS, GROUPS * WORDS))


@triton.jit
def _load_codes(
    codes,
    scales,
    column,
    magic,
    dtype: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Numbers of KEYS positions in four tensors [KEYS, BLOCKS * GROUP / 4]: of the dimensions 0, 4,
    8 .., of 1, 5, 9 ..

    Codes are loaded four to a word and become float16 two at a time: 0x6400 is 1024, and a code
    below it, its sign bit flipped, adds 128 + code. magic: 0x64806480, in a register: ptxas does
    not merge two operations on bits with constants.
    """
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    WORDS: tl.constexpr = GROUP // 4
    word, group = tl.arange(0, BLOCKS * WORDS), tl.arange(0, BLOCKS)
    at, by = (
        codes + column[:, None] * (D // 4) + word[None, :],
        scales + column[:, None] * GROUPS + group[None, :],
    )
    if D == BLOCKS * GROUP:
        four, scale = tl.load(at), tl.load(by)
    else:
        four = tl.load(at, mask=(word < D // 4)[None, :], other=0)
        scale = tl.load(by, mask=(group < GROUPS)[None, :], other=0)
    if dtype == tl.float16:
        even = (four & 0x00FF00FF) ^ magic
        odd = ((four >> 8) & 0x00FF00FF) ^ magic
        n0 = even.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
        n1 = odd.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
        n2 = (even >> 16).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
        n3 = (odd >> 16).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    else:
        scale = scale.to(dtype)
        n0, n1 = ((four << 24) >> 24).to(dtype), ((four << 16) >> 24).to(dtype)
        n2, n3 = ((four << 8) >> 24).to(dtype), (four >> 24).to(dtype)
    return (
        _scaled(n0, scale, KEYS, BLOCKS, WORDS),
        _scaled(n1, scale, KEYS, BLOCKS, WORDS),
        _scaled(n2, scale, KEYS, BLOCKS, WORDS),
        _scaled(n3, scale, KEYS, BLOCKS, WORDS),
    )


@triton.jit(do_not_specialize=["layer"])
def _attend_codes(
    state,
    layer,
    query,
    codes,
    scales,
    sums,
    tops,
    parts,
    factor,
    window,
    cap,
    G,
    R: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As `_attend`, with keys and values in codes of 8 bits. Products are of float16 numbers, or of
    float32 if the query is.

    codes, scales: tensors of the stored types; BLOCKS: groups of GROUP numbers, at least D / GROUP.
    """
    g, piece, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, share = _share(state, row, window, PIECES, KEYS)
    start = first + piece * share
    if start < end:
        count = tl.minimum(share, end - start)
        magic = (end >> 31) ^ 0x64806480  # the compiler cannot know that `end` is positive
        WIDTH: tl.constexpr = BLOCKS * GROUP // 4
        GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
        words = tl.pointer_type(tl.int32)
        keys = _head_address(state, layer, 0, g, start, row, codes, G, D, _NUMBERS).to(words)
        values = _head_address(state, layer, 1, g, start, row, codes, G, D, _NUMBERS).to(words)
        key_scales = _head_address(state, layer, 0, g, start, row, scales, G, GROUPS, _SCALES)
        value_scales = _head_address(state, layer, 1, g, start, row, scales, G, GROUPS, _SCALES)
        r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        head = (row * G + g) * R + r
        there = (r < R)[:, None] & (d < D // 4)[None, :]
        queries = query + head[:, None] * D + 4 * d[None, :]
        q0, q1 = tl.load(queries, mask=there, other=0), tl.load(queries + 1, mask=there, other=0)
        q2, q3 = (
            tl.load(queries + 2, mask=there, other=0),
            tl.load(queries + 3, mask=there, other=0),
        )
        dtype: tl.constexpr = tl.float32 if query.dtype.element_ty == tl.float32 else tl.float16
        q0, q1, q2, q3 = q0.to(dtype), q1.to(dtype), q2.to(dtype), q3.to(dtype)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, KEYS), tl.float32)
        m0, m1 = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
        m2, m3 = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
        for at in range(0, count, KEYS):
            column = at + tl.arange(0, KEYS)
            seen = column < count
            column = tl.minimum(column, count - 1)  # no masks: later positions have zero weights
            k0, k1, k2, k3 = _load_codes(
                keys, key_scales, column, magic, dtype, D, KEYS, BLOCKS, GROUP
            )
            score = tl.dot(q0, tl.trans(k0), input_precision="ieee")
            score = tl.dot(q1, tl.trans(k1), score, input_precision="ieee")
            score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
            score = tl.dot(q3, tl.trans(k3), score, input_precision="ieee")
            top, kept, weight = _weigh(score, seen, top, factor, cap)
            v0, v1, v2, v3 = _load_codes(
                values, value_scales, column, magic, dtype, D, KEYS, BLOCKS, GROUP
            )
            total = total * kept + weight
            weight = weight.to(dtype)
            m0 = tl.dot(weight, v0, m0 * kept, input_precision="ieee")
            m1 = tl.dot(weight, v1, m1 * kept, input_precision="ieee")
            m2 = tl.dot(weight, v2, m2 * kept, input_precision="ieee")
            m3 = tl.dot(weight, v3, m3 * kept, input_precision="ieee")
        place = head.to(tl.int64) * PIECES + piece
        tl.store(tops + place, top * factor, mask=r < R)
        tl.store(sums + place, tl.sum(total, axis=1), mask=r < R)
        target = parts + place[:, None] * D + 4 * d[None, :]
        tl.store(target, m0, mask=there)
        tl.store(target + 1, m1, mask=there)
        tl.store(target + 2, m2, mask=there)
        tl.store(target + 3, m3, mask=there)


@triton.jit
def _join(
    state,
    sums,
    tops,
    parts,
    out,
    window,
    H,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a head's pieces, BLOCK per iteration."""
    row = tl.program_id(1)
    h = row * H + tl.program_id(0)
    first, end, share = _share(state, row, window, PIECES, KEYS)
    count = tl.cdiv(end - first, share)
    pieces, d = tl.arange(0, PIECES), tl.arange(0, WIDTH)
    place = h.to(tl.int64) * PIECES
    top = tl.load(tops + place + pieces, mask=pieces < count, other=float("-inf"))
    highest = tl.max(top, axis=0)
    total = tl.sum(
        tl.exp2(top - highest) * tl.load(sums + place + pieces, mask=pieces < count, other=0),
        axis=0,
    )
    mixed = tl.zeros((WIDTH,), tl.float32)
    for at in range(0, count, BLOCK):
        piece = at + tl.arange(0, BLOCK)
        weight = tl.exp2(
            tl.load(tops + place + piece, mask=piece < count, other=float("-inf")) - highest
        )
        there = (piece < count)[:, None] & (d < D)[None, :]
        part = tl.load(parts + (place + piece)[:, None] * D + d[None, :], mask=there, other=0)
        mixed += tl.sum(weight[:, None] * part, axis=0)
    tl.store(out + h * D + d, (mixed / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _gate(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * F + f, mask=f < F, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=f < F, other=0).to(tl.float32)
    tl.store(
        out + row * F + f, (_activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=f < F
    )


@triton.jit
def _recent(state, like, out, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    at = _field(state, _NEXT, row) - WINDOW + i
    there = (at >= 0) & (i < WINDOW) & (_field(state, _TOKENS, row) != 0)
    token = tl.load(_address(state, _TOKENS, row, like) + at, mask=there, other=-1)
    tl.store(out + row * WINDOW + i, token, mask=i < WINDOW)


@triton.jit
def _four_rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0 += x1
    x1 = ((x1 << A) | (x1 >> (32 - A))) ^ x0
    x0 += x1
    x1 = ((x1 << B) | (x1 >> (32 - B))) ^ x0
    x0 += x1
    x1 = ((x1 << C) | (x1 >> (32 - C))) ^ x0
    x0 += x1
    return x0, ((x1 << D) | (x1 >> (32 - D))) ^ x0


@triton.jit
def _add_noise(
    position,
    words,
    scores,
    table,
    out,
    V,
    first,
    PARITY: tl.constexpr,
    SHIFT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add core.rng's noise (threefry2x32) of a row's position; none to a row that is not random."""
    row = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = _field(words, _SEED_LOW, row).to(tl.uint32)
    high = _field(words, _SEED_HIGH, row).to(tl.uint32)
    third = low ^ high ^ PARITY
    x0 = (i + first).to(tl.uint32) + low
    x1 = tl.zeros((BLOCK,), tl.uint32) + (tl.load(position + row).to(tl.uint32) + high)
    for group in tl.static_range(5):
        if group % 2 == 0:
            x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
        else:
            x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
        if group % 3 == 0:
            x0 += high
            x1 += third + (group + 1)
        elif group % 3 == 1:
            x0 += third
            x1 += low + (group + 1)
        else:
            x0 += low
            x1 += high + (group + 1)
    k = (x0 >> 8).to(tl.float32) + 1
    index = (k.to(tl.int32, bitcast=True) >> SHIFT) - OFFSET
    place = row.to(tl.int64) * V + i
    score = tl.load(scores + place, mask=i < V, other=0)
    noisy = tl.where(_field(words, _IS_RANDOM, row) != 0, score + tl.load(table + index), score)
    tl.store(out + place, noisy, mask=i < V)


@triton.jit
def _note(state, like):
    row = tl.program_id(0)
    there = _field(state, _TOKENS, row) != 0
    token = _field(state, _TOKEN, row).to(like.dtype.element_ty)
    tl.store(_address(state, _TOKENS, row, like) + _field(state, _POSITION, row), token, mask=there)


@triton.jit
def _advance(state, tokens, like):
    row = tl.program_id(0)
    there = _field(state, _TOKENS, row) != 0  # a padding row does not move
    position, following = _field(state, _NEXT, row), tl.load(tokens + row)
    tl.store(_address(state, _TOKENS, row, like) + position, following, mask=there)
    # -1 tells the host of logits that are not finite; the next step runs before it is read, and
    # needs a valid id.
    tl.store(state + _TOKEN * _STRIDE + row, tl.maximum(following, 0).to(tl.int64), mask=there)
    tl.store(state + _NEXT * _STRIDE + row, position + 1, mask=there)
    tl.store(state + _POSITION * _STRIDE + row, position, mask=there)


@triton.jit(do_not_specialize=["layer"])
def _read_keys(
    state, layer, codes, scales, out, G, D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    g, row, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    position = _field(state, _POSITION, row)
    key = tl.load(
        _head_address(state, layer, 0, g, position, row, codes, G, D, _NUMBERS) + d,
        mask=d < D,
        other=0,
    )
    if scales is not None:
        line = _head_address(
            state, layer, 0, g, position, row, scales, G, (D + GROUP - 1) // GROUP, _SCALES
        )
        key = key.to(tl.float32) * tl.load(line + d // GROUP, mask=d < D, other=0).to(tl.float32)
    tl.store(out + (row * G + g) * D + d, key.to(out.dtype.element_ty), mask=d < D)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm times weight). x, delta: [..., E]; weight: [E]."""
    E, x, delta = x.shape[-1], x.contiguous(), None if delta is None else delta.contiguous()
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(E)
    packed.run(
        _add_rms_norm,
        (x.numel() // E,),
        x,
        delta,
        weight,
        total,
        normed,
        eps,
        E,
        block,
        num_warps=min(16, max(1, block // 512)),
    )
    return total, normed


def norm_heads(
    heads: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    H: int,
    G: int,
    D: int,
    eps: float,
) -> torch.Tensor:
    """RMS norm over each head of query and key. heads: [..., (H + 2 G) D]: queries, keys, values;
    weights: [D].
    """
    heads = heads.contiguous()
    out, block = torch.empty_like(heads), triton.next_power_of_2(D)
    packed.run(
        _norm_heads,
        (H + 2 * G, heads.numel() // heads.shape[-1]),
        heads,
        query_weight,
        key_weight,
        out,
        eps,
        H,
        G,
        D,
        block,
        num_warps=max(1, block // 512),
    )
    return out


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, summed in float32. x: [..., K]; weight: [N, K]; bias: [N]; returns [...,
    N] in x's dtype.
    """
    return _product(x, weight, bias, len(weight), "")


def multiply_chosen(
    x: torch.Tensor, stack: torch.Tensor, chosen: torch.Tensor, groups: packed.Groups | None = None
) -> torch.Tensor:
    """Multiply each row with some matrices of a stack [X, N, K]. chosen: int64 [T, used]; x: [T,
    K], each row for all of its matrices, or [T used, K]; groups: as in packed.multiply_chosen.
    Returns [T used, N] in x's dtype."""
    N, weight = stack.shape[1], stack.view(-1, stack.shape[-1])
    if groups and x.dtype == weight.dtype != torch.float32:
        return _product_of_tiles(x, weight, None, N, "", groups, chosen.numel())
    return _product(x, weight, None, N, "", chosen.contiguous())


def experts(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    gate_stack: Any,
    up_stack: Any,
    down_stack: Any,
    activation: str,
    is_grouped: bool = False,
) -> torch.Tensor:
    """Mix the MLPs of each row's experts. rows: [T, E]; chosen: int64 [T, used]; shares: float32
    [T, used]; stacks: tensors [X, N, K] or QuantizedStacks; is_grouped: read an expert once for 32
    of its rows, in a prompt. Returns [T, E]."""
    groups = packed.group_rows(chosen, gate_stack.shape[0]) if is_grouped else None

    def multiply(x: torch.Tensor, stack: Any) -> torch.Tensor:
        if isinstance(stack, torch.Tensor):
            return multiply_chosen(x, stack, chosen, groups)
        return packed.multiply_chosen(stack.matrix, x, chosen, stack.count, groups)

    hidden = gate(
        torch.cat([multiply(rows, gate_stack), multiply(rows, up_stack)], dim=-1), activation
    )
    return combine(multiply(hidden, down_stack), shares)


def combine(outputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows times their shares. outputs: [T used, E]; shares: float32 [T, used];
    returns [T, E].
    """
    (T, used), E = shares.shape, outputs.shape[1]
    out = torch.empty((T, E), dtype=outputs.dtype, device=outputs.device)
    packed.run(
        _combine,
        (T, triton.cdiv(E, _BLOCK)),
        outputs,
        shares.contiguous(),
        out,
        E,
        used,
        _BLOCK,
        num_warps=4,
    )
    return out


def multiply_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """activation(gate) * up, rounded once. x: [..., K]; weight: [2 F, K], the gate's rows first;
    activation: "silu" or "gelu_tanh"; returns [..., F]."""
    return _product(x, weight, bias, len(weight) // 2, activation)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    N: int,
    activation: str,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    K = weight.shape[1]
    if chosen is None and x.dtype == weight.dtype != torch.float32:
        return _product_of_tiles(x, weight, bias, N, activation)
    rows, columns = (
        _ROWS // 2 if activation else _ROWS,
        min(_COLUMNS, max(32, triton.next_power_of_2(K))),
    )
    x, weight, M = x.contiguous(), weight.contiguous(), x.numel() // K  # a mapped share has strides
    shared, shape = 1, x.shape[:-1]
    if chosen is not None:
        shared, M, shape = chosen.numel() // M, chosen.numel(), (chosen.numel(),)
    tile = min(_SAMPLES, triton.next_power_of_2(M)) if chosen is None else 1
    out = torch.empty((*shape, N), dtype=x.dtype, device=x.device)
    packed.run(
        _multiply,
        (triton.cdiv(M, tile) * triton.cdiv(N, rows),),
        x,
        weight,
        bias,
        chosen,
        out,
        M,
        N,
        K,
        shared,
        activation,
        tile,
        rows,
        columns,
        num_warps=max(1, columns // 256),
    )
    return out


def _product_of_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    N: int,
    activation: str,
    groups: packed.Groups | None = None,
    products: int = 0,
) -> torch.Tensor:
    """Multiply 16-bit numbers. The order of sums depends on the matrix alone. products: number of
    rows in `groups`.
    """
    K, x, weight = weight.shape[1], x.contiguous(), weight.contiguous()
    rows, wide, columns = (
        x.numel() // K,
        2 * N if activation else N,
        min(_TILE_COLUMNS, max(16, triton.next_power_of_2(K))),
    )
    M, shape = (products, (products,)) if groups else (rows, x.shape[:-1])
    chosen, members = groups or (None, None)
    tile = members.shape[1] if groups else packed.tile(M)
    tiles = len(chosen) if groups else triton.cdiv(M, tile)
    blocks, steps = triton.cdiv(wide, _TILE_ROWS), triton.cdiv(K, columns)
    # a prompt has enough programs
    part = steps if groups else triton.cdiv(steps, triton.cdiv(packed.PROGRAMS, blocks))
    parts = triton.cdiv(steps, part)
    sums = torch.empty((parts, M, wide), dtype=torch.float32, device=x.device)
    packed.run(
        _multiply_tile,
        (tiles * blocks, parts),
        x,
        weight,
        chosen,
        members,
        sums,
        M,
        tiles,
        wide,
        K,
        M // rows,
        tile,
        _TILE_ROWS,
        columns,
        part * columns,
        num_warps=packed.WARPS,
        num_stages=4,
    )
    out = torch.empty((*shape, N), dtype=x.dtype, device=x.device)
    packed.run(
        _finish,
        (M, triton.cdiv(N, _BLOCK)),
        sums,
        bias,
        out,
        M,
        N,
        parts,
        activation,
        _BLOCK,
        num_warps=4,
    )
    return out


def adapt(
    state: torch.Tensor, product: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """product + (x @ a.T) @ b.T by each row's adapter, x @ a.T in float32. product: [B, 1, N],
    overwritten; x: [B, 1, K]; a: [adapters, R, K], R a multiple of 8; b: [adapters, N, R]."""
    (_, R, K), (B, _, N) = a.shape, product.shape
    x, product = x.contiguous(), product.contiguous()
    inner = torch.empty((B, R), dtype=torch.float32, device=x.device)
    columns, width = min(_COLUMNS, max(32, triton.next_power_of_2(K))), triton.next_power_of_2(R)
    packed.run(
        _shrink, (R // _ADAPTED, B), state, x, a, inner, R, K, _ADAPTED, columns, num_warps=4
    )
    rows = max(1, 4096 // width)
    packed.run(
        _expand, (triton.cdiv(N, rows), B), state, inner, b, product, N, R, rows, width, num_warps=4
    )
    return product


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of each head by their position's angle. x: [B, H, T, D], the last
    axis contiguous; cosines, sines: float32 [T, D/2] or [B, T, D/2]; returns [B, H, T, D],
    contiguous."""
    B, H, T, D = x.shape
    out = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    packed.run(
        _rotate,
        (T, H, B),
        x,
        cosines.contiguous(),
        sines.contiguous(),
        out,
        H,
        T,
        *x.stride()[:3],
        T * (D // 2) if cosines.numel() > T * (D // 2) else 0,
        D // 2,
        triton.next_power_of_2(D // 2),
        num_warps=1,
    )
    return out


def store_rotated(
    state: torch.Tensor,
    layer: int,
    heads: torch.Tensor,
    H: int,
    G: int,
    D: int,
    rotates: bool = True,
    bits: int | None = None,
    half: int | None = None,
    offset: int = 0,
    query_offset: int = 0,
    stride: int | None = None,
) -> torch.Tensor:
    """Rotate queries and keys for each row's position, and store keys and values. Returns the
    queries [B, H, 1, D].

    heads: [B, .., (H + 2 G) D]: queries, keys, values of a position; rotates: False to store keys
    unrotated; bits: of the cache, as in stored_dtype; half: pairs to rotate, None for D / 2, by the
    angles from `offset` (queries: `query_offset`) on of the tables' rows of `stride` angles, None
    for `half`.
    """
    B, half = len(heads), half or D // 2
    query = torch.empty((B, H, 1, D), dtype=heads.dtype, device=heads.device)
    table = torch.empty(0, dtype=torch.float32, device=heads.device)
    packed.run(
        _store_rotated,
        (H + 2 * G, B),
        state,
        layer,
        heads.contiguous(),
        query,
        table,
        *_stored(heads, bits),
        H,
        G,
        D,
        half,
        stride or half,
        offset,
        query_offset,
        triton.next_power_of_2(half),
        triton.next_power_of_2(max(1, D - 2 * half)),
        rotates,
        triton.next_power_of_2(triton.cdiv(D, CACHE_GROUP)),
        CACHE_GROUP,
        num_warps=1,
    )
    return query


def _stored(like: torch.Tensor, bits: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Empty tensors of the types of a cache's keys and values, and of their scales. like: of the
    activations' type.
    """
    scales = torch.empty(0, dtype=torch.float16, device=like.device) if bits == 8 else None
    return torch.empty(0, dtype=stored_dtype(like.dtype, bits), device=like.device), scales


def attend(
    state: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    G: int,
    window: int | None,
    scale: float,
    bits: int | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Attention of the token at each row's position to the row's keys up to there. query: [B, H, 1,
    D], for 8 bits D a multiple of 4; bits: as in `store_rotated`; cap: softcap of the scores;
    returns [B, 1, H D]. Raises ValueError."""
    B, H, _, D = query.shape
    if bits == 8 and D % 4:
        raise ValueError(f"heads of {D} numbers: 8-bit keys and values need a multiple of 4")
    pieces, keys, device = pieces_of(G), keys_at_a_time(D, query.itemsize), query.device
    sums, tops = torch.empty((2, B, H, pieces), dtype=torch.float32, device=device)
    parts = torch.empty((B, H, pieces, D), dtype=torch.float32, device=device)
    out = torch.empty((B, 1, H * D), dtype=query.dtype, device=device)
    stored, scales = _stored(query, bits)
    # The GPU computes powers of two, not of e.
    common = (sums, tops, parts, scale * _LOG2_E, window or 0, cap and cap * _LOG2_E)
    rows = max(16, triton.next_power_of_2(H // G))  # tl.dot's minimum
    width = max(16, triton.next_power_of_2(D))
    if scales is None:
        packed.run(
            _attend,
            (G, pieces, B),
            state,
            layer,
            query,
            stored,
            *common,
            G,
            H // G,
            D,
            rows,
            width,
            pieces,
            keys,
            num_warps=4,
        )
    else:
        # four warps split a quarter of the numbers
        blocks = max(4, triton.next_power_of_2(triton.cdiv(D, CACHE_GROUP)))
        packed.run(
            _attend_codes,
            (G, pieces, B),
            state,
            layer,
            query,
            stored,
            scales,
            *common,
            G,
            H // G,
            D,
            rows,
            blocks,
            pieces,
            keys,
            CACHE_GROUP,
            num_warps=4,
        )
    packed.run(
        _join,
        (H, B),
        state,
        sums,
        tops,
        parts,
        out,
        window or 0,
        H,
        D,
        width,
        pieces,
        keys,
        min(pieces, _JOINED),
        num_warps=4,
    )
    return out


def pieces_of(G: int) -> int:
    """Number of programs for the positions of each of G key heads. A row's programs fill a large
    GPU.
    """
    return max(_PIECES, triton.next_power_of_2(triton.cdiv(_PROGRAMS, G)))


def keys_at_a_time(D: int, itemsize: int) -> int:
    """Positions per iteration of `_attend`: 64 for keys of 128 16-bit numbers, fewer for larger
    ones.
    """
    return min(64, max(16, _TILE // (triton.next_power_of_2(D) * itemsize)))


def gate(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(gate) * up, rounded once. gate_up: [..., 2 F], the gate first; activation: "silu"
    or "gelu_tanh"; returns [..., F]."""
    gate_up = gate_up.contiguous()
    F = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], F), dtype=gate_up.dtype, device=gate_up.device)
    packed.run(
        _gate,
        (out.numel() // F, triton.cdiv(F, _BLOCK)),
        gate_up,
        out,
        F,
        _BLOCK,
        activation,
        num_warps=4,
    )
    return out


def recent(state: torch.Tensor, B: int, window: int) -> torch.Tensor:
    """Last `window` tokens of B rows up to their positions, int32 [B, window], padded with -1 in
    front.
    """
    out = torch.empty((B, window), dtype=torch.int32, device=state.device)
    packed.run(_recent, (B,), state, out, out, window, triton.next_power_of_2(window), num_warps=4)
    return out


def add_noise(
    scores: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    words: torch.Tensor,
    first: int = 0,
) -> torch.Tensor:
    """Add core.rng's Gumbel noise at `positions` to random rows.

    scores: float32 [B, V]; table: rng's gumbel_table on the device; positions: int64 [B]; words:
    sampling options, int64 [fields, MAX_ROWS]; first: id of the first token. Returns float32 [B,
    V].
    """
    (B, V), out = scores.shape, torch.empty_like(scores)
    packed.run(
        _add_noise,
        (triton.cdiv(V, _BLOCK), B),
        positions,
        words,
        scores,
        table,
        out,
        V,
        first,
        rng.PARITY,
        rng.TABLE_SHIFT,
        rng.TABLE_OFFSET,
        _BLOCK,
        num_warps=4,
    )
    return out


def note(state: torch.Tensor, B: int) -> None:
    """Store the tokens of B rows in their caches."""
    packed.run(
        _note, (B,), state, torch.empty(0, dtype=torch.int32, device=state.device), num_warps=1
    )


def advance(state: torch.Tensor, tokens: torch.Tensor) -> None:
    """Make `tokens`, int32 [B, 1], the rows' tokens, at the next positions, and store them in the
    caches.
    """
    packed.run(_advance, (len(tokens),), state, tokens, tokens, num_warps=1)


def read_keys(
    state: torch.Tensor,
    layer: int,
    B: int,
    G: int,
    D: int,
    dtype: torch.dtype,
    bits: int | None = None,
) -> torch.Tensor:
    """A layer's stored keys at the rows' positions: [B, G, 1, D]."""
    out = torch.empty((B, G, 1, D), dtype=dtype, device=state.device)
    packed.run(
        _read_keys,
        (G, B),
        state,
        layer,
        *_stored(out, bits),
        out,
        G,
        D,
        triton.next_power_of_2(D),
        CACHE_GROUP,
        num_warps=1,
    )
    return out


def try_heads(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, bits: int | None = None
) -> None:
    """Compile and launch `attend` for a model's heads. bits: of keys and values. Raises Triton's
    errors.
    """
    H, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    storage = Storage.allocate(config, 1, dtype, bits, device)
    state, table = new_state(), torch.zeros((1, D), device=device)
    pack_row(state, 0, 0, storage, (table, table))
    attend(
        torch.from_numpy(state).to(device),
        0,
        torch.zeros((1, H, 1, D), dtype=dtype, device=device),
        G,
        None,
        1.0,
        bits,
    )


def try_out(device: torch.device) -> None:
    """Compile and launch a small `multiply`. Raises Triton's errors."""
    x = torch.zeros((1, 32), dtype=torch.float16, device=device)
    multiply(x, x)
