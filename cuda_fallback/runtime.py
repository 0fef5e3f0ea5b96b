"""The torch device. Operations are queued on the GPU; `read` waits for a token."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mlx_llama.core.errors import BackendError, OutOfMemoryError
from mlx_llama.core.system import machine

SURVIVES_FORK = False  # a forked process lacks torch's threads, and CUDA's contexts
HAS_ONE_THREAD = False


def has_gpu() -> bool:
    """True if torch has kernels for an NVIDIA GPU here, or sees an AMD one (untested)."""
    if not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or _has_kernels(torch.cuda.current_device())


def _has_kernels(device: int) -> bool:
    """True if torch was built for this GPU, by binaries or by PTX of earlier versions."""
    major, minor = torch.cuda.get_device_capability(device)
    for name in torch.cuda.get_arch_list():
        kind, _, number = name.partition("_")
        built = re.match(r"(\d+)(\d)", number)
        if built and (
            (kind == "compute" and (int(built[1]), int(built[2])) <= (major, minor))
            or (kind == "sm" and int(built[1]) == major and int(built[2]) <= minor)
        ):
            return True
    return False


def pick_device(device: str | None = None) -> torch.device:
    """Pick the device: "gpu", "cpu", or None for the GPU. Raises BackendError without a GPU."""
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BackendError(
            "torch sees no CUDA GPU here: use `device='cpu'` to run the cuda backend on torch's "
            "CPU device, or `backend='cpu'`"
        )
    return torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    return "torch on the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def runs_ahead(device: torch.device) -> bool:
    """True on a GPU: step n+1 may be launched before token n is read."""
    return device.type != "cpu"


def pick_dtype(
    dtype: str, stored: str, device: torch.device, exceeds_float16: bool = False
) -> torch.dtype:
    """Pick the dtype of activations and weights. dtype: a name, or "auto" for the `stored` one.

    "auto" turns a stored bfloat16 into float16 on a GPU without bfloat16, or into float32 for a
    model that overflows float16. Raises BackendError for "bfloat16" there.
    """
    chosen = getattr(torch, stored if dtype == "auto" else dtype)
    if chosen == torch.bfloat16 and device.type == "cuda" and not _has_bfloat16(device):
        if dtype == "auto":
            return torch.float32 if exceeds_float16 else torch.float16
        raise BackendError(f"{device_name(device)} has no bfloat16: use `dtype='float16'`")
    return chosen


def _has_bfloat16(device: torch.device) -> bool:
    """True if the GPU has bfloat16 instructions; torch emulates missing ones slowly."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def launch(arrays: Sequence[Tensor]) -> None:
    """Start the copy of `arrays[0]` to pinned memory, if it has tokens, without waiting.

    The computation itself is queued already: torch queues operations when they are called.
    """
    tokens = arrays[0]
    if tokens.is_cuda and tokens.dtype == torch.int32:
        tokens._arrival = _Arrival(tokens)


def read(tokens: Sequence[Tensor]) -> list[int]:
    arrivals = [vars(part).get("_arrival") for part in tokens]
    if None in arrivals:
        return torch.cat([part.reshape(-1) for part in tokens]).tolist()
    arrivals[-1].event.synchronize()  # launched last, so it arrives last
    return [token for arrival in arrivals for token in arrival.tokens.flatten().tolist()]


def send(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy a host array to the device, through pinned memory, without waiting."""
    tensor = torch.as_tensor(array)
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class _Arrival:
    """Asynchronous copy of tokens [B, T] to pinned memory, and the event of its end."""

    def __init__(self, tokens: Tensor):
        self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self.tokens.copy_(tokens, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(tokens.device))


def to_numpy(array: Tensor) -> np.ndarray:
    array = array.detach().cpu()
    return (array.float() if array.is_floating_point() else array).numpy().copy()


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return machine.peak_memory()


def is_out_of_memory(error: BaseException) -> bool:
    kinds = MemoryError, OutOfMemoryError, torch.OutOfMemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def free_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return machine.free_memory()
    # cached by torch for new tensors
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reusable


def bandwidth(device: torch.device) -> float | None:
    """Measured bandwidth of a GPU's memory, bytes per second; None for the CPU device."""
    if device.type == "cpu":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source)
    start.record()
    for _ in range(5):
        target.copy_(source)  # reads and writes every byte once
    end.record()
    end.synchronize()
    return 5 * 2 * source.nbytes / (start.elapsed_time(end) / 1e3)


def primitives(arrays: Sequence[torch.Tensor]) -> int | None:
    return None
