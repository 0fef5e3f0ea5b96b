"""OpenAI's Responses: text in, text out, nothing kept."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Completion

from .answers import Answers, Ask
from .faults import Refusal, bad_field
from .fields import Body, OptionFields, read_body
from .guard import request_id
from .openai import TextFormat, join_parts
from .replies import check_model, event, reply_stream, reply_whole
from .schemas import takes

router = APIRouter(tags=["OpenAI"])


class InputPart(BaseModel):
    """A part of an item: text of a question, or of an earlier answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: list[Any] = Field([], max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        return {name: found for name, found in value.items() if found is not None} if isinstance(value, dict) else value


class InputItem(BaseModel):
    """A message among the input."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str = Field("", max_length=512)
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        return {name: found for name, found in value.items() if found is not None} if isinstance(value, dict) else value


class TextConfig(Body):
    """Format of the answer."""

    format: TextFormat = TextFormat(type="text")


class ResponsesRequest(OptionFields):
    """POST /v1/responses."""

    renamed: ClassVar = {"max_output_tokens": "max_tokens"}
    unsupported: ClassVar[Mapping[str, str]] = {
        "previous_response_id": "answers are not kept: send the conversation as input",
        "conversation": "answers are not kept: send the conversation as input",
        **dict.fromkeys(("reasoning", "prompt", "max_tool_calls", "background", "stream_options", "top_logprobs", "moderation",
                         "context_management", "prompt_cache_retention"), ""),
        **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "not yet"),
    }

    input: str | list[InputItem] = Field(min_length=1)
    instructions: str = ""
    model: str | None = Field(None, max_length=512)
    stream: bool = False
    text: TextConfig = TextConfig()
    store: Literal[False] = Field(False, description="answers are not kept")
    truncation: Literal["disabled"] = "disabled"
    include: list[Any] = Field([], max_length=0)
    service_tier: Literal["auto", "default"] = "auto"
    metadata: dict[str, str] = Field({}, max_length=16, description="comes back with the answer")
    user: str | None = Field(None, max_length=512, description="has no effect")
    safety_identifier: str | None = Field(None, max_length=512, description="has no effect")
    prompt_cache_key: str | None = Field(None, max_length=512, description="has no effect: every prefix is known")

    def plain(self) -> list[dict[str, str]]:
        """The conversation as templates take it. Raises Refusal."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [
            {"role": "system" if item.role == "developer" else item.role, "content": join_parts(item.content)}
            for item in self.input]
        if not any(item["role"] == "user" for item in items):
            raise bad_field("input", "a message of the user", "input: has no message of the user")
        return [*([{"role": "system", "content": self.instructions}] if self.instructions else []), *items]


@router.post("/v1/responses", **takes(ResponsesRequest))
@router.post("/responses", include_in_schema=False)
async def respond(request: Request) -> Response:
    """Answer an input."""
    body = await read_body(request, ResponsesRequest)
    name = check_model(request, body.model)
    asks = [Ask(body.plain(), "input", body.given_options())]
    identity, created = request_id(request), int(time.time())

    def response(answers: Answers, status: str, output: list[Any]) -> dict[str, Any]:
        completion = answers.completions[0]
        options = completion.options
        is_over = status not in ("in_progress", "queued")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {"id": f"resp_{identity}", "object": "response", "created_at": created, "status": status, "error": None,
                "incomplete_details": reason, "instructions": body.instructions or None,
                "max_output_tokens": options.get("max_tokens"), "model": name, "output": output, "parallel_tool_calls": False,
                "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
                "temperature": options.get("temperature"), "text": {"format": {"type": "text"}}, "tool_choice": "none",
                "tools": [], "top_p": options.get("top_p"), "truncation": "disabled", "user": body.user,
                "metadata": body.metadata, "usage": write_usage(completion) if is_over else None}

    def item(status: str, content: list[Any]) -> dict[str, Any]:
        return {"type": "message", "id": f"msg_{identity}", "status": status, "role": "assistant", "content": content}

    def part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def whole(answers: Answers) -> dict[str, Any]:
        completion = answers.completions[0]
        status = status_of(completion)
        return response(answers, status, [item(status, [part(completion.text)])])

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        number = -1
        place = {"item_id": f"msg_{identity}", "output_index": 0, "content_index": 0}

        def told(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number, **fields}, kind)

        yield told("response.created", response=response(answers, "in_progress", []))
        yield told("response.in_progress", response=response(answers, "in_progress", []))
        yield told("response.output_item.added", output_index=0, item=item("in_progress", []))
        yield told("response.content_part.added", **place, part=part(""))
        async for batch in answers.batches():
            for token in batch.tokens:
                if token.text:
                    yield told("response.output_text.delta", **place, delta=token.text, logprobs=[])
        completion = answers.completions[0]
        status = status_of(completion)
        content = part(completion.text)
        yield told("response.output_text.done", **place, text=completion.text, logprobs=[])
        yield told("response.content_part.done", **place, part=content)
        yield told("response.output_item.done", output_index=0, item=item(status, [content]))
        yield told(f"response.{status}", response=response(answers, status, [item(status, [content])]))

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


def fail(refusal: Refusal) -> bytes:
    """An error within a stream."""
    return event({"type": "error", "code": refusal.code, "message": refusal.message, "param": None, "sequence_number": 0},
                 "error")


def status_of(completion: Completion) -> str:
    """Whether the answer ended by itself."""
    return "incomplete" if completion.finish_reason in ("length", "context") else "completed"


def write_usage(completion: Completion) -> dict[str, Any]:
    """The usage of a response."""
    read, written = completion.prompt_tokens, len(completion.tokens)
    return {"input_tokens": read, "input_tokens_details": {"cached_tokens": completion.reused_tokens,
                                                           "cache_write_tokens": 0},
            "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written}
