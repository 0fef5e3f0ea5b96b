"""The table of options, those of load and those of an answer; command-line flags, Python arguments,
HTTP fields and their documentation follow it.

Names follow mlx-lm's, with llama.cpp's as aliases where they are free. Precedence: the user's
value, the checkpoint's generation_config.json, the default; `Resolved.origins` names the source of
each value.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import reprlib
import secrets
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, cast, get_type_hints

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
)
from pydantic.fields import FieldInfo

from mlx_llama.core.dtypes import ITEMSIZE
from mlx_llama.core.errors import BackendError, OptionsError, plain, shorten
from mlx_llama.core.system.machine import parse_size
from mlx_llama.core.text.controls import is_unicode

from .answers.hooks import LogitsProcessor, OnPiece, OnProgress, takes_two
from .answers.schema import Schema
from .answers.stops import MAX_PERIOD, REPETITION_LIMIT

MAX_REGEX = 1 << 13  # characters
MAX_GRAMMAR = 1 << 14  # characters; llguidance's converter of GBNF takes quadratic time
SHOWN_INPUT = 200  # characters of a bad value in a message
ENDLESS = 2**31  # tokens: more than any context holds
MAX_WINDOW = 65536  # recent tokens that penalties consider
# Meanings of -1, as in llama.cpp
MINUS_ONE = {
    "max_tokens": ENDLESS,
    "top_k": 0,
    "repetition_context_size": MAX_WINDOW,
    "seed": None,  # a new one each time
}
MAX_LOGPROBS = 20  # most likely tokens per position, as in OpenAI's API
DTYPES = ("auto", *ITEMSIZE)
SHORT_DTYPES = {
    **dict.fromkeys(("f32", "fp32", "float"), "float32"),
    **dict.fromkeys(("f16", "fp16", "half"), "float16"),
    "bf16": "bfloat16",
}  # other tools' names
BYTES_PER_THREAD = 4 << 20  # bytes of weights that are worth one more thread
CHECKPOINTS = 8  # of a row, unless the user says otherwise
MAX_ROWS = 32  # requests that one step computes, unless the user says otherwise
MOST_ROWS = 512
MOST_THREADS = 1024
_BOOLEANS = ("speculate", "schema", "post_sampling_probs")  # options that a bool may be meant for


def option(
    default: Any,
    help: str,
    aliases: str = "",
    *,
    flag_help: str = "",
    limits: tuple[float, float] | None = None,
    extra: Mapping[str, Any] = {},
    **constraints: Any,
) -> Any:
    """An entry of the table of an answer's options.

    aliases: other tools' names. flag_help: more help, for the command line only. limits: both
    included. extra: see `load_option`. constraints: others of pydantic's Field.
    """
    if limits:
        constraints |= {"ge": limits[0], "le": limits[1]}
    notes = {"aliases": aliases.split(), "flag_help": flag_help, **extra}
    return Field(default, description=help, json_schema_extra=notes, **constraints)


def load_option(
    default: Any,
    help: str,
    aliases: str = "",
    *,
    metavar: str = "",
    choices: Collection[Any] = (),
    expects: str = "",
    flag_help: str = "",
    is_flag: bool = True,
    is_negatable: bool = False,
    of_model: bool = False,
) -> Any:
    """An entry of the table of load's options.

    expects: a value of the annotated type, or of `choices`, in words. of_model: decides how the
    model computes.
    """
    extra: dict[str, Any] = {"metavar": metavar, "choices": choices, "expects": expects}
    extra |= {"is_flag": is_flag, "is_negatable": is_negatable, "of_model": of_model}
    entry = option(default, help, aliases, flag_help=flag_help, extra=extra)
    return field(default=default, metadata={"option": entry})


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. Numbers may be text, as on a command line, until `check`."""

    model: str | os.PathLike | None = load_option(
        None,
        "a folder, a .gguf file, a Hugging Face hub id, hub id:TYPE or hub id:file.gguf, or a "
        "short name such as smollm2 (default: the small guide model in this package)",
        metavar="MODEL",
        expects="a path or a name",
    )
    backend: str = load_option(
        "auto",
        "auto: MLX on Apple silicon, CUDA if torch sees a GPU, else the CPU",
        choices=("auto", "mlx", "cpu", "cuda"),
    )
    device: str | None = load_option(
        None,
        "run the mlx or cuda backend on this device (default: the GPU, if there is one)",
        choices=("cpu", "gpu"),
    )
    dtype: str = load_option(
        "auto",
        "width of the activations (default: the checkpoint's; float32 on the cpu backend)",
        choices=DTYPES,
        of_model=True,
    )
    _: KW_ONLY
    revision: str | None = load_option(
        None,
        "branch, tag or commit of a hub id",
        metavar="REVISION",
        expects="a branch, tag or commit",
    )
    ctx_size: int | None = load_option(
        None,
        "positions of the context (default: as many as the model was trained for)",
        "c max_kv_size",
        metavar="TOKENS",
    )
    template: str | os.PathLike | None = load_option(
        None,
        "chat template to use instead of the checkpoint's: a name, a file, or Jinja text",
        "chat_template chat_template_file",
        metavar="NAME_OR_FILE",
        expects="a path or a name",
    )
    threads: int | None = load_option(
        None,
        "threads of the cpu backend (default: one per physical core, fewer for a small model: "
        "one per 4 MB of weights)",
        metavar="N",
        choices=range(1, MOST_THREADS + 1),
        of_model=True,
    )
    activation_bits: int | None = load_option(
        None,
        "width of the activations that the cpu backend multiplies with low-bit weights (default: "
        "16; 8 is faster and coarser, 32 exact and slower)",
        choices=(8, 16, 32),
        of_model=True,
    )
    compile: bool | None = load_option(
        None,
        "run a step as one traced graph (mlx) or as compiled kernels (cpu); the tokens are the "
        "same (default: yes; no for mlx on the CPU, where MLX calls a C++ compiler first)",
        is_negatable=True,
        expects="True or False",
        of_model=True,
    )
    draft_model: str | os.PathLike | None = load_option(
        None,
        "a smaller model with the same vocabulary, to guess tokens ahead: the same text, sooner",
        "model_draft",
        metavar="MODEL",
        expects="a path or a name",
    )
    cache_bits: int | None = load_option(
        None,
        "store keys and values in 8 or 16 bits (default: in the activations' width, 32 on cpu)",
        "kv_bits",
        choices=(8, 16),
        expects="8 or 16; without it, keys and values have the activations' width",
        of_model=True,
    )
    cache_memory: int | str | None = load_option(
        None,
        "memory of all keys and values, in bytes or as a size such as 2GB (default: what is free "
        "beside the weights, at most half of it and 8 GB)",
        metavar="SIZE",
    )
    checkpoints: int | None = load_option(
        None,
        "copies of a row's recurrent states, where its text can be cut; the oldest go first "
        f"(default: {CHECKPOINTS}; a draft needs 2)",
        "ctx_checkpoints swa_checkpoints",
        metavar="N",
        choices=range(2, 257),
        of_model=True,
    )
    swa_full: bool | None = load_option(
        None,
        "keep all positions of layers with a sliding window, so that a row can be cut anywhere (on "
        "cpu, which drops what the window has passed; mlx and cuda keep all)",
        expects="True or False",
        of_model=True,
    )
    max_rows: int | None = load_option(
        None,
        f"requests computed together in one step (default: {MAX_ROWS})",
        "parallel np",
        metavar="N",
        choices=range(1, MOST_ROWS + 1),
    )
    batch_invariant: bool | None = load_option(
        None,
        "bit-identical answers whatever else is in the batch, and however the prompt is cut "
        "into chunks (slower prompts on cuda; always on for cpu; not available on mlx)",
        expects="True or False",
        of_model=True,
    )
    adapters: str | os.PathLike | Sequence[str | os.PathLike] | None = load_option(
        None,
        "LoRA adapters in the format of PEFT or mlx_lm, each FOLDER or FOLDER=SCALE; each "
        "request uses one",
        "adapter adapter_path lora",
        metavar="FOLDER[=SCALE]",
        flag_help="; repeat it for more",
    )
    on_progress: Callable[[int, int], object] | None = load_option(
        None,
        "f(done, total), bytes of the weights, called while they are loaded, one call at a time",
        is_flag=False,
    )

    def __post_init__(self) -> None:
        # Numbers and sizes have to wait for the backend, in `check`.
        for name, entry in LOAD_FIELDS.items():
            known, value = about(entry), getattr(self, name)
            kind: Any = entry.annotation
            if known["expects"] and not known["choices"] and not isinstance(value, kind):
                raise OptionsError(f"`{name}` {value!r:.40}: must be {known['expects']}")
        if self.on_progress and not takes_two(self.on_progress):
            raise OptionsError(f"on_progress: {self.on_progress!r:.60}: must take two numbers")

    def of_model(self) -> dict[str, Any]:
        """The options that decide how the model computes, for another process."""
        return {
            name: getattr(self, name)
            for name, entry in LOAD_FIELDS.items()
            if about(entry)["of_model"]
        }

    def check(self, backend: str) -> LoadOptions:
        """These options as a backend takes them: numbers for text, full names, defaults. Raises
        BackendError, OptionsError.
        """
        dtype = full_dtype(self.dtype)
        if dtype not in DTYPES:
            raise BackendError(f"`dtype` {dtype!r:.40} is not one of {', '.join(DTYPES)}")
        if backend == "cpu" and dtype not in ("auto", "float32"):
            raise BackendError(
                f"`dtype={dtype!r}`: the cpu backend computes in float32, at any stored width: "
                "leave it out, or choose `backend='mlx'` or cuda"
            )
        for name in ("threads", "activation_bits"):
            if backend != "cpu" and (value := getattr(self, name)) is not None:
                raise BackendError(
                    f"`{name}` {value!s:.40}: is for the cpu backend, and this is {backend}: "
                    "leave it out, or choose `backend='cpu'`"
                )
        threads, bits = self._read_number("threads"), self._read_number("activation_bits")
        if dtype == "float32" and bits not in (None, 32):
            raise BackendError(
                f"`activation_bits` {bits} and `dtype='float32'`, which asks for 32, contradict "
                "each other: leave one of them out"
            )
        if self.compile is False and not (threads is bits is None):
            raise BackendError(
                "`threads` and `activation_bits` are for compiled kernels: leave out "
                "`compile=False`, or them"
            )
        if self.batch_invariant and backend == "mlx":
            raise BackendError(
                "`batch_invariant`: the mlx backend's products depend on their shapes, and at "
                "float32 the tokens are the same without it: leave it out, or choose "
                "`backend='cpu'` or cuda"
            )
        return replace(
            self,
            dtype=dtype,
            threads=threads,
            activation_bits=bits,
            cache_bits=self._read_number("cache_bits"),
            batch_invariant=bool(self.batch_invariant),
            swa_full=bool(self.swa_full),
            cache_memory=parse_memory(self.cache_memory),
            checkpoints=self._read_number("checkpoints") or CHECKPOINTS,
            max_rows=self._read_number("max_rows") or MAX_ROWS,
            adapters=list_adapters(self.adapters),
        )

    def _read_number(self, name: str) -> int | None:
        value, known = getattr(self, name), about(LOAD_FIELDS[name])
        if value is None:
            return None
        choices = known["choices"]
        if re.fullmatch(r"[0-9]{1,9}", str(value)) and int(value) in choices:
            return int(value)
        listed = f"one of {', '.join(map(str, choices))}"
        if isinstance(choices, range):
            listed = f"{choices[0]} to {choices[-1]}"
        error = OptionsError if name in ("checkpoints", "max_rows") else BackendError
        expected = known["expects"] or f"a whole number, {listed}"
        raise error(f"`{name}` {value!r:.40}: must be {expected}")


_HINTS = get_type_hints(LoadOptions)
LOAD_FIELDS = {
    entry.name: FieldInfo.from_annotated_attribute(_HINTS[entry.name], entry.metadata["option"])
    for entry in fields(LoadOptions)
}


def about(entry: FieldInfo) -> dict[str, Any]:
    """An entry's aliases and flag_help, and what `load_option` adds, by its parameters' names."""
    return cast("dict[str, Any]", entry.json_schema_extra)


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


with warnings.catch_warnings():
    # it shadows BaseModel.schema, long deprecated
    warnings.filterwarnings("ignore", 'Field name "schema"')

    class _StructureOptions(BaseModel):
        """Options that constrain the answer, of which one may be set."""

        model_config = ConfigDict(
            extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True
        )

        schema: Schema | None = option(  # type: ignore[assignment]  # shadows a method
            None,
            "JSON schema that the answer must satisfy",
            "json_schema j json_schema_file jf",
            flag_help="; a file or JSON text",
        )
        regex: str | None = option(None, "regular expression that the whole answer must match")
        grammar: str | None = option(
            None,
            "grammar that the answer must follow: Lark with a rule start, or GBNF with a rule root",
            "grammar_file",
            flag_help="; a file or text",
        )

        @field_validator("schema", mode="before")
        @classmethod
        def _build_schema(cls, value):
            return None if value is None else Schema.of(value)

        @field_serializer("schema")
        def _dump_schema(self, value):
            return None if value is None else value.as_dict()

        @field_validator("regex", "grammar")
        @classmethod
        def _check_text(cls, value, info):
            limit = MAX_REGEX if info.field_name == "regex" else MAX_GRAMMAR
            if value is not None and not 1 <= len(value) <= limit:
                raise ValueError(f"text of 1 to {limit} characters, not {len(value)}")
            for name in {"schema", "regex"} - {info.field_name} if value is not None else ():
                if info.data.get(name) is not None:
                    raise ValueError(f"the only constraint on the answer: {name} is given too")
            return value


class GenerationOptions(_StructureOptions):
    """Complete, checked options. Each is a flag, a Python argument and part of the receipt."""

    max_tokens: int = option(
        256,
        "maximum number of tokens to generate; -1: unlimited",
        "m n predict n_predict",
        limits=(-1, ENDLESS),
    )
    temperature: float = option(0.0, "softmax temperature; 0 is greedy", "temp", limits=(0, 100))
    top_k: int = option(0, "sample from the k most likely tokens; 0: all", limits=(-1, 2**31))
    top_p: float = option(
        1.0,
        "sample from the smallest set of tokens that reaches this probability (nucleus); 1: all",
        limits=(1e-6, 1),
    )
    min_p: float = option(
        0.0,
        "drop tokens less likely than this fraction of the most likely one; 0: none",
        limits=(0, 1),
    )
    repetition_penalty: float = option(
        1.0,
        "divide the logits of recent tokens by this (multiply negative ones); 1: off",
        "repeat_penalty",
        limits=(0.01, 100),
    )
    repetition_context_size: int = option(
        20,
        "number of recent tokens that the three penalties consider, prompt included",
        "repeat_last_n",
        limits=(-1, MAX_WINDOW),
    )
    repetition_limit: int = option(
        0,
        "end an answer, but no structured one, whose last tokens, this many, are one passage of at "
        f"most {MAX_PERIOD} tokens again and again; 0: off",
        flag_help=f"; chat uses {REPETITION_LIMIT}",
        limits=(0, 65536),
    )
    presence_penalty: float = option(
        0.0, "subtract this from the logits of tokens seen recently; 0: off", limits=(-100, 100)
    )
    frequency_penalty: float = option(
        0.0, "subtract this times the number of recent occurrences; 0: off", limits=(-100, 100)
    )
    dry_multiplier: float = option(
        0.0,
        "DRY: subtract this from the logits of tokens that would continue a repetition; 0: off",
        limits=(0, 100),
    )
    dry_base: float = option(
        1.75,
        "DRY: multiply the penalty by this for each repeated token beyond the allowed length",
        limits=(1, 100),
    )
    dry_allowed_length: int = option(2, "DRY: repeated tokens without a penalty", limits=(0, 65536))
    dry_penalty_last_n: int = option(
        64,
        "DRY: number of recent tokens searched for repetitions, prompt included; -1: all",
        limits=(-1, 65536),
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        ("\n", ":", '"', "*"),
        "DRY: no repetition goes beyond these texts",
        "dry_sequence_breaker",
        flag_help="; repeat it for more, none: no text",
    )
    xtc_probability: float = option(
        0.0,
        "XTC: probability that all but the least likely of the tokens above the threshold are "
        "dropped; 0: off",
        limits=(0, 1),
    )
    xtc_threshold: float = option(
        0.1,
        "XTC: probability of a likely token, after the filters and without the temperature; above "
        "0.5: off",
        limits=(0, 1),
    )
    logit_bias: dict[int, float] = option(
        {},
        "token ids and what is added to their logits",
        flag_help=", as TOKEN_ID=BIAS; repeat it for more",
    )
    seed: int | None = option(
        None,
        "seed of the random numbers; the same seed gives the same tokens (default: a new one "
        "each time)",
        "s",
        ge=-1,
        lt=2**64,
    )
    stop: tuple[str, ...] = option(
        (), "stop at this text", "r reverse_prompt", flag_help="; repeat it for more"
    )
    stop_token_ids: tuple[int, ...] = option(
        (),
        "stop at these tokens, besides the model's end tokens",
        flag_help=", separated by commas",
    )
    prefill_step_size: int | None = option(
        None,
        "prompt tokens processed at once (default: 512; 2048 on a GPU by cuda)",
        "ubatch_size batch_size",
        limits=(1, 65536),
    )
    speculate: Literal["none", "prompt", "model"] | None = option(
        None,
        "guess tokens ahead, to get the same text sooner: prompt, from the text so far; model, by "
        "the draft model; none (default: model if a draft model is loaded, else none)",
    )
    logprobs: int | None = option(
        None,
        "keep each token's log-probability and those of the k likeliest: of the softmax over the "
        "model's own logits, before penalties, biases, temperature, filters and grammars",
        limits=(0, MAX_LOGPROBS),
    )
    post_sampling_probs: bool = option(
        False,
        "take log-probabilities after biases, penalties, temperature, filters and grammars, as the "
        "token was drawn; tokens that these exclude are not among the likeliest",
    )

    adapter: str | None = option(
        None,
        "name of the loaded adapter that answers; base: none (default: the first one)",
        max_length=512,
    )
    reasoning: Literal["auto", "on", "off", "raw"] = option(
        "auto",
        "thoughts of a reasoning model: on or off, where the chat template has a switch (off ends "
        "those that it opens, too); auto: as the template does; raw: left in the text",
    )
    reasoning_budget: int = option(
        -1,
        "maximum number of tokens of a thought, whose end is then forced; 0: no thought; -1: "
        "unlimited",
        "thinking_budget_tokens",
        limits=(-1, 2**31),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value, info):
        # Python's bool is an int, but `temperature=True` is a slip, not 1.0.
        if isinstance(value, (bool, np.bool_)) and info.field_name not in _BOOLEANS:
            raise ValueError("a number, not true or false")
        # pydantic converts NumPy integers through float and loses their lower bits.
        return int(value) if isinstance(value, np.integer) else value

    @field_validator("max_tokens", "top_k", "repetition_context_size", "seed")
    @classmethod
    def _read_minus_one(cls, value, info):
        return MINUS_ONE[info.field_name] if value == -1 else value

    @field_validator("stop", "dry_sequence_breakers", mode="before")
    @classmethod
    def _list_stops(cls, value, info):
        if info.field_name != "stop" and value in ("none", ["none"], ("none",)):
            return ()
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(text, str) for text in items):
            raise ValueError("a text or a list of texts; token ids are for stop_token_ids")
        return items

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _split_token_ids(cls, value):
        if isinstance(value, int):
            return (value,)
        parts = [value] if isinstance(value, str) else value
        is_list = isinstance(parts, (list, tuple, set, frozenset, np.ndarray))
        if not is_list or any(isinstance(part, bool) for part in parts):
            raise ValueError("token ids")
        words = [part.split(",") if isinstance(part, str) else [part] for part in parts]
        return tuple(itertools.chain.from_iterable(words))

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _parse_biases(cls, value):
        pairs = [value] if isinstance(value, str) else value
        if isinstance(pairs, Mapping):
            return dict(pairs)
        if not isinstance(pairs, (list, tuple)):
            raise ValueError("TOKEN_ID=BIAS, or a mapping of token ids to biases")
        biases: dict[str, str] = {}
        for pair in map(str, pairs):
            # llama.cpp writes 15043+1 and 15043-1; 15043=-1 works too.
            match = re.fullmatch(r"(\d*)([=+-]?)(.*)", pair, re.S)
            assert match is not None  # the pattern matches any text
            name, sign, number = match.groups()
            if not (name and sign and number):
                raise ValueError(f"TOKEN_ID=BIAS, not {pair!r:.40}")
            name = str(int(name))
            if name in biases:
                raise ValueError(f"one bias per token: {name} has two")
            biases[name] = ("-" if sign == "-" else "") + number
        return biases

    @field_validator(
        "temperature",
        "stop_token_ids",
        "stop",
        "dry_sequence_breakers",
        "regex",
        "grammar",
        "logit_bias",
    )
    @classmethod
    def _check_value(cls, value, info):
        for names, is_allowed, expected in _RULES:
            if info.field_name in names and not is_allowed(value):
                raise ValueError(expected)
        return value


# Names of options, a test of a value, and the values that it allows, in words
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    # a smaller one's quotient with logits would overflow float32
    (("temperature",), lambda t: t == 0 or t >= 1e-4, "0 (greedy) or at least 0.0001"),
    (("stop_token_ids",), lambda ids: min(ids, default=0) >= 0, "token ids that are not negative"),
    (
        ("stop", "dry_sequence_breakers"),
        all,
        "texts of one character or more, not an empty one",
    ),
    (
        ("stop", "dry_sequence_breakers", "regex", "grammar"),
        is_unicode,
        "valid Unicode: this text is not UTF-8 and would never match",
    ),
    (
        ("logit_bias",),
        # texts stand for their tokens in requests of the server
        lambda biases: all(isinstance(token, str) or token >= 0 for token in biases),
        "for token ids that are not negative",
    ),
    (
        ("logit_bias",),
        lambda biases: all(abs(bias) <= 1e6 for bias in biases.values()),
        "between -1e6 and 1e6",
    ),
)

# In the order of the help: constraints of the answer last, though their class comes first.
_LAST, _ALL = _StructureOptions.model_fields, GenerationOptions.model_fields
FIELDS = {name: field for name, field in _ALL.items() if name not in _LAST} | _LAST


# Names of options, including those of other tools -> names in the table.
ALIASES: dict[str, str] = {
    alias: name for name, field in FIELDS.items() for alias in (name, *about(field)["aliases"])
}


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `send`, for type checkers. None: unset.
    Values are wider than in GenerationOptions, from which mypy cannot derive this; a test compares
    both.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    repetition_context_size: int | None
    repetition_limit: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: str | Sequence[str] | None
    xtc_probability: float | None
    xtc_threshold: float | None
    # token ids to biases, or "TOKEN_ID=BIAS" each
    logit_bias: Mapping[int, float] | Sequence[str] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: int | Sequence[int] | None
    prefill_step_size: int | None
    speculate: Literal["none", "prompt", "model"] | None
    logprobs: int | None
    post_sampling_probs: bool | None
    adapter: str | None
    reasoning: Literal["auto", "on", "off", "raw"] | None
    reasoning_budget: int | None
    # a pydantic model or another type, or a JSON schema
    schema: type | Mapping[str, Any] | str | bool | None
    regex: str | None
    grammar: str | None
    # f(tokens [T], logits [1, V]) -> logits: see Hooks
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    on_progress: OnProgress | None  # f(tokens of the prompt computed, all of them)
    on_piece: OnPiece | None  # f(text, kind): see Hooks


@dataclass(frozen=True)
class Resolved:
    """Complete options and each value's source: "user", "checkpoint" or "default"."""

    options: GenerationOptions
    origins: dict[str, str]
    notices: tuple[str, ...] = ()  # the checkpoint's settings that have no counterpart


def validate(options: Mapping[str, Any], source: str = "") -> GenerationOptions:
    """Build GenerationOptions; converts text. source: a file's name. Raises OptionsError."""
    try:
        return GenerationOptions(**options)
    except ValidationError as error:
        text = "; ".join(dict.fromkeys(map(_describe_fault, error.errors())))
        raise OptionsError(f"{source}: {plain(text)}" if source else text) from None


def _describe_fault(fault: Mapping[str, Any]) -> str:
    name = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        if name == "n":
            return "there is no option 'n': for several answers call batch([prompt] * n)"
        near = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, FIELDS, 1)
        return f"there is no option {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
    limits = _describe_limits(name)
    if limits and fault["type"].startswith(("greater_than", "less_than", "finite")):
        special = re.search(r"; (-?[0-9.]+)(?:: | is )(\w+)", FIELDS[name].description or "")
        meaning = f" ({special[1]} means {special[2]})" if special else ""
        return (
            f"option `{name}`: {fault['input']!r} is not allowed, it must be a finite number, "
            f"{limits}{meaning}"
        )
    message, range_ = split_fault(fault)[1], f" ({limits})" if limits else ""
    return f"option `{name}`: {_show(fault['input'])} is not allowed, it must be {message}{range_}"


def split_fault(fault: Mapping[str, Any]) -> tuple[str, str]:
    """(place, message) of a fault that pydantic reports; place "" for the whole."""
    parts = [part for part in fault["loc"] if part not in ("str", "int")]  # branches of a union
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    message = fault["msg"].partition(", unable to parse")[0].removeprefix("Value error, ")
    message = message.removeprefix("Input should be ")
    return place.lstrip("."), message


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = reprlib.repr(value)  # to a few levels
    return shorten(text, SHOWN_INPUT)


def _describe_limits(name: str) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    rules = [(type(rule).__name__.lower(), rule) for rule in FIELDS[name].metadata]
    return ", ".join(f"{signs[key]} {getattr(rule, key)}" for key, rule in rules if key in signs)


# transformers' name of an option -> ours.
_SAME = "temperature top_k top_p min_p repetition_penalty".split()
_GENERATION_CONFIG = {name: name for name in _SAME}
_GENERATION_CONFIG |= {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
# Settings that change the text in transformers and have no counterpart here, by their value for
# "off"; None: off where they are not set.
_UNSUPPORTED = {
    None: "top_h bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias "
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty",
    0: "penalty_alpha epsilon_cutoff eta_cutoff no_repeat_ngram_size min_new_tokens min_length",
    1: "num_beams num_beam_groups typical_p encoder_repetition_penalty guidance_scale",
}


def from_generation_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Options set by a generation_config.json; without `do_sample` those of greedy decoding."""
    pairs = [(raw.get(theirs), ours) for theirs, ours in _GENERATION_CONFIG.items()]
    options = {ours: value for value, ours in pairs if value is not None}
    if not raw.get("do_sample", False):
        for name in ("temperature", "top_k", "top_p", "min_p"):
            options.pop(name, None)
    elif "temperature" not in options:
        options["temperature"] = 1.0
    return options


class Defaults:
    """A checkpoint's defaults: its generation_config.json, checked once, and ours."""

    def __init__(
        self,
        generation_config: Mapping[str, Any] | None = None,
        source: str = "generation_config.json",
    ):
        """source: the file's path. Raises OptionsError that names it."""
        raw = generation_config or {}
        self._ours: dict[str, Any] = {}
        self.options = validate(from_generation_config(raw), source)
        settings = ((name, off) for off, names in _UNSUPPORTED.items() for name in names.split())
        used = (name for name, off in settings if raw.get(name) not in (None, [], off))
        unsupported = ", ".join(f"{name}={raw[name]!r:.40}" for name in used)
        notice = f"generation_config.json asks for {unsupported}, which is not supported"
        self.notices = (notice,) if unsupported else ()

    def lift_limit(self) -> None:
        """Let answers go on to their end, unless the checkpoint has a limit of tokens."""
        if "max_tokens" not in self.options.model_fields_set:
            self._ours["max_tokens"] = ENDLESS

    def end_repetition(self) -> None:
        """End answers that repeat themselves for ever, for people who read along."""
        self._ours["repetition_limit"] = REPETITION_LIMIT

    def resolve(self, user: Mapping[str, Any] | GenerationOptions) -> Resolved:
        """Add a user's options (None: unset), which win, and a seed. Raises OptionsError."""
        if not isinstance(user, GenerationOptions):
            user = validate({name: value for name, value in user.items() if value is not None})
        chosen = {name: getattr(user, name) for name in user.model_fields_set}
        if chosen.get("seed", 0) is None:
            del chosen["seed"]
        origins = dict.fromkeys(FIELDS, "default")
        origins |= dict.fromkeys(self.options.model_fields_set, "checkpoint")
        origins |= dict.fromkeys(chosen, "user")
        values = {"seed": secrets.randbits(32)} | self._ours | chosen
        return Resolved(self.options.model_copy(update=values), origins, self.notices)


def resolve(
    user: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    source: str = "generation_config.json",
) -> Resolved:
    """`Defaults.resolve` for a single request."""
    return Defaults(generation_config, source).resolve(user)
