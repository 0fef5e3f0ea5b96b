"""Selection of a backend and its device: the one place that imports a backend."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.options import GenerationOptions, LoadOptions
from mlx_llama.core.system import machine
from mlx_llama.core.system.forks import cached_property
from mlx_llama.core.system.machine import has_gpu_driver

from .interface import Model, SamplingBatch
from .shards import Ranks

PACKAGES = {"mlx": "mlx_llama.mlx_native", "cpu": "cpu_fallback", "cuda": "cuda_fallback"}
_NEEDS = {
    "mlx": ("mlx", "pip install mlx (Apple silicon) or pip install 'mlx[cpu]' (Linux)"),
    "cpu": ("numpy", "pip install numpy"),
    "cuda": ("torch", "pip install torch"),
}
_loaded_by: dict[str, int] = {}  # the process that first loaded a model, by backend


class World(Protocol):
    """The processes that a launcher started, for rank 0: mlx_llama.distributed."""

    backend: str
    size: int
    ranks: Ranks

    # a share on each rank; `build` loads rank 0's
    def load(
        self,
        backend: Backend,
        checkpoint: Checkpoint,
        options: LoadOptions,
        build: Callable[[], Model],
    ) -> Any: ...
    # the backend's runtime, whose results all ranks compute
    def guard(self, runtime: Any) -> Any: ...


world: World | None = None  # set by mlx_llama.distributed; None: this process computes alone


@dataclass(frozen=True)
class Backend:
    """One backend, imported and with its device chosen."""

    name: str
    device: Any
    runtime: Any  # the module
    model: ModuleType
    arrays: ModuleType

    @cached_property
    def device_name(self) -> str:
        name = self.runtime.device_name(self.device)
        return f"{name}, {world.size} processes" if world and world.backend == self.name else name

    @property
    def runs_ahead(self) -> bool:
        return self.runtime.runs_ahead(self.device)

    def load(self, checkpoint: Checkpoint, dtype: str = "auto", **options: Any) -> Model:
        """`build` with some of LoadOptions, checked."""
        return self.build(checkpoint, self.check(LoadOptions(dtype=dtype, **options)))

    def build(self, checkpoint: Checkpoint, options: LoadOptions, is_whole: bool = False) -> Model:
        """Build the model, under a launcher a share. Raises BackendError, CheckpointError."""
        self.check_process()
        build = functools.partial(self.model.Llama.load, checkpoint, options, self.device)
        if world is None or is_whole:
            model = build()
        else:
            _check_launcher(self.name, world.backend)
            if checkpoint.adapters:
                raise BackendError(
                    "`adapters`: adapters are not split over several processes: start one, or "
                    "merge the adapter into the model first (python -m mlx_llama.quantize)"
                )
            build = functools.partial(build, ranks=world.ranks)
            model = world.load(self, checkpoint, options, build)
        machine.trim_memory()
        return model

    def check_process(self) -> None:
        """Raise BackendError in a forked process that lacks the framework's threads."""
        first = _loaded_by.setdefault(self.name, os.getpid())
        if first != os.getpid() and not self.runtime.SURVIVES_FORK:
            raise BackendError(
                f"the {self.name} backend had loaded a model when this process was forked, and a "
                "fork does not copy its threads: load models only in the new process, use "
                "multiprocessing's start method 'spawn', or use the cpu backend"
            )

    def check(self, options: LoadOptions) -> LoadOptions:
        """Check load options before any work. Raises as LoadOptions.check."""
        return options.check(self.name)

    def sampling_batch(self, options: Sequence[GenerationOptions]) -> SamplingBatch:
        """Sampling of one token per row. options: of each row."""
        return self.arrays.SamplingBatch(options, self.device)


def missing(name: str) -> str:
    """The reason why backend `name` cannot be imported here, with the remedy; "" if it can."""
    package, remedy = _NEEDS[name]
    if importlib.util.find_spec(package) is None:
        return f"backend {name!r} needs the package {package!r}, which is not installed: {remedy}"
    return ""


def import_file(name: str, file: str) -> ModuleType:
    """Import a file of a backend; `facts` alone needs no framework."""
    return importlib.import_module(f"{PACKAGES[name]}.{file}")


def _check_launcher(name: str, launched: str) -> None:
    """Raise BackendError for a backend that the launcher of this process does not connect."""
    launcher = {"mlx": "mlx.launch", "cuda": "torchrun"}
    if name == "cpu":
        raise BackendError(
            f"`backend='cpu'` computes in one process, and {launcher[launched]} started several: "
            f"choose `backend={launched!r}`, or start without the launcher"
        )
    if name != launched:
        raise BackendError(
            f"`backend={name!r}`: {launcher[launched]} connects processes of the {launched} "
            f"backend: choose `backend={launched!r}`, or start with {launcher[name]}"
        )


def _has_gpu(name: str) -> bool:
    if missing(name):
        return False
    try:
        return import_file(name, "runtime").has_gpu()
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        text = f"backend {name!r} is installed but does not import ({error})"
        print(f"{text}: continuing without it", file=sys.stderr)
        return False


def auto() -> str:
    """MLX on Apple silicon, CUDA where torch sees a GPU, else the CPU path."""
    if platform.system() == "Darwin" and platform.machine() == "arm64" and _has_gpu("mlx"):
        return "mlx"
    # torch takes a second to import: ask it only where there is a driver.
    if has_gpu_driver() and _has_gpu("cuda"):
        return "cuda"
    return "cpu"


def select(name: str = "auto", device: str | None = None) -> Backend:
    """Import a backend (or "auto"), pick its device (None, "cpu" or "gpu"). Raises BackendError."""
    if name == "auto":
        name = world.backend if world else auto()
    if name not in PACKAGES:
        raise BackendError(f"there is no backend {name!r}: choose auto, {', '.join(PACKAGES)}")
    if device not in (None, "cpu", "gpu"):
        raise BackendError(f"there is no device {device!r}: choose cpu or gpu")
    if reason := missing(name):
        raise BackendError(reason)
    try:
        files = "runtime", "model", "arrays"
        runtime, model, arrays = (import_file(name, file) for file in files)
    except (ImportError, OSError) as error:
        raise BackendError(
            f"backend {name!r} is installed but does not import: {error}. "
            f"Reinstall it: {_NEEDS[name][1]}"
        ) from error
    chosen = runtime.pick_device(device)
    guarded = world.guard(runtime) if world and world.backend == name else runtime
    return Backend(name, chosen, guarded, model, arrays)


def find_guard() -> machine.Guard | None:
    """What makes this process survive truncated weights, of any backend; None on systems that it
    does not know.
    """
    try:
        return import_file("cpu", "kernels.bus_errors").find_guard()
    except (ImportError, OSError):  # there is no compiler
        return None
