"""The module interface that the three backends share, and the one place that imports a backend.

A backend is a package with the files runtime, ops, layers, cache, sampling and model, with the same public names and
signatures in each. The Protocols below are what the engine uses of them; "array" is the backend's own array type.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, Mapping, Protocol

import numpy as np

from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.generation.options import GenerationOptions
from mlx_llama.core.models.config import LlamaConfig

Array = Any
Probe = Callable[[str, Array], None]

PACKAGES = {"mlx": "mlx_llama.mlx_native", "cpu": "cpu_fallback", "cuda": "cuda_fallback"}
DTYPES = ("auto", "float32", "float16", "bfloat16")
ACTIVATION_BITS = (8, 16, 32)
MOST_THREADS = 1024
_NEEDS = {
    "mlx": ("mlx", "pip install mlx (Apple silicon) or pip install 'mlx[cpu]' (Linux)"),
    "cpu": ("numpy", "pip install numpy"),
    "cuda": ("torch", "pip install torch"),
}


class Cache(Protocol):
    """The one owner of sequence state: keys, values and tokens so far, rope tables and masks."""

    length: int  # positions filled
    capacity: int  # positions it may hold at most; storage grows towards it in steps
    tokens: Array  # ids so far, int32 [B, allocated]

    @property
    def nbytes(self) -> int: ...
    def arrays(self) -> list[Array]: ...
    def check_memory(self, batch: int, end: int) -> None: ...
    def trim(self, length: int) -> None: ...
    def reset(self) -> None: ...
    def state(self) -> dict[str, np.ndarray]: ...
    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...


class Sampler(Protocol):
    """Logits to token, on the device."""

    window: int  # recent tokens it looks at

    def __call__(self, logits: Array, position: int, recent: Array) -> Array: ...


class Model(Protocol):
    """A Llama. Immutable after loading; everything that changes while generating is in the `Cache`."""

    config: LlamaConfig
    verify_width: int  # positions that `verify` takes for little more than a step costs
    notices: tuple[str, ...]  # what a user should know of how this model is computed, a line each

    def make_cache(self, capacity: int) -> Cache: ...
    def forward(self, tokens: Array, index_pos: int, cache: Cache, *, all_positions: bool = False,
                probe: Probe | None = None) -> Array: ...
    def step(self, token: Array, index_pos: int, cache: Cache, sampler: Sampler) -> Array: ...
    def verify(self, tokens: Array, index_pos: int, cache: Cache, sampler: Sampler) -> Array: ...


@dataclass(frozen=True)
class Backend:
    """One backend, imported and with its device chosen."""

    name: str
    device: Any
    runtime: ModuleType
    model: ModuleType
    sampling: ModuleType

    @property
    def device_name(self) -> str:
        return self.runtime.device_name(self.device)

    @property
    def runs_ahead(self) -> bool:
        return self.runtime.runs_ahead(self.device)

    def load(self, checkpoint: Checkpoint, dtype: str = "auto", threads: int | str | None = None,
             activation_bits: int | str | None = None, compile: bool | None = None) -> Model:
        """Build the model on the device. Raises BackendError, CheckpointError."""
        return self.model.Llama.load(checkpoint, dtype, self.device,
                                     **self.load_options(dtype, threads, activation_bits, compile))

    def load_options(self, dtype: str = "auto", threads: int | str | None = None,
                     activation_bits: int | str | None = None, compile: bool | None = None) -> dict[str, Any]:
        """How to load, checked before any work is done: what was given of threads (1 to 1024) and activation_bits
        (8, 16 or 32), as numbers, and of compile. Raises BackendError, also where this backend cannot honour it."""
        if dtype not in DTYPES:
            raise BackendError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        given = {name: value for name, value in (("threads", threads), ("activation_bits", activation_bits))
                 if value is not None}
        for name, value in given.items():
            flag = "--" + name.replace("_", "-")
            if self.name != "cpu":
                raise BackendError(f"{flag} {value}: is for the cpu backend, and this is {self.name}: leave it out, or "
                                   f"choose --backend cpu")
            allowed = range(1, MOST_THREADS + 1) if name == "threads" else ACTIVATION_BITS
            if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,9}", str(value)) or int(value) not in allowed:
                must = f"1 to {MOST_THREADS}" if name == "threads" else "8, 16 or 32"
                raise BackendError(f"{flag} {value!r:.40}: must be a whole number, {must}")
            given[name] = int(value)
        if dtype == "float32" and given.get("activation_bits", 32) != 32:
            raise BackendError(f"--activation-bits {given['activation_bits']} and --dtype float32, which asks for 32, "
                               f"contradict each other: leave one of them out")
        if compile is False and given:
            raise BackendError("--threads and --activation-bits are for compiled kernels: leave out --no-compile, or them")
        return given if compile is None else given | {"compile": compile}

    def sampler(self, options: GenerationOptions) -> Sampler:
        return self.sampling.Sampler(options, self.device)

    def launch(self, *arrays: Array) -> None:
        self.runtime.launch(*arrays)

    def read(self, token: Array) -> int:
        return self.runtime.read(token)

    def read_all(self, *tokens: Array) -> list[int]:
        return self.runtime.read_all(*tokens)


def missing(name: str) -> str:
    """Why backend `name` cannot be imported here and what to install, or "" if it can."""
    package, remedy = _NEEDS[name]
    if importlib.util.find_spec(package) is None:
        return f"backend {name!r} needs the package {package!r}, which is not installed: {remedy}"
    return ""


def _has_gpu(name: str) -> bool:
    if missing(name):
        return False
    try:
        return importlib.import_module(f"{PACKAGES[name]}.runtime").has_gpu()
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        print(f"backend {name!r} is installed but does not import ({error}): going on without it", file=sys.stderr)
        return False


def auto() -> str:
    """MLX on Apple silicon, CUDA where torch sees a GPU, else the CPU path."""
    if platform.system() == "Darwin" and platform.machine() == "arm64" and _has_gpu("mlx"):
        return "mlx"
    # torch takes a second to import, so it is asked only where a driver is in sight.
    if _gpu_driver() and _has_gpu("cuda"):
        return "cuda"
    return "cpu"


def _gpu_driver() -> bool:
    if os.name == "nt":
        return os.path.exists(os.path.expandvars(r"%SystemRoot%\System32\nvcuda.dll"))
    # In turn: NVIDIA, NVIDIA inside WSL, NVIDIA Jetson, AMD's ROCm, which torch calls cuda too.
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/kfd")))


def select(name: str = "auto", device: str | None = None) -> Backend:
    """Import the backend `name` ("auto", "mlx", "cpu" or "cuda") and pick its device (None, "cpu" or "gpu").

    Raises BackendError when the name is unknown, the package is not installed or the device is not there.
    """
    if name == "auto":
        name = auto()
    if name not in PACKAGES:
        raise BackendError(f"there is no backend {name!r}: choose auto, {', '.join(PACKAGES)}")
    if device not in (None, "cpu", "gpu"):
        raise BackendError(f"there is no device {device!r}: choose cpu or gpu")
    if reason := missing(name):
        raise BackendError(reason)
    try:
        runtime, model, sampling = (
            importlib.import_module(f"{PACKAGES[name]}.{file}") for file in ("runtime", "model", "sampling"))
    except (ImportError, OSError) as error:
        raise BackendError(f"backend {name!r} is installed but does not import: {error}. "
                           f"Reinstall it: {_NEEDS[name][1]}") from error
    return Backend(name, runtime.pick_device(device), runtime, model, sampling)
