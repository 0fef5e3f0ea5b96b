"""Refusals in one shape: status, code, and every fault of the request with its field.

An API writes a refusal in its own envelope (OpenAI's `error`, Anthropic's `type: error`); `errors`
is beside it in both.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

SHOWN = 200  # characters of a value in an error
MOST_FAULTS = 32  # told of one request


@dataclass(frozen=True)
class Fault:
    """One reason to refuse a request. field: its path in the body, "" for the body itself."""

    field: str
    constraint: str
    message: str
    value: Any = None


class Refusal(Exception):
    """A request that is not served; `status`, `code` and `headers` are HTTP's."""

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


def bad_field(field: str, constraint: str, message: str, value: Any = None) -> Refusal:
    """A 400 for one field."""
    return Refusal(400, "invalid_value", [Fault(field, constraint, message, shorten(value))])


def client_gone() -> Refusal:
    """The end of a request whose client left; nobody reads it."""
    return Refusal(499, "client_gone", message="the client left")


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "overloaded_error",
    504: "timeout_error",
}


def write_openai(refusal: Refusal) -> dict[str, Any]:
    """The body of an error as OpenAI's clients read it."""
    kind = (
        "api_error"
        if refusal.status == 500
        else _TYPES.get(refusal.status, "invalid_request_error")
    )
    kind = {"not_found_error": "invalid_request_error", "overloaded_error": "server_error"}.get(
        kind, kind
    )
    param = refusal.faults[0].field or None if refusal.faults else None
    return {
        "error": {
            "message": refusal.message,
            "type": kind,
            "param": param,
            "code": refusal.code,
            **refusal.extras,
        },
        "errors": [asdict(fault) for fault in refusal.faults],
    }


def write_anthropic(refusal: Refusal) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it."""
    kind = (
        "api_error"
        if refusal.status == 500
        else _TYPES.get(refusal.status, "invalid_request_error")
    )
    return {
        "type": "error",
        "error": {"type": kind, "message": refusal.message, "code": refusal.code, **refusal.extras},
        "errors": [asdict(fault) for fault in refusal.faults],
    }


def write_ollama(refusal: Refusal) -> dict[str, Any]:
    """The body of an error as Ollama's clients read it."""
    return {"error": refusal.message, "errors": [asdict(fault) for fault in refusal.faults]}


# pydantic's errors -> faults

_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}
_LENGTHS = {
    "too_long": ("at most", "max_length"),
    "too_short": ("at least", "min_length"),
    "string_too_long": ("at most", "max_length"),
    "string_too_short": ("at least", "min_length"),
}
_TYPE_NAMES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "string": "string",
    "list": "array",
    "dict": "object",
    "model": "object",
    "tuple": "array",
    "none": "null",
}
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
MOST_LOOKED_AT = 1000  # errors, for those of a union's branches


def collect_faults(
    errors: Iterable[Mapping[str, Any]], known: Iterable[str], refused: Mapping[str, str]
) -> list[Fault]:
    """One fault per field from pydantic's errors, MOST_FAULTS at most and one that counts the rest.

    known: names of the fields, for "did you mean". refused: fields that the API defines and this
    server does not do, with the reason ("" for none).
    """
    located = [(_path(error["loc"]), error) for error in errors]
    # A union's branch of another type is no fault where a deeper one shows which branch was meant.
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
            value = shorten(error["input"]) if field and error["type"] != "missing" else None
            faults[field] = Fault(field, constraint, f"{field or 'body'}: {message}", value)
        elif error["type"].endswith("_type") and faults[field].constraint not in ("required",):
            # Branches of a union: name every type that is allowed.
            constraint, _ = _describe(error)
            other = faults[field]
            if other.constraint in _TYPE_NAMES.values() or " or " in other.constraint:
                names = dict.fromkeys([*other.constraint.split(" or "), constraint])
                joined = " or ".join(names)
                faults[field] = Fault(field, joined, f"{field}: must be {joined}", other.value)
    more = (
        [Fault("", f"at most {MOST_FAULTS} faults", f"and faults of {len(rest)} more fields")]
        if rest
        else []
    )
    return [*faults.values(), *more]


def rename_fault(fault: Fault, names: Mapping[str, str]) -> Fault:
    """The fault with the name that the request used. names: of options in the table -> of places in
    the request.
    """
    head = re.split(r"[.\[]", fault.field)[0]
    if head not in names:
        return fault
    return replace(
        fault,
        field=names[head] + fault.field[len(head) :],
        message=fault.message.replace(head, names[head], 1),
    )


def _describe_foreign(
    field: str, value: Any, known: Iterable[str], refused: Mapping[str, str]
) -> Fault:
    if field in refused:
        reason = refused[field]
        return Fault(
            field,
            "unsupported",
            f"{field}: is not supported by this server" + (f": {reason}" if reason else ""),
            shorten(value),
        )
    near = difflib.get_close_matches(field, known, 1)
    return Fault(
        field,
        "unknown",
        f"{field}: there is no such field" + (f" (did you mean {near[0]}?)" if near else ""),
        shorten(value),
    )


def _describe(error: Mapping[str, Any]) -> tuple[str, str]:
    """The constraint that an error names, and a clause for the message."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _BOUNDS:
        sign, key = _BOUNDS[kind]
        return f"{sign} {context[key]}", f"must be {sign} {context[key]}"
    if kind in _LENGTHS:
        words, key = _LENGTHS[kind]
        unit = ("character" if kind.startswith("string") else "item") + "s" * (context[key] != 1)
        return f"{words} {context[key]} {unit}", f"must have {words} {context[key]} {unit}"
    if kind == "missing":
        return "required", "is required"
    if kind == "literal_error":
        expected = _JSON_WORDS.get(context["expected"], context["expected"])
        return f"one of {expected}" if " or " in expected else expected, f"must be {expected}"
    if kind == "string_pattern_mismatch":
        return f"matches {context['pattern']}", f"must match {context['pattern']}"
    if kind == "string_unicode":
        return "valid Unicode", "must be valid Unicode"
    if kind == "finite_number":
        return "finite", "must be a finite number"
    if kind == "extra_forbidden":
        return "unknown", "there is no such field"
    if kind == "union_tag_invalid":
        return (
            f"one of {context['expected_tags']}",
            f"{context['discriminator']} must be one of {context['expected_tags']}",
        )
    base = kind.removesuffix("_type")
    if kind.endswith("_type") and base in _TYPE_NAMES:
        return _TYPE_NAMES[base], f"must be {_article(_TYPE_NAMES[base])}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    # The checks that raise ValueError state the rule.
    return message[:SHOWN] if kind == "value_error" else kind.replace("_", " "), message


def _article(name: str) -> str:
    return name if name == "null" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


_BRANCH = re.compile(
    r"(str|int|float|bool|none|dict|list|constrained-\w+|function-\w+|literal|model|tuple|[A-Z]\w*)(\[.*\])?",
    re.S,
)


def _path(location: tuple[Any, ...]) -> str:
    """messages[0].content: a place in the body, without the names of a union's branches and a
    mapping's "[key]".
    """
    parts = []
    for i, part in enumerate(location):
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif part != "[key]" and not (i and _BRANCH.fullmatch(part)):
            parts.append(f".{part[:SHOWN]}")
    return "".join(parts).lstrip(".")[:SHOWN]


def shorten(value: Any) -> Any:
    """A value for an error: numbers and short texts as they are, the rest as a short text of
    JSON.
    """
    if (
        value is None
        or isinstance(value, bool)
        or (isinstance(value, (int, float)) and abs(value) < 2**53)
    ):
        return value
    text = (
        value
        if isinstance(value, str)
        else json.dumps(_prune(value), ensure_ascii=False, default=str)
    )
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _prune(value: Any, depth: int = 4) -> Any:
    """The beginning of a value, as much as a short text may show."""
    if isinstance(value, str):
        return value[:SHOWN]
    if isinstance(value, dict):
        return (
            {str(key)[:SHOWN]: _prune(value[key], depth - 1) for key in list(value)[:20]}
            if depth
            else {}
        )
    if isinstance(value, (list, tuple)):
        return [_prune(item, depth - 1) for item in value[:40]] if depth else []
    return value
