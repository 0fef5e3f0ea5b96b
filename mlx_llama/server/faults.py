"""Refused requests: status, code, and every fault with its field.

Each API has an envelope (OpenAI's `error`, Anthropic's `type: error`) with `errors` beside it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

SHOWN = 200  # characters of a value in an error
MOST_FAULTS = 32  # reported per request
SIMILAR = 0.82  # a field that is ignored is likelier another server's: min_tokens is no max_tokens


@dataclass(frozen=True)
class Fault:
    """A reason to refuse a request."""

    field: str  # its path in the body, "" for the body itself
    constraint: str
    message: str
    value: Any = None  # shortened

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", shorten(self.value))


class Refusal(Exception):
    """A refused request; `status` and `headers` are HTTP's."""

    def __init__(
        self,
        status: int,
        code: str,
        faults: Iterable[Fault] = (),
        message: str = "",
        headers: Mapping[str, str] | None = None,
        **extras: Any,
    ):
        self.status, self.code, self.faults = status, code, list(faults)
        self.headers = dict(headers or {})
        self.extras = extras  # further fields of the error object
        super().__init__(message)

    @property
    def message(self) -> str:
        return self.args[0] or "; ".join(fault.message for fault in self.faults)

    def __str__(self) -> str:
        return self.message

    def add(self, faults: Iterable[Fault]) -> None:
        """Append faults of fields that have none yet."""
        known = {fault.field for fault in self.faults}
        self.faults += [fault for fault in faults if fault.field not in known]


def fault_of(field: str, constraint: str, text: str, value: Any = None) -> Fault:
    """Return a fault whose message is the field and a text."""
    return Fault(field, constraint, f"{field}: {text}", value)


def bad_field(
    field: str,
    constraint: str,
    text: str,
    value: Any = None,
    status: int = 400,
    code: str = "invalid_value",
) -> Refusal:
    """Refuse a request for a fault of a field."""
    return Refusal(status, code, [fault_of(field, constraint, text, value)])


def not_found(text: str) -> Refusal:
    """Refuse a request for something that is not there, or switched off."""
    return Refusal(404, "not_found", message=text)


def client_gone() -> Refusal:
    """Refuse a request whose client has left, for the log."""
    return Refusal(499, "client_gone", message="the client left")


def unavailable(code: str, text: str, seconds: int) -> Refusal:
    """Refuse a request that may be sent again after so many seconds."""
    return Refusal(503, code, message=text, headers={"Retry-After": str(seconds)})


def shutting_down() -> Refusal:
    """Refuse a request while the server shuts down."""
    return unavailable("shutting_down", "the server is shutting down", 5)


_TYPES = {  # others: invalid_request_error
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "api_error",
    501: "not_supported_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def write_openai(refusal: Refusal) -> dict[str, Any]:
    """Write an error for OpenAI's clients."""
    kinds: dict[Any, str] = _TYPES | {404: "invalid_request_error", 503: "server_error"}
    kinds["context_length_exceeded"] = "exceed_context_size_error"  # llama-server's type
    kind = kinds.get(refusal.code) or kinds.get(refusal.status, "invalid_request_error")
    param = refusal.faults[0].field or None if refusal.faults else None
    error = {"message": refusal.message, "type": kind, "param": param, "code": refusal.code}
    return {"error": error | refusal.extras, "errors": _write_faults(refusal)}


def write_anthropic(refusal: Refusal) -> dict[str, Any]:
    """Write an error for Anthropic's clients."""
    kind = _TYPES.get(refusal.status, "invalid_request_error")
    error = {"type": kind, "message": refusal.message, "code": refusal.code}
    return {"type": "error", "error": error | refusal.extras, "errors": _write_faults(refusal)}


def write_ollama(refusal: Refusal) -> dict[str, Any]:
    """Write an error for Ollama's clients."""
    return {"error": refusal.message, "errors": _write_faults(refusal)}


def _write_faults(refusal: Refusal) -> list[dict[str, Any]]:
    return [asdict(fault) for fault in refusal.faults]


# pydantic's errors -> faults

_RULES = {  # what a value must do; the constraint is all but the verb
    "greater_than_equal": "be >= {ge}",
    "greater_than": "be > {gt}",
    "less_than_equal": "be <= {le}",
    "less_than": "be < {lt}",
    "too_long": "have at most {max_length} items",
    "too_short": "have at least {min_length} items",
    "string_too_long": "have at most {max_length} characters",
    "string_too_short": "have at least {min_length} characters",
    "string_unicode": "be valid Unicode",
}
_TYPE_NAMES = {  # JSON's
    **{"int": "integer", "float": "number", "bool": "boolean", "string": "string"},
    **{"list": "array", "tuple": "array", "dict": "object", "model": "object", "none": "null"},
}
MEDIA = re.compile("image|screenshot|audio|video|document|file")  # in types of parts
TEXT_ONLY = "this package reads text only: leave the {} out, or describe it in words"
MOST_LOOKED_AT = 1000  # errors searched for a union's branches


def collect_faults(
    values: Any,
    errors: Iterable[Mapping[str, Any]],
    known: Iterable[str],
    refused: Mapping[str, str],
) -> list[Fault]:
    """Reduce pydantic's errors to a fault per field, at most MOST_FAULTS and a count of the rest.

    values: of the body. known: names of fields, for "did you mean". refused: fields of the API that
    this server does not support, with the reason or "".
    """
    located = [(_locate(values, error), error) for error in errors]
    # Skip type errors of a union's other branches if a deeper error shows which one was meant.
    within = {
        field[: match.start()]
        for field, _ in located[:MOST_LOOKED_AT]
        for match in re.finditer(r"[.\[]", field)
    }
    faults: dict[str, Fault] = {}
    rest = set()
    for field, error in located:
        if field not in faults and len(faults) == MOST_FAULTS:
            rest.add(field)
        elif error["type"] == "extra_forbidden" and "." not in field and "[" not in field:
            faults[field] = _describe_foreign(field, error["input"], known, refused)
        elif error["type"].endswith("_type") and field in within:
            continue
        elif field not in faults:
            constraint, message = _describe(error)
            value = error["input"] if field and error["type"] != "missing" else None
            faults[field] = Fault(field, constraint, f"{field or 'body'}: {message}", value)
        elif error["type"].endswith("_type") and faults[field].constraint != "required":
            constraint, _ = _describe(error)  # a union: name every allowed type
            other = faults[field]
            if other.constraint in _TYPE_NAMES.values() or " or " in other.constraint:
                names = dict.fromkeys([*other.constraint.split(" or "), constraint])
                joined = " or ".join(names)
                faults[field] = Fault(field, joined, f"{field}: must be {joined}", other.value)
        elif faults[field].constraint in _TYPE_NAMES.values():  # of a union's other branch
            constraint, message = _describe(error)
            faults[field] = Fault(field, constraint, f"{field}: {message}", error["input"])
    # A part that is no text has no other faults.
    parts = [field.removesuffix(".type") for field in faults if faults[field].constraint == "text"]
    others = tuple(part + mark for part in parts for mark in ".[")
    for field in [field for field in faults if field.startswith(others)]:
        if faults[field].constraint != "text":
            del faults[field]
    more = Fault("", f"at most {MOST_FAULTS} faults", f"and errors in {len(rest)} more fields")
    return [*faults.values(), *([more] if rest else [])]


def rename_fault(fault: Fault, names: Mapping[str, str]) -> Fault:
    """Rename a fault's field as the request does. names: option -> place in the request."""
    head = re.split(r"[.\[]", fault.field)[0]
    if head not in names:
        return fault
    message = fault.message.replace(head, names[head], 1)
    return replace(fault, field=names[head] + fault.field[len(head) :], message=message)


def _describe_foreign(
    field: str, value: Any, known: Iterable[str], refused: Mapping[str, str]
) -> Fault:
    if field in refused:
        reason = f": {refused[field]}" if refused[field] else ""
        message = f"{field}: is not supported by this server{reason}"
        return Fault(field, "unsupported", message, value)
    message = f"{field}: unknown field{suggest(field, known, 0.6)}"
    return Fault(field, "unknown", message, value)


def suggest(name: str, known: Iterable[str], similar: float = SIMILAR) -> str:
    """Return " (did you mean NAME?)" for the known name that is most similar; "" if none is.

    similar: minimum ratio of difflib.
    """
    near = difflib.get_close_matches(name[:SHOWN].lower(), known, 1, similar)
    return f" (did you mean {near[0]}?)" if near else ""


def _describe(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return an error's constraint, and a clause for the message."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _RULES:
        rule = re.sub(r"\b(1 \w+)s$", r"\1", _RULES[kind].format(**context))
        return rule.partition(" ")[2], f"must {rule}"
    if kind == "missing":
        return "required", "is required"
    sent = context.get("tag", error["input"])
    is_kind = kind in ("literal_error", "union_tag_invalid") and isinstance(sent, str)
    is_part = is_kind and not {"content", "input"}.isdisjoint(error["loc"])
    if is_part and (match := MEDIA.search(sent)):
        return "text", f"is {shorten(sent)}, but {TEXT_ONLY.format(match[0])}"
    if kind == "literal_error":
        expected = context["expected"]
        return f"one of {expected}" if " or " in expected else expected, f"must be {expected}"
    if kind == "string_pattern_mismatch":
        return f"matches {context['pattern']}", f"must match {context['pattern']}"
    if kind == "finite_number":
        return "finite", "must be a finite number"
    if kind == "extra_forbidden":
        return "unknown", "unknown field"
    if kind == "union_tag_invalid":
        rule = f"one of {context['expected_tags']}"
        return rule, f"{context['discriminator']} must be {rule}"
    base = kind.removesuffix("_type")
    if kind.endswith("_type") and base in _TYPE_NAMES:
        return _TYPE_NAMES[base], f"must be {_article(_TYPE_NAMES[base])}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    # A ValueError of our checks states the rule.
    return message[:SHOWN] if kind == "value_error" else kind.replace("_", " "), message


def _article(name: str) -> str:
    return name if name == "null" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def find_path(value: Any, location: Sequence[str | int]) -> list[str | int] | None:
    """Return the keys and indices of pydantic's location, without a union's branches; None if there
    is no such place.
    """
    if not location:
        return []
    head, rest = location[0], location[1:]
    is_here = (isinstance(value, dict) and head in value) or (
        isinstance(value, list) and isinstance(head, int) and head < len(value)
    )
    if is_here and (path := find_path(value[head], rest)) is not None:
        return [head, *path]
    return find_path(value, rest) if rest and isinstance(head, str) else None


def _locate(values: Any, error: Mapping[str, Any]) -> str:
    """Write the place of an error as messages[0].content."""
    # A missing field may be there as null.
    where, last = error["loc"], error["loc"][-1:] if error["type"] == "missing" else ()
    lengths = range(len(where) - len(last), -1, -1)
    path = next(path for n in lengths if (path := find_path(values, where[:n])) is not None)
    path += last
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN]}" for part in path]
    return "".join(parts).lstrip(".")[:SHOWN]


def shorten(value: Any) -> Any:
    """Shorten a value for an error: numbers and short texts stay, others become text or JSON."""
    if value is None or (isinstance(value, (int, float)) and abs(value) < 2**53):
        return value
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(_prune(value), ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _prune(value: Any, depth: int = 4) -> Any:
    """Cut a value to about as much as a short text shows."""
    if isinstance(value, str):
        return value[:SHOWN]
    if isinstance(value, dict):
        keys = list(value)[:20] if depth else []
        return {str(key)[:SHOWN]: _prune(value[key], depth - 1) for key in keys}
    if isinstance(value, (list, tuple)):
        return [_prune(item, depth - 1) for item in value[: 40 if depth else 0]]
    return value
