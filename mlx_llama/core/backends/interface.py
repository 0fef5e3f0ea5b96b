"""The module interface of a backend: what core calls, and what the three answer with.

A backend is a package with the files facts, runtime, ops, arrays, cache, weights and model. Their
modules implement the Protocols of this file, of core.ops and of core.sample; their classes derive
from Positions, BaseWeights, SamplingBatch and BaseLlama. The model itself is core.llama, over the
backend's ops. "Array" is the backend's own array type. Core's docstrings are not repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlx_llama.core.ops import Array, Probe as Probe
from mlx_llama.core.sample import Masks as Masks, SamplingBatch as SamplingBatch

from .model import BaseLlama
from .positions import Positions

if TYPE_CHECKING:
    from mlx_llama.core.files.checkpoint import Checkpoint
    from mlx_llama.core.files.quantized import AffineWeight
    from mlx_llama.core.files.tensor import Tensor
    from mlx_llama.core.system.machine import Gpus

# The classes that a backend derives, under the names that it gives them.
Cache = Positions
Model = BaseLlama


class Runtime(Protocol):
    """The device under the arrays: the module runtime.py of a backend."""

    SURVIVES_FORK: bool  # a forked process may compute
    HAS_ONE_THREAD: bool  # all calls are made by one thread

    def has_gpu(self) -> bool: ...
    # "gpu", "cpu", None for a GPU if there is one; BackendError
    def pick_device(self, device: str | None = None) -> Any: ...
    def device_name(self, device: Any) -> str: ...  # in receipts
    # step n+1 may be launched before token n is read
    def runs_ahead(self, device: Any) -> bool: ...
    # The activations' dtype; "auto": the `stored` one. BackendError for one that the device lacks.
    def pick_dtype(
        self, dtype: str, stored: str, device: Any, exceeds_float16: bool = False
    ) -> Any: ...
    # submits the arrays' work to the device without waiting
    def launch(self, arrays: Sequence[Array]) -> None: ...
    # waits once for int32 [B, T] each, and concatenates their rows
    def read(self, tokens: Sequence[Array]) -> list[int]: ...
    # float32 or integers, copied; never while decoding
    def to_numpy(self, array: Array) -> np.ndarray: ...
    # bytes allocated on the device, or of the process; 0: unknown
    def peak_memory(self, device: Any) -> int: ...
    def is_out_of_memory(self, error: BaseException) -> bool: ...
    def free_memory(self, device: Any) -> int | None: ...  # bytes; None: unknown
    # bytes per second, measured; None: that of the host's memory
    def bandwidth(self, device: Any) -> float | None: ...
    # in the arrays' unevaluated graph; None: there is no graph
    def primitives(self, arrays: Sequence[Array]) -> int | None: ...


class Facts(Protocol):
    """The backend without its framework, for the doctor: the module facts.py of a backend."""

    DISTRIBUTIONS: tuple[str, ...]  # packages whose versions it tells

    # packages: versions of those installed
    def describe(self, packages: dict[str, str], gpus: Gpus) -> BackendFacts: ...
    # dtypes and size on this machine's device
    def plan_weights(self, checkpoint: Checkpoint, facts: BackendFacts) -> WeightsPlan: ...
    # Bytes once packed. dtype: of the activations.
    def weights_nbytes(
        self, tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool
    ) -> int: ...


@dataclass(frozen=True)
class BackendFacts:
    """One backend on this machine, described without importing its framework."""

    name: str
    available: bool  # it can be chosen
    reason: str  # why it cannot, with the remedy, or what it lacks
    packages: dict[str, str]  # versions by name
    gpu: bool | None = False  # it would run on a GPU; None: unknown
    device: str = ""  # in words
    options: tuple[tuple[str, str], ...] = ()  # names and values that `load` needs besides it
    memory_bytes: int | None = None  # that a model may take of the device; None: unknown
    memory_is: str = ""  # "free" or "an estimate"
    has_bfloat16: bool = True  # False on GPUs without its instructions
    kernels: str | None = None  # target of the compiled kernels, None without them


@dataclass(frozen=True)
class WeightsPlan:
    """Dtypes and size of a model's weights on a backend, planned without loading them."""

    dtype: str  # the activations'
    low_bit_operand: str  # dtype that low-bit weights are multiplied in
    nbytes: int  # all weights once packed, which stay in memory
