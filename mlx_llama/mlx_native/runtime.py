"""The MLX device. Graphs are built lazily; `launch` submits them, and `read` waits for a token."""

from __future__ import annotations

import io
import os
import time
import weakref
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.errors import BackendError, OutOfMemoryError
from mlx_llama.core.system import machine

SURVIVES_FORK = False  # a forked process lacks MLX's threads
HAS_ONE_THREAD = True  # streams and traces belong to threads


def has_gpu() -> bool:
    """True if MLX has a GPU: Metal on Apple silicon, or MLX's CUDA build."""
    return mx.is_available(mx.gpu)


def pick_device(device: str | None = None) -> mx.Device:
    """Pick the device: "gpu", "cpu", or None for a GPU if any. Raises BackendError without "gpu".

    Sets MLX_ENABLE_TF32 to 0 unless it is set. Newer GPUs would round float32 products to TF32,
    with 10 bits of mantissa. MLX reads it at a process's first product.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    if device == "gpu" and not has_gpu():
        raise BackendError(
            "MLX has no GPU here (Metal needs Apple silicon, CUDA the package mlx[cuda13]): "
            "use `device='cpu'`, or leave it out"
        )
    return mx.Device(mx.gpu if device != "cpu" and has_gpu() else mx.cpu)


def device_name(device: mx.Device) -> str:
    if device.type == mx.cpu:
        return "MLX on the CPU"
    return f"MLX on {mx.device_info(device).get('device_name', 'the GPU')}"


def runs_ahead(device: mx.Device) -> bool:
    """Always True: step n+1 may be launched before token n is read."""
    return True


def pick_dtype(
    dtype: str, stored: str, device: mx.Device, exceeds_float16: bool = False
) -> mx.Dtype:
    """Pick the dtype of activations and weights: a dtype's name, or "auto" for `stored`."""
    return getattr(mx, stored if dtype == "auto" else dtype)


def launch(arrays: Sequence[mx.array]) -> None:
    """Submit the arrays' graphs to the device without waiting."""
    mx.async_eval(*arrays)


def read(tokens: Sequence[mx.array]) -> list[int]:
    joined = tokens[0]
    if len(tokens) > 1:
        joined = mx.concatenate([array.reshape(1, -1) for array in tokens], axis=1)
    return [token for row in joined.tolist() for token in row]


def to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)


def peak_memory(device: mx.Device) -> int:
    return mx.get_peak_memory()


def is_out_of_memory(error: BaseException) -> bool:
    # MLX reports failed allocations as RuntimeError (mlx/backend/{metal,cuda}/allocator.cpp).
    texts = ("malloc]", "unable to allocate", "attempting to allocate", "out of memory")
    return isinstance(error, (MemoryError, OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
    )


def free_memory(device: mx.Device) -> int | None:
    if device.type == mx.cpu:
        free = machine.free_memory()
        # freed arrays that MLX keeps for reuse
        return None if free is None else free + mx.get_cache_memory()
    info = mx.device_info(device)
    most = info.get("max_recommended_working_set_size", info.get("memory_size"))
    return None if most is None else most - mx.get_active_memory()


def bandwidth(device: mx.Device) -> float | None:
    """Measured bandwidth of a GPU's memory, bytes per second; None for the CPU device."""
    if device.type == mx.cpu:
        return None
    with mx.stream(device):
        source = mx.zeros(1 << 28, mx.float32)
        mx.eval(source, source + 1)
        started = time.perf_counter()
        for _ in range(5):
            mx.eval(source + 1)  # reads and writes every byte once
        return 5 * 2 * source.nbytes / (time.perf_counter() - started)


def primitives(arrays: Sequence[mx.array]) -> int | None:
    """Count the operations in the graph of `arrays`, without evaluating it."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


# Wired memory: a share of memory that stays resident while models are loaded
_wired = {"models": 0, "before": 0}


def wire(model: object, device: mx.Device) -> None:
    """Keep the GPU's memory resident until `model` is dropped, on Metal from macOS 15 on.

    Otherwise the system may page a large model out between tokens (mlx-lm's `wired_limit`). Half of
    a small Mac's memory stays free; with all of it wired, a Mac froze.
    """
    if device.type != mx.gpu or not mx.metal.is_available():
        return
    info = mx.device_info()
    total, recommended = info["memory_size"], info["max_recommended_working_set_size"]
    limit = min(recommended, max(total // 2, total - (8 << 30)))
    try:
        before = mx.set_wired_limit(limit)
    except (RuntimeError, ValueError):  # before macOS 15
        return
    if _wired["models"] == 0:
        _wired["before"] = before
    _wired["models"] += 1
    weakref.finalize(model, _unwire)


def _unwire() -> None:
    _wired["models"] -= 1
    if _wired["models"] == 0:
        mx.set_wired_limit(_wired["before"])
