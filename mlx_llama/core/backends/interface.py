"""The module interface of a backend: what core calls, and what the three answer with.

A backend is a package with the files facts, runtime, ops, cache, weights, sampling and model, with the same public names
and signatures in each. The model itself is core.llama, over the backend's ops. "Array" is the backend's own array type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Protocol

import numpy as np

from mlx_llama.core.generation.options import GenerationOptions
from mlx_llama.core.models.config import LlamaConfig

from ..ops import Probe
from .profile import Profile

Array = Any

# Computes the tokens that grammars allow, int32 [B, ceil(V / 32)] on the host; bit i % 32 of word i // 32 is token i's. A row
# without a grammar has all bits set. Call it once, after the forward is on its way: the host works while the device does.
Masks = Callable[[], np.ndarray]

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number


class Cache(Protocol):
    """The one owner of sequence state: each row holds one sequence's keys, values and tokens."""

    lengths: list[int]  # positions filled, by row
    allocated: list[int]  # positions that the storage has room for, by row
    adapters: list[int]  # number of the adapter that computes a row's positions, 0 for none; the caller sets it
    length: int  # lengths[0], for a cache of one sequence
    rows: int  # number of rows; an empty row takes no storage
    capacity: int  # positions that a row may hold at most; its storage grows towards it in steps
    position_nbytes: int  # bytes of one position's keys and values

    @property
    def nbytes(self) -> int: ...  # taken now, shared pages once
    def nbytes_for(self, length: int) -> int: ...  # that a row of `length` positions takes
    def arrays(self) -> list[Array]: ...
    def reserve(self, ends: Mapping[int, int]) -> None: ...
    def check_memory(self, ends: Mapping[int, int]) -> None: ...
    def view(self, tokens: Array, index_pos: int | Sequence[int], rows: Sequence[int] | None = None) -> Any: ...
    def recent(self, window: int, rows: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Array: ...
    def trim(self, length: int, row: int = 0) -> None: ...
    def reset(self, row: int | None = None) -> None: ...
    def copy_prefix(self, source: int, target: int, length: int) -> None: ...
    def state(self, row: int = 0) -> dict[str, np.ndarray]: ...
    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None: ...


class SamplingBatch(Protocol):
    """Logits to tokens, on the device; each row has options of its own.

    -1 is in place of a token whose score is NaN or infinite, so that the host learns of it from the token it reads anyway.
    """

    options: tuple[GenerationOptions, ...]  # by row
    window: int  # recent tokens that any row looks at
    logprobs: int | None  # likeliest tokens to report beside each token (core.backends.logprobs); None: tokens alone

    def __call__(self, logits: Array, positions: Sequence[int], recent: Array | None = None,
                 masks: Masks | None = None) -> Array: ...


class Model(Protocol):
    """A Llama. Immutable once loaded; the `Cache` holds all state of a generation."""

    config: LlamaConfig
    dtype: Any  # of the activations, the backend's own
    cache_bits: int | None  # of keys and values; None: the activations' width
    verify_width: int  # positions that `verify` takes at little more than a step's cost
    prefill_width: int  # most prompt tokens of a call that Ctrl-C does not wait long for
    adapters: tuple[str, ...]  # names of those loaded; a row of a new cache has number 1, the first, or 0 where there is none
    notices: tuple[str, ...]  # lines for the user on precision and compilation
    is_batch_invariant: bool  # a row is bit-identical whatever else is in the batch, and with any chunks

    def profile(self) -> AbstractContextManager[Profile]: ...
    def make_cache(self, capacity: int, rows: int = 1) -> Cache: ...
    def forward(self, tokens: Array, index_pos: int | Sequence[int], cache: Cache, *, rows: Sequence[int] | None = None,
                all_positions: bool = False, probe: Probe | None = None) -> Array: ...
    def step(self, tokens: Array, index_pos: int | Sequence[int], cache: Cache, sampling: SamplingBatch, *,
             rows: Sequence[int] | None = None, masks: Masks | None = None) -> Array: ...
    def sample(self, logits: Array, cache: Cache, sampling: SamplingBatch, *, rows: Sequence[int] | None = None,
               masks: Masks | None = None) -> Array: ...
    def verify(self, tokens: Array, index_pos: int, cache: Cache, sampling: SamplingBatch, *,
               rows: Sequence[int] | None = None) -> Array: ...


@dataclass(frozen=True)
class BackendFacts:
    """One backend on this machine, described without importing its framework.

    available: it can be chosen. reason: why it cannot, with the remedy, or what it lacks. packages: {name: version}.
    gpu: it would run on a GPU; None: unknown. device: in words. options: pairs of name and value that `load` needs besides the backend.
    memory_bytes: that a model may take of the device; None: unknown. memory_is: "free" or "an estimate".
    has_bfloat16: False on GPUs without its instructions. kernels: target of the compiled kernels, None without them.
    """

    name: str
    available: bool
    reason: str
    packages: dict[str, str]
    gpu: bool | None = False
    device: str = ""
    options: tuple[tuple[str, str], ...] = ()
    memory_bytes: int | None = None
    memory_is: str = ""
    has_bfloat16: bool = True
    kernels: str | None = None


@dataclass(frozen=True)
class WeightsPlan:
    """Dtypes and size of a model's weights on a backend, planned without loading them.

    dtype: of the activations. low_bit_operand: dtype that low-bit weights are multiplied in. nbytes: of all weights once
    packed, which is what the process takes for them after loading.
    """

    dtype: str
    low_bit_operand: str
    nbytes: int
