"""Products with dense weights, experts and adapters by Triton's kernels.

Sums are float32, in an order that depends on the matrix alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlx_llama.core.ops import ExpertStacks

from . import packed
from .addresses import ADAPTER, field
from .elements import gate
from .packed import gated

_SAMPLES = 4  # maximum rows of x per program of `_multiply`
# rows of w per program of `_multiply`: small programs fill the last wave of a small matrix
ROWS = 2
_TILE_ROWS, _TILE_COLUMNS = 64, 64  # rows and columns of w per iteration of `multiply_tile`
_COLUMNS = 1024  # columns per iteration of `_multiply`: each thread loads 16 bytes of each row
# maximum number of programs where K is split: one wave, four for each of 132 multiprocessors; a
# second, partial wave would leave most of them idle
PROGRAMS = 528
_ADAPTED = 8  # rows of an adapter's first matrix per program of `_shrink`
_BLOCK = 1024  # elements per program of `_combine`


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
    """out[m, n] = w[n] @ x[m] + bias[n]; ACTIVATION: of w[n] @ x[m], times w[N + n] @ x[m].

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
        place = w + row * K + k
        weight = tl.load(place, mask=inside, other=0, eviction_policy="evict_first")
        total += weight.to(tl.float32) * value
        if GATED:
            place = w + (row + N) * K + k
            weight = tl.load(place, mask=inside, other=0, eviction_policy="evict_first")
            other += weight.to(tl.float32) * value
    result = tl.sum(total, axis=2)
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    if GATED:
        up = tl.sum(other, axis=2)
        if bias is not None:
            up += tl.load(bias + N + n, mask=n < N, other=0).to(tl.float32)
        result = gated(result, up, ACTIVATION)
    tl.store(out + m * N + n, result.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit(do_not_specialize=["M", "tiles"])
def multiply_tile(
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
    """out[part, m, n] = w[n] @ x[m] over PART columns, on tensor cores. out: [parts, M, N].

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
        stop = tl.where(
            tl.load(members + tile * TILE) < 0, 0, stop
        )  # a tile without rows takes no steps
        m = tl.where(m < 0, M, m)
    sample = tl.minimum(m, M - 1)  # those beyond M and N are not stored
    if SHARED > 1:
        sample = sample // SHARED
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(part * PART, stop, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        at_a, at_b = w + row[:, None] * K + k[None, :], x + sample[None, :] * K + k[:, None]
        if K % COLUMNS:
            inside = k < K
            a = tl.load(at_a, mask=inside[None, :], other=0, eviction_policy="evict_first")
            b = tl.load(at_b, mask=inside[:, None], other=0)
        else:
            a, b = tl.load(at_a, eviction_policy="evict_first"), tl.load(at_b)
        if packed.IS_INTERPRETED:  # the interpreter would multiply bfloat16's raw bits
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    target, inside = out + (part * M + m)[None, :] * N, (m < M)[None, :] & (n < N)[:, None]
    tl.store(target + n[:, None], total, mask=inside)


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
    """out[row, r] = a[adapter of the row, r] @ x[row], float32. R: a multiple of ROWS."""
    row = tl.program_id(1).to(tl.int64)
    adapter = field(state, ADAPTER, row)
    if adapter != 0:
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            value = tl.load(x + row * K + k, mask=k < K, other=0).to(tl.float32)
            place = (adapter * R + r)[:, None] * K + k[None, :]
            weight = tl.load(a + place, mask=k[None, :] < K, other=0).to(tl.float32)
            total += weight * value[None, :]
        tl.store(out + row * R + r, tl.sum(total, axis=1))


@triton.jit
def _expand(
    state, inner, b, product, N, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """product[row, n] += b[adapter of the row, n] @ inner[row]; nothing without an adapter."""
    row = tl.program_id(1).to(tl.int64)
    adapter = field(state, ADAPTER, row)
    if adapter != 0:
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        r = tl.arange(0, COLUMNS)
        inside = (n < N)[:, None] & (r < R)[None, :]
        value = tl.load(inner + row * R + r, mask=r < R, other=0)
        place = (adapter * N + n)[:, None] * R + r[None, :]
        weight = tl.load(b + place, mask=inside, other=0).to(tl.float32)
        total = tl.sum(weight * value[None, :], axis=1)
        before = tl.load(product + row * N + n, mask=n < N, other=0).to(tl.float32)
        tl.store(product + row * N + n, (before + total).to(product.dtype.element_ty), mask=n < N)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, summed in float32. x: [..., K]; weight: [N, K]; returns x's dtype."""
    return _product(x, weight, bias, len(weight), "")


def multiply_chosen(
    x: Tensor, stack: Tensor, chosen: Tensor, groups: packed.Groups | None = None
) -> Tensor:
    """Multiply each row with some matrices of a stack [X, N, K]. chosen: int64 [T, used]; x: [T,
    K], each row for all of its matrices, or [T used, K]; groups: as in packed.multiply_chosen.
    Returns [T used, N] in x's dtype."""
    N, weight = stack.shape[1], stack.view(-1, stack.shape[-1])
    if groups and x.dtype == weight.dtype != torch.float32:
        return _product_of_tiles(x, weight, None, N, "", groups, chosen.numel())
    return _product(x, weight, None, N, "", chosen.contiguous())


def multiply_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """activation(gate) * up, rounded once. x: [..., K]; weight: [2 F, K], the gate's rows first;
    activation: as in core.ops.gate; returns [..., F]."""
    return _product(x, weight, bias, len(weight) // 2, activation)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    N: int,
    activation: str,
    chosen: Tensor | None = None,
) -> Tensor:
    K = weight.shape[1]
    if chosen is None and x.dtype == weight.dtype != torch.float32:
        return _product_of_tiles(x, weight, bias, N, activation)
    rows = ROWS // 2 if activation else ROWS
    columns = min(_COLUMNS, max(32, triton.next_power_of_2(K)))
    x, weight, M = x.contiguous(), weight.contiguous(), x.numel() // K  # a mapped share has strides
    shared, shape = 1, x.shape[:-1]
    if chosen is not None:
        shared, M, shape = chosen.numel() // M, chosen.numel(), (chosen.numel(),)
    tile = min(_SAMPLES, triton.next_power_of_2(M)) if chosen is None else 1
    out = torch.empty((*shape, N), dtype=x.dtype, device=x.device)
    grid, warps = (triton.cdiv(M, tile) * triton.cdiv(N, rows),), max(1, columns // 256)
    packed.run(
        _multiply,
        grid,
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
        num_warps=warps,
    )
    return out


def _product_of_tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    N: int,
    activation: str,
    groups: packed.Groups | None = None,
    products: int = 0,
) -> Tensor:
    """Multiply 16-bit numbers, by `multiply_tile`. products: number of rows in `groups`."""
    K, x, weight = weight.shape[1], x.contiguous(), weight.contiguous()
    rows, wide = x.numel() // K, 2 * N if activation else N
    columns = min(_TILE_COLUMNS, max(16, triton.next_power_of_2(K)))
    M, shape = (products, (products,)) if groups else (rows, x.shape[:-1])
    chosen, members = groups or (None, None)
    tile = members.shape[1] if groups else packed.tile(M)
    tiles = len(chosen) if groups else triton.cdiv(M, tile)
    blocks, steps = triton.cdiv(wide, _TILE_ROWS), triton.cdiv(K, columns)
    # a prompt has enough programs
    part = steps if groups else triton.cdiv(steps, max(1, PROGRAMS // blocks))
    parts = triton.cdiv(steps, part)
    sums = torch.empty((parts, M, wide), dtype=torch.float32, device=x.device)
    packed.run(
        multiply_tile,
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
    packed.add_parts(sums, out, bias, activation)
    return out


def experts(
    rows: Tensor, chosen: Tensor, shares: Tensor, stacks: ExpertStacks, is_grouped: bool = False
) -> Tensor:
    """Mix the MLPs of each row's experts. rows: [T, E], or [T used, E], one for each expert;
    chosen: int64 [T, used]; shares: float32 [T, used]; stacks: of tensors or QuantizedStacks;
    is_grouped: read an expert once for 32 of its rows, in a prompt. Returns [T, E]."""
    groups = packed.group_rows(chosen, stacks.gate.shape[0]) if is_grouped else None

    def multiply(x: Tensor, stack: Any, bias: Tensor | None) -> Tensor:
        if isinstance(stack, Tensor):
            product = multiply_chosen(x, stack, chosen, groups)
        else:
            product = packed.multiply_chosen(stack.matrix, x, chosen, stack.count, groups)
        return product if bias is None else product + bias.index_select(0, chosen.reshape(-1))

    gate_bias, up_bias, down_bias = stacks.biases
    parts = [multiply(rows, stacks.gate, gate_bias), multiply(rows, stacks.up, up_bias)]
    hidden = gate(torch.cat(parts, dim=-1), stacks.spec.activation)
    return combine(multiply(hidden, stacks.down, down_bias), shares)


def combine(outputs: Tensor, shares: Tensor) -> Tensor:
    """Sum each token's rows of outputs [T used, E] times shares, float32 [T, used]: [T, E]."""
    (T, used), E = shares.shape, outputs.shape[1]
    out = torch.empty((T, E), dtype=outputs.dtype, device=outputs.device)
    grid = (T, triton.cdiv(E, _BLOCK))
    packed.run(_combine, grid, outputs, shares.contiguous(), out, E, used, _BLOCK)
    return out


def adapt(state: Tensor, product: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """product + (x @ a.T) @ b.T by each row's adapter, x @ a.T in float32. product: [B, 1, N],
    overwritten; x: [B, 1, K]; a: [adapters, R, K], R a multiple of 8; b: [adapters, N, R]."""
    (_, R, K), (B, _, N) = a.shape, product.shape
    x, product = x.contiguous(), product.contiguous()
    inner = torch.empty((B, R), dtype=torch.float32, device=x.device)
    columns, width = min(_COLUMNS, max(32, triton.next_power_of_2(K))), triton.next_power_of_2(R)
    packed.run(_shrink, (R // _ADAPTED, B), state, x, a, inner, R, K, _ADAPTED, columns)
    rows = max(1, 4096 // width)
    packed.run(_expand, (triton.cdiv(N, rows), B), state, inner, b, product, N, R, rows, width)
    return product
