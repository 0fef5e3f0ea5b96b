"""The table of load options, of which flags, `mlx_llama.load` and its documentation are made."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

from mlx_llama.core.errors import BackendError, OptionsError
from mlx_llama.core.system.machine import parse_size

DTYPES = ("auto", "float32", "float16", "bfloat16")
SHORT_DTYPES = {
    **dict.fromkeys(("f32", "fp32", "float"), "float32"),
    **dict.fromkeys(("f16", "fp16", "half"), "float16"),
    "bf16": "bfloat16",
}  # other tools' names
BYTES_PER_THREAD = 4 << 20  # of weights, at least, for one more thread
MAX_ROWS = 32  # requests that one step computes, unless the user says otherwise
MOST_ROWS = 512


# Defaults. flag_help: for the command line only. of_model: decides how the model computes.
_ABOUT: dict[str, Any] = {"metavar": "", "choices": (), "flag_help": ""}
_ABOUT |= {"is_flag": True, "is_negatable": False, "of_model": False}


def _option(help: str, aliases: str = "", default: Any = None, **about: Any) -> Any:
    # aliases: other tools' names. about: some of _ABOUT.
    metadata = {"help": help, "aliases": tuple(aliases.split()), **_ABOUT, **about}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. Numbers may be text, as on a command line, until `Limits.check`."""

    model: str | os.PathLike | None = _option(
        "a folder, a .gguf file, a Hugging Face hub id, hub id:TYPE or hub id:file.gguf, or a "
        "short name such as smollm2 (default: the small guide model in this package)",
        metavar="MODEL",
    )
    backend: str = _option(
        "auto: MLX on Apple silicon, CUDA if torch sees a GPU, else the CPU",
        default="auto",
        choices=("auto", "mlx", "cpu", "cuda"),
    )
    device: str | None = _option(
        "run the mlx or cuda backend on this device (default: the GPU, if there is one)",
        choices=("cpu", "gpu"),
    )
    dtype: str = _option(
        "width of the activations (default: the checkpoint's; float32 on the cpu backend)",
        default="auto",
        choices=DTYPES,
        of_model=True,
    )
    _: KW_ONLY
    revision: str | None = _option("branch, tag or commit of a hub id", metavar="REVISION")
    ctx_size: int | None = _option(
        "positions of the context (default: as many as the model was trained for)",
        "c max_kv_size",
        metavar="TOKENS",
    )
    template: str | None = _option(
        "chat template to use instead of the checkpoint's: a name, a file, or Jinja text",
        "chat_template chat_template_file",
        metavar="NAME_OR_FILE",
    )
    threads: int | None = _option(
        "threads of the cpu backend (default: one per physical core, fewer for a small model: "
        "one per 4 MB of weights)",
        metavar="N",
        of_model=True,
    )
    activation_bits: int | None = _option(
        "width of the activations that the cpu backend multiplies with low-bit weights (default: "
        "16; 8 is faster and coarser, 32 exact and slower)",
        choices=(8, 16, 32),
        of_model=True,
    )
    compile: bool | None = _option(
        "run a step as one traced graph (mlx) or as compiled kernels (cpu); the tokens are the "
        "same (default: yes; no for mlx on the CPU, where MLX calls a C++ compiler first)",
        is_negatable=True,
        of_model=True,
    )
    draft_model: str | os.PathLike | None = _option(
        "a smaller model with the same vocabulary, to guess tokens ahead: the same text, sooner",
        "model_draft",
        metavar="MODEL",
    )
    cache_bits: int | None = _option(
        "store keys and values in 8 or 16 bits (default: in the activations' width, 32 on cpu)",
        "kv_bits",
        choices=(8, 16),
        of_model=True,
    )
    cache_memory: int | str | None = _option(
        "memory of all keys and values, in bytes or as a size such as 2GB (default: what is free "
        "beside the weights, at most half of it and 8 GB)",
        metavar="SIZE",
    )
    max_rows: int | None = _option(
        f"requests computed together in one step (default: {MAX_ROWS})", "parallel np", metavar="N"
    )
    batch_invariant: bool | None = _option(
        "bit-identical answers whatever else is in the batch, and however the prompt is cut "
        "into chunks (slower prompts on cuda; always on for cpu; not available on mlx)",
        of_model=True,
    )
    adapters: str | os.PathLike | Sequence[str | os.PathLike] | None = _option(
        "LoRA adapters in the format of PEFT or mlx_lm, each FOLDER or FOLDER=SCALE; each "
        "request uses one",
        "adapter adapter_path lora",
        metavar="FOLDER[=SCALE]",
        flag_help="; repeat it for more",
    )
    on_progress: Callable[[int, int], object] | None = _option(
        "f(done, total), bytes of the weights, called while they are loaded, one call at a time",
        is_flag=False,
    )

    def of_model(self) -> dict[str, Any]:
        """The options that decide how the model computes, for another process."""
        names = [name for name, field in TABLE.items() if field.metadata["of_model"]]
        return {name: getattr(self, name) for name in names}


TABLE = {field.name: field for field in fields(LoadOptions)}


def default_threads(weights: int, cores: int) -> int:
    """Threads of the cpu backend by default: one per core, fewer for small weights (bytes)."""
    return max(1, min(cores, weights // BYTES_PER_THREAD))


def full_dtype(name: str) -> str:
    """The name of a dtype that other tools shorten, as bf16; other names unchanged."""
    return SHORT_DTYPES.get(name, name) if isinstance(name, str) else name


def parse_memory(value: int | str | None, name: str = "cache_memory") -> int | None:
    """Bytes of a size such as "2GB", or of a number; None stays None. Raises OptionsError."""
    if value is None:
        return None
    if not (nbytes := parse_size(str(value))):
        raise OptionsError(
            f"`{name}` {value!r:.40}: must be a size such as 2GB, 512MB or 1.5GiB, or a number "
            "of bytes"
        )
    return nbytes


def _is_among(value: int | str, allowed: Sequence[int]) -> bool:
    """True for one of some whole numbers, perhaps as text."""
    return bool(re.fullmatch(r"[0-9]{1,9}", str(value))) and int(value) in allowed


def parse_rows(value: int | str | None) -> int:
    """The number of rows in one step; None: MAX_ROWS. Raises OptionsError."""
    if value is None:
        return MAX_ROWS
    if not _is_among(value, range(1, MOST_ROWS + 1)):
        raise OptionsError(f"`max_rows` {value!r:.40}: must be a whole number, 1 to {MOST_ROWS}")
    return int(value)


@dataclass(frozen=True)
class Limits:
    """Values of load options that one backend takes."""

    backend: str
    dtypes: tuple[str, ...] = DTYPES  # widths of activations that it computes in, and "auto"
    most_threads: int = 0  # 0: it takes no `threads`
    activation_bits: tuple[int, ...] = ()  # against low-bit weights; (): it takes none
    has_invariance: bool = True  # it takes `batch_invariant`

    def check(self, options: LoadOptions) -> LoadOptions:
        """The options with numbers for text and full dtypes. Raises BackendError, OptionsError."""
        dtype = full_dtype(options.dtype)
        if dtype not in DTYPES:
            raise BackendError(f"`dtype` {dtype!r:.40} is not one of {', '.join(DTYPES)}")
        if dtype not in self.dtypes:
            raise BackendError(
                f"`dtype={dtype!r}`: the {self.backend} backend computes in "
                f"{' or '.join(self.dtypes[1:])}, "
                "at any stored width: leave it out, or choose `backend='mlx'` or cuda"
            )
        threads = self._whole_number("threads", options.threads, range(1, self.most_threads + 1))
        bits = self._whole_number("activation_bits", options.activation_bits, self.activation_bits)
        if dtype == "float32" and bits not in (None, 32):
            raise BackendError(
                f"`activation_bits` {bits} and `dtype='float32'`, which asks for 32, contradict "
                "each other: leave one of them out"
            )
        if options.compile is False and not (threads is bits is None):
            raise BackendError(
                "`threads` and `activation_bits` are for compiled kernels: leave out "
                "`compile=False`, or them"
            )
        cache_bits, allowed = options.cache_bits, TABLE["cache_bits"].metadata["choices"]
        if cache_bits is not None and not _is_among(cache_bits, allowed):
            raise BackendError(
                f"`cache_bits` {cache_bits!r:.40}: must be {' or '.join(map(str, allowed))}; "
                "without it, keys and values have the activations' width"
            )
        if options.batch_invariant and not self.has_invariance:
            raise BackendError(
                f"`batch_invariant`: the {self.backend} backend's products depend on their shapes, "
                "and at float32 the tokens are the same without it: leave it out, or choose "
                "`backend='cpu'` or cuda"
            )
        return replace(
            options,
            dtype=dtype,
            threads=threads,
            activation_bits=bits,
            cache_bits=None if cache_bits is None else int(cache_bits),
            batch_invariant=bool(options.batch_invariant),
            cache_memory=parse_memory(options.cache_memory),
            max_rows=parse_rows(options.max_rows),
            adapters=list_adapters(options.adapters),
        )

    def _whole_number(
        self, name: str, value: int | str | None, allowed: range | tuple[int, ...]
    ) -> int | None:
        if value is None:
            return None
        if not allowed:
            raise BackendError(
                f"`{name}` {value!s:.40}: is for the cpu backend, and this is {self.backend}: "
                "leave it out, or choose `backend='cpu'`"
            )
        if not _is_among(value, allowed):
            limits = f"one of {', '.join(map(str, allowed))}"
            limits = f"1 to {allowed[-1]}" if isinstance(allowed, range) else limits
            raise BackendError(f"`{name}` {value!r:.40}: must be a whole number, {limits}")
        return int(value)


def list_adapters(
    adapters: str | os.PathLike | Sequence[str | os.PathLike] | None,
) -> tuple[str | os.PathLike, ...]:
    """One adapter or several as a tuple. Raises OptionsError."""
    if adapters is None or isinstance(adapters, (str, os.PathLike)):
        return () if adapters is None else (adapters,)
    is_list = isinstance(adapters, (list, tuple))
    if not is_list or not all(isinstance(adapter, (str, os.PathLike)) for adapter in adapters):
        raise OptionsError(f"`adapters` {adapters!r:.60}: must be a folder or a list of folders")
    return tuple(adapters)
