"""Items of OpenAI's Responses, and the responses that are kept for `previous_response_id`."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from .conversations import Part, adapt_arguments, adapt_custom, adapt_parts, join_texts
from .faults import bad_field
from .fields import Body, Noted, Notes, TextOr
from .replies import Json

router = APIRouter(tags=["OpenAI"])

MOST_RESPONSES, MOST_CHARACTERS, SECONDS = 256, 16 << 20, 3600.0


class InputPart(Part):
    """A text part of an item, from a question or an earlier answer."""

    type: Literal["input_text", "output_text"]
    annotations: Noted[list[Any]] = Field([], max_length=0)  # an answer that is sent back has them
    logprobs: Noted[list[Any]] = Field([], description="has no effect")


# Fields that an item of a type has
_ITEMS = {
    "message": ("role", "content"),
    "reasoning": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": (),
}
_MAY_BE_EMPTY = ("content", "output", "arguments")


class InputItem(Body):
    """A message, a call or its result in the input."""

    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "item_reference"
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: TextOr[list[InputPart]] | None = None
    id: Noted[str] = Field(default="", max_length=512)
    status: Noted[Literal["in_progress", "completed", "incomplete"]] = "completed"
    call_id: str = Field(default="", max_length=4096)
    name: str = Field(default="", max_length=128)
    arguments: str | None = None
    output: TextOr[list[InputPart]] | None = None

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        kind = values.get("type", "message")
        if not isinstance(kind, str):
            return
        if kind == "custom_tool_call":
            values |= {**adapt_custom(values), "type": "function_call"}
            values.pop("input", None)
        elif kind in _RUN_BY_CLIENTS:
            names = _RUN_BY_CLIENTS[kind]
            arguments = {name: values.pop(name) for name in names if name in values}
            call = {"name": kind.removesuffix("_call"), "arguments": adapt_arguments(arguments)}
            identity = values.get("call_id", values.get("id"))
            values |= {"type": "function_call", "call_id": identity, **call}
        elif kind == "reasoning":
            values["content"] = find_thought(values)
            values.pop("summary", None)
        elif kind.endswith("_call_output") and (
            kind != "function_call_output" or isinstance(values.get("output"), dict)
        ):
            _adapt_output(values)
        elif kind == "function_call" and "arguments" in values:
            values["arguments"] = adapt_arguments(values["arguments"])
        is_sent = values.get("role", "assistant") != "assistant"
        for name in ("content", "output"):
            adapt_parts(values, name, "input_text", None if is_sent else notes)

    @model_validator(mode="after")
    def _check_type(self):
        needed = _ITEMS[self.type]
        absent = {name: (None,) if name in _MAY_BE_EMPTY else (None, "") for name in needed}
        if missing := [name for name in needed if getattr(self, name) in absent[name]]:
            raise ValueError(f"{self.type} needs {', '.join(missing)}")
        fields = {name for names in _ITEMS.values() for name in names}
        if foreign := sorted((fields & self.model_fields_set) - set(needed)):
            raise ValueError(f"{self.type} cannot have {', '.join(foreign)}")
        return self


# Calls that clients run, and their fields with the arguments
_RUN_BY_CLIENTS = {
    "local_shell_call": ("action",),
    "shell_call": ("action",),
    "apply_patch_call": ("operation",),
    "computer_call": ("action", "actions"),
}
# Other items without a text for the model; also all calls that ran on OpenAI's servers
_PASSED_OVER = (
    "reasoning compaction compaction_trigger configuration_update additional_tools "
    "tool_search_output mcp_list_tools mcp_approval_request mcp_approval_response "
    "program program_output"
).split()


def is_passed_over(item: Any, notes: Notes) -> bool:
    """True for an item that has no text for the model; it is noted."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind in ("function_call", "custom_tool_call", *_RUN_BY_CLIENTS):
        return False
    has_text = kind == "reasoning" and bool(find_thought(item))
    if is_passed := not has_text and (kind in _PASSED_OVER or kind.endswith("_call")):
        notes.note(f"input[].{kind:.40}")
    return is_passed


def find_thought(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item, or its summary."""
    return join_texts(item.get("content")) or join_texts(item.get("summary"), "\n\n")


def _adapt_output(item: dict[str, Any]) -> None:
    """Turn the output of a client's tool into that of a function: texts, others as JSON."""
    output = item.get("output", item.get("status", ""))
    if not isinstance(output, str):
        outputs = output if isinstance(output, list) else [output]
        is_part = [isinstance(part, dict) and "type" in part for part in outputs]
        output = [
            part if known or isinstance(part, str) else json.dumps(part, ensure_ascii=False)
            for part, known in zip(outputs, is_part, strict=True)
        ]
    identity = item.get("call_id", item.get("id"))
    item |= {"type": "function_call_output", "call_id": identity, "output": output}


def as_input(item: dict[str, Any]) -> dict[str, Any] | None:
    """Turn an output item into an input item; None for an empty thought."""
    if item["type"] == "reasoning" and item["content"]:
        return {"type": "reasoning", "id": item["id"], "content": find_thought(item)}
    if item["type"] == "message":
        return {
            "type": "message",
            "role": "assistant",
            "id": item["id"],
            "content": [{"type": "output_text", "text": part["text"]} for part in item["content"]],
        }
    if item["type"] == "function_call":
        return {name: item[name] for name in ("type", "id", "call_id", "name", "arguments")}
    return None


# Kept responses


@dataclass(frozen=True)
class Kept:
    """A response and its conversation."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]  # the conversation as an input, the output at its end
    ends: float  # time.monotonic()
    characters: int  # size of both as JSON


class KeptResponses:
    """The latest responses by id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def put(self, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Keep a response. items: its input."""
        items = [*items, *filter(None, map(as_input, response["output"]))]
        characters = len(json.dumps([response, items]))
        self._kept[response["id"]] = Kept(response, items, time.monotonic() + SECONDS, characters)
        self._clean()

    def get(self, name: str, field: str) -> Kept:
        """Return a response. Raises Refusal if it is not kept, or no longer."""
        self._clean()
        if name not in self._kept:
            text = (
                f"{name!r:.100} is not kept here: only the latest {MOST_RESPONSES} are, for an "
                "hour; send the conversation as input"
            )
            raise bad_field(
                field,
                "a response that is kept",
                text,
                name,
                status=404 if field == "response_id" else 400,
                code="previous_response_not_found",
            )
        return self._kept[name]

    def find_item(self, name: str) -> dict[str, Any]:
        """Return an item of a kept response. Raises Refusal."""
        self._clean()
        for kept in reversed(self._kept.values()):
            for item in kept.items:
                if item.get("id") == name:
                    return item
        text = f"the item {name!r:.100} is not kept here: send the whole item"
        raise bad_field("input", "an item that is kept", text, name)

    def drop(self, name: str, field: str) -> None:
        """Forget a response. Raises as `get`."""
        self.get(name, field)
        del self._kept[name]

    def _clean(self) -> None:
        now = time.monotonic()
        while self._kept and (
            len(self._kept) > MOST_RESPONSES
            or next(iter(self._kept.values())).ends < now
            or sum(kept.characters for kept in self._kept.values()) > MOST_CHARACTERS
        ):
            self._kept.popitem(last=False)


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """Return a kept response."""
    return Json(request.app.state.kept_responses.get(response_id, "response_id").response)


@router.delete("/v1/responses/{response_id}")
async def forget(request: Request, response_id: str) -> Response:
    """Forget a response."""
    request.app.state.kept_responses.drop(response_id, "response_id")
    return Json({"id": response_id, "object": "response", "deleted": True})
