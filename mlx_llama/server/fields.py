"""Read and check request bodies, and collect every fault. Generation options come from core's
table.
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.requests import ClientDisconnect, Request

from mlx_llama.core.answers.schema import Schema
from mlx_llama.core.files.adapters import MOST_ADAPTERS
from mlx_llama.core.options import FIELDS, MAX_LOGPROBS, GenerationOptions
from mlx_llama.core.text.surrogates import replace_surrogates

from .faults import (
    MOST_FAULTS,
    SHOWN,
    Fault,
    Refusal,
    client_gone,
    collect_faults,
    fault_of,
    find_path,
    rename_fault,
    suggest,
)
from .settings import Settings

MAX_BIASES, MAX_BIAS = 4096, 1e6  # entries of logit_bias, and their magnitude
# in a body, without token ids: reporting a fault takes some microseconds
MOST_VALUES = 1 << 15
MAX_NOTED = 256  # ignored places that a request's answer and the log name
NOT_AS_SENT = "cannot be served as sent: leave it out, or start the server without --strict"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or as bytes
RULES = ("schema", "regex", "grammar")  # options that exclude each other
Note = Callable[[str], None]  # reports an ignored place in the body
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]  # may be long: report the first fault only
ModelName = Annotated[str | None, Field(max_length=512)]
Likeliest = Annotated[
    int | None,
    Field(ge=0, le=MAX_LOGPROBS, description="number of likeliest tokens to report per position"),
]
Count = Annotated[
    int, Field(ge=1, le=16, description="answers per prompt; with a seed, answer i uses seed + i")
]


class Dialect(BaseModel):
    """Conventions of an API's requests.

    A null field counts as absent; a null of RULES also lifts the server's rule.

    Unknown fields, and invalid values of `noted` fields, cannot change the answer: they are ignored
    and reported, or refused with --strict.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, serialize_by_alias=True
    )
    # Name in the API -> name in the options table; both are accepted, and the API's wins.
    renamed: ClassVar[Mapping[str, str]] = {}
    # Name in the options table -> further places in the body that may set it
    places: ClassVar[Mapping[str, Sequence[str]]] = {}
    # Places (a.b, items of lists included) whose invalid values are ignored
    noted: ClassVar[frozenset[str]] = frozenset()
    list_field: ClassVar[str] = ""  # of a body that may be a bare list
    # Unsupported fields that change the answer -> the reason, or ""
    refused: ClassVar[Mapping[str, str]] = {}
    # Unsupported fields -> values that switch them off, the default first
    switched_off: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        """Rewrite other spellings of supported values, in place. values: not null, unchecked."""

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        """Return faults of fields that contradict each other. values: not null, unchecked."""
        return []


class Body(Dialect):
    """A JSON object of a request."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}


class AdapterScale(Body):
    """The scale of an adapter."""

    id: int = Field(ge=0, description="of GET /lora-adapters")
    scale: float = Field(0.0, description="0: off; otherwise the scale that it was loaded with")


AdapterScales = Annotated[
    list[AdapterScale],
    Field(max_length=MOST_ADAPTERS, description="scales of adapters; others are off"),
]

with warnings.catch_warnings():
    # shadows BaseModel.schema, which is deprecated
    warnings.filterwarnings("ignore", 'Field name "schema"')

    class _TableFields(GenerationOptions):
        """The options table with JSON's types."""

        schema: dict[str, Any] | bool | None = Field(  # type: ignore[assignment]
            None,
            description=FIELDS["schema"].description,
            json_schema_extra=FIELDS["schema"].json_schema_extra,
        )


class OptionFields(Dialect, _TableFields):
    """The options table as fields of a request, strictly typed: "0.5" is not 0.5, true is not 1."""

    model_config = Dialect.model_config
    model: ModelName = None
    logit_bias: dict[TokenId | str, Bias] = Field(  # type: ignore[assignment]
        {},
        description="maps token ids or texts to biases; also a list of [id or text, bias or false]",
        json_schema_extra=FIELDS["logit_bias"].json_schema_extra,
    )
    stop: tuple[str, ...] = Field(
        (),
        description="stop at this text, or at any in a list of texts",
        json_schema_extra=FIELDS["stop"].json_schema_extra,
    )
    renamed: ClassVar[Mapping[str, str]] = {
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "repeat_last_n": "repetition_context_size",
        "thinking_budget_tokens": "reasoning_budget",
        "thinking_token_budget": "reasoning_budget",
        "guided_json": "schema",
        "guided_regex": "regex",
        "guided_grammar": "grammar",
    }

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        """Translate values by which other servers switch an option off."""
        super().adapt(values, note)
        if _number(values.get("top_p")) == 0:
            values["top_p"] = 1e-6  # the likeliest token
        if _number(values.get("dry_base")) < 1:
            del values["dry_base"]  # as llama-server does
        if isinstance(breakers := values.get("dry_sequence_breakers"), list):
            values["dry_sequence_breakers"] = [text for text in breakers if text != ""]
        if 0 < _number(values.get("temperature")) < 1e-4:
            values["temperature"] = 0
        seed = values.get("seed")
        if _number(seed) == -1:
            del values["seed"]
        elif isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed < 2**64:
            note("seed")
            values["seed"] = seed % 2**64
        if isinstance(stop := values.get("stop"), list):
            values["stop"] = [text for text in stop if text != ""]
        asks = {"logprobs", "top_logprobs", "include"} & values.keys()
        if not asks and values.pop("post_sampling_probs", False):
            note("post_sampling_probs")
        for name, nothing in (("stop", ""), ("logit_bias", [])):
            if values.get(name) == nothing:
                del values[name]
        if values.get("grammar") == "":
            values["grammar"] = None

    @field_validator("schema", mode="before")
    @classmethod
    def _build_schema(cls, value):
        if isinstance(value, (dict, bool)):
            Schema.of(value)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value, info):
        # Strict types refuse booleans as numbers. JSON's 5.0 is an integer.
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        is_integer = cls.model_fields[info.field_name].annotation in (int, int | None)
        return int(value) if is_whole and is_integer else value

    @field_validator("stop", "stop_token_ids", "dry_sequence_breakers", mode="before")
    @classmethod
    def _make_tuple(cls, value, info):
        if isinstance(value, str) and info.field_name == "stop":
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _parse_biases(cls, value):
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
            rule = "must map token ids or texts to biases, as an object or a list of pairs"
            raise ValueError(f"{rule}, at most {MAX_BIASES}")
        biases = {}
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError("must have pairs [token id or text, bias]")
            token, bias = pair
            if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < 16:
                token = int(token)
            if isinstance(token, bool) or not isinstance(token, (int, str)):
                raise ValueError("must have token ids or texts")
            biases[token] = -MAX_BIAS if bias is False else bias
        return biases

    @classmethod
    def renames(cls, **names: str) -> Mapping[str, str]:
        """Return `renamed` with further names of an API."""
        return {**cls.renamed, **names}

    def requested_options(self) -> dict[str, Any]:
        """Return the options that the request sets, by their names in the table."""
        return {name: getattr(self, name) for name in FIELDS if name in self.model_fields_set}


# Fields by which APIs control thinking
_SWITCHES = ("reasoning_effort", "reasoning", "thinking", "enable_thinking", "think")


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else math.nan


Parsed = TypeVar("Parsed", bound=Dialect)


async def read_body(request: Request, kind: type[Parsed]) -> Parsed:
    """Read and check a request's body. Raises Refusal with every fault.

    Sets in the request's scope `names`, option -> place in this body that sets it, `noted`, the
    ignored places, and `suggest`, which adds "did you mean" to one.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise client_gone() from None
    settings, desk = request.app.state.settings, request.app.state.desk
    take_note = None if settings.is_strict else functools.partial(note, request)
    values = parse_object(raw, kind.list_field, take_note)
    names = request.scope["names"] = name_options(values, kind)
    request.scope["suggest"] = functools.partial(suggest_field, kind)
    if switch := next((name for name in _SWITCHES if values.get(name) is not None), None):
        for name in ("enable_thinking", "reasoning_effort"):
            names[f"chat_template_kwargs.{name}"] = switch
    if values.get("documents") is not None:
        names["chat_template_kwargs.documents"] = "documents"
    try:
        return check_values(values, kind, settings, lambda place: note(request, place))
    except Refusal as refusal:
        # Also run the checks that need the model, for fields without a fault so far.
        faulty = {re.split(r"[.\[]", fault.field)[0] for fault in refusal.faults}
        options = {
            name: look_up(values, place)
            for name, place in names.items()
            if place.split(".")[0] not in faulty
        }
        faults = await desk.find_faults(
            values.get("model") if "model" in kind.model_fields else None, options
        )
        refusal.add(faults[:MOST_FAULTS])
        raise


@functools.cache
def _known_names(kind: type[Dialect]) -> frozenset[str]:
    """Return the names of a body's fields, and of those within them."""
    schema = kind.model_json_schema()
    objects = [schema, *schema.get("$defs", {}).values()]
    return frozenset(kind.renamed).union(*(part.get("properties", ()) for part in objects))


def suggest_field(kind: type[Dialect], place: str) -> str:
    """Return an ignored place with the known field that it may be a misspelling of."""
    name, known = place.rpartition(".")[2], _known_names(kind)
    return place if name in known else place + suggest(name, known)


def note(request: Request, place: str) -> None:
    """Report in the answer and in the log that a place of the request was ignored."""
    noted = request.scope.setdefault("noted", {})
    if len(noted) < MAX_NOTED:
        noted[place[:SHOWN]] = None


def parse_object(raw: bytes, list_field: str, note: Note | None) -> dict[str, Any]:
    """Parse a JSON object, or a list as this field of one. Raises Refusal."""
    try:
        values = _parse(raw.removeprefix(b"\xef\xbb\xbf"), note)
    except ValueError as error:
        fault = Fault("", "JSON", f"the body is not JSON: {error}")
        if "recursion" in fault.message:
            fault = Fault("", "depth", "the body is nested too deeply: 200 levels at most")
        raise Refusal(400, "invalid_json", [fault]) from None
    if list_field and isinstance(values, list):
        values = {list_field: values}
    if not isinstance(values, dict):
        fault = Fault("", "object", "the body must be a JSON object")
        raise Refusal(400, "invalid_type", [fault])
    counted = [value for name, value in values.items() if name not in ("prompt", "tokens")]
    if _is_large(counted, MOST_VALUES - len(values)):
        text = f"the body has more than {MOST_VALUES} values, not counting prompt and tokens"
        raise Refusal(400, "invalid_value", [Fault("", f"at most {MOST_VALUES} values", text)])
    return values


def _parse(raw: bytes, note: Note | None) -> Any:
    """Parse JSON. Lone surrogates become U+FFFD if that can be noted. Raises ValueError."""
    parse = functools.partial(pydantic_core.from_json, allow_inf_nan=False)
    try:
        return parse(raw)
    except ValueError as error:
        if not _SURROGATE.search(raw):
            raise
        try:  # the standard library takes them
            values = json.loads(raw.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            raise error from None
    if note is None:
        raise ValueError("half of a surrogate pair stands alone: send U+FFFD in its place")
    note("lone surrogates")
    return parse(replace_surrogates(json.dumps(values, ensure_ascii=False)))


def _is_large(values: list[Any], limit: int) -> bool:
    """True if there are more than `limit` values, nested ones counted."""
    waiting = [values]
    limit += len(values)
    while waiting and limit >= 0:
        inner = waiting.pop()
        limit -= len(inner)
        waiting += [
            list(item.values()) if isinstance(item, dict) else item
            for item in inner
            if isinstance(item, (dict, list))
        ]
    return limit < 0


def name_options(values: Mapping[str, Any], kind: type[Dialect]) -> dict[str, str]:
    """Map the options that a body sets to their places, written "a.b" within objects."""
    chosen: dict[str, str] = {}
    for name in FIELDS:
        theirs = [theirs for theirs, ours in kind.renamed.items() if ours == name]
        for place in (name, *theirs, *kind.places.get(name, ())):
            if look_up(values, place) is not None:
                chosen.setdefault(name, place)
    return chosen


def look_up(values: Any, place: str) -> Any:
    """Return the value at a place a.b; None if there is none."""
    for part in place.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def check_values(
    values: dict[str, Any], kind: type[Parsed], settings: Settings, note: Note = lambda place: None
) -> Parsed:
    """Check a JSON object, which is modified. Raises Refusal with every fault."""
    faults: list[Fault] = []
    ignored: dict[str, Fault] = {}
    body: Any = None
    renamed = kind.renamed
    adapted = {
        name: value
        for name, value in values.items()
        if (value is not None or (name in RULES and name in kind.model_fields))
        and value not in kind.switched_off.get(name, ())
    }
    for theirs, ours in renamed.items():
        if theirs in values and ours in RULES:
            adapted.setdefault(ours, None)
        if values.get(theirs) is not None:
            value = adapted.pop(theirs)
            if adapted.get(ours) not in (None, value):
                if settings.is_strict:
                    text = f"{theirs}: contradicts {ours}: send only one"
                    faults.append(Fault(theirs, "one value", text, value))
                else:
                    note(ours)
            adapted[ours] = value

    def refuse_noted(place: str) -> None:
        fault = fault_of(place, "unsupported", NOT_AS_SENT, look_up(values, place))
        ignored.setdefault(place, fault)

    kind.adapt(adapted, refuse_noted if settings.is_strict else note)
    while True:
        try:
            body = kind.model_validate(adapted)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            if not settings.is_strict and (places := _pass_over(adapted, errors, kind)):
                for place in places:
                    note(place)
                continue
            names = [*kind.model_fields, *renamed]
            # Name the field as the request does.
            sent = {theirs for theirs in renamed if values.get(theirs) is not None}
            back = {ours: theirs for theirs, ours in renamed.items() if theirs in sent}
            collected = collect_faults(adapted, errors, names, kind.refused)
            faults += [rename_fault(fault, back) for fault in collected]
        break
    known = {fault.field for fault in faults}
    present = {name: value for name, value in adapted.items() if value is not None}
    more = (*kind.check_together(present), *ignored.values())
    faults += [fault for fault in more if fault.field not in known]
    if faults:
        raise Refusal(400, _CODES.get(faults[0].constraint, "invalid_value"), faults)
    return body


def _pass_over(
    values: dict[str, Any], errors: Sequence[Mapping[str, Any]], kind: type[Dialect]
) -> list[str]:
    """Remove unknown fields, and invalid values of `noted` ones. Return their places, as a[].b."""
    paths: dict[tuple[str | int, ...], None] = {}
    for error in errors:
        path = find_path(values, error["loc"])
        if path and error["type"] == "extra_forbidden" and path[0] not in kind.refused:
            paths[tuple(path)] = None
        elif path is not None or error["type"] == "missing":
            path = path or find_path(values, error["loc"][:-1]) or []
            for length in range(len(path), 0, -1):
                names = [part for part in path[:length] if isinstance(part, str)]
                if ".".join(names) in kind.noted:
                    paths[tuple(path[:length])] = None
                    break
    for place in sorted(paths, key=lambda path: [str(part).zfill(6) for part in path])[::-1]:
        owner: Any = values
        for part in place[:-1]:
            owner = owner[part]
        del owner[place[-1]]
    return [
        "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        for path in paths
    ]


_CODES = {
    "required": "missing_required_parameter",
    "unknown": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}
