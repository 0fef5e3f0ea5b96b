"""ONE table of generation options: the source of command-line flags, Python arguments and HTTP fields.

Names follow mlx-lm's, with llama.cpp's as aliases where they are free. Precedence: the user's value, the checkpoint's
generation_config.json, the default; `Resolved.origins` names the source of each value.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import reprlib
import secrets
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypedDict

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.system.sizes import parse_size

from .hooks import LogitsProcessor, OnProgress
from .schema import MAX_CHARACTERS, Schema

MAX_REGEX = 1 << 13  # characters
MAX_GRAMMAR = 1 << 14  # characters; llguidance's converter of GBNF takes quadratic time
SHOWN_INPUT = 200  # characters of a bad value in a message
MAX_LOGPROBS = 20  # likeliest tokens per position, as in OpenAI's API


def _option(default, help: str, *flags: str, flag_help: str = "", **limits):
    # flag_help: of the command line alone.
    return Field(default, description=help, json_schema_extra={"flags": list(flags), "flag_help": flag_help}, **limits)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", 'Field name "schema"')  # it shadows BaseModel.schema, long deprecated

    class _StructureOptions(BaseModel):
        """Options of which at most one says what an answer must match. A class of its own for the sake of the warning."""

        model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)

        schema: Schema | None = _option(
            None, "JSON schema that the answer satisfies", "--json-schema", "-j", "--json-schema-file", "-jf",
            flag_help="; a file or JSON text")
        regex: str | None = _option(
            None, "regular expression that the whole answer matches", "--regex")
        grammar: str | None = _option(
            None, "grammar that the answer follows: Lark with a rule start, or GBNF with a rule root",
            "--grammar", "--grammar-file", flag_help="; a file or text")

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
            others = [name for name in ("schema", "regex") if name != info.field_name and info.data.get(name) is not None]
            if value is not None and others:
                raise ValueError(f"the only one that says what the answer matches: {others[0]} is given too")
            return value


class GenerationOptions(_StructureOptions):
    """Generation options, complete and checked. Every field is a flag, a Python argument and a receipt entry."""

    max_tokens: int = _option(
        256, "most tokens to generate", "--max-tokens", "-m", "-n", "--predict", "--n-predict", ge=0, le=2**31)
    temperature: float = _option(
        0.0, "softmax temperature; 0 is greedy", "--temp", "--temperature", ge=0, le=100)
    top_k: int = _option(0, "sample from the k likeliest tokens; 0: all", "--top-k", ge=0, le=2**31)
    top_p: float = _option(
        1.0, "sample from the smallest set of tokens with this probability (nucleus); 1: all", "--top-p", ge=1e-6, le=1)
    min_p: float = _option(
        0.0, "drop tokens less likely than this share of the likeliest; 0: none", "--min-p", ge=0, le=1)
    repetition_penalty: float = _option(
        1.0, "divide (multiply, if negative) the logits of recent tokens by this; 1: off",
        "--repetition-penalty", "--repeat-penalty", ge=0.01, le=100)
    repetition_context_size: int = _option(
        20, "recent tokens that the three penalties look at, prompt included",
        "--repetition-context-size", "--repeat-last-n", ge=0, le=65536)
    presence_penalty: float = _option(
        0.0, "subtract from the logits of tokens seen recently; 0: off", "--presence-penalty", ge=-100, le=100)
    frequency_penalty: float = _option(
        0.0, "subtract times the number of recent occurrences; 0: off", "--frequency-penalty", ge=-100, le=100)
    logit_bias: dict[int, float] = _option(
        {}, "token ids and what is added to their logits", "--logit-bias", flag_help=", as TOKEN_ID=BIAS; repeat it for more")
    seed: int | None = _option(
        None, "seed of the random numbers; the same seed gives the same tokens (default: drawn anew each time)",
        "--seed", "-s", ge=0, lt=2**64)
    stop: tuple[str, ...] = _option(
        (), "end before this text", "--stop", "-r", "--reverse-prompt", flag_help="; repeat it for more")
    stop_token_ids: tuple[int, ...] = _option(
        (), "end at these tokens, beside the model's own end tokens", "--stop-token-ids", flag_help=", with commas between them")
    prefill_step_size: int = _option(
        512, "tokens of the prompt processed at once", "--prefill-step-size", "--ubatch-size", "--batch-size", ge=1, le=65536)
    speculate: Literal["none", "prompt", "model"] | None = _option(
        None, "guess tokens ahead, for the same text sooner: prompt, from the text so far; model, by the draft model; none "
        "(default: model where a draft model is loaded, else none)", "--speculate")
    logprobs: int | None = _option(
        None, "keep each token's log-probability and those of the k likeliest: of the softmax over the model's own logits, "
        "before penalties, biases, temperature, filters and grammars", "--logprobs", ge=0, le=MAX_LOGPROBS)

    adapter: str | None = _option(
        None, "name of the adapter that answers, of those that were loaded; base: none (default: the first one)",
        "--use-adapter", max_length=512)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value, info):
        # Python's bool is an int, but `temperature=True` is a slip, not 1.0.
        if isinstance(value, (bool, np.bool_)) and info.field_name not in ("speculate", "schema"):
            raise ValueError("a number, not true or false")
        # pydantic converts NumPy integers through float and loses their lower bits.
        return int(value) if isinstance(value, np.integer) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _list_one_stop(cls, value):
        if isinstance(value, (list, tuple)) and any(isinstance(one, (int, np.integer)) for one in value):
            raise ValueError("texts; token ids are for stop_token_ids")
        return (value,) if isinstance(value, str) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _split_token_ids(cls, value):
        if isinstance(value, int):
            return (value,)
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple, set, frozenset, np.ndarray)) or any(isinstance(one, bool) for one in parts):
            raise ValueError("token ids")
        return tuple(word for part in parts for word in (part.split(",") if isinstance(part, str) else [part]))

    @field_validator("stop_token_ids")
    @classmethod
    def _check_token_ids(cls, value):
        if any(token < 0 for token in value):
            raise ValueError("token ids that are not negative")
        return value

    @field_validator("temperature")
    @classmethod
    def _refuse_tiny_temperature(cls, value):
        if 0 < value < 1e-4:  # the quotient with logits would overflow float32
            raise ValueError("0 (greedy) or at least 0.0001")
        return value

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value):
        if any(not text for text in value):
            raise ValueError("texts of one character or more: an empty one would end every answer at once")
        if any(0xD800 <= ord(character) < 0xE000 for text in value for character in text):
            raise ValueError("valid Unicode: this text is not UTF-8 and would never match")
        return value

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
            name, sign, number = re.fullmatch(r"(\d*)([=+-]?)(.*)", pair, re.S).groups()
            if not (name and sign and number):
                raise ValueError(f"TOKEN_ID=BIAS, not {pair!r:.40}")
            name = str(int(name))
            if name in biases:
                raise ValueError(f"one bias per token: {name} has two")
            biases[name] = ("-" if sign == "-" else "") + number
        return biases

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, value):
        if any(token < 0 for token in value):
            raise ValueError("for token ids that are not negative")
        if any(abs(bias) > 1e6 for bias in value.values()):
            raise ValueError("between -1e6 and 1e6")
        return value


# In the order of the help: what an answer must match stands last, though its class comes first.
FIELDS = {name: GenerationOptions.model_fields[name]
          for name in sorted(GenerationOptions.model_fields, key=lambda name: name in _StructureOptions.model_fields)}


def option_flags(name: str) -> list[str]:
    """Command-line flags of an option, the preferred one first."""
    extra: Any = FIELDS[name].json_schema_extra
    return extra["flags"]


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `send`, for type checkers. None: not given.

    GenerationOptions states meanings, limits and defaults.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    repetition_context_size: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Sequence[str] | None  # token ids to biases, or "TOKEN_ID=BIAS" each
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: int | Sequence[int] | None
    prefill_step_size: int | None
    speculate: Literal["none", "prompt", "model"] | None
    logprobs: int | None
    adapter: str | None
    schema: type | Mapping[str, Any] | str | bool | None  # a pydantic model or another type, or a JSON schema
    regex: str | None
    grammar: str | None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None  # f(tokens [T], logits [1, V]) -> logits: see Hooks
    on_progress: OnProgress | None  # f(tokens of the prompt computed, all of them)


# Flags without dashes -> the options that they set.
ALIASES = {flag.lstrip("-").replace("-", "_"): name for name in FIELDS for flag in option_flags(name)}


@dataclass(frozen=True)
class Resolved:
    """Complete options and, per field, the source of its value: "user", "checkpoint" or "default"."""

    options: GenerationOptions
    origins: dict[str, str]
    notices: tuple[str, ...] = ()  # the checkpoint's settings that have no counterpart


def validate(given: Mapping[str, Any], source: str = "") -> GenerationOptions:
    """Build `GenerationOptions` from names and values; converts text.

    Raises OptionsError that lists every bad option with its value and its limits; `source` names a file, if any.
    """
    try:
        return GenerationOptions(**given)
    except ValidationError as error:
        faults = list(dict.fromkeys(map(_describe_fault, error.errors())))
        raise OptionsError((f"{source}: " if source else "") + "; ".join(faults)) from None


def _describe_fault(fault: Mapping[str, Any]) -> str:
    name = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        near = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, FIELDS, 1)
        return f"there is no option {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
    limits = _describe_limits(name)
    if limits and fault["type"].startswith(("greater_than", "less_than", "finite")):
        special = re.search(r"; ([0-9.]+)(?:: | is )(\w+)", FIELDS[name].description)
        meaning = f" ({special[1]} means {special[2]})" if special else ""
        return f"option {name}: {fault['input']!r} is not allowed, it must be a finite number, {limits}{meaning}"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    range_ = f" ({limits})" if limits else ""
    return f"option {name}: {_show(fault['input'])} is not allowed, it must be {message}{range_}"


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = reprlib.repr(value)  # to a few levels
    return text if len(text) <= SHOWN_INPUT else text[:SHOWN_INPUT - 3] + "..."


def _describe_limits(name: str) -> str:
    signs = {"Ge": ("ge", "at least"), "Gt": ("gt", "above"), "Le": ("le", "at most"), "Lt": ("lt", "below")}
    return ", ".join(f"{words} {getattr(rule, key)}" for rule in FIELDS[name].metadata
                     for kind, (key, words) in signs.items() if type(rule).__name__ == kind)


# transformers' name of an option -> ours.
_GENERATION_CONFIG = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens", "stop_strings": "stop",
}
# Settings that change the text in transformers and have no counterpart here, with their values for "off".
_UNSUPPORTED = {
    "num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0.0,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,), "top_h": (), "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,),
    "bad_words_ids": (), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "guidance_scale": (1.0,),
    "min_new_tokens": (0,), "min_length": (0,),
}


def from_generation_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Options set by a generation_config.json. Without `do_sample` decoding is greedy, as in transformers, and its
    temperature and filters do not apply."""
    found = {ours: raw[theirs] for theirs, ours in _GENERATION_CONFIG.items() if raw.get(theirs) is not None}
    if not raw.get("do_sample", False):
        for name in ("temperature", "top_k", "top_p", "min_p"):
            found.pop(name, None)
    elif "temperature" not in found:
        found["temperature"] = 1.0
    return found


def resolve(given: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, source: str = "") -> Resolved:
    """Merge options by precedence. given: the user's; None means not given. source: the generation config's path.

    Draws a missing seed, so that the receipt can name it. Raises OptionsError.
    """
    given = {name: value for name, value in given.items() if value is not None}
    from_checkpoint = from_generation_config(generation_config or {})
    validate(from_checkpoint, source or "generation_config.json")
    validate(given)
    merged = {**from_checkpoint, **given}
    origins = {name: "user" if name in given else "checkpoint" if name in merged else "default" for name in FIELDS}
    merged.setdefault("seed", secrets.randbits(32))
    unsupported = [f"{name}={value!r:.40}" for name, value in (generation_config or {}).items()
                   if name in _UNSUPPORTED and value is not None and value not in _UNSUPPORTED[name]]
    notices = (f"generation_config.json asks for {', '.join(unsupported)}: not supported",) if unsupported else ()
    return Resolved(validate(merged), origins, notices)


# Flags of llama.cpp, vLLM and mlx-lm -> those with the same purpose here.
FOREIGN_FLAGS = {
    "-m": "--model", "-hf": "--model", "--hf-repo": "--model", "-hfr": "--model", "-md": "--draft-model", "-t": "--threads",
    "-ngl": "--device", "--n-gpu-layers": "--device", "--gpu-layers": "--device", "--max-model-len": "--ctx-size",
    "--lora-modules": "--adapter", "--lora-scaled": "--adapter", "-ctk": "--cache-bits", "--cache-type-k": "--cache-bits", "--kv-cache-dtype": "--cache-bits",
    "--max-new-tokens": "--max-tokens", "--max-num-seqs": "--max-rows", "--extra-eos-token": "--stop-token-ids",
    "--hf-path": "--model",
}


class Parser(argparse.ArgumentParser):
    """argparse that raises OptionsError, so that every door prints errors in the same one line; suggests known flags."""

    def parse_known_args(self, args=None, namespace=None):
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._arguments, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = [argument.partition("=")[0] for argument in self._arguments if self._is_unknown(argument)]
        found = {name: near for name in unknown if (near := self._suggest(name))}
        if found:
            raise OptionsError("; ".join(f"there is no flag {name} (did you mean {near}?)" for name, near in found.items()))
        raise OptionsError(f"{message} (see --help)")

    def _is_unknown(self, argument: str) -> bool:
        name = argument.partition("=")[0]
        if not re.match(r"--?[A-Za-z]", name) or name in self._option_string_actions:
            return False
        return name in FOREIGN_FLAGS or name[:2] not in self._option_string_actions  # -m5 is -m 5

    def _suggest(self, flag: str) -> str:
        """The flag that may have been meant, "" for none."""
        if FOREIGN_FLAGS.get(flag) in self._option_string_actions:
            return FOREIGN_FLAGS[flag]
        return next(iter(difflib.get_close_matches(flag.replace("_", "-"), self._option_string_actions, 1)), "")


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag per option. Values stay text until `resolve`, which reports all bad ones at once."""
    group = parser.add_argument_group("generation options")
    for name, field in FIELDS.items():
        repeats = name in ("stop", "stop_token_ids", "logit_bias")
        default = f" (default: {field.default})" if field.default not in (None, (), {}) else ""
        group.add_argument(*option_flags(name), dest=f"option:{name}", default=argparse.SUPPRESS,
                           action="append" if repeats else "store", metavar=name.split("_")[-1].upper(),
                           help=(field.description + field.json_schema_extra["flag_help"]).replace("%", "%%") + default)


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Values of the flags of `add_generation_flags` on the command line, by option name. Reads files of schema and grammar.

    Raises OptionsError for a file that cannot be read.
    """
    given = {name.removeprefix("option:"): value for name, value in vars(arguments).items() if name.startswith("option:")}
    if re.search(r"[/\\]|\.gguf$", given.get("max_tokens", "")):
        raise OptionsError(f"-m {given['max_tokens']!r:.200}: is --max-tokens here, a number: did you mean --model?")
    for name in ("schema", "grammar"):
        if name in given:
            given[name] = _read_file(name, given[name])
    for name, meant in _MINUS_ONE.items():
        if given.get(name) == "-1":
            given[name] = meant
    return {name: value for name, value in given.items() if value is not None}


# -1 as llama.cpp's flags mean it: no limit; drawn anew.
_MINUS_ONE = {"max_tokens": str(2**31), "seed": None, "repetition_context_size": "65536"}


def _read_file(name: str, value: str) -> str:
    """The text of a file. `value` itself if it is text: a schema starts with a brace, a grammar has rules."""
    if value.lstrip().startswith("{") if name == "schema" else re.search(r"\bstart\s*:|\broot\s*::=", value):
        return value
    try:
        with open(os.path.expanduser(value), encoding="utf-8") as file:
            return file.read(max(MAX_CHARACTERS, MAX_GRAMMAR) + 1)  # longer ones are refused by their length
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise OptionsError(f"option {name}: the file {value!r:.200} cannot be read ({reason}): check its name") from None


MAX_ROWS = 32  # requests that one step computes, unless the user says otherwise
MOST_ROWS = 512


def parse_memory(value: int | str | None, flag: str = "--cache-memory") -> int | None:
    """Bytes of a size such as "2GB", "512MB", "1.5GiB" or a number of bytes; None stays None. Raises OptionsError."""
    if value is None:
        return None
    if not (nbytes := parse_size(str(value))):
        raise OptionsError(f"{flag} {value!r:.40}: must be a size such as 2GB, 512MB or 1.5GiB, or a number of bytes")
    return nbytes


def parse_rows(value: int | str | None) -> int:
    """The number of rows in one step; None: MAX_ROWS. Raises OptionsError."""
    if value is None:
        return MAX_ROWS
    if not re.fullmatch(r"[0-9]{1,9}", str(value)) or not 1 <= int(value) <= MOST_ROWS:
        raise OptionsError(f"--max-rows {value!r:.40}: must be a whole number, 1 to {MOST_ROWS}")
    return int(value)


def add_rows_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the number of rows, for doors that run several requests at once."""
    parser.add_argument("--max-rows", "--parallel", "-np", default=None, metavar="N",
                        help=f"requests computed together in one step (default: {MAX_ROWS})")


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `mlx_llama.load`, for doors that generate."""
    group = add_model_flags(parser)
    group.add_argument("--cache-memory", default=None, metavar="SIZE",
                       help="memory of all keys and values, such as 2GB (default: what is free beside the weights, less a "
                            "reserve)")
    group.add_argument("--ctx-size", "-c", "--max-kv-size", default=None, metavar="TOKENS",
                       help="positions of the context (default: as many as the model was trained for)")
    group.add_argument("--draft-model", "--model-draft", default=None, metavar="MODEL",
                       help="a smaller model with the same vocabulary, to guess tokens ahead: the same text, sooner")
    group.add_argument("--template", "--chat-template", "--chat-template-file", default=None, metavar="NAME_OR_FILE",
                       help="chat template to use instead of the checkpoint's: a name, a file, or Jinja text")


def add_model_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add flags for a model and its backend; numbers stay text until Backend.load_options."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", default=None,
                       help="a folder, a .gguf file, a Hugging Face hub id or hub id:file.gguf (default: the small guide "
                            "model in this package)")
    group.add_argument("--revision", default=None, help="branch, tag or commit of a hub id")
    group.add_argument("--backend", default="auto", metavar="{auto,mlx,cpu,cuda}",
                       help="auto: MLX on Apple silicon, CUDA where torch sees a GPU, else the CPU")
    group.add_argument("--device", default=None, metavar="{cpu,gpu}",
                       help="run the mlx or cuda backend on this device (default: its GPU where there is one)")
    group.add_argument("--dtype", default="auto", metavar="{auto,float32,float16,bfloat16}",
                       help="width of the activations (default: the checkpoint's; the cpu backend uses float32)")
    group.add_argument("--threads", default=None, metavar="N",
                       help="threads of the cpu backend (default: one per physical core, fewer for a small model: one per 4 MB "
                            "of weights)")
    group.add_argument("--activation-bits", default=None, metavar="{8,16,32}",
                       help="width of the activations that the cpu backend multiplies with low-bit weights (default: 16; 8 "
                            "is faster and coarser, 32 exact and slower)")
    group.add_argument("--compile", default=None, action=argparse.BooleanOptionalAction,
                       help="run a step as one traced graph (mlx) or as compiled kernels (cpu); the tokens are the same "
                            "(default: yes; no for mlx on the CPU, where MLX calls a C++ compiler first)")
    add_cache_bits_flag(group)
    add_invariance_flag(group)
    add_adapter_flag(group)
    return group


def add_adapter_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for adapters."""
    group.add_argument("--adapter", "--adapter-path", "--lora", action="append", default=None,
                       metavar="FOLDER[=SCALE]",
                       help="a LoRA adapter beside the model, as PEFT and mlx_lm write them, perhaps times SCALE; repeat it for "
                            "more, of which each request uses one")


def add_cache_bits_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for the width of keys and values."""
    group.add_argument("--cache-bits", "--kv-bits", default=None, metavar="{8,16}",
                       help="store keys and values in 8 or 16 bits (default: in the activations' width, 32 on cpu)")


def add_invariance_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for answers whose bits do not depend on their company."""
    group.add_argument("--batch-invariant", default=None, action="store_true",
                       help="the same bits in any company and with any chunks of the prompt: on cuda prompts are slower, on cpu "
                            "it is so already, mlx has it not")


def load_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `mlx_llama.load` from `add_load_flags` and, if the door has it, `add_rows_flag`."""
    names = ("model", "backend", "device", "dtype", "threads", "activation_bits", "compile", "revision", "ctx_size",
             "template", "draft_model", "cache_bits", "cache_memory", "batch_invariant",
             *(["max_rows"] if "max_rows" in arguments else []))
    found = {name: getattr(arguments, name) for name in names} | {"adapters": arguments.adapter}
    # As llama.cpp's flags have them: the model's own length, and a number chosen here.
    return found | {name: None for name, unset in (("ctx_size", "0"), ("threads", "-1")) if found[name] == unset}
