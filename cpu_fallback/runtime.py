"""The device under NumPy: it computes at once, so `launch` and `read` have nothing to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_llama.core.errors import BackendError, OutOfMemoryError
from mlx_llama.core.system import machine

from .kernels import find_target

SURVIVES_FORK = True  # kernels.runner starts new threads
HAS_ONE_THREAD = False


def has_gpu() -> bool:
    return False


def pick_device(device: str | None = None) -> str:
    """The device to run on: "cpu". Raises BackendError for "gpu"."""
    if device == "gpu":
        raise BackendError(
            "the cpu backend has no GPU: use `backend='mlx'` or `backend='cuda'`, or leave out "
            "`device`"
        )
    return "cpu"


def device_name(device: str) -> str:
    target, _ = find_target()
    return f"CPU, compiled for {target.name}" if target else "NumPy on the CPU"


def runs_ahead(device: str) -> bool:
    """Always False: to launch step n+1 before token n is read would delay token n."""
    return False


def pick_dtype(dtype: str, stored: str, device: str, exceeds_float16: bool = False) -> np.dtype:
    """The dtype of activations: float32, whatever width the weights are `stored` in."""
    return np.dtype(np.float32)


def launch(arrays: Sequence[np.ndarray]) -> None:
    """Submit the arrays' work to the device without waiting: NumPy has already done it."""


def read(tokens: Sequence[np.ndarray]) -> list[int]:
    if len(tokens) == 1:
        return tokens[0].ravel().tolist()
    return np.concatenate([array.ravel() for array in tokens]).tolist()


def to_numpy(array: np.ndarray) -> np.ndarray:
    return np.array(array, dtype=np.float32 if array.dtype.kind == "f" else array.dtype)


def peak_memory(device: str) -> int:
    return machine.peak_memory()


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, OutOfMemoryError))


def free_memory(device: str) -> int | None:
    return machine.free_memory()


def bandwidth(device: str) -> float | None:
    return None


def primitives(arrays: Sequence[np.ndarray]) -> int | None:
    return None
