"""The arithmetic of a Llama: one vocabulary of words that layers.py calls.

Each word is written here in torch's own operations. Where Triton runs, its kernels take the place of those for up to MAX_ROWS
rows of one position each, for rotations and for gates (kernels.find_kernels decides). A `StateView` always stands for kernels.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from mlx_llama.core.models.spec import LayerSpec

from . import kernels
from .cache import View
from .kernels.state import MAX_ROWS, StateView
from .kernels.storage import split_rows
from .quantized import QuantizedMatrix

Matrix = torch.Tensor | QuantizedMatrix


def embed(tokens: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Rows of the embedding. tokens: int32 or int64 [B, T]; weight: [V, E]; returns [B, T, E]."""
    return weight.rows(tokens) if isinstance(weight, QuantizedMatrix) else F.embedding(tokens, weight)


def linear(x: torch.Tensor, weight: Matrix | tuple[Matrix, ...], bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias. x: [..., K]; weight: [N, K] or a tuple of its row blocks; bias: [N]; returns [..., N]."""
    if isinstance(weight, torch.Tensor):
        by_kernel = _row_kernels(x)
        return by_kernel.multiply(x, weight, bias) if by_kernel else F.linear(x, weight, bias)
    if isinstance(weight, QuantizedMatrix):
        product = weight.matmul(x)
    else:
        product = torch.cat([linear(x, block) for block in weight], dim=-1)
    return product if bias is None else product + bias


def gated_linear(x: torch.Tensor, weight: Matrix | tuple[Matrix, ...], bias: torch.Tensor | None = None,
                 activation: str = "silu") -> torch.Tensor:
    """activation(gate) * up of linear(x, weight, bias). x: [..., K]; weight: [2 F, K], the gate's rows first.

    activation: "silu" or "gelu_tanh". Returns [..., F].
    """
    if isinstance(weight, torch.Tensor) and (by_kernel := _row_kernels(x)):
        return by_kernel.multiply_gated(x, weight, bias, activation)
    gate_up = linear(x, weight, bias)
    return swiglu(gate_up) if activation == "silu" else geglu(gate_up)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm times weight). x, delta: [..., E], delta None for zero; weight: [E]."""
    if by_kernel := _row_kernels(x):
        return by_kernel.add_rms_norm(x, delta, weight, eps)
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight, eps)


def add(x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """x + delta. x, delta: [..., E], delta None for zero."""
    return x if delta is None else x + delta


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor. x: any shape."""
    return x * factor


def norm_heads(heads: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """RMS norm over each head of query and key (Qwen3). heads: [B, T, (H + 2 G) D]: queries, keys, values; weights: [D]."""
    H, G, D = spec.heads, spec.key_value_heads, spec.head_dim
    if by_kernel := _row_kernels(heads):
        return by_kernel.norm_heads(heads, query_weight, key_weight, H, G, D, spec.eps)
    query, key, value = heads.unflatten(-1, (H + 2 * G, D)).split((H, G, G), dim=-2)
    query, key = rms_norm(query, query_weight, spec.eps), rms_norm(key, key_weight, spec.eps)
    return torch.cat([query, key, value], dim=-2).flatten(-2)


def split_heads(heads: torch.Tensor, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [B, H, T, D], key and value [B, G, T, D] of heads [B, T, (H + 2 G) D]."""
    H, G = spec.heads, spec.key_value_heads
    B, T, _ = heads.shape
    return heads.view(B, T, H + 2 * G, spec.head_dim).transpose(1, 2).split_with_sizes((H, G, G), dim=1)


def rope_and_store(heads: torch.Tensor, view: View | StateView, spec: LayerSpec) -> torch.Tensor:
    """Rotate queries and keys, store keys and values. heads: [B, T, (H + 2 G) D]; returns the queries [B, H, T, D]."""
    if isinstance(view, StateView):
        return view.kernels.store_rotated(view.state, spec.index, heads, spec.heads, spec.key_value_heads, spec.head_dim,
                                          spec.rotates, view.bits)
    query, key, value = split_heads(heads, spec)
    if spec.rotates:
        query, key = rope(query, view.tables), rope(key, view.tables)
    view.append(spec.index, key, value)
    return query


def attend(query: torch.Tensor, view: View | StateView, spec: LayerSpec) -> torch.Tensor:
    """Attention to what the view holds. query: [B, H, T, D], of all new positions or of the last; returns [B, T, H D]."""
    if isinstance(view, StateView):
        return view.kernels.attend(view.state, spec.index, query, spec.key_value_heads, spec.window, spec.scale,
                                   view.bits)
    # Each sequence by itself: they have different lengths, and storage of their own.
    mixed = []
    for own, (keys, values), mask in zip(split_rows(query), view.stored(spec.index, spec.window), view.mask(spec.window)):
        mask = mask[-query.shape[2]:] if isinstance(mask, torch.Tensor) else mask
        mixed.append(attention(own, keys, values, spec.scale, mask))
    mixed = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    return mixed.transpose(1, 2).reshape(query.shape[0], -1, spec.heads * spec.head_dim)


def last_position(x: torch.Tensor) -> torch.Tensor:
    """The last position alone. x: [B, T, E] or [B, H, T, D]; returns [B, 1, E] or [B, H, 1, D]."""
    return x[..., -1:, :]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, accumulated in float32 (Zhang and Sennrich 2019).

    x: [B, T, E] or [B, T, H, D].
    """
    if by_kernel := _row_kernels(x):
        return by_kernel.add_rms_norm(x, None, weight, eps)[1]
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of each head by the angle of its position (Su et al. 2021, in Hugging Face's layout).

    x: [B, H, T, D]; table: cosines and sines of the T positions, float32 [T, D/2] or [B, T, D/2]; returns [B, H, T, D] in
    x's dtype.
    """
    cosine, sine = table
    if by_kernel := kernels.find_kernels(x.device).decode:
        return by_kernel.rotate(x, cosine, sine)
    cosine, sine = cosine.unsqueeze(-3), sine.unsqueeze(-3)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
              mask: torch.Tensor | str | None = None) -> torch.Tensor:
    """softmax(query @ keys.T * scale) @ values; each key head serves H / G query heads (Ainslie et al. 2023).

    query: [B, H, T, D]; keys, values: [B, G, L, D]; mask: bool [T, L], True where visible, None for all, "causal" where
    the last query is at the last key. Returns [B, H, T, D].
    """
    T, L = query.shape[2], keys.shape[2]
    if isinstance(mask, str) and T == 1:
        mask = None
    grouped, is_causal = query.shape[1] != keys.shape[1], isinstance(mask, str)
    if query.is_cuda and (mask is None or is_causal) and query.shape[-1] % 8 == 0 and can_use_flash_attention(
            SDPAParams(query, keys, values, None, 0.0, False, grouped)):
        # This operation's causal mask ends at the last key, that of torch's public function at the first T; and that
        # one may choose cuDNN, which plans anew for every length.
        return torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, is_causal, scale=scale)[0]
    is_causal = is_causal and T == L
    if is_causal:
        mask = None
    elif isinstance(mask, str):
        mask = torch.ones((T, L), dtype=torch.bool, device=query.device).tril(L - T)
    if grouped and mask is not None:
        # With a mask, torch's fused kernels know no groups; the unfused one would hold all scores in memory.
        keys, values = (part.repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for part in (keys, values))
        grouped = False
    return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020). gate_up: [..., 2 F], the gate first; returns [..., F]."""
    if by_kernel := kernels.find_kernels(gate_up.device).decode:
        return by_kernel.gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up by the tanh approximation (Hendrycks and Gimpel 2016). gate_up: [..., 2 F], the gate first."""
    if by_kernel := kernels.find_kernels(gate_up.device).decode:
        return by_kernel.gate(gate_up, "gelu_tanh")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _row_kernels(x: torch.Tensor) -> ModuleType | None:
    """Triton's kernels where they run and x, [B, T, E], is one position of up to MAX_ROWS rows: for more, torch's products
    are faster, but a row's bits depend on the others."""
    by_kernel = kernels.find_kernels(x.device).decode
    return by_kernel if by_kernel and x.ndim == 3 and x.shape[1] == 1 and x.shape[0] <= MAX_ROWS else None
