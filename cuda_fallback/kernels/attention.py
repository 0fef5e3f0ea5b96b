"""Attention of decoded tokens by Triton's kernels: keys and values are stored, read and attended to
in each row's cache, as numbers or as 8-bit codes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlx_llama.core.backends.positions import CACHE_GROUP
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Window

from . import packed
from .addresses import COSINES, NEXT, NUMBERS, POSITION, SCALES, SINES, address, field, head_address
from .state import new_state, pack_row
from .storage import LARGEST_SCALE, Place, Storage, key_places, key_shapes, stored_dtype

_LARGEST_SCALE, _GROUP = tl.constexpr(LARGEST_SCALE), tl.constexpr(CACHE_GROUP)
PIECES = 64  # minimum number of programs for the positions of a key head
# minimum number of programs for a row's attention: two for each of some 130 multiprocessors
PROGRAMS = 256
_JOINED = 32  # pieces that `_join` sums per iteration
_LOG2_E = math.log2(math.e)
_LOG2_OF_E = tl.constexpr(_LOG2_E)
_BASES = ["base", "scale_base"]  # not specialised: layers of a shape share machine code
TILE = 16384  # bytes of keys per iteration of `_attend`; shared memory holds a few tiles in flight


@triton.jit(do_not_specialize=_BASES)
def _store_rotated(
    state,
    base,
    scale_base,
    heads,
    query,
    table,
    codes,
    scales,
    H,
    G,
    UNIT: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    ROTATES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Rotate a head of queries or keys, and store keys and values. codes, scales: tensors of the
    stored types (None: no codes).

    HALF pairs are rotated by angles OFFSET (queries: QUERY) and following of a position's STRIDE;
    REST: block size of the other dimensions.
    """
    h, row = tl.program_id(0), tl.program_id(1)
    position = field(state, POSITION, row)
    source = heads + (row * (H + 2 * G) + h) * D
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    first = tl.load(source + d, mask=inside, other=0)
    second = tl.load(source + HALF + d, mask=inside, other=0)
    if ROTATES:
        if h < H + G:
            angle = position * STRIDE + tl.where(h < H, QUERY, OFFSET) + d
            cosine = tl.load(address(state, COSINES, row, table) + angle, mask=inside, other=0)
            sine = tl.load(address(state, SINES, row, table) + angle, mask=inside, other=0)
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
            target = head_address(state, base, part, g, position, row, codes, G, D, UNIT, NUMBERS)
            tl.store(target + d, first, mask=inside)
            tl.store(target + HALF + d, second, mask=inside)
            if D > 2 * HALF:
                other = tl.load(source + rest, mask=rest < D, other=0)
                tl.store(target + rest, other, mask=rest < D)
        else:  # as storage.quantize does
            GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
            group = tl.arange(0, BLOCKS)[:, None]
            at = group * _GROUP + tl.arange(0, _GROUP)[None, :]
            within = at < D
            value = tl.load(source + at, mask=within, other=0)
            if ROTATES:
                if part == 0:
                    angle = position * STRIDE + OFFSET + tl.where(at < HALF, at, at - HALF)
                    turns = at < 2 * HALF
                    cosine = tl.load(address(state, COSINES, row, table) + angle, turns, other=1)
                    sine = tl.load(address(state, SINES, row, table) + angle, turns, other=0)
                    paired = source + tl.where(at < HALF, at + HALF, at - HALF)
                    other = tl.load(paired, mask=turns, other=0).to(tl.float32)
                    other = tl.where(at < HALF, -other, other)
                    value = (value.to(tl.float32) * cosine + other * sine).to(value.dtype)
            wide = value.to(tl.float32)
            largest = tl.max(tl.abs(wide), axis=1)[:, None]
            scale = tl.minimum(tl.div_rn(largest, largest * 0 + 127), _LARGEST_SCALE).to(tl.float16)
            by = scale.to(tl.float32)
            code = tl.div_rn(wide, tl.where(by > 0, by, 1))
            # rounds to even: 1.5 * 2**23 has no fraction
            code = tl.where(by > 0, (code + 12582912.0) - 12582912.0, 0)
            code = tl.minimum(tl.maximum(code, -127), 127)
            target = head_address(state, base, part, g, position, row, codes, G, D, UNIT, NUMBERS)
            tl.store(target + at, code.to(tl.int8), mask=within)
            target = head_address(
                state, scale_base, part, g, position, row, scales, G, GROUPS, SCALE_UNIT, SCALES
            )
            tl.store(target + group, scale, mask=group < GROUPS)


@triton.jit
def _share(state, row, window, PIECES: tl.constexpr, KEYS: tl.constexpr):
    """(first visible position, last + 1, positions per piece), int32."""
    end = field(state, NEXT, row).to(tl.int32)
    first = end * 0
    if window > 0:
        first = tl.maximum(end - window, 0)
    if window < 0:  # chunks
        first = (end - 1) // -window * -window
    share = tl.cdiv(tl.cdiv(end - first, PIECES), KEYS) * KEYS
    return first, end, share


@triton.jit
def _weigh(score, seen, top, factor, cap):
    """(new maximum, factor for previous sums, weights) of scores [R, KEYS], see `_attend`."""
    if cap is not None:
        # cap * tanh(score / cap)
        score = (cap - 2 * cap / (tl.exp(2 * score * factor / cap) + 1)) / factor
    score = tl.where(seen[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    # a fused multiply-add and a power of two
    weight = tl.exp2(score * factor - (higher * factor)[:, None])
    return higher, tl.exp2((top - higher) * factor)[:, None], weight


@triton.jit(do_not_specialize=_BASES)
def _attend(
    state,
    base,
    query,
    stored,
    sums,
    tops,
    parts,
    factor,
    window,
    cap,
    G,
    UNIT: tl.constexpr,
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
        keys = head_address(state, base, 0, g, start, row, stored, G, D, UNIT, NUMBERS)
        values = head_address(state, base, 1, g, start, row, stored, G, D, UNIT, NUMBERS)
        r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        head = (row * G + g) * R + r
        there = (r < R)[:, None] & (d < D)[None, :]
        queries = tl.load(query + head[:, None] * D + d[None, :], mask=there, other=0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, KEYS), tl.float32)
        mixed = tl.zeros((ROWS, WIDTH), tl.float32)
        for at in range(0, count, KEYS):
            column = at + tl.arange(0, KEYS)
            seen = column < count
            inside = seen[None, :] & (d < D)[:, None]
            key = tl.load(keys + column[None, :] * D + d[:, None], mask=inside, other=0)
            score = tl.dot(queries, key.to(queries.dtype), input_precision="ieee")
            top, kept, weight = _weigh(score, seen, top, factor, cap)
            inside = seen[:, None] & (d < D)[None, :]
            value = tl.load(values + column[:, None] * D + d[None, :], mask=inside, other=0)
            total = total * kept + weight
            weight, value = weight.to(queries.dtype), value.to(queries.dtype)
            mixed = mixed * kept + tl.dot(weight, value, input_precision="ieee")
        place = head.to(tl.int64) * PIECES + piece
        tl.store(tops + place, top * factor, mask=r < R)
        tl.store(sums + place, tl.sum(total, axis=1), mask=r < R)
        tl.store(parts + place[:, None] * D + d[None, :], mixed, mask=there)


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
):
    """Numbers of KEYS positions in four tensors [KEYS, BLOCKS * _GROUP / 4]: of dimensions 0, 4, 8
    .., of 1, 5, 9 ..

    Codes are loaded four to a word and become float16 two at a time: 0x6400 is 1024, and a code
    below it, its sign bit flipped, adds 128 + code. magic: 0x64806480, in a register: ptxas does
    not merge two operations on bits with constants.
    """
    GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
    WORDS: tl.constexpr = _GROUP // 4
    # Beyond D they begin again, which takes no masks: queries are 0 there, and sums are not stored.
    word, group = tl.arange(0, BLOCKS * WORDS) % (D // 4), tl.arange(0, BLOCKS) % GROUPS
    four = tl.load(codes + column[:, None] * (D // 4) + word[None, :])
    scale = tl.load(scales + column[:, None] * GROUPS + group[None, :])
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
    n0, n1 = _scaled(n0, scale, KEYS, BLOCKS, WORDS), _scaled(n1, scale, KEYS, BLOCKS, WORDS)
    n2, n3 = _scaled(n2, scale, KEYS, BLOCKS, WORDS), _scaled(n3, scale, KEYS, BLOCKS, WORDS)
    return n0, n1, n2, n3


@triton.jit(do_not_specialize=_BASES)
def _attend_codes(
    state,
    base,
    scale_base,
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
    UNIT: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """As `_attend`, with keys and values in codes of 8 bits. Products are of float16 numbers, or of
    float32 if the query is.

    codes, scales: tensors of the stored types; BLOCKS: groups of numbers, at least D / _GROUP.
    """
    g, piece, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, share = _share(state, row, window, PIECES, KEYS)
    start = first + piece * share
    if start < end:
        count = tl.minimum(share, end - start)
        magic = (end >> 31) ^ 0x64806480  # the compiler cannot know that `end` is positive
        WIDTH: tl.constexpr = BLOCKS * _GROUP // 4
        GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
        words = tl.pointer_type(tl.int32)
        keys = head_address(state, base, 0, g, start, row, codes, G, D, UNIT, NUMBERS).to(words)
        values = head_address(state, base, 1, g, start, row, codes, G, D, UNIT, NUMBERS).to(words)
        key_scales = head_address(
            state, scale_base, 0, g, start, row, scales, G, GROUPS, SCALE_UNIT, SCALES
        )
        value_scales = head_address(
            state, scale_base, 1, g, start, row, scales, G, GROUPS, SCALE_UNIT, SCALES
        )
        r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        head = (row * G + g) * R + r
        there = (r < R)[:, None] & (d < D // 4)[None, :]
        queries = query + head[:, None] * D + 4 * d[None, :]
        q0, q1 = tl.load(queries, mask=there, other=0), tl.load(queries + 1, mask=there, other=0)
        q2 = tl.load(queries + 2, mask=there, other=0)
        q3 = tl.load(queries + 3, mask=there, other=0)
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
            k0, k1, k2, k3 = _load_codes(keys, key_scales, column, magic, dtype, D, KEYS, BLOCKS)
            score = tl.dot(q0, tl.trans(k0), input_precision="ieee")
            score = tl.dot(q1, tl.trans(k1), score, input_precision="ieee")
            score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
            score = tl.dot(q3, tl.trans(k3), score, input_precision="ieee")
            top, kept, weight = _weigh(score, seen, top, factor, cap)
            v0, v1, v2, v3 = _load_codes(
                values, value_scales, column, magic, dtype, D, KEYS, BLOCKS
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
    sinks,
    out,
    window,
    H,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a head's pieces, BLOCK per iteration. sinks: as in core.ops, or None."""
    row = tl.program_id(1)
    h = row * H + tl.program_id(0)
    first, end, share = _share(state, row, window, PIECES, KEYS)
    count = tl.cdiv(end - first, share)
    pieces, d = tl.arange(0, PIECES), tl.arange(0, WIDTH)
    place = h.to(tl.int64) * PIECES
    top = tl.load(tops + place + pieces, mask=pieces < count, other=float("-inf"))
    highest = tl.max(top, axis=0)
    if sinks is not None:
        # a power of two, like the tops
        sink = tl.load(sinks + tl.program_id(0)).to(tl.float32) * _LOG2_OF_E
        highest = tl.maximum(highest, sink)
    total = tl.load(sums + place + pieces, mask=pieces < count, other=0)
    total = tl.sum(tl.exp2(top - highest) * total, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - highest)
    mixed = tl.zeros((WIDTH,), tl.float32)
    for at in range(0, count, BLOCK):
        piece = at + tl.arange(0, BLOCK)
        weight = tl.load(tops + place + piece, mask=piece < count, other=float("-inf"))
        weight = tl.exp2(weight - highest)
        there = (piece < count)[:, None] & (d < D)[None, :]
        part = tl.load(parts + (place + piece)[:, None] * D + d[None, :], mask=there, other=0)
        mixed += tl.sum(weight[:, None] * part, axis=0)
    tl.store(out + h * D + d, (mixed / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=_BASES)
def _read_keys(
    state,
    base,
    scale_base,
    codes,
    scales,
    out,
    G,
    UNIT: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g, row, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    position = field(state, POSITION, row)
    line = head_address(state, base, 0, g, position, row, codes, G, D, UNIT, NUMBERS)
    key = tl.load(line + d, mask=d < D, other=0)
    if scales is not None:
        GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
        line = head_address(
            state, scale_base, 0, g, position, row, scales, G, GROUPS, SCALE_UNIT, SCALES
        )
        key = key.to(tl.float32) * tl.load(line + d // _GROUP, mask=d < D, other=0).to(tl.float32)
    tl.store(out + (row * G + g) * D + d, key.to(out.dtype.element_ty), mask=d < D)


def store_rotated(
    state: Tensor,
    place: Place,
    heads: Tensor,
    H: int,
    G: int,
    D: int,
    rotates: bool = True,
    bits: int | None = None,
    half: int | None = None,
    offset: int = 0,
    query_offset: int = 0,
    stride: int | None = None,
) -> Tensor:
    """Rotate queries and keys by position, and store keys and values. Returns queries [B, H, 1, D].

    heads: [B, .., (H + 2 G) D]: queries, keys, values of a position, a G of 0 to store none;
    rotates: False to store keys unrotated; bits: of the cache, as in stored_dtype; half: pairs to
    rotate, None for D / 2, by the angles from `offset` (queries: `query_offset`) on of tables' rows
    of `stride` angles (`half`).
    """
    B, half = len(heads), half or D // 2
    query = torch.empty((B, H, 1, D), dtype=heads.dtype, device=heads.device)
    table = torch.empty(0, dtype=torch.float32, device=heads.device)
    stored, scales = _stored(heads, bits)
    widths = half, max(1, D - 2 * half), triton.cdiv(D, CACHE_GROUP)
    block, rest, groups = map(triton.next_power_of_2, widths)
    packed.run(
        _store_rotated,
        (H + 2 * G, B),
        state,
        place.base,
        place.scale_base,
        heads.contiguous(),
        query,
        table,
        stored,
        scales,
        H,
        G,
        place.unit,
        place.scale_unit,
        D,
        half,
        stride or half,
        offset,
        query_offset,
        block,
        rest,
        rotates,
        groups,
        num_warps=1,
    )
    return query


def _stored(like: Tensor, bits: int | None) -> tuple[Tensor, Tensor | None]:
    """Empty tensors of the types of a cache's numbers and scales. like: of activations' type."""
    scales = torch.empty(0, dtype=torch.float16, device=like.device) if bits == 8 else None
    return torch.empty(0, dtype=stored_dtype(like.dtype, bits), device=like.device), scales


def attend(
    state: Tensor,
    place: Place,
    query: Tensor,
    G: int,
    window: Window | None,
    scale: float,
    bits: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the token at each row's position to the row's keys up to there. query: [B, H, 1,
    D], for 8 bits D a multiple of 4; bits: as in `store_rotated`; cap: softcap of the scores;
    sinks: [H], as in core.ops; returns [B, 1, H D]. Raises ValueError."""
    B, H, _, D = query.shape
    if bits == 8 and D % 4:
        raise ValueError(f"heads of {D} numbers: 8-bit keys and values need a multiple of 4")
    # each key head's positions are cut so that a row's programs fill a large GPU
    pieces = max(PIECES, triton.next_power_of_2(triton.cdiv(PROGRAMS, G)))
    # positions per iteration of `_attend`: 64 for keys of 128 16-bit numbers, else fewer
    keys = min(64, max(16, TILE // (triton.next_power_of_2(D) * query.itemsize)))
    device = query.device
    sums, tops = torch.empty((2, B, H, pieces), dtype=torch.float32, device=device)
    parts = torch.empty((B, H, pieces, D), dtype=torch.float32, device=device)
    out = torch.empty((B, 1, H * D), dtype=query.dtype, device=device)
    stored, scales = _stored(query, bits)
    width = window.size * (-1 if window.is_chunk else 1) if window else 0
    # The GPU computes powers of two, not of e.
    scale, cap = scale * _LOG2_E, cap and cap * _LOG2_E
    rows = max(16, triton.next_power_of_2(H // G))  # tl.dot's minimum
    block = max(16, triton.next_power_of_2(D))
    grid, shared = (G, pieces, B), H // G
    # Wide heads take the registers of more threads and, in float32, more shared memory.
    options = dict(num_warps=8) if block > 256 else {}
    if block > 256 and query.dtype == torch.float32:
        options["num_stages"] = 2
    if scales is None:
        # Keys that are widened to float32 stay in registers, which leaves none for others to come.
        if stored.itemsize < query.itemsize:
            options["num_stages"] = 1
        packed.run(
            _attend,
            grid,
            state,
            place.base,
            query,
            stored,
            sums,
            tops,
            parts,
            scale,
            width,
            cap,
            G,
            place.unit,
            shared,
            D,
            rows,
            block,
            pieces,
            keys,
            **options,
        )
    else:
        # four warps split a quarter of the numbers
        blocks = max(4, triton.next_power_of_2(triton.cdiv(D, CACHE_GROUP)))
        packed.run(
            _attend_codes,
            grid,
            state,
            place.base,
            place.scale_base,
            query,
            stored,
            scales,
            sums,
            tops,
            parts,
            scale,
            width,
            cap,
            G,
            place.unit,
            place.scale_unit,
            shared,
            D,
            rows,
            blocks,
            pieces,
            keys,
            **options,
        )
    joined = min(pieces, _JOINED)
    packed.run(
        _join,
        (H, B),
        state,
        sums,
        tops,
        parts,
        sinks,
        out,
        width,
        H,
        D,
        block,
        pieces,
        keys,
        joined,
    )
    return out


def read_keys(
    state: Tensor, place: Place, B: int, G: int, D: int, dtype: torch.dtype, bits: int | None = None
) -> Tensor:
    """A layer's stored keys at the rows' positions: [B, G, 1, D]."""
    out = torch.empty((B, G, 1, D), dtype=dtype, device=state.device)
    (stored, scales), block = _stored(out, bits), triton.next_power_of_2(D)
    bases, units = (place.base, place.scale_base), (place.unit, place.scale_unit)
    arguments = state, *bases, stored, scales, out, G, *units, D, block
    packed.run(_read_keys, (G, B), *arguments, num_warps=1)
    return out


def try_heads(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, bits: int | None = None
) -> None:
    """Compile and launch `attend` for a model's heads and cache. Raises Triton's errors."""
    host, table = new_state(), torch.zeros((1, 1), device=device)
    pack_row(host, 0, 0, Storage.allocate(config, 1, dtype, bits, device), (table, table))
    state, places = torch.from_numpy(host).to(device), key_places(key_shapes(config))
    for kind in config.kinds:
        shape = 1, config.num_attention_heads, 1, kind.head_dim
        query = torch.zeros(shape, dtype=dtype, device=device)
        attend(state, places[kind.slots[0]], query, kind.heads, None, 1.0, bits)
