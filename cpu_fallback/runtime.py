"""The CPU computes at once, so launching and reading cost nothing; the names are here because the engine calls them."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.errors import BackendError
from mlx_llama.core.system import machine

from .kernels import compilation as compiled

NAME = "cpu"


def has_gpu() -> bool:
    """False: NumPy has no GPU."""
    return False


def pick_device(device: str | None = None) -> str:
    """The device to run on: "cpu". Raises BackendError for "gpu"."""
    if device == "gpu":
        raise BackendError("the cpu backend has no GPU: use --backend mlx or --backend cuda, or leave out --device")
    return "cpu"


def device_name(device: str) -> str:
    """A name for receipts."""
    target, _ = compiled.find_target()
    return f"CPU, compiled for {target.name}" if target else "NumPy on the CPU"


def runs_ahead(device: str) -> bool:
    """Whether step n+1 may be launched before token n is read: no, it would delay token n."""
    return False


def pick_dtype(dtype: str, stored: str, device: str) -> np.dtype:
    """The dtype of activations: float32, whatever width the weights are `stored` in. Raises BackendError for others."""
    if dtype not in ("auto", "float32"):
        raise BackendError(f"the cpu backend computes in float32 (16-bit weights stay 16-bit in memory), not {dtype}: "
                           f"leave out --dtype, or use --backend mlx or cuda")
    return np.dtype(np.float32)


def launch(*arrays: np.ndarray) -> None:
    """Hand work to the device without waiting: NumPy has already done it."""


def read(token: np.ndarray) -> int:
    """The token [1, 1] as an int: the single evaluation point."""
    return int(token[0, 0])


def read_all(*tokens: np.ndarray) -> list[int]:
    """Tokens [1, T] of one or more arrays, in order, as ints: one wait for all of them."""
    return np.concatenate(tokens, axis=1)[0].tolist()


def to_numpy(array: np.ndarray) -> np.ndarray:
    """A float32 (or integer) copy on the host. Off the decode path: for logits, probes and saved state."""
    return np.array(array, dtype=np.float32 if array.dtype.kind == "f" else array.dtype)


def peak_memory(device: str) -> int:
    """Most bytes this process has had in memory; 0 where the system does not say."""
    return machine.peak_memory()


def free_memory(device: str) -> int | None:
    """Bytes of memory that the device has left; None: unknown."""
    return machine.free_memory()


def bandwidth(device: str) -> float | None:
    """Bytes per second that the device's memory gives; None: the host's memory, which the bench measures itself."""
    return None


def primitives(*arrays: np.ndarray) -> int | None:
    """Operations in the graph that `arrays` wait for, which is left as it is; None where arrays have no graph."""
    return None
