"""MLX builds a graph lazily; `launch` hands it to the device, `read` is the one place that waits for a token."""

from __future__ import annotations

import io
import os
import time

import mlx.core as mx
import numpy as np

from mlx_llama.core.errors import BackendError
from mlx_llama.core.system import machine

NAME = "mlx"


def has_gpu() -> bool:
    """True where MLX has a GPU: Metal on Apple silicon, or MLX's CUDA build."""
    return mx.is_available(mx.gpu)


def pick_device(device: str | None = None) -> mx.Device:
    """The device to run on: "gpu", "cpu", or None for the GPU where there is one. Raises BackendError for no GPU."""
    if device == "gpu" and not has_gpu():
        raise BackendError("MLX has no GPU here (Metal needs Apple silicon, CUDA the package mlx[cuda13]): "
                           "use --device cpu, or leave it out")
    return mx.Device(mx.gpu if device != "cpu" and has_gpu() else mx.cpu)


def device_name(device: mx.Device) -> str:
    """A name for receipts."""
    return "MLX on the CPU" if device.type == mx.cpu else f"MLX on {mx.device_info(device).get('device_name', 'the GPU')}"


def runs_ahead(device: mx.Device) -> bool:
    """Whether step n+1 may be launched before token n is read: yes, MLX evaluates on a thread of its own."""
    return True


def pick_dtype(dtype: str, stored: str, device: mx.Device) -> mx.Dtype:
    """The dtype of activations and weights: the `stored` one, unless told otherwise."""
    chosen = getattr(mx, stored if dtype == "auto" else dtype)
    # Newer GPUs would round float32 products to TF32 (10 bits of mantissa). MLX reads this at the process's first product,
    # so also before a 16-bit model, which a float32 one may follow.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    return chosen


def launch(*arrays: mx.array) -> None:
    """Hand the arrays' graphs to the device, do not wait."""
    mx.async_eval(*arrays)


def read(token: mx.array) -> int:
    """The token [1, 1] as an int: the single evaluation point."""
    return token.item()


def read_all(*tokens: mx.array) -> list[int]:
    """Tokens [1, T] of one or more arrays, in order, as ints: one wait for all of them."""
    return (tokens[0] if len(tokens) == 1 else mx.concatenate(tokens, axis=1)).tolist()[0]


def to_numpy(array: mx.array) -> np.ndarray:
    """A float32 (or integer) copy on the host. Off the decode path: for logits, probes and saved state."""
    return np.array(array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)


def peak_memory(device: mx.Device) -> int:
    """Most bytes that MLX has had allocated."""
    return mx.get_peak_memory()


def free_memory(device: mx.Device) -> int | None:
    """Bytes of memory that the device has left; None: unknown."""
    if device.type == mx.cpu:
        free = machine.free_memory()
        return None if free is None else free + mx.get_cache_memory()  # which MLX holds for its next arrays
    info = mx.device_info(device)
    most = info.get("max_recommended_working_set_size", info.get("memory_size"))
    return None if most is None else most - mx.get_active_memory()


def bandwidth(device: mx.Device) -> float | None:
    """Bytes per second that the device's memory gives; None: the host's memory, which the bench measures itself."""
    if device.type == mx.cpu:
        return None
    with mx.stream(device):
        source = mx.zeros(1 << 28, mx.float32)
        mx.eval(source, source + 1)
        started = time.perf_counter()
        for _ in range(5):
            mx.eval(source + 1)  # reads and writes every byte once
        return 5 * 2 * source.nbytes / (time.perf_counter() - started)


def primitives(*arrays: mx.array) -> int | None:
    """Operations in the graph that `arrays` wait for, which is left as it is; None where arrays have no graph."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")
