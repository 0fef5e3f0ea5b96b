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
TYPE_NAMES = {  # pydantic's and Python's names -> JSON's
    **{"int": "integer", "float": "number", "bool": "boolean", "string": "string", "str": "string"},
    **{"list": "array", "tuple": "array", "dict": "object", "model": "object", "none": "null"},
}
MEDIA = re.compile("image|screenshot|audio|video|document|file")  # in types of parts
TEXT_ONLY = "this package reads text only: leave the {} out, or describe it in words"


def collect_faults(errors: Iterable[Mapping[str, Any]], known: Iterable[str]) -> list[Fault]:
    """Turn pydantic's errors into a fault per field, at most MOST_FAULTS and a count of the rest.

    known: names of fields, for "did you mean".
    """
    faults: dict[str, Fault] = {}
    rest = set()
    for error in errors:
        field = _write_place(error["loc"])
        if field not in faults and len(faults) == MOST_FAULTS:
            rest.add(field)
        elif field not in faults:
            constraint, message = _describe(error)
            if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
                message += suggest(field, known, 0.6)
            value = error["input"] if field and error["type"] != "missing" else None
            faults[field] = Fault(field, constraint, f"{field or 'body'}: {message}", value)
    more = Fault("", f"at most {MOST_FAULTS} faults", f"and errors in {len(rest)} more fields")
    return [*faults.values(), *([more] if rest else [])]


def _write_place(location: Sequence[str | int]) -> str:
    """Write the place of an error as messages[0].content, without tags of unions."""
    names = [part for part in location if not str(part).startswith("as:")]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN]}" for part in names]
    return "".join(parts).lstrip(".")[:SHOWN]


def rename_fault(fault: Fault, names: Mapping[str, str]) -> Fault:
    """Rename a fault's field as the request does. names: option -> place in the request."""
    head = re.split(r"[.\[]", fault.field)[0]
    if head not in names:
        return fault
    message = fault.message.replace(head, names[head], 1)
    return replace(fault, field=names[head] + fault.field[len(head) :], message=message)


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
    if kind == "unsupported":
        return kind, context["text"]
    sent = context["tag"].removeprefix("as:") if "tag" in context else error["input"]
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
        tags = re.findall("as:([^']*)", context["expected_tags"])
        if "name_kind" in context["discriminator"]:
            rule = f"one of {', '.join(map(repr, tags))}"
            return rule, f"'type' must be {rule}"
        rule = " or ".join(dict.fromkeys(tag.split()[-1].replace("list", "array") for tag in tags))
        return rule, f"must be {rule}"
    base = kind.removesuffix("_type")
    if kind.endswith("_type") and base in TYPE_NAMES:
        return TYPE_NAMES[base], f"must be {_article(TYPE_NAMES[base])}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    # A ValueError of our checks states the rule.
    return message[:SHOWN] if kind == "value_error" else kind.replace("_", " "), message


def _article(name: str) -> str:
    return name if name == "null" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


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
