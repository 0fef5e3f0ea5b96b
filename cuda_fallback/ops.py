"""The vocabulary (core.ops) in torch's operations, with Triton's kernels for rotations, gates,
experts and recurrences where those run.

kernels/ops.py has the vocabulary of decoded tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from mlx_llama.core import ops as plain
from mlx_llama.core.models.parts import (
    Attention,
    GatedDelta,
    LayerInputs,
    PerLayerInput,
    Router,
    ShortConv,
)
from mlx_llama.core.ops import DeltaWeights, ExpertStacks

from . import arrays, kernels
from .cache import View
from .kernels.state import MAX_ROWS, describe
from .kernels.storage import split_rows
from .quantized import QuantizedMatrix, QuantizedStack

Matrix = Tensor | QuantizedMatrix
Matrices = Matrix | tuple[Matrix, ...]  # a tuple: their rows concatenated
Stack = Tensor | QuantizedStack  # matrices [X, N, K] of all experts
# a [1 + adapters, R, K] and b [1 + adapters, N, R] by number, zeros for none
Adapters = tuple[Tensor, Tensor]

add, scale, last_position = plain.add, plain.scale, plain.last_position
scale_heads = plain.scale_heads
gated_linear = partial(plain.gated_linear, sys.modules[__name__])
add_rms_norm = partial(plain.add_rms_norm, sys.modules[__name__])


def embed(tokens: Tensor, weight: Matrix) -> Tensor:
    return (
        weight.rows(tokens) if isinstance(weight, QuantizedMatrix) else F.embedding(tokens, weight)
    )


def linear(x: Tensor, weight: Matrices, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, QuantizedMatrix):
        product = weight.matmul(x)
    else:
        product = torch.cat([linear(x, block) for block in weight], dim=-1)
    return product if bias is None else product + bias


def gate(gate_up: Tensor, activation: str) -> Tensor:
    if by_kernel := kernels.find_kernels(gate_up.device).decode:
        return by_kernel.gate(gate_up, activation)
    return plain.gate(arrays, gate_up, activation)


def xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    by_kernel = kernels.find_kernels(x.device).decode
    apply = by_kernel.xielu if by_kernel else partial(plain.xielu, arrays)
    return apply(x, positive, negative, beta, eps)


def gate_output(x: Tensor, score: Tensor) -> Tensor:
    by_kernel = kernels.find_kernels(x.device).decode
    if by_kernel and x.shape == score.shape:  # not a score for a whole token
        return by_kernel.gate_output(x, score)
    return plain.gate_output(arrays, x, score)


def layer_inputs(embedded: Tensor, projected: Tensor, weight: Tensor, spec: LayerInputs) -> Tensor:
    if by_kernel := kernels.find_kernels(embedded.device).decode:
        return by_kernel.layer_inputs(embedded, projected, weight, spec)
    return plain.layer_inputs(sys.modules[__name__], embedded, projected, weight, spec)


def gate_input(gate: Tensor, inputs: Tensor, spec: PerLayerInput) -> Tensor:
    by_kernel = kernels.find_kernels(gate.device).decode
    apply = by_kernel.gate_input if by_kernel else partial(plain.gate_input, arrays)
    return apply(gate, inputs, spec)


def short_conv(
    x: Tensor, view: View, spec: ShortConv, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if by_kernel := kernels.find_kernels(x.device).decode:
        return _by_states(by_kernel.short_conv, x, view, spec.slot, weight, bias)
    return plain.short_conv(arrays, x, view, spec, weight, bias)


def gated_delta(x: Tensor, view: View, spec: GatedDelta, weights: DeltaWeights) -> Tensor:
    if by_kernel := kernels.find_kernels(x.device).decode:
        return _by_states(by_kernel.gated_delta, x, view, spec.slot, spec, weights)
    return plain.gated_delta(arrays, x, view, spec, weights)


def _by_states(
    kernel: Callable[..., Tensor], x: Tensor, view: View, slot: int, *weights: Any
) -> Tensor:
    """A kernel's results for all rows."""
    view.states = view.states or describe(view.cache, view.spans)
    parts, place = zip(view.states, x.split(MAX_ROWS)), view.cache.places[slot]
    results = [kernel(state, place, part, *weights) for state, part in parts]
    return results[0] if len(results) == 1 else torch.cat(results)


def experts(x: Tensor, scores: Tensor, stacks: ExpertStacks) -> Tensor:
    """As in core.ops. Single positions are computed row by row, without waiting for the device. A
    prompt with few rows per expert takes three grouped products by kernels; any other waits for the
    experts' counts and multiplies expert by expert."""
    spec, router = stacks.spec, stacks.spec.router
    rows = x.reshape(-1, x.shape[-1])
    chosen, shares = choose_experts(scores.reshape(len(rows), -1), router, *stacks[5:])
    rows, shares = scale_inputs(rows, shares, router)
    if x.shape[1] == 1:
        mixed = []
        for row, numbers, share in zip(rows.view(len(chosen), -1, rows.shape[-1]), chosen, shares):
            mixed.append(share @ _run_experts(_multiply_each, row, stacks, numbers).float())
        return torch.stack(mixed).to(x.dtype).view(x.shape)
    by_kernels = kernels.find_kernels(x.device)
    if (
        by_kernels.decode
        and chosen.numel() <= by_kernels.packed.MOST_ROWS * spec.count
        and (x.dtype != torch.float32 or isinstance(stacks.gate, QuantizedStack))
    ):
        mixed = by_kernels.decode.experts(rows, chosen, shares, stacks, is_grouped=True)
        return mixed.view(x.shape)
    out = torch.zeros((len(chosen), x.shape[-1]), dtype=torch.float32, device=x.device)
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=spec.count).tolist()  # waits for the device
    numbers = torch.arange(spec.count, device=flat.device)
    for expert, pairs in enumerate(order.split(counts)):
        if counts[expert]:
            # a new tensor would wait for its copy
            number, tokens = numbers[expert : expert + 1], pairs // router.used
            inputs = rows[pairs if router.scales_input else tokens]
            outputs = _run_experts(
                lambda x, matrices: F.linear(x, matrices[0]), inputs, stacks, number
            )
            # a token has an expert once
            out[tokens] += outputs.float() * shares.reshape(-1)[pairs, None]
    return out.to(x.dtype).view(x.shape)


choose_experts = partial(plain.choose_experts, arrays)


def scale_inputs(rows: Tensor, shares: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Inputs [T, E], or times shares [T used, E], and factors of their outputs, [T, used]."""
    if not router.scales_input:
        return rows, shares
    scaled = (rows[:, None] * shares[..., None]).to(rows.dtype)
    return scaled.view(-1, rows.shape[-1]), torch.ones_like(shares)


def _run_experts(
    multiply: Callable[..., Tensor], x: Tensor, stacks: ExpertStacks, numbers: Tensor
) -> Tensor:
    """Outputs of the experts of these numbers, int64 [n], by multiply(x, matrices [n, N, K])."""

    def project(x: Tensor, stack: Stack, bias: Tensor | None) -> Tensor:
        if isinstance(stack, Tensor):
            wide, matrices = x, stack.index_select(0, numbers)
        else:
            wide = x if x.is_cuda else x.float()
            matrices = stack.dequantize(numbers, wide.dtype)
        product = multiply(wide, matrices).to(x.dtype)
        return product if bias is None else product + bias.index_select(0, numbers)

    gate_bias, up_bias, down_bias = stacks.biases
    gate_up = project(x, stacks.gate, gate_bias), project(x, stacks.up, up_bias)
    hidden = gate(torch.cat(gate_up, dim=-1), stacks.spec.activation)
    return project(hidden, stacks.down, down_bias)


def _multiply_each(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply row n of x, or its only row, with matrix n."""
    return (matrices @ x[:, :, None])[:, :, 0]


def adapt(product: Tensor, x: Tensor, adapters: Adapters, view: View) -> Tensor:
    down, up = adapters
    for row, number in enumerate(view.adapters):
        if number:
            product[row] += (x[row] @ down[number].T) @ up[number].T
    return product


def softcap(x: Tensor, cap: float) -> Tensor:
    """As in core.ops, in float32."""
    return plain.softcap(arrays, x.float(), cap).to(x.dtype)


def norm_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor | None, spec: Attention
) -> Tensor:
    H, G, D = spec.heads, spec.new_heads, spec.head_dim
    parts = list(heads.split((H * D, G * D, G * D), dim=-1))
    for i, weight in enumerate((query_weight, key_weight)):
        if weight is not None:
            units = parts[i].unflatten(-1, (-1, len(weight)))
            parts[i] = rms_norm(units, weight, spec.eps).reshape(parts[i].shape)
    if G and spec.norms_values:
        units = parts[2].unflatten(-1, (G, D))
        parts[2] = F.rms_norm(units, (D,), None, spec.eps).reshape(parts[2].shape)
    return torch.cat(parts, dim=-1)


def split_heads(heads: Tensor, spec: Attention) -> tuple[Tensor, Tensor, Tensor]:
    # one call in place of plain's three slices
    H, G = spec.heads, spec.new_heads
    B, T, _ = heads.shape
    parts = heads.view(B, T, H + 2 * G, spec.head_dim).transpose(1, 2)
    return parts.split_with_sizes((H, G, G), dim=1)


def rope_and_store(heads: Tensor, view: View, spec: Attention) -> Tensor:
    query, key, value = split_heads(heads, spec)
    if spec.rotates:
        query, key = (
            rope(part, tuple(table[..., -heads.shape[1] :, columns] for table in view.tables))
            for part, columns in ((query, spec.query_angles), (key, spec.angles))
        )
    if spec.new_heads:
        view.append(spec.slot, key, value)
    return query


def attend(query: Tensor, view: View, spec: Attention, sinks: Tensor | None = None) -> Tensor:
    # Sequences have different lengths and separate storage.
    mixed = []
    for queries, (keys, values), mask in zip(
        split_rows(query), view.stored(spec.slot, spec.window), view.mask(spec.window)
    ):
        mask = mask[-query.shape[2] :] if isinstance(mask, Tensor) else mask
        mixed.append(attention(queries, keys, values, spec.scale, mask, spec.softcap, sinks))
    mixed = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    return mixed.transpose(1, 2).reshape(query.shape[0], -1, spec.heads * spec.head_dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + R/2) of each head by its position's angle, as core.ops.rope_and_store.

    x: [B, H, T, D]; table: cosines and sines of the T positions, float32 [T, R/2] or [B, T, R/2], R
    <= D: other dimensions are copied; returns [B, H, T, D] in x's dtype.
    """
    cosine, sine = table
    if (rotated := 2 * cosine.shape[-1]) < x.shape[-1]:
        return torch.cat([rope(x[..., :rotated], table), x[..., rotated:]], dim=-1)
    if by_kernel := kernels.find_kernels(x.device).decode:
        return by_kernel.rotate(x, cosine, sine)
    cosine, sine = cosine.unsqueeze(-3), sine.unsqueeze(-3)
    first, second = x.float().chunk(2, dim=-1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat(turned, dim=-1).to(x.dtype)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | str | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(query @ keys.T * scale) @ values; each key head serves H / G query heads.

    query: [B, H, T, D]; keys, values: [B, G, L, D]; mask: bool [T, L], True where visible, None for
    all, "causal" if the last query is at the last key; cap: softcap of the scores; sinks: [H], as
    in core.ops. Returns [B, H, T, D].
    """
    T, L = query.shape[2], keys.shape[2]
    if isinstance(mask, str) and T == 1:
        mask = None
    grouped, is_causal = query.shape[1] != keys.shape[1], isinstance(mask, str)
    if (
        query.is_cuda
        and not cap
        and (mask is None or is_causal)
        and query.shape[-1] % 8 == 0
        and can_use_flash_attention(SDPAParams(query, keys, values, None, 0.0, False, grouped))
    ):
        # The public function's causal mask ends at key T, and it may choose cuDNN, which plans
        # again for every length.
        mixed, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, is_causal, scale=scale
        )[:2]
        if sinks is None:
            return mixed
        # total / (total + exp(sink)), the denominators without and with the sink
        kept = torch.sigmoid(logsumexp - sinks.float()[:, None])
        return (mixed * kept[..., None]).to(mixed.dtype)
    if cap or sinks is not None:
        return _unfused_attention(query, keys, values, scale, mask, cap, sinks)
    is_causal = is_causal and T == L
    if is_causal:
        mask = None
    elif isinstance(mask, str):
        mask = torch.ones((T, L), dtype=torch.bool, device=query.device).tril(L - T)
    if grouped and mask is not None:
        # torch's fused kernels do not take groups with a mask; the unfused kernel would allocate
        # all scores.
        shared = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(shared, dim=1) for part in (keys, values))
        grouped = False
    return F.scaled_dot_product_attention(
        query, keys, values, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _unfused_attention(query: Tensor, keys: Tensor, values: Tensor, *how: Any) -> Tensor:
    """`attention` with a softcap or sinks, which fused kernels lack: 256 queries at a time."""
    scale, mask, cap, sinks = how
    (_, H, T, _), (G, L) = query.shape, keys.shape[1:3]
    mixed = []
    for first in range(0, T, 256):
        part = query[:, :, first : first + 256]
        B, _, count, D = part.shape
        grouped = part.reshape(B, G, -1, D)  # queries of a key head as rows of a product
        scores = (grouped @ keys.transpose(-1, -2)).float() * scale
        scores = (softcap(scores, cap) if cap else scores).view(B, H, count, L)
        if isinstance(mask, str):
            columns = torch.arange(L, device=query.device)
            last = columns[L - T + first : L - T + first + count]
            scores = scores.masked_fill(columns > last[:, None], -torch.inf)
        elif mask is not None:
            scores = scores.masked_fill(~mask[first : first + 256], -torch.inf)
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(B, H, count, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :L].to(values.dtype).reshape(B, G, -1, L)
        mixed.append((weights @ values).view(part.shape))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)
