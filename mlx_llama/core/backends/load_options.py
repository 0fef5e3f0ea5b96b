"""The options of `Backend.load`: each backend declares in its runtime which of them it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.errors import BackendError

DTYPES = ("auto", "float32", "float16", "bfloat16")
SHORT_DTYPES = {"f32": "float32", "fp32": "float32", "float": "float32", "f16": "float16", "fp16": "float16", "half": "float16",
                "bf16": "bfloat16"}  # other tools' names
BYTES_PER_THREAD = 4 << 20  # least weights for one more thread
CACHE_BITS = (8, 16)  # widths of stored keys and values besides the activations'


def default_threads(weights: int, cores: int) -> int:
    """Threads of the cpu backend unless the user says otherwise: one per physical core, fewer for a small model.

    weights: bytes of the checkpoint. Waking a thread for every token costs time, which small weights do not save.
    """
    return max(1, min(cores, weights // BYTES_PER_THREAD))


def full_dtype(name: str) -> str:
    """The name of a dtype that other tools shorten: "bf16" is "bfloat16". Other names stay as they are."""
    return SHORT_DTYPES.get(name, name) if isinstance(name, str) else name


@dataclass(frozen=True)
class LoadOptions:
    """Options that one backend takes, with their limits. Every backend takes `compile` and `cache_bits`.

    dtypes: widths of activations that it computes in, and "auto". most_threads: limit of `threads`, 0 where it takes
    none. activation_bits: widths of activations against low-bit weights, () where it takes none. has_invariance: it takes
    `batch_invariant`.
    """

    backend: str
    dtypes: tuple[str, ...] = DTYPES
    most_threads: int = 0
    activation_bits: tuple[int, ...] = ()
    has_invariance: bool = True

    def check(self, dtype: str = "auto", threads: int | str | None = None, activation_bits: int | str | None = None,
              compile: bool | None = None, cache_bits: int | str | None = None,
              batch_invariant: bool | None = None) -> dict[str, Any]:
        """The options that were given besides `dtype`, as keyword arguments of `Llama.load`; numbers as ints.

        Raises BackendError for a value outside the limits, an option of another backend and a contradiction.
        """
        dtype = full_dtype(dtype)
        if dtype not in DTYPES:
            raise BackendError(f"--dtype {dtype!r:.40} is not one of {', '.join(DTYPES)}")
        if dtype not in self.dtypes:
            raise BackendError(f"--dtype {dtype}: the {self.backend} backend computes in {' or '.join(self.dtypes[1:])}, "
                               "at any stored width: leave it out, or choose --backend mlx or cuda")
        limits = {"threads": range(1, self.most_threads + 1), "activation_bits": self.activation_bits}
        given = {name: self._whole_number(name, value, limits[name])
                 for name, value in (("threads", threads), ("activation_bits", activation_bits)) if value is not None}
        if dtype == "float32" and given.get("activation_bits", 32) != 32:
            raise BackendError(f"--activation-bits {given['activation_bits']} and --dtype float32, which asks for 32, "
                               "contradict each other: leave one of them out")
        if compile is False and given:
            raise BackendError("--threads and --activation-bits are for compiled kernels: leave out --no-compile, or them")
        if cache_bits is not None:
            if str(cache_bits) not in map(str, CACHE_BITS):
                raise BackendError(f"--cache-bits {cache_bits!r:.40}: must be {' or '.join(map(str, CACHE_BITS))}; without it, "
                                   "keys and values have the activations' width")
            given["cache_bits"] = int(cache_bits)
        if batch_invariant:
            if not self.has_invariance:
                raise BackendError(f"--batch-invariant: the {self.backend} backend's products depend on their shapes, and at "
                                   "float32 the tokens are the same without it: leave it out, or choose --backend cpu or cuda")
            given["batch_invariant"] = True
        return given if compile is None else given | {"compile": compile}

    def _whole_number(self, name: str, value: int | str, allowed: range | tuple[int, ...]) -> int:
        flag = f"--{name.replace('_', '-')}"
        if not allowed:
            raise BackendError(f"{flag} {value!s:.40}: is for the cpu backend, and this is {self.backend}: leave it out, or "
                               "choose --backend cpu")
        if not re.fullmatch(r"[0-9]{1,9}", str(value)) or int(value) not in allowed:
            limits = f"1 to {allowed[-1]}" if isinstance(allowed, range) else f"one of {', '.join(map(str, allowed))}"
            raise BackendError(f"{flag} {value!r:.40}: must be a whole number, {limits}")
        return int(value)
