"""The file of a saved conversation: JSON, checked by field when it is read."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    field_validator,
    model_serializer,
)

from mlx_llama.core.errors import OptionsError, SessionError, TemplateError, plain
from mlx_llama.core.options import split_fault, validate
from mlx_llama.core.system.files import read_file, write_file, writing
from mlx_llama.core.text.adapting import join_parts
from mlx_llama.core.text.controls import mend
from mlx_llama.core.text.template import check_messages

FORMAT: Final = "mlx_llama session"
MOST_BYTES = 1 << 26  # in a file
QUESTION, CALLS, RESULT, ANSWER = "user", "calls", "tool", "assistant"  # kinds of messages
NEXT = {ANSWER: [QUESTION], QUESTION: [ANSWER, CALLS], CALLS: [RESULT]}
NEXT[RESULT] = [RESULT, CALLS, ANSWER]
ROLES = {CALLS: "assistant"}  # where the kind is not the role


class Message(BaseModel):
    """A question, an answer, perhaps with tool calls, or the result of a call."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(join_parts)]
    reasoning_content: str | None = None  # the thought of an answer
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_serializer(mode="wrap")
    def _drop_nulls(self, handler):
        return {name: value for name, value in handler(self).items() if value is not None}


class SavedSession(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(strict=True)

    format: Literal["mlx_llama session"]
    version: Literal[1]
    model: str
    system: str | None
    options: dict[str, Any]  # fields of GenerationOptions, as JSON
    messages: list[Message]  # questions and answers in turn, calls and results before their answer
    dropped: int = 0  # messages at the front that no longer fit the context
    is_cut: bool = False  # the last answer stopped before its end

    @field_validator("options")
    @classmethod
    def _check_options(cls, value):
        validate(value)
        return value

    @field_validator("messages")
    @classmethod
    def _check_turns(cls, value):
        before = ANSWER
        for i, message in enumerate(value):
            kind = CALLS if message.tool_calls else message.role
            if kind not in NEXT[before]:
                roles = dict.fromkeys(repr(ROLES.get(kind, kind)) for kind in NEXT[before])
                needed = f"messages[{i}] needs the role {' or '.join(roles)}"
                raise ValueError(f"questions and answers in turn: {needed}")
            before = kind
        if before != ANSWER:
            raise ValueError("questions and answers in turn, ending with an answer")
        try:
            check_messages([message.model_dump() for message in value])
        except TemplateError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("dropped")
    @classmethod
    def _check_dropped(cls, value, info):
        messages = info.data.get("messages", ())
        is_start = 0 < value < len(messages) and (
            messages[value].role == QUESTION or messages[value].tool_calls
        )
        if value and not is_start:
            kinds = "a question, or of an answer with calls,"
            raise ValueError(f"the place of {kinds} among the {len(messages)} messages, or 0")
        return value


def check_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a session holds them. Raises SessionError."""
    if not messages:
        return []
    fields = {"format": FORMAT, "version": 1, "model": "", "system": None, "options": {}}
    copies = [dict(message) if isinstance(message, Mapping) else message for message in messages]
    try:
        saved = SavedSession.model_validate(fields | {"messages": mend(copies)})
    except ValidationError as error:
        raise SessionError(_describe_fault(error.errors()[0])) from None
    return [message.model_dump() for message in saved.messages]


def expand_path(path: str | os.PathLike) -> Path:
    """Expand ~ in a path. An unknown user is no error here, as it is for Path.expanduser."""
    return Path(os.path.expanduser(path))


def read_session(path: Path) -> SavedSession:
    """Read and check a saved session. Raises SessionError."""
    with writing(path, SessionError, "read"):
        raw = read_file(path, MOST_BYTES)
    return parse_session(raw, path)


def parse_session(raw: bytes, path: str | Path) -> SavedSession:
    """Check the content of a saved session; `path` names it in errors. Raises SessionError."""
    try:
        return SavedSession.model_validate_json(raw.removeprefix(codecs.BOM_UTF8))
    except OptionsError as error:
        raise SessionError(f"{path}: {plain(str(error))}") from None
    except ValidationError as error:
        # the first in the order of fields
        raise SessionError(f"{path}: {_describe_fault(error.errors()[0])}") from None


def _describe_fault(fault: Mapping[str, Any]) -> str:
    place, message = split_fault(fault)
    if fault["type"] == "json_invalid":
        return f"is not a saved session (not JSON: {message.removeprefix('Invalid JSON: ')})"
    if place in ("", "format"):
        return f'is not a saved session (no "format": {FORMAT!r})'
    if fault["type"] == "missing":
        return f"{place} is missing"
    if place == "version":
        return f"version is {fault['input']!r:.40}, this program reads 1"
    return f"{place} is {fault['input']!r:.40}, it must be {message}"


def write_session(path: Path, **fields: Any) -> None:
    """Write a SavedSession of `fields` atomically. Raises SessionError."""
    with writing(path, SessionError):  # also of text that is not Unicode
        try:
            text = SavedSession(format=FORMAT, version=1, **fields).model_dump_json(indent=1)
        except ValidationError as error:
            raise ValueError(_describe_fault(error.errors()[0])) from None
        write_file(path, text.encode(), is_private=True)
