"""The module interface of a backend: what core calls, and what the three answer with.

A backend is a package with the files facts, runtime, ops, layers, cache, sampling and model, with the same public names
and signatures in each. "Array" is the backend's own array type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol

import numpy as np

from mlx_llama.core.models.config import LlamaConfig

Array = Any
Probe = Callable[[str, Array], None]

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number


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
    """A Llama. Immutable once loaded; the `Cache` holds all state of a generation."""

    config: LlamaConfig
    dtype: Any  # of the activations, the backend's own
    verify_width: int  # positions that `verify` takes at little more than a step's cost
    notices: tuple[str, ...]  # lines for the user on precision and compilation

    def make_cache(self, capacity: int) -> Cache: ...
    def forward(self, tokens: Array, index_pos: int, cache: Cache, *, all_positions: bool = False,
                probe: Probe | None = None) -> Array: ...
    def step(self, token: Array, index_pos: int, cache: Cache, sampler: Sampler) -> Array: ...
    def verify(self, tokens: Array, index_pos: int, cache: Cache, sampler: Sampler) -> Array: ...


@dataclass(frozen=True)
class BackendFacts:
    """One backend on this machine, described without importing its framework.

    available: it can be chosen. reason: why it cannot, with the remedy, or what it lacks. packages: {name: version}.
    gpu: it would run on a GPU; None: unknown. device: in words. flags: needed on the command line besides --backend.
    memory_bytes: that a model may take of the device; None: unknown. memory_is: "free" or "an estimate".
    has_bfloat16: False on GPUs without its instructions. kernels: target of the compiled kernels, None without them.
    """

    name: str
    available: bool
    reason: str
    packages: dict[str, str]
    gpu: bool | None = False
    device: str = ""
    flags: tuple[str, ...] = ()
    memory_bytes: int | None = None
    memory_is: str = ""
    has_bfloat16: bool = True
    kernels: str | None = None


@dataclass(frozen=True)
class WeightsPlan:
    """Dtypes and size of a model's weights on a backend, planned without loading them.

    dtype: of the activations. low_bit_operand: dtype that low-bit weights are multiplied in. nbytes: of all weights once
    packed (cpu: the peak while loading).
    """

    dtype: str
    low_bit_operand: str
    nbytes: int
