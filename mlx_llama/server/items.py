"""Items of OpenAI's Responses, as the input has them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .conversations import adapt_parts, write_arguments
from .fields import Body


class InputPart(Body):
    """A text part of an item, from a question or an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0)  # of an answer that is sent back
    logprobs: list[Any] = Field([], description="has no effect")


# Fields that an item of a type has
_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": (),
}
_MAY_BE_EMPTY = ("content", "output", "arguments")


class InputItem(Body):
    """A message, a call or its result in the input."""

    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str = Field(default="", max_length=512)
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    call_id: str = Field(default="", max_length=4096)
    name: str = Field(default="", max_length=64)
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    @model_validator(mode="after")
    def _check_type(self):
        needed, missing = _ITEMS[self.type], []
        for name in needed:
            value = getattr(self, name)
            if value is None or (value == "" and name not in _MAY_BE_EMPTY):
                missing.append(name)
        if missing:
            raise ValueError(f"{self.type} needs {', '.join(missing)}")
        fields = {name for names in _ITEMS.values() for name in names}
        if foreign := sorted((fields & self.model_fields_set) - set(needed)):
            raise ValueError(f"{self.type} cannot have {', '.join(foreign)}")
        return self


def adapt_item(item: Any) -> Any:
    """Convert an input item; None for thoughts, and for calls that ran on OpenAI's servers."""
    if not isinstance(item, dict):
        return item
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        return item
    if kind == "reasoning" or (kind.endswith("_call") and kind != "function_call"):
        return None
    if kind == "function_call" and "arguments" in item:
        item["arguments"] = write_arguments(item["arguments"])
    for name in ("content", "output"):
        adapt_parts(item, name, "input_text")
    return item


def as_input(item: dict[str, Any]) -> dict[str, Any] | None:
    """Turn an output item into an input item; None for thoughts."""
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
