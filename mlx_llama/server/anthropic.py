"""Anthropic's Messages, and the count of their tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Literal

import anyio
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Completion

from .answers import Answers, Ask, prepare
from .faults import Refusal, bad_field, write_anthropic
from .fields import Body, OptionFields, read_body
from .guard import request_id
from .openai import join_parts
from .replies import Json, check_model, desk_of, event, reply_stream, reply_whole
from .schemas import takes

router = APIRouter(tags=["Anthropic"])


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] = Field({}, description="has no effect: every prefix is known")
    citations: list[Any] = Field([], max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        return {name: found for name, found in value.items() if found is not None} if isinstance(value, dict) else value


class AnthropicMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["user", "assistant"]
    content: str | list[TextBlock]


class Thinking(Body):
    """No thinking."""

    type: Literal["disabled"]


class Conversation(Body):
    """Fields that both routes take."""

    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("container", "context_management", "mcp_servers", "output_config", "inference_geo"), ""),
        **dict.fromkeys(("tools", "tool_choice"), "not yet")}

    model: str = Field(max_length=512)
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[TextBlock] = ""
    thinking: Thinking | None = None

    def plain(self) -> list[dict[str, str]]:
        """The conversation as templates take it. Raises Refusal."""
        if self.messages[-1].role == "assistant":
            at = f"messages[{len(self.messages) - 1}].role"
            raise bad_field(at, "user", f"{at}: the last message must be the user's: the beginning of an answer is not taken",
                            "assistant")
        system = join_parts(self.system)
        return [*([{"role": "system", "content": system}] if system else []),
                *({"role": message.role, "content": join_parts(message.content)} for message in self.messages)]


class MessagesRequest(OptionFields, Conversation):
    """POST /v1/messages."""

    model_config = Body.model_config
    renamed: ClassVar = {"stop_sequences": "stop"}

    max_tokens: int = Field(ge=0, le=2**31)
    stream: bool = False
    metadata: Mapping[str, Any] = Field({}, description="has no effect")
    service_tier: Literal["auto", "standard_only"] = "auto"

    @field_validator("metadata", mode="before")
    @classmethod
    def _take_metadata(cls, value):
        if not isinstance(value, dict) or set(value) - {"user_id"}:
            raise ValueError("an object with user_id")
        return value


@router.post("/v1/messages", **takes(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, MessagesRequest)
    name = check_model(request, body.model)
    asks = [Ask(body.plain(), "messages", body.given_options())]
    made = {"id": f"msg_{request_id(request)}", "type": "message", "role": "assistant", "model": name}

    def whole(answers: Answers) -> dict[str, Any]:
        completion = answers.completions[0]
        return {**made, "content": [{"type": "text", "text": completion.text}], "stop_reason": stop_reason(completion),
                "stop_sequence": completion.stop, "usage": write_usage(completion)}

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        completion = answers.completions[0]
        begun = False
        async for batch in answers.batches():
            if not begun:  # by now the reused tokens are known
                begun = True
                empty: dict[str, Any] = {**made, "content": [], "stop_reason": None, "stop_sequence": None,
                         "usage": write_usage(completion) | {"output_tokens": 0}}
                yield named({"type": "message_start", "message": empty})
                yield named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
                yield named({"type": "ping"})
            for token in batch.tokens:
                if token.text:
                    yield named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta",
                                                                                      "text": token.text}})
        yield named({"type": "content_block_stop", "index": 0})
        yield named({"type": "message_delta", "delta": {"stop_reason": stop_reason(completion),
                                                        "stop_sequence": completion.stop}, "usage": write_usage(completion)})
        yield named({"type": "message_stop"})

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


def named(value: Mapping[str, Any]) -> bytes:
    """An event with the name that its type says."""
    return event(value, value["type"])


def fail(refusal: Refusal) -> bytes:
    """An error within a stream."""
    return event(write_anthropic(refusal), "error")


def stop_reason(completion: Completion) -> str:
    """Anthropic's word for the end of an answer."""
    return {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens",
            "context": "model_context_window_exceeded"}.get(completion.finish_reason, "end_turn")


def write_usage(completion: Completion) -> dict[str, int]:
    """Anthropic's usage: reused tokens are not among the input's."""
    return {"input_tokens": completion.prompt_tokens - completion.reused_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": completion.reused_tokens, "output_tokens": len(completion.tokens)}


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens."""


@router.post("/v1/messages/count_tokens", **takes(CountRequest))
async def count_tokens(request: Request) -> Response:
    """The tokens of a prompt, as the model sees it."""
    body = await read_body(request, CountRequest)
    check_model(request, body.model)
    ask = Ask(body.plain(), "messages", {})
    desk = desk_of(request)
    llm = await desk.keeper.enter()
    try:
        counted = await anyio.to_thread.run_sync(lambda: len(prepare(llm, ask, desk.settings, fits=False).prompt))
    finally:
        desk.keeper.leave()
    return Json({"input_tokens": counted})
