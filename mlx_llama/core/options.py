"""The table of generation options; command-line flags, Python arguments and HTTP fields follow it.

Names follow mlx-lm's, with llama.cpp's as aliases where they are free. Precedence: the user's
value, the checkpoint's generation_config.json, the default; `Resolved.origins` names the source of
each value.
"""

from __future__ import annotations

import difflib
import itertools
import re
import reprlib
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
)

from mlx_llama.core.errors import OptionsError, plain
from mlx_llama.core.text.surrogates import is_unicode

from .answers.hooks import LogitsProcessor, OnPiece, OnProgress
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
MAX_LOGPROBS = 20  # likeliest tokens per position, as in OpenAI's API
_BOOLEANS = ("speculate", "schema", "post_sampling_probs")  # options that a bool may be meant for


def _option(default, help: str, aliases: str = "", *, flag_help: str = "", limits=None, **more):
    # aliases: other tools' names. flag_help: for the command line only. limits: both included.
    extra: Any = {"aliases": aliases.split(), "flag_help": flag_help}
    bounds = {"ge": limits[0], "le": limits[1]} if limits else {}
    return Field(default, description=help, json_schema_extra=extra, **bounds, **more)


with warnings.catch_warnings():
    # it shadows BaseModel.schema, long deprecated
    warnings.filterwarnings("ignore", 'Field name "schema"')

    class _StructureOptions(BaseModel):
        """Options that constrain the answer, of which one may be set."""

        model_config = ConfigDict(
            extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True
        )

        schema: Schema | None = _option(  # type: ignore[assignment]  # shadows a method
            None,
            "JSON schema that the answer must satisfy",
            "json_schema j json_schema_file jf",
            flag_help="; a file or JSON text",
        )
        regex: str | None = _option(None, "regular expression that the whole answer must match")
        grammar: str | None = _option(
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

    max_tokens: int = _option(
        256,
        "maximum number of tokens to generate; -1: unlimited",
        "m n predict n_predict",
        limits=(-1, ENDLESS),
    )
    temperature: float = _option(0.0, "softmax temperature; 0 is greedy", "temp", limits=(0, 100))
    top_k: int = _option(0, "sample from the k most likely tokens; 0: all", limits=(-1, 2**31))
    top_p: float = _option(
        1.0,
        "sample from the smallest set of tokens that reaches this probability (nucleus); 1: all",
        limits=(1e-6, 1),
    )
    min_p: float = _option(
        0.0,
        "drop tokens less likely than this fraction of the most likely one; 0: none",
        limits=(0, 1),
    )
    repetition_penalty: float = _option(
        1.0,
        "divide the logits of recent tokens by this (multiply negative ones); 1: off",
        "repeat_penalty",
        limits=(0.01, 100),
    )
    repetition_context_size: int = _option(
        20,
        "number of recent tokens that the three penalties consider, prompt included",
        "repeat_last_n",
        limits=(-1, MAX_WINDOW),
    )
    repetition_limit: int = _option(
        0,
        "end an answer, but no structured one, whose last tokens, this many, are one passage of at "
        f"most {MAX_PERIOD} tokens again and again; 0: off",
        flag_help=f"; chat uses {REPETITION_LIMIT}",
        limits=(0, 65536),
    )
    presence_penalty: float = _option(
        0.0, "subtract this from the logits of tokens seen recently; 0: off", limits=(-100, 100)
    )
    frequency_penalty: float = _option(
        0.0, "subtract this times the number of recent occurrences; 0: off", limits=(-100, 100)
    )
    dry_multiplier: float = _option(
        0.0,
        "DRY: subtract this from the logits of tokens that would continue a repetition; 0: off",
        limits=(0, 100),
    )
    dry_base: float = _option(
        1.75,
        "DRY: multiply the penalty by this for each repeated token beyond the allowed length",
        limits=(1, 100),
    )
    dry_allowed_length: int = _option(
        2, "DRY: repeated tokens without a penalty", limits=(0, 65536)
    )
    dry_penalty_last_n: int = _option(
        64,
        "DRY: number of recent tokens searched for repetitions, prompt included; -1: all",
        limits=(-1, 65536),
    )
    dry_sequence_breakers: tuple[str, ...] = _option(
        ("\n", ":", '"', "*"),
        "DRY: no repetition goes beyond these texts",
        "dry_sequence_breaker",
        flag_help="; repeat it for more, none: no text",
    )
    xtc_probability: float = _option(
        0.0,
        "XTC: probability that all but the least likely of the tokens above the threshold are "
        "dropped; 0: off",
        limits=(0, 1),
    )
    xtc_threshold: float = _option(
        0.1,
        "XTC: probability of a likely token, after the filters and without the temperature; above "
        "0.5: off",
        limits=(0, 1),
    )
    logit_bias: dict[int, float] = _option(
        {},
        "token ids and what is added to their logits",
        flag_help=", as TOKEN_ID=BIAS; repeat it for more",
    )
    seed: int | None = _option(
        None,
        "seed of the random numbers; the same seed gives the same tokens (default: a new one "
        "each time)",
        "s",
        ge=-1,
        lt=2**64,
    )
    stop: tuple[str, ...] = _option(
        (), "stop at this text", "r reverse_prompt", flag_help="; repeat it for more"
    )
    stop_token_ids: tuple[int, ...] = _option(
        (),
        "stop at these tokens, besides the model's end tokens",
        flag_help=", separated by commas",
    )
    prefill_step_size: int | None = _option(
        None,
        "prompt tokens processed at once (default: 512; 2048 on a GPU by cuda)",
        "ubatch_size batch_size",
        limits=(1, 65536),
    )
    speculate: Literal["none", "prompt", "model"] | None = _option(
        None,
        "guess tokens ahead, to get the same text sooner: prompt, from the text so far; model, by "
        "the draft model; none (default: model if a draft model is loaded, else none)",
    )
    logprobs: int | None = _option(
        None,
        "keep each token's log-probability and those of the k likeliest: of the softmax over the "
        "model's own logits, before penalties, biases, temperature, filters and grammars",
        limits=(0, MAX_LOGPROBS),
    )
    post_sampling_probs: bool = _option(
        False,
        "take log-probabilities after biases, penalties, temperature, filters and grammars, as the "
        "token was drawn; tokens that these exclude are not among the likeliest",
    )

    adapter: str | None = _option(
        None,
        "name of the loaded adapter that answers; base: none (default: the first one)",
        max_length=512,
    )
    reasoning: Literal["auto", "on", "off", "raw"] = _option(
        "auto",
        "thoughts of a reasoning model: on or off, where the chat template has a switch (off ends "
        "those that it opens, too); auto: as the template does; raw: left in the text",
    )
    reasoning_budget: int = _option(
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
        return tuple(itertools.chain(*words))

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

    @field_validator("stop", "dry_sequence_breakers")
    @classmethod
    def _check_stops(cls, value):
        if any(not text for text in value):
            raise ValueError("texts of one character or more, not an empty one")
        return value

    @field_validator("stop", "dry_sequence_breakers", "regex", "grammar")
    @classmethod
    def _check_unicode(cls, value):
        if not is_unicode(value):
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

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, value):
        # texts stand for their tokens in requests of the server
        if any(isinstance(token, int) and token < 0 for token in value):
            raise ValueError("for token ids that are not negative")
        if any(abs(bias) > 1e6 for bias in value.values()):
            raise ValueError("between -1e6 and 1e6")
        return value


# In the order of the help: constraints of the answer last, though their class comes first.
_LAST, _ALL = _StructureOptions.model_fields, GenerationOptions.model_fields
FIELDS = {name: field for name, field in _ALL.items() if name not in _LAST} | _LAST


# Names of options, including those of other tools -> names in the table.
ALIASES: dict[str, str] = {
    alias: name
    for name, field in FIELDS.items()
    for alias in (name, *cast("dict[str, Any]", field.json_schema_extra)["aliases"])
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
    return text if len(text) <= SHOWN_INPUT else text[: SHOWN_INPUT - 3] + "..."


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
