"""Read and check request bodies, and collect every fault. Generation options come from core's
table.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError, PydanticUseDefault
from starlette.requests import ClientDisconnect, Request

from mlx_llama.core.answers.schema import Schema
from mlx_llama.core.files.adapters import MOST_ADAPTERS
from mlx_llama.core.options import FIELDS, MAX_LOGPROBS, GenerationOptions
from mlx_llama.core.text.controls import replace_surrogates

from .faults import (
    MOST_FAULTS,
    SHOWN,
    TYPE_NAMES,
    Fault,
    Refusal,
    client_gone,
    collect_faults,
    fault_of,
    suggest,
)

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
    Field(ge=0, le=MAX_LOGPROBS, description="number of most likely tokens to report per position"),
]
Count = Annotated[
    int, Field(ge=1, le=16, description="answers per prompt; with a seed, answer i uses seed + i")
]


class Notes:
    """The places of a body that are passed over; the context of its validation."""

    def __init__(self, values: Mapping[str, Any] | None = None, report: Note | None = None):
        """values: the body. report: None to refuse these places, as with --strict."""
        self._values, self._report = values or {}, report
        self.is_strict = report is None
        self.faults: list[Fault] = []  # besides those that pydantic finds
        self.path: list[str] = []  # names of the fields around the one that is checked

    def note(self, name: str) -> None:
        """Report a place within the current field, or refuse it."""
        place = ".".join([*self.path, name])
        if self._report:
            self._report(place)
        else:
            self.refuse(place, "unsupported", NOT_AS_SENT, look_up(self._values, place))

    def refuse(self, field: str, constraint: str, text: str, value: Any = None) -> None:
        """Add a fault of a field."""
        self.faults.append(fault_of(field, constraint, text, value))


Value = TypeVar("Value")
NOTED, HIDDEN = object(), SkipJsonSchema()
Noted = Annotated[Value, NOTED]  # a value that does not fit is passed over


class Body(BaseModel):
    """A JSON object of a request, or within one. A null field counts as absent.

    Unknown fields, and invalid values of `Noted` fields, cannot change the answer: they are passed
    over and reported, or refused with --strict.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, serialize_by_alias=True
    )
    list_field: ClassVar[str] = ""  # the only field of a body that may be a bare list
    nullable: ClassVar[Sequence[str]] = ()  # fields whose null differs from an absent one
    schema_places: ClassVar[Sequence[str]] = ()  # places of a schema within formats

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        """Rewrite other spellings of supported values, in place. values: not null, unchecked."""

    @classmethod
    def check_together(cls, values: Mapping[str, Any], notes: Notes) -> None:
        """Refuse fields that contradict each other. values: unchecked."""

    @model_validator(mode="before")
    @classmethod
    def _adapt(cls, value, info):
        if not isinstance(value, dict):
            return value
        notes, names = info.context or Notes(), spellings(cls)
        keeps = notes.is_strict or cls.model_config["extra"] == "allow"
        values = {
            name: field
            for name, field in value.items()
            if field is not None or names.get(name) in cls.nullable
        }
        # Of several spellings the preferred one counts; another with the same value is no mistake.
        chosen: dict[str, str] = {}
        for name in sorted(
            filter(values.__contains__, names), key=lambda name: values[name] is None
        ):
            first = chosen.setdefault(names[name], name)
            if first != name and values[name] in (None, values[first]):
                del values[name]
        cls.adapt(values, notes)
        cls.check_together(values, notes)
        for name in list(values):
            first = chosen.get(names.get(name, ""), name)
            first = first if first in values else name  # it may have been switched off
            if first != name and notes.is_strict:
                text = f"contradicts {name}: send only one"
                notes.refuse(first, "one value", text, values[first])
            elif first != name or (name not in names and not keeps):
                notes.note(name)
            else:
                continue
            del values[name]
        return values

    @field_validator("*", mode="wrap")
    @classmethod
    def _pass_over(cls, value, check, info):
        name, notes = info.field_name, info.context or Notes()
        notes.path.append(f"{name}[]" if isinstance(value, list) else name)
        try:
            return check(value)
        except ValidationError:
            if notes.is_strict or NOTED not in cls.model_fields[name].metadata:
                raise
        finally:
            notes.path.pop()
        notes.note(name)
        raise PydanticUseDefault


@functools.cache
def spellings(kind: type[BaseModel]) -> dict[str, str]:
    """Return the field of each name that a body may send, preferred names first."""
    names: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        alias = field.validation_alias or name
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names |= dict.fromkeys(map(str, choices), name)
    return names


def known_names(kind: type[BaseModel]) -> list[str]:
    """Return the names that a body may send, without those of features that are not available."""
    fields = kind.model_fields
    return [name for name, field in spellings(kind).items() if HIDDEN not in fields[field].metadata]


def spell(**names: str) -> ConfigDict:
    """Let a body name fields as its API does, too. names: of the API, by field; several between
    spaces, the preferred one first.
    """

    def list_names(field: str) -> AliasChoices:
        listed = f"{names.get(field, '')} {_COMMON.get(field, '')} {field}"
        return AliasChoices(*listed.split())

    return ConfigDict(alias_generator=AliasGenerator(validation_alias=list_names))


_COMMON = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "repetition_context_size": "repeat_last_n",
    "reasoning_budget": "thinking_token_budget thinking_budget_tokens",
    "schema": "json_schema guided_json",
    "regex": "guided_regex",
    "grammar": "guided_grammar",
}


def unavailable(values: Sequence[Any] = (), reason: str | None = None) -> AfterValidator:
    """Check a field of a feature that is not available: `values` switch it off. reason: why a
    request with another one is refused.
    """
    text = NOT_AS_SENT if reason is None else "is not supported by this server"
    text += f": {reason}" if reason else ""

    def check(value: Any) -> Any:
        if value not in values:
            raise PydanticCustomError("unsupported", "{text}", {"text": text})
        return value

    return AfterValidator(check)


# Unions of different types of JSON


def name_type(value: Any) -> str:
    """Return the tag of a union's branch for a value."""
    return f"as:{TYPE_NAMES.get(type(value).__name__, 'other')}"


def name_kind(value: Any) -> str:
    """Return the tag of a union's branch for an object with a type."""
    return f"as:{value.get('type') if isinstance(value, dict) else None}"


Text = Annotated[str, Tag("as:string")]
BY_TYPE = Discriminator(name_type)
TextOr = Annotated[Text | Annotated[Value, Tag("as:array")], BY_TYPE]
SchemaValue = Annotated[
    Annotated[dict[str, Any], Tag("as:object")] | Annotated[bool, Tag("as:boolean")], BY_TYPE
]


class AdapterScale(Body):
    """The scale of an adapter."""

    id: int = Field(ge=0, description="number in GET /lora-adapters")
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

        schema: SchemaValue | None = Field(  # type: ignore[assignment]
            None,
            description=FIELDS["schema"].description,
            json_schema_extra=FIELDS["schema"].json_schema_extra,
        )


class OptionFields(Body, _TableFields):
    """The options table as fields of a request, strictly typed: "0.5" is not 0.5, true is not 1. A
    null of RULES lifts the server's rule.
    """

    model_config = Body.model_config | spell()
    nullable: ClassVar[Sequence[str]] = RULES
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

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        """Translate values by which other servers switch an option off."""
        if _number(values.get("top_p")) == 0:
            values["top_p"] = 1e-6  # the most likely token
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
            notes.note("seed")
            values["seed"] = seed % 2**64
        for name in ("stop", "stop_sequences"):
            if isinstance(stop := values.get(name), list):
                values[name] = [text for text in stop if text != ""]
        asks = {"logprobs", "top_logprobs", "n_probs", "include"} & values.keys()
        if not asks and values.pop("post_sampling_probs", False):
            notes.note("post_sampling_probs")
        for name, nothing in (("stop", ""), ("stop_sequences", ""), ("logit_bias", [])):
            if values.get(name) == nothing:
                del values[name]
        for name in ("grammar", "guided_grammar"):
            if values.get(name) == "":
                values[name] = None

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
            is_id = type(token) is int and token >= 0
            if not is_id and not isinstance(token, str):
                raise ValueError("must have token ids or texts")
            biases[token] = -MAX_BIAS if bias is False else bias
        return biases

    def requested_options(self) -> dict[str, Any]:
        """Return the options that the request sets, by their names in the table."""
        return {name: getattr(self, name) for name in FIELDS if name in self.model_fields_set}


# Fields by which APIs control thinking
_SWITCHES = ("reasoning_effort", "reasoning", "thinking", "enable_thinking", "think")


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else math.nan


Parsed = TypeVar("Parsed", bound=Body)


async def read_body(request: Request, kind: type[Parsed]) -> Parsed:
    """Read and check a request's body. Raises Refusal with every fault.

    Sets in the request's scope `names`, option -> place in this body that sets it, `noted`, the
    ignored places, and `suggest`, which adds "did you mean" to one.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise client_gone() from None
    settings, admission = request.app.state.settings, request.app.state.admission
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
        return check_values(values, kind, take_note)
    except Refusal as refusal:
        # Also run the checks that need the model, for fields without a fault so far.
        faulty = {re.split(r"[.\[]", fault.field)[0] for fault in refusal.faults}
        options = {
            name: look_up(values, place)
            for name, place in names.items()
            if place.split(".")[0] not in faulty
        }
        faults = await admission.find_faults(
            values.get("model") if "model" in kind.model_fields else None, options
        )
        refusal.add(faults[:MOST_FAULTS])
        raise


@functools.cache
def _known_names(kind: type[Body]) -> frozenset[str]:
    """Return the names of a body's fields, and of those within them."""
    schema = kind.model_json_schema()
    objects = [schema, *schema.get("$defs", {}).values()]
    inner = (name for part in objects for name in part.get("properties", ()))
    return frozenset(itertools.chain(known_names(kind), inner))


def suggest_field(kind: type[Body], place: str) -> str:
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


def name_options(values: Mapping[str, Any], kind: type[Body]) -> dict[str, str]:
    """Map the options that a body sets to their places, written "a.b" within objects."""
    sent = {place: name for place, name in spellings(kind).items() if name in FIELDS}
    sent |= dict.fromkeys(kind.schema_places, "schema")
    chosen: dict[str, str] = {}
    for place, name in sent.items():
        if look_up(values, place) is not None:
            chosen.setdefault(name, place)
    return chosen


def look_up(values: Any, place: str) -> Any:
    """Return the value at a place a.b; None if there is none."""
    for part in place.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def check_values(values: Mapping[str, Any], kind: type[Parsed], report: Note | None) -> Parsed:
    """Check a JSON object. report: None to refuse what would be passed over. Raises Refusal with
    every fault.
    """
    notes, faults = Notes(values, report), list[Fault]()
    try:
        body = kind.model_validate(values, context=notes)
    except ValidationError as error:
        faults = collect_faults(error.errors(include_url=False), known_names(kind))
    known = {fault.field for fault in faults}
    faults += {fault.field: fault for fault in notes.faults if fault.field not in known}.values()
    if faults:
        raise Refusal(400, _CODES.get(faults[0].constraint, "invalid_value"), faults)
    return body


_CODES = {
    "required": "missing_required_parameter",
    "unknown": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}
