"""Bodies of requests: read, checked field by field, every fault collected. Generation options come from core's one table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.requests import ClientDisconnect, Request

from mlx_llama.core.generation.options import FIELDS, GenerationOptions
from mlx_llama.core.generation.schema import Schema

from .faults import Fault, Refusal, client_gone, collect_faults
from .settings import Settings

MOST_BIASES = 4096  # entries of logit_bias


class Body(BaseModel):
    """A JSON object of a request. A field that is null counts as left out; one that is not listed is refused.

    unsupported: fields that the API defines and this server does not do, with a reason or "".
    renamed: names of the API -> names of the options table; both are taken.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, serialize_by_alias=True)
    unsupported: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        return {name: found for name, found in value.items() if found is not None} if isinstance(value, dict) else value


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", 'Field name "schema"')  # it shadows BaseModel.schema, long deprecated

    class _TableFields(GenerationOptions):
        """The options table with types that JSON has."""

        schema: dict[str, Any] | bool | None = Field(  # type: ignore[assignment]
            None, description=FIELDS["schema"].description, json_schema_extra=FIELDS["schema"].json_schema_extra)


class OptionFields(_TableFields):
    """The options table as fields of a request. JSON's types are kept apart: no "0.5" for 0.5, no true for 1."""

    model_config = Body.model_config

    @field_validator("schema", mode="before")
    @classmethod
    def _build_schema(cls, value):
        if isinstance(value, (dict, bool)):
            Schema.of(value)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value, info):
        # Strict types refuse it where a number is due. JSON's 5.0 is a whole number.
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        return int(value) if is_whole and cls.model_fields[info.field_name].annotation in (int, int | None) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _list_one_stop(cls, value):
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _parse_biases(cls, value):
        if not isinstance(value, dict):
            raise ValueError("must be an object of token ids and biases")
        if len(value) > MOST_BIASES:
            raise ValueError(f"must have at most {MOST_BIASES} entries")
        if foreign := next((key for key in value if not (key.isdecimal() and key.isascii() and len(key) < 16)), None):
            raise ValueError(f"must have token ids as keys, not {foreign!r:.40}")
        return {int(key): bias for key, bias in value.items()}

    def given_options(self) -> dict[str, Any]:
        """Options that the request sets, by their names in the table."""
        return {name: getattr(self, name) for name in FIELDS if name in self.model_fields_set}


Parsed = TypeVar("Parsed", bound=BaseModel)


async def read_body(request: Request, kind: type[Parsed]) -> Parsed:
    """Read and check a request's body. Raises Refusal with every fault."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise client_gone() from None
    return parse_body(raw, kind, request.app.state.settings)


def parse_body(raw: bytes, kind: type[Parsed], settings: Settings) -> Parsed:
    """Check a JSON body. Raises Refusal with every fault; fields of a later check are checked after those of the type."""
    try:
        values = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        message = f"the body is not JSON: {error}"
        if "recursion" in message:
            raise Refusal(400, "invalid_json", [Fault("", "depth", "the body is nested too deeply: 200 levels at most")])
        raise Refusal(400, "invalid_json", [Fault("", "JSON", message)]) from None
    if not isinstance(values, dict):
        raise Refusal(400, "invalid_type", [Fault("", "object", "the body must be a JSON object", None)])
    return check_values(values, kind, settings)


def check_values(values: dict[str, Any], kind: type[Parsed], settings: Settings) -> Parsed:
    """Check a JSON object. Raises Refusal."""
    faults: list[Fault] = []
    body: Any = None
    given = {name: value for name, value in values.items() if value is not None}
    for theirs, ours in getattr(kind, "renamed", {}).items():
        if theirs in given:
            value = given.pop(theirs)
            if given.setdefault(ours, value) != value:
                faults.append(Fault(theirs, "one value", f"{theirs}: contradicts {ours}; give one of them"))
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        found = collect_faults(error.errors(include_url=False), [*kind.model_fields, *getattr(kind, "renamed", {})],
                               getattr(kind, "unsupported", {}))
        # Name the field as the request does.
        back = {ours: theirs for theirs, ours in getattr(kind, "renamed", {}).items() if values.get(theirs) is not None}
        faults += [_rename(fault, back) for fault in found]
    faults += _check_limits(given, settings)
    if faults:
        raise Refusal(400, _code(faults), faults)
    return body


def _rename(fault: Fault, names: Mapping[str, str]) -> Fault:
    name = names.get(fault.field)
    return fault if name is None else Fault(name, fault.constraint, fault.message.replace(fault.field, name, 1), fault.value)


def _code(faults: list[Fault]) -> str:
    constraint = faults[0].constraint
    return {"required": "missing_required_parameter", "unknown": "unknown_parameter",
            "unsupported": "unsupported_parameter"}.get(constraint, "invalid_value")


def _check_limits(given: Mapping[str, Any], settings: Settings) -> list[Fault]:
    """Faults against the server's own limits, which no schema states."""
    faults = []
    for name, most in (("messages", settings.max_messages), ("input", settings.max_messages),
                       ("stop", settings.max_stops), ("stop_sequences", settings.max_stops)):
        value = given.get(name)
        if isinstance(value, list) and len(value) > most:
            faults.append(Fault(name, f"at most {most} items", f"{name}: has {len(value)} items, at most {most} are taken"))
        if name.startswith("stop"):
            texts = value if isinstance(value, list) else [value]
            longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
            if longest > settings.max_stop_length:
                faults.append(Fault(name, f"at most {settings.max_stop_length} characters",
                                    f"{name}: a text of {longest} characters, at most {settings.max_stop_length} are taken"))
    return faults
