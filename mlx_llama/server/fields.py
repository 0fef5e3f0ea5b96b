"""Read and check request bodies, and collect every fault. Generation options come from core's
table.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.requests import ClientDisconnect, Request

from mlx_llama.core.generation.options import FIELDS, MAX_LOGPROBS, GenerationOptions
from mlx_llama.core.generation.schema import Schema

from .faults import (
    MOST_FAULTS,
    Fault,
    Refusal,
    bad_field,
    client_gone,
    collect_faults,
    rename_fault,
)
from .settings import Settings

MOST_BIASES = 4096  # entries of logit_bias
# in a body, without token ids: reporting a fault takes some microseconds
MOST_VALUES = 1 << 15
RULES = ("schema", "regex", "grammar")  # options that exclude each other
ENDLESS = 2**31  # tokens: more than any context holds
Note = Callable[[str], None]  # reports an ignored place in the body
TokenIds = Annotated[list[int], Field(fail_fast=True)]  # may be long: report the first fault only
TemplateVariables = Annotated[
    dict[str, Any], Field(description="variables of the chat template, such as enable_thinking")
]
CacheKey = Annotated[
    str | None, Field(max_length=512, description="has no effect: every prefix is reused")
]
Identity = Annotated[str | None, Field(max_length=512, description="has no effect")]
ModelName = Annotated[str | None, Field(max_length=512)]
Likeliest = Annotated[
    int | None,
    Field(ge=0, le=MAX_LOGPROBS, description="number of likeliest tokens to report per position"),
]
Strict = Annotated[
    bool | None, Field(description="has no effect: a required call always fits its schema")
]


def list_places(text: str) -> frozenset[str]:
    """Places in a body, written with spaces between them."""
    return frozenset(text.split())


class Dialect:
    """Conventions of an API's requests.

    A null field counts as absent; a null of RULES also lifts the server's rule.

    Unknown fields, and invalid values of `noted` fields, cannot change the answer: they are ignored
    and reported, or refused with --strict.
    """

    # Name in the API -> name in the options table; both are accepted, and the API's wins.
    renamed: ClassVar[Mapping[str, str]] = {}
    # Name in the options table -> further places in the body that may set it
    places: ClassVar[Mapping[str, Sequence[str]]] = {}
    # Places (a.b, items of lists included) whose invalid values are ignored
    noted: ClassVar[frozenset[str]] = frozenset()
    # Unsupported fields that change the answer -> the reason, or ""
    refused: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        """Rewrite other spellings of supported values, in place. values: not null, unchecked."""

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        """Return faults of fields that contradict each other. values: not null, unchecked."""
        return []


class Body(Dialect, BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, serialize_by_alias=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        return (
            {name: field for name, field in value.items() if field is not None}
            if isinstance(value, dict)
            else value
        )


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

    model_config = Body.model_config
    renamed: ClassVar[Mapping[str, str]] = {
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "repeat_last_n": "repetition_context_size",
        "guided_json": "schema",
        "guided_regex": "regex",
        "guided_grammar": "grammar",
    }

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        """Translate values by which other servers switch an option off."""
        super().adapt(values, note)
        off_values = {
            "max_tokens": ENDLESS,
            "top_k": 0,
            "repetition_context_size": 65536,
            "seed": None,
        }
        for name, off in off_values.items():
            if _is_number(value := values.get(name)) and value == -1:
                values[name] = off
        if _is_number(values.get("top_p")) and values["top_p"] == 0:
            values["top_p"] = 1e-6  # the likeliest token
        if _is_number(base := values.get("dry_base")) and base < 1:
            del values["dry_base"]  # as llama-server does
        if isinstance(breakers := values.get("dry_sequence_breakers"), list):
            values["dry_sequence_breakers"] = [text for text in breakers if text != ""]
        if _is_number(temperature := values.get("temperature")) and 0 < temperature < 1e-4:
            values["temperature"] = 0
        seed = values.get("seed")
        if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed < 2**64:
            note("seed")
            values["seed"] = seed % 2**64
        if isinstance(stop := values.get("stop"), list):
            values["stop"] = [text for text in stop if text != ""]
        elif stop == "":
            del values["stop"]
        if isinstance(bias := values.get("logit_bias"), list) and not bias:
            del values["logit_bias"]
        if values.get("seed", 0) is None:
            del values["seed"]

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
        return (
            int(value)
            if is_whole and cls.model_fields[info.field_name].annotation in (int, int | None)
            else value
        )

    @field_validator("stop", "stop_token_ids", "dry_sequence_breakers", mode="before")
    @classmethod
    def _make_tuple(cls, value, info):
        if isinstance(value, str) and info.field_name == "stop":
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _parse_biases(cls, value):
        if not isinstance(value, dict):
            raise ValueError("must be an object that maps token ids to biases")
        if len(value) > MOST_BIASES:
            raise ValueError(f"must have at most {MOST_BIASES} entries")
        for key in value:
            if not (key.isdecimal() and key.isascii() and len(key) < 16):
                raise ValueError(f"must have token ids as keys, not {key!r:.40}")
        return {int(key): bias for key, bias in value.items()}

    def requested_options(self) -> dict[str, Any]:
        """Return the options that the request sets, by their names in the table."""
        return {name: getattr(self, name) for name in FIELDS if name in self.model_fields_set}


# Fields by which APIs control thinking
_SWITCHES = ("reasoning_effort", "reasoning", "thinking", "enable_thinking", "think")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Parsed = TypeVar("Parsed", bound=BaseModel)


async def read_body(request: Request, kind: type[Parsed]) -> Parsed:
    """Read and check a request's body. Raises Refusal with every fault.

    Sets in the request's scope `names`, option -> place in this body that sets it, and `noted`,
    the ignored places.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise client_gone() from None
    settings, desk = request.app.state.settings, request.app.state.desk
    values = parse_object(raw)
    names = request.scope["names"] = name_options(values, kind)
    if switch := next((name for name in _SWITCHES if values.get(name) is not None), None):
        names |= dict.fromkeys(
            ("chat_template_kwargs.enable_thinking", "chat_template_kwargs.reasoning_effort"),
            switch,
        )
    try:
        return check_values(values, kind, settings, lambda place: note(request, place))
    except Refusal as refusal:
        # Also run the checks that need the model, for fields without a fault so far.
        faulty = {re.split(r"[.\[]", fault.field)[0] for fault in refusal.faults}
        options = {
            name: _look_up(values, place)
            for name, place in names.items()
            if place.split(".")[0] not in faulty
        }
        faults = await desk.find_faults(
            values.get("model") if "model" in kind.model_fields else None, options
        )
        refusal.add([rename_fault(fault, names) for fault in faults][:MOST_FAULTS])
        raise


def note(request: Request, place: str) -> None:
    """Report in the answer and in the log that a place of the request was ignored."""
    request.scope.setdefault("noted", {})[place] = None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises Refusal."""
    try:
        values = pydantic_core.from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:
        fault = Fault("", "JSON", f"the body is not JSON: {error}")
        if "recursion" in fault.message:
            fault = Fault("", "depth", "the body is nested too deeply: 200 levels at most")
        raise Refusal(400, "invalid_json", [fault]) from None
    if not isinstance(values, dict):
        raise Refusal(
            400, "invalid_type", [Fault("", "object", "the body must be a JSON object", None)]
        )
    counted = [value for name, value in values.items() if name not in ("prompt", "tokens")]
    if _is_large(counted, MOST_VALUES - len(values)):
        text = f"the body has more than {MOST_VALUES} values, not counting prompt and tokens"
        raise bad_field("", f"at most {MOST_VALUES} values", text)
    return values


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


def name_options(values: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, str]:
    """Map the options that a body sets to their places, written "a.b" within objects."""
    ours = {name: [name] for name in FIELDS}
    for theirs, name in getattr(kind, "renamed", {}).items():
        if name in ours:
            ours[name].append(theirs)
    for name, places in getattr(kind, "places", {}).items():
        ours[name] += places
    chosen = {
        name: next((place for place in places if _look_up(values, place) is not None), None)
        for name, places in ours.items()
    }
    return {name: place for name, place in chosen.items() if place is not None}


def find_conflict(field: str, form: Any, values: Mapping[str, Any]) -> list[Fault]:
    """Return the fault of a format beside a rule of the options table."""
    rules = [name for name in RULES if name in values]
    text = f"{field}: cannot be combined with {', '.join(rules)}"
    return [Fault(field, "at most one rule", text, form)] if rules else []


def _look_up(values: Any, place: str) -> Any:
    for part in place.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def check_values(
    values: dict[str, Any], kind: type[Parsed], settings: Settings, note: Note = lambda place: None
) -> Parsed:
    """Check a JSON object, which is modified. Raises Refusal with every fault."""
    faults: list[Fault] = []
    body: Any = None
    renamed: Mapping[str, str] = getattr(kind, "renamed", {})
    adapted = {
        name: value
        for name, value in values.items()
        if value is not None or (name in RULES and name in kind.model_fields)
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
    if issubclass(kind, Dialect) and not settings.is_strict:
        kind.adapt(adapted, note)
    while True:
        try:
            body = kind.model_validate(adapted)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            if not settings.is_strict and (places := _pass_over(adapted, errors, kind)):
                for place in places:
                    note(place)
                continue
            known = [*kind.model_fields, *renamed]
            # Name the field as the request does.
            back = {
                ours: theirs for theirs, ours in renamed.items() if values.get(theirs) is not None
            }
            faults += [
                rename_fault(fault, back)
                for fault in collect_faults(errors, known, getattr(kind, "refused", {}))
            ]
        break
    faults += _check_limits(adapted, settings)
    if issubclass(kind, Dialect):
        known = {fault.field for fault in faults}
        together = kind.check_together(
            {name: value for name, value in adapted.items() if value is not None}
        )
        faults += [fault for fault in together if fault.field not in known]
    if faults:
        raise Refusal(400, _code(faults), faults)
    return body


def _pass_over(
    values: dict[str, Any], errors: Sequence[Mapping[str, Any]], kind: type[BaseModel]
) -> list[str]:
    """Remove unknown fields, and invalid values of `noted` ones. Return their places, as a[].b."""
    refused, noted = getattr(kind, "refused", {}), getattr(kind, "noted", ())
    paths: dict[tuple[str | int, ...], None] = {}
    for error in errors:
        path = _find_path(values, error["loc"])
        if path and error["type"] == "extra_forbidden" and path[0] not in refused:
            paths[tuple(path)] = None
        elif path is not None or error["type"] == "missing":
            path = path or _find_path(values, error["loc"][:-1]) or []
            lengths = (
                n
                for n in range(len(path), 0, -1)
                if ".".join(p for p in path[:n] if isinstance(p, str)) in noted
            )
            if length := next(lengths, 0):
                paths[tuple(path[:length])] = None
    for path in sorted(paths, key=lambda path: [str(part).zfill(6) for part in path], reverse=True):
        owner: Any = values
        for part in path[:-1]:
            owner = owner[part]
        del owner[path[-1]]
    return [
        "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        for path in paths
    ]


def _find_path(value: Any, location: Sequence[str | int]) -> list[str | int] | None:
    """Return the keys and indices of pydantic's location, without a union's branches; None if there
    is no such place.
    """
    if not location:
        return []
    head, rest = location[0], location[1:]
    is_here = (isinstance(value, dict) and head in value) or (
        isinstance(value, list) and isinstance(head, int) and head < len(value)
    )
    if is_here and (path := _find_path(value[head], rest)) is not None:
        return [head, *path]
    return _find_path(value, rest) if rest and isinstance(head, str) else None


def _code(faults: list[Fault]) -> str:
    constraint = faults[0].constraint
    return {
        "required": "missing_required_parameter",
        "unknown": "unknown_parameter",
        "unsupported": "unsupported_parameter",
    }.get(constraint, "invalid_value")


def _check_limits(values: Mapping[str, Any], settings: Settings) -> list[Fault]:
    """Return violations of the server's limits, which no schema states."""
    faults = []
    for name, limit in (
        ("messages", settings.max_messages),
        ("input", settings.max_messages),
        ("stop", settings.max_stops),
        ("stop_sequences", settings.max_stops),
    ):
        value = values.get(name)
        if isinstance(value, list) and len(value) > limit:
            text = f"{name}: has {len(value)} items, the maximum is {limit}"
            faults.append(Fault(name, f"at most {limit} items", text))
        if name.startswith("stop"):
            texts = value if isinstance(value, list) else [value]
            longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
            if longest > settings.max_stop_length:
                limit = settings.max_stop_length
                text = f"{name}: a text has {longest} characters, the maximum is {limit}"
                faults.append(Fault(name, f"at most {limit} characters", text))
    return faults
