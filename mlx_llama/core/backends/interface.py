"""The module interface of a backend: what core calls, and what the three answer with.

A backend is a package with the files facts, runtime, ops, cache, weights, sampling and model; their
modules and classes implement the Protocols of this file, of core.ops and of core.llama. The model
itself is core.llama, over the backend's ops. "Array" is the backend's own array type. A docstring
that stands here is not repeated there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlx_llama.core.generation.options import GenerationOptions
from mlx_llama.core.models.config import LlamaConfig

from ..ops import Probe
from .load_options import Limits
from .profile import Profile

if TYPE_CHECKING:
    from mlx_llama.core.files.quantized import AffineWeight
    from mlx_llama.core.files.tensor import Tensor
    from mlx_llama.core.system.gpus import Gpus

Array = Any

# Computes the tokens that grammars allow, int32 [B, ceil(V / 32)] on the host; bit i % 32 of word i
# // 32 is token i's. A row without a grammar has all bits set. If any row has DRY, V columns
# follow, the bits of float32 penalties that come after the others. Call it once, after the forward
# is on its way: the host works while the device does.
Masks = Callable[[], np.ndarray]

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number


class Cache(Protocol):
    """The one owner of sequence state: each row holds one sequence's keys, values and tokens."""

    lengths: list[int]  # positions filled, by row
    allocated: list[int]  # positions that the storage has room for, by row
    # number of the adapter that computes a row's positions, 0 for none; the caller sets it
    adapters: list[int]
    length: int  # lengths[0], for a cache of one sequence
    rows: int  # number of rows; an empty row takes no storage
    capacity: int  # positions that a row may hold at most; its storage grows towards it in steps
    position_nbytes: int  # bytes of one position's keys and values
    free_memory: Callable[[], int | None]  # bytes that the device has free; None: unknown

    @property
    def nbytes(self) -> int: ...  # taken now, shared pages once
    def nbytes_for(self, length: int) -> int: ...  # that a row of `length` positions takes
    def arrays(self) -> list[Array]: ...
    def reserve(self, ends: Mapping[int, int]) -> None: ...
    def select_rows(self, batch: int, rows: Sequence[int] | None) -> list[int]: ...
    def check_continues(self, row: int, index_pos: int, count: int) -> None: ...
    def check_memory(self, ends: Mapping[int, int]) -> None: ...
    def check_copy(self, source: int, target: int, length: int) -> None: ...
    def check_state(self, state: Mapping[str, np.ndarray], row: int) -> None: ...
    # Of one call over `tokens` int32 [B, T] from `index_pos` on, which are stored at once. Raises
    # ContextError.
    def view(
        self, tokens: Array, index_pos: int | Sequence[int], rows: Sequence[int] | None = None
    ) -> Any: ...
    def recent(
        self, window: int, rows: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> Array: ...
    def trim(self, length: int, row: int = 0) -> None: ...
    def reset(self, row: int | None = None) -> None: ...
    def copy_prefix(self, source: int, target: int, length: int) -> None: ...
    def state(self, row: int = 0) -> dict[str, np.ndarray]: ...
    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None: ...


class SamplingBatch(Protocol):
    """Logits to tokens, on the device; each row has options of its own.

    -1 is in place of a token whose score is NaN or infinite, so that the host learns of it from the
    token it reads anyway.
    """

    options: tuple[GenerationOptions, ...]  # by row
    window: int  # recent tokens that any row looks at
    # likeliest tokens to report beside each token (core.backends.logprobs); None: tokens alone
    logprobs: int | None

    # the batch of `count` rows like this batch's only one
    def repeat(self, count: int) -> SamplingBatch: ...
    def __call__(
        self,
        logits: Array,
        positions: Sequence[int],
        recent: Array | None = None,
        masks: Masks | None = None,
    ) -> Array: ...
    # log-probabilities of `tokens` int32 [T, 1] by logits [T, V], and of the `count` likeliest:
    # int32 [T, 2 + 2 count], as core.backends.logprobs packs them
    def rate(self, logits: Array, tokens: np.ndarray, count: int) -> Array: ...


class Model(Protocol):
    """A Llama. Immutable once loaded; the `Cache` holds all state of a generation."""

    config: LlamaConfig
    dtype: Any  # of the activations, the backend's own
    cache_bits: int | None  # of keys and values; None: the activations' width
    verify_width: int  # positions that `verify` takes at little more than a step's cost
    prefill_width: int  # most prompt tokens of a call that Ctrl-C does not wait long for
    # names of those loaded; a row of a new cache has number 1, the first, or 0 where there is none
    adapters: tuple[str, ...]
    notices: tuple[str, ...]  # lines for the user on precision and compilation
    # a row is bit-identical whatever else is in the batch, and with any chunks
    is_batch_invariant: bool

    def profile(self) -> AbstractContextManager[Profile]: ...
    def make_cache(self, capacity: int, rows: int = 1) -> Cache: ...
    def forward(
        self,
        tokens: Array,
        index_pos: int | Sequence[int],
        cache: Cache,
        *,
        rows: Sequence[int] | None = None,
        all_positions: bool = False,
        probe: Probe | None = None,
    ) -> Array: ...
    def step(
        self,
        tokens: Array,
        index_pos: int | Sequence[int],
        cache: Cache,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
    ) -> Array: ...
    def sample(
        self,
        logits: Array,
        cache: Cache,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
    ) -> Array: ...
    def verify(
        self,
        tokens: Array,
        index_pos: int,
        cache: Cache,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
    ) -> Array: ...


class Runtime(Protocol):
    """The device under the arrays: the module runtime.py of a backend."""

    NAME: str
    LIMITS: Limits
    SURVIVES_FORK: bool  # a forked process may compute
    HAS_ONE_THREAD: bool  # all calls are made by one thread

    def has_gpu(self) -> bool: ...
    # "gpu", "cpu", None for a GPU if there is one; BackendError
    def pick_device(self, device: str | None = None) -> Any: ...
    def device_name(self, device: Any) -> str: ...  # in receipts
    # step n+1 may be launched before token n is read
    def runs_ahead(self, device: Any) -> bool: ...
    # Of the activations; "auto" is the `stored` one. BackendError for one that the device lacks.
    def pick_dtype(
        self, dtype: str, stored: str, device: Any, exceeds_float16: bool = False
    ) -> Any: ...
    def dtype_name(self, dtype: Any) -> str: ...  # "float32", "float16" or "bfloat16"
    # submits the arrays' work to the device without waiting
    def launch(self, *arrays: Array) -> None: ...
    def read(self, token: Array) -> int: ...  # waits for int32 [1, 1]
    # waits once for int32 [1, T] or [B, 1] each
    def read_all(self, *tokens: Array) -> list[int]: ...
    # float32 or integers, copied; never while decoding
    def to_numpy(self, array: Array) -> np.ndarray: ...
    # bytes allocated on the device, or of the process; 0: unknown
    def peak_memory(self, device: Any) -> int: ...
    def is_out_of_memory(self, error: BaseException) -> bool: ...
    def free_memory(self, device: Any) -> int | None: ...  # bytes; None: unknown
    # bytes per second, measured; None: that of the host's memory
    def bandwidth(self, device: Any) -> float | None: ...
    # in the arrays' unevaluated graph; None: there is no graph
    def primitives(self, *arrays: Array) -> int | None: ...
    # Measures candidates for the kernels of decoding; save: enters the best in the table that
    # ships. None: there are none. Raises BackendError, OSError.
    def measure_kernels(
        self, threads: int | None, save: bool, advance: Callable[[str], None]
    ) -> dict[str, Any] | None: ...


class Facts(Protocol):
    """The backend as the doctor describes it, without its framework: the module facts.py of a
    backend.
    """

    DISTRIBUTIONS: tuple[str, ...]  # packages whose versions it tells

    # packages: versions of those installed
    def describe(self, packages: dict[str, str], gpus: Gpus) -> BackendFacts: ...
    # Dtypes and size on this machine's device. stored: the checkpoint's dtype.
    def plan_weights(
        self,
        tensors: Iterable[Tensor | AffineWeight],
        stored: str,
        facts: BackendFacts,
        exceeds_float16: bool = False,
    ) -> WeightsPlan: ...
    # Bytes once packed. dtype: of the activations.
    def weights_nbytes(
        self, tensors: Iterable[Tensor | AffineWeight], dtype: str, on_gpu: bool
    ) -> int: ...


@dataclass(frozen=True)
class BackendFacts:
    """One backend on this machine, described without importing its framework.

    available: it can be chosen. reason: why it cannot, with the remedy, or what it lacks. packages:
    {name: version}. gpu: it would run on a GPU; None: unknown. device: in words. options: pairs of
    name and value that `load` needs besides the backend. memory_bytes: that a model may take of the
    device; None: unknown. memory_is: "free" or "an estimate". has_bfloat16: False on GPUs without
    its instructions. kernels: target of the compiled kernels, None without them.
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

    dtype: of the activations. low_bit_operand: dtype that low-bit weights are multiplied in.
    nbytes: of all weights once packed, which is what the process takes for them after loading.
    """

    dtype: str
    low_bit_operand: str
    nbytes: int
