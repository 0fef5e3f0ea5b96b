"""Triton kernels of a decoded token, for weights that are not packed, and of a prompt's rotations and gates.

Importing it needs the package triton. Numbers that change from token to token are read from the device's memory (state.py),
so that a captured step needs nothing from the host. Each function's test is its plain twin:

    add_rms_norm   ops.add_rms_norm                 multiply, multiply_gated   ops.linear, ops.gated_linear
    norm_heads     ops.norm_heads                   rotate, gate               ops.rope, ops.swiglu
    store_rotated  ops.rope_and_store               attend                     ops.attend
    recent         Cache.recent                     add_noise                  sampling.gumbel added to the scores
    read_keys      View.new_keys

All sums are made in float32, in an order that depends on the sizes and the position alone: the same bits in every run
and at every capacity of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_llama.core.generation import rng

from . import packed
from .state import ALLOCATED, COSINES, LAYERS, TOKENS, pack_state

_ROWS = 2  # of a matrix, of one program of `multiply`: small programs fill the last wave of a small matrix
_COLUMNS = 1024  # that a program multiplies at a time: each of its threads loads 16 bytes of each row
_PIECES = 64  # programs that share the positions of one key head
_TILE = 16384  # bytes of keys that a program of `attend` takes at a time; in flight are a few, in shared memory
_BLOCK = 1024  # elements of one program of the kernels that take element by element


@triton.jit
def _address(state, index, like):
    """The pointer in state[index], to elements of `like`'s type; PyTorch aligns storage to 16 bytes."""
    found = tl.load(state + index).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(found, 16)


@triton.jit
def _silu(gate):
    return gate / (1 + tl.exp(-gate))


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
def _norm_heads(heads, query_weight, key_weight, out, eps, H, G, D: tl.constexpr, BLOCK: tl.constexpr):
    """One head of a row: norms of queries and keys, copies of values."""
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
        value = (wide * scale * tl.load(weight + d, mask=inside, other=0).to(tl.float32)).to(value.dtype)
    tl.store(out + at + d, value, mask=inside)


@triton.jit
def _multiply(x, w, bias, out, N, K: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[n] = w[n] @ x + bias[n]; GATED: silu(w[n] @ x) * (w[N + n] @ x)."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    other = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        k = (start + tl.arange(0, COLUMNS))[None, :]
        inside = k < K
        value = tl.load(x + k, mask=inside, other=0).to(tl.float32)
        total += tl.load(w + row * K + k, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32) * value
        if GATED:
            second = tl.load(w + (row + N) * K + k, mask=inside, other=0, eviction_policy="evict_first")
            other += second.to(tl.float32) * value
    result = tl.sum(total, axis=1)
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    if GATED:
        up = tl.sum(other, axis=1)
        if bias is not None:
            up += tl.load(bias + N + n, mask=n < N, other=0).to(tl.float32)
        result = _silu(result) * up
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _rotate(x, cosines, sines, out, H, T, batch_stride, head_stride, row_stride, HALF: tl.constexpr, BLOCK: tl.constexpr):
    t, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    source = x + b.to(tl.int64) * batch_stride + h.to(tl.int64) * head_stride + t.to(tl.int64) * row_stride + d
    target = out + ((b.to(tl.int64) * H + h) * T + t) * (2 * HALF) + d
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    cosine = tl.load(cosines + t * HALF + d, mask=inside, other=0)
    sine = tl.load(sines + t * HALF + d, mask=inside, other=0)
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def _store_rotated(state, layer, heads, query, table, H, G, HALF: tl.constexpr, BLOCK: tl.constexpr,
                   ROTATES: tl.constexpr, COSINES: tl.constexpr, ALLOCATED: tl.constexpr, LAYERS: tl.constexpr):
    h = tl.program_id(0)
    position, allocated = tl.load(state), tl.load(state + ALLOCATED)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    first = tl.load(heads + h * 2 * HALF + d, mask=inside, other=0)
    second = tl.load(heads + h * 2 * HALF + HALF + d, mask=inside, other=0)
    if ROTATES:
        if h < H + G:
            cosine = tl.load(_address(state, COSINES, table) + position * HALF + d, mask=inside, other=0)
            sine = tl.load(_address(state, COSINES + 1, table) + position * HALF + d, mask=inside, other=0)
            one, two = first.to(tl.float32), second.to(tl.float32)
            first = (one * cosine - two * sine).to(first.dtype)
            second = (two * cosine + one * sine).to(first.dtype)
    if h < H:
        target = query + h * 2 * HALF
    elif h < H + G:
        target = _address(state, LAYERS + 2 * layer, heads) + ((h - H) * allocated + position) * (2 * HALF)
    else:
        target = _address(state, LAYERS + 2 * layer + 1, heads) + ((h - H - G) * allocated + position) * (2 * HALF)
    tl.store(target + d, first, mask=inside)
    tl.store(target + HALF + d, second, mask=inside)


@triton.jit
def _share(state, window, PIECES: tl.constexpr, KEYS: tl.constexpr):
    """(first visible position, the one after the last, positions of each piece)."""
    end = tl.load(state) + 1
    first = end * 0
    if window > 0:
        first = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - first, PIECES), KEYS) * KEYS
    return first, end, share


@triton.jit(do_not_specialize=["layer"])
def _attend(state, layer, query, sums, tops, parts, scale, window, G, ALLOCATED: tl.constexpr, LAYERS: tl.constexpr,
            R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
            KEYS: tl.constexpr):
    """One key head's R query heads over one piece of the positions: softmax's top, sum and weighted values."""
    g, piece = tl.program_id(0), tl.program_id(1)
    first, end, share = _share(state, window, PIECES, KEYS)
    start = first + piece * share
    if start < end:
        stop = tl.minimum(start + share, end)
        allocated = tl.load(state + ALLOCATED)
        keys = _address(state, LAYERS + 2 * layer, query) + g * allocated * D
        values = _address(state, LAYERS + 2 * layer + 1, query) + g * allocated * D
        r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        head = g * R + r
        asked = tl.load(query + head[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, WIDTH), tl.float32)
        for at in range(start, stop, KEYS):
            column = at + tl.arange(0, KEYS)
            seen = column < stop
            key = tl.load(keys + column[None, :] * D + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0)
            score = tl.dot(asked, key, input_precision="ieee") * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            weight = tl.exp(score - higher[:, None])
            kept = tl.exp(top - higher)
            value = tl.load(values + column[:, None] * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0)
            total = total * kept + tl.sum(weight, axis=1)
            mixed = mixed * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            top = higher
        place = head * PIECES + piece
        tl.store(tops + place, top, mask=r < R)
        tl.store(sums + place, total, mask=r < R)
        tl.store(parts + place[:, None] * D + d[None, :], mixed, mask=(r < R)[:, None] & (d < D)[None, :])


@triton.jit
def _join(state, sums, tops, parts, out, window, D: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
          KEYS: tl.constexpr):
    h = tl.program_id(0)
    first, end, share = _share(state, window, PIECES, KEYS)
    piece, d = tl.arange(0, PIECES), tl.arange(0, WIDTH)
    there = piece < tl.cdiv(end - first, share)
    top = tl.load(tops + h * PIECES + piece, mask=there, other=float("-inf"))
    weight = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(weight * tl.load(sums + h * PIECES + piece, mask=there, other=0), axis=0)
    part = tl.load(parts + (h * PIECES + piece)[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
    mixed = tl.sum(weight[:, None] * part, axis=0) / total
    tl.store(out + h * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _gate(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * F + f, mask=f < F, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=f < F, other=0).to(tl.float32)
    tl.store(out + row * F + f, (_silu(gate) * up).to(out.dtype.element_ty), mask=f < F)


@triton.jit
def _recent(state, like, out, WINDOW: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.load(state) + 1 - WINDOW + i
    token = tl.load(_address(state, TOKENS, like) + at, mask=(at >= 0) & (i < WINDOW), other=-1)
    tl.store(out + i, token, mask=i < WINDOW)


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
def _add_noise(position, seed, scores, table, out, V, PARITY: tl.constexpr, SHIFT: tl.constexpr, OFFSET: tl.constexpr,
               BLOCK: tl.constexpr):
    """core.rng's noise of the token at a position, see its threefry2x32."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.load(seed).to(tl.uint32)
    high = tl.load(seed + 1).to(tl.uint32)
    third = low ^ high ^ PARITY
    x0 = i.to(tl.uint32) + low
    x1 = tl.zeros((BLOCK,), tl.uint32) + (tl.load(position).to(tl.uint32) + high)
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
    noise = tl.load(table + index)
    tl.store(out + i, tl.load(scores + i, mask=i < V, other=0) + noise, mask=i < V)


@triton.jit
def _advance(state, token, like, TOKENS: tl.constexpr):
    position, following = tl.load(state) + 1, tl.load(token)
    tl.store(_address(state, TOKENS, like) + position, following)
    tl.store(state + 2, following.to(tl.int64))
    tl.store(state + 1, position + 1)
    tl.store(state, position)


@triton.jit(do_not_specialize=["layer"])
def _read_keys(state, layer, like, out, D: tl.constexpr, BLOCK: tl.constexpr, ALLOCATED: tl.constexpr,
               LAYERS: tl.constexpr):
    g, d = tl.program_id(0), tl.arange(0, BLOCK)
    keys = _address(state, LAYERS + 2 * layer, like) + (g * tl.load(state + ALLOCATED) + tl.load(state)) * D
    tl.store(out + g * D + d, tl.load(keys + d, mask=d < D, other=0), mask=d < D)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm times weight). x, delta: [..., E], contiguous; weight: [E]."""
    E = x.shape[-1]
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(E)
    packed.run(_add_rms_norm, (x.numel() // E,), x, delta, weight, total, normed, eps, E, block,
               num_warps=min(16, max(1, block // 512)))
    return total, normed


def norm_heads(heads: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, H: int, G: int, D: int,
               eps: float) -> torch.Tensor:
    """RMS norm over each head of query and key. heads: [..., (H + 2 G) D]: queries, keys, values; weights: [D]."""
    heads = heads.contiguous()
    out, block = torch.empty_like(heads), triton.next_power_of_2(D)
    packed.run(_norm_heads, (H + 2 * G, heads.numel() // heads.shape[-1]), heads, query_weight, key_weight, out, eps, H, G,
               D, block, num_warps=max(1, block // 512))
    return out


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, summed in float32. x: [..., K], one row; weight: [N, K]; bias: [N]; returns [..., N] in x's
    dtype."""
    return _product(x, weight, bias, len(weight), False)


def multiply_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, rounded once. x: [..., K], one row; weight: [2 F, K], the gate's rows first; returns [..., F]."""
    return _product(x, weight, bias, len(weight) // 2, True)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, N: int, gated: bool) -> torch.Tensor:
    K = weight.shape[1]
    rows, columns = _ROWS // 2 if gated else _ROWS, min(_COLUMNS, max(32, triton.next_power_of_2(K)))
    x, out = x.contiguous(), torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    packed.run(_multiply, (triton.cdiv(N, rows),), x, weight, bias, out, N, K, gated, rows, columns,
               num_warps=max(1, columns // 256))
    return out


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of each head by their position's angle. x: [B, H, T, D], the last axis contiguous;
    cosines, sines: float32 [T, D/2]; returns [B, H, T, D], contiguous."""
    B, H, T, D = x.shape
    out = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    packed.run(_rotate, (T, H, B), x, cosines.contiguous(), sines.contiguous(), out, H, T, *x.stride()[:3], D // 2,
               triton.next_power_of_2(D // 2), num_warps=1)
    return out


def store_rotated(state: torch.Tensor, layer: int, heads: torch.Tensor, H: int, G: int, D: int,
                  rotates: bool = True) -> torch.Tensor:
    """Rotate queries and keys for the state's position, store keys and values there. heads: [.., (H + 2 G) D]: queries,
    keys, values of one position; rotates: False to store them as they are; returns the queries [1, H, 1, D]."""
    query = torch.empty((1, H, 1, D), dtype=heads.dtype, device=heads.device)
    table = torch.empty(0, dtype=torch.float32, device=heads.device)
    packed.run(_store_rotated, (H + 2 * G,), state, layer, heads, query, table, H, G, D // 2, triton.next_power_of_2(D // 2),
               rotates, COSINES, ALLOCATED, LAYERS, num_warps=1)
    return query


def attend(state: torch.Tensor, layer: int, query: torch.Tensor, G: int, window: int | None, scale: float) -> torch.Tensor:
    """Attention of the token at the state's position to what the cache holds up to it. query: [1, H, 1, D]; returns
    [1, 1, H D]."""
    _, H, _, D = query.shape
    width = max(16, triton.next_power_of_2(D))  # the least that tl.dot takes
    keys = keys_at_a_time(D, query.itemsize)
    sums, tops = torch.empty((2, H, _PIECES), dtype=torch.float32, device=query.device)
    parts = torch.empty((H, _PIECES, D), dtype=torch.float32, device=query.device)
    out = torch.empty((1, 1, H * D), dtype=query.dtype, device=query.device)
    packed.run(_attend, (G, _PIECES), state, layer, query, sums, tops, parts, scale, window or 0, G, ALLOCATED, LAYERS, H // G,
               D, max(16, triton.next_power_of_2(H // G)), width, _PIECES, keys, num_warps=4)
    packed.run(_join, (H,), state, sums, tops, parts, out, window or 0, D, width, _PIECES, keys, num_warps=4)
    return out


def keys_at_a_time(D: int, itemsize: int) -> int:
    """Positions of which a program of `attend` holds keys of D numbers: 64 for 128 of 16 bits, fewer for larger ones."""
    return min(64, max(16, _TILE // (triton.next_power_of_2(D) * itemsize)))


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded once. gate_up: [..., 2 F], the gate first; returns [..., F]."""
    gate_up = gate_up.contiguous()
    F = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], F), dtype=gate_up.dtype, device=gate_up.device)
    packed.run(_gate, (out.numel() // F, triton.cdiv(F, _BLOCK)), gate_up, out, F, _BLOCK, num_warps=4)
    return out


def recent(state: torch.Tensor, window: int) -> torch.Tensor:
    """The last `window` tokens up to the state's position, int32 [1, window], -1 in front where there are fewer."""
    out = torch.empty((1, window), dtype=torch.int32, device=state.device)
    packed.run(_recent, (1,), state, out, out, window, triton.next_power_of_2(window), TOKENS, num_warps=4)
    return out


def add_noise(scores: torch.Tensor, table: torch.Tensor, position: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """scores plus core.rng's Gumbel noise for the token at `position`. scores: float32 [V]; table: its gumbel_table on the
    device; position: int64 []; seed: int64 [2], low and high word; returns float32 [V]."""
    out = torch.empty_like(scores)
    packed.run(_add_noise, (triton.cdiv(len(scores), _BLOCK),), position, seed, scores, table, out, len(scores), rng.PARITY,
               rng.TABLE_SHIFT, rng.TABLE_OFFSET, _BLOCK, num_warps=4)
    return out


def advance(state: torch.Tensor, token: torch.Tensor) -> None:
    """Make `token`, int32 [1, 1], the state's token and the next position its position, and note it in the cache."""
    packed.run(_advance, (1,), state, token, token, TOKENS, num_warps=1)


def read_keys(state: torch.Tensor, layer: int, G: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """A layer's keys at the state's position, as they are stored: [1, G, 1, D]."""
    out = torch.empty((1, G, 1, D), dtype=dtype, device=state.device)
    packed.run(_read_keys, (G,), state, layer, out, out, D, triton.next_power_of_2(D), ALLOCATED, LAYERS, num_warps=1)
    return out


def try_heads(H: int, G: int, D: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and launch `attend` for a model's heads. Raises Triton's errors."""
    row = torch.zeros((G, 1, D), dtype=dtype, device=device)
    state = pack_state(0, allocated=1, layers=(row, row)).to(device)
    attend(state, 0, torch.zeros((1, H, 1, D), dtype=dtype, device=device), G, None, 1.0)


def try_out(device: torch.device) -> None:
    """Compile and launch a small `multiply`. Raises Triton's errors."""
    x = torch.zeros((1, 32), dtype=torch.float16, device=device)
    multiply(x, x)
