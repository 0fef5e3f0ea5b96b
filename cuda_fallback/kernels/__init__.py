"""Triton's kernels and CUDA graphs of decoded tokens: whether they run on a device, and why not."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from mlx_llama.core.errors import BackendError
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

from ..facts import KERNELS_CAPABILITY


class Kernels(NamedTuple):
    """Modules of Triton's kernels; None if Triton does not run on the device."""

    decode: ModuleType | None = None  # for dense weights and decoded tokens
    packed: ModuleType | None = None  # for low-bit weights
    notices: tuple[str, ...] = ()  # why there are none, except on the CPU device


TRITON = "triton-windows" if sys.platform == "win32" else "triton"  # the package
_SLOW = (
    "decoding is not captured, and low-bit weights are dequantised for every product, which is slow"
)


@dataclass(frozen=True)
class Decoding:
    """How tokens are decoded."""

    kernels: ModuleType | None  # decode.py; None for torch's operations
    is_captured: bool  # as a CUDA graph
    notices: tuple[str, ...]


@functools.cache
def find_kernels(device: torch.device) -> Kernels:
    """The kernels that run on a device. The first call compiles and launches two of them."""
    if device.type == "cpu":
        return Kernels()
    major, minor = torch.cuda.get_device_capability(device)
    capability = float(f"{major}.{minor}")
    # On older GPUs Triton 3.3 cannot compile attention, and later versions spill its registers.
    if torch.version.hip is None and capability < KERNELS_CAPABILITY:
        reason = f"need compute capability {KERNELS_CAPABILITY}, and this GPU has {capability}"
        return Kernels(notices=(f"{_SLOW}: Triton's kernels {reason}",))
    try:
        from . import decode, packed

        packed.try_out(device)
        decode.try_out(device)
    except Exception as error:  # noqa: BLE001: no triton, no C compiler for its launcher, a GPU it does not know ...
        remedy = f"pip install {TRITON}, and a C compiler"
        reason = f"do not run here ({first_line(error)}): {remedy}"
        return Kernels(notices=(f"{_SLOW}: Triton's kernels {reason}",))
    return Kernels(decode, packed)


def plan_decoding(
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    compile: bool | None,
    cache_bits: int | None = None,
    batch_invariant: bool = False,
) -> Decoding:
    """Choose how a model's tokens are decoded. compile: as a CUDA graph or not (None: if possible).
    batch_invariant: run prompts by the same kernels.

    Raises BackendError if `compile` or `batch_invariant` cannot be honoured.
    """
    decode, _, notices = find_kernels(device)
    reason = notices[0] if notices else ""
    if rope.length_dependent(config):
        decode, reason = None, reason or "dynamic rope turns by angles that depend on the length"
    elif decode:
        try:  # a GPU may have too little shared memory for this model's sizes
            decode.try_heads(config, dtype, device, cache_bits)
        except Exception as error:  # noqa: BLE001: Triton's, which derive from Exception alone
            decode, reason = None, f"attention's kernel does not run here ({first_line(error)})"
    if batch_invariant and not decode:
        reason = reason or "its kernels are for a GPU, and this is torch's CPU device"
        raise BackendError(f"`batch_invariant`: {reason}: leave it out, or choose `backend='cpu'`")
    if device.type == "cpu":
        if compile:
            raise BackendError(
                "`compile`: CUDA graphs are for a GPU, and this is torch's CPU device: leave it out"
            )
        return Decoding(decode, False, ())
    if compile and reason:
        raise BackendError(f"`compile`: {reason}: leave it out")
    if compile is False:
        reason = "`compile=False` asks for it"
    if reason and not notices:
        notices = (f"decoding is not captured: {reason}",)
    return Decoding(decode, not reason, notices)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
