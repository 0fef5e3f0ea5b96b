"""The arithmetic of a Llama, one function each, in torch's own operations; on a GPU Triton's kernels where these fuse."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from .quantized import QuantizedMatrix, find_kernels


def embed(weight: torch.Tensor | QuantizedMatrix, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding. weight: [V, E]; tokens: int32 [B, T]; returns [B, T, E]."""
    return weight.rows(tokens) if isinstance(weight, QuantizedMatrix) else F.embedding(tokens, weight)


def linear(x: torch.Tensor, weight: torch.Tensor | QuantizedMatrix | tuple,
           bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias. x: [..., K]; weight: [N, K] or a tuple of its row blocks; bias: [N]; returns [..., N]."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, QuantizedMatrix):
        product = weight.matmul(x)
    else:
        product = torch.cat([linear(x, block) for block in weight], dim=-1)
    return product if bias is None else product + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, accumulated in float32 (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of each head by the angle of its position (Su et al. 2021, in Hugging Face's layout).

    x: [B, H, T, D]; table: cosines and sines of the T positions, float32 [T, D/2]; returns [B, H, T, D] in x's dtype.
    """
    cosine, sine = table
    if fused := _fused(x):
        return fused.rotate(x, cosine, sine)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
              mask: torch.Tensor | str | None = None) -> torch.Tensor:
    """softmax(query @ keys.T * scale) @ values; each key head serves H / G query heads (Ainslie et al. 2023).

    query: [B, H, T, D]; keys, values: [B, G, L, D]; mask: bool [T, L], True where visible, None for all, "causal" where
    the last query is at the last key. Returns [B, H, T, D].
    """
    T, L = query.shape[2], keys.shape[2]
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
    if fused := _fused(gate_up):
        return fused.gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _fused(x: torch.Tensor) -> ModuleType | None:
    """The module of fused kernels where they run."""
    if not x.is_cuda or find_kernels(x.device)[0] is None:
        return None
    from .kernels import decode as fused

    return fused
