"""OpenAI's chat completions, completions and models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from .answers import Answers, Batch
from .faults import Fault, Refusal
from .fields import Body, OptionFields, read_body
from .guard import request_id
from .replies import (
    DONE,
    FINGERPRINT,
    Json,
    check_model,
    choices_of,
    desk_of,
    event,
    finish_reason,
    reply_stream,
    reply_whole,
    served_names,
    write_openai,
    write_timings,
    write_usage,
)
from .schemas import takes

router = APIRouter(tags=["OpenAI"])


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    refusal: Literal[""] = ""  # assistants' messages come back with these, empty
    annotations: list[Any] = Field([], max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        return {name: found for name, found in value.items() if found is not None} if isinstance(value, dict) else value

    def plain(self) -> dict[str, str]:
        """The message as templates take it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": join_parts(self.content)}


def join_parts(content: Any) -> str:
    """The text of a message's parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class CommonFields(OptionFields):
    """Fields of both kinds of completion."""

    model: str | None = Field(None, max_length=512)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=16, description="answers to each prompt; with a seed, answer i draws with seed + i")
    user: str | None = Field(None, max_length=512, description="has no effect")

    @model_validator(mode="after")
    def _check_stream_options(self):
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self


class ChatRequest(CommonFields):
    """POST /v1/chat/completions."""

    renamed: ClassVar = {"max_completion_tokens": "max_tokens"}
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("audio", "prediction", "web_search_options", "reasoning_effort", "verbosity", "moderation",
                         "prompt_cache_retention", "prompt_cache_options"), ""),
        "functions": "use tools", "function_call": "use tool_choice",
        **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "top_logprobs"), "not yet"),
    }

    messages: list[Message] = Field(min_length=1)
    logprobs: Literal[False] = False
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] = ["text"]
    store: Literal[False] = Field(False, description="answers are not kept")
    service_tier: Literal["auto", "default"] = "auto"
    metadata: dict[str, str] = Field({}, max_length=16, description="has no effect without store")
    safety_identifier: str | None = Field(None, max_length=512, description="has no effect")
    prompt_cache_key: str | None = Field(None, max_length=512, description="has no effect: every prefix is known")


class TextFormat(Body):
    """Plain text."""

    type: Literal["text"]


ChatRequest.model_rebuild()


@router.post("/v1/chat/completions", **takes(ChatRequest))
@router.post("/chat/completions", include_in_schema=False)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    name = check_model(request, body.model)
    messages = [message.plain() for message in body.messages]
    asks = choices_of(body.given_options(), [messages], "messages", body.n)
    made = {"id": f"chatcmpl-{request_id(request)}", "created": int(time.time()), "model": name,
            "system_fingerprint": FINGERPRINT}

    def whole(answers: Answers) -> dict[str, Any]:
        choices = [{"index": i, "message": {"role": "assistant", "content": completion.text, "refusal": None},
                    "logprobs": None, "finish_reason": finish_reason(completion)}
                   for i, completion in enumerate(answers.completions)]
        return {**made, "object": "chat.completion", "choices": choices, "usage": write_usage(answers),
                "timings": write_timings(answers.completions[0])}

    def delta(i: int, content: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        usage = {"usage": None} if body.stream_options.include_usage else {}
        return event({**made, "object": "chat.completion.chunk", **usage, "choices": [
            {"index": i, "delta": content, "logprobs": None, "finish_reason": reason}], **more})

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        for i in range(body.n):
            yield delta(i, {"role": "assistant", "content": ""})
        async for batch in answers.batches():
            for token in batch.tokens:
                if token.text:
                    yield delta(batch.index, {"content": token.text})
            if batch.is_last:
                yield delta(batch.index, {}, *_end(answers, batch))
        if body.stream_options.include_usage:
            yield event({**made, "object": "chat.completion.chunk", "choices": [], "usage": write_usage(answers),
                         "timings": write_timings(answers.completions[0])})
        yield DONE

    def _end(answers: Answers, batch: Batch) -> tuple[str]:
        return (finish_reason(answers.completions[batch.index]),)

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


def fail(refusal: Refusal) -> bytes:
    """An error within a stream."""
    return event(write_openai(refusal))


class CompletionRequest(CommonFields):
    """POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, str]] = {"suffix": "", "logprobs": "not yet"}

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = Field(False, description="put the prompt before the answer")
    best_of: Literal[1] = 1


def split_prompts(prompt: Any, most: int) -> list[Any]:
    """The prompts of a field that takes one or several. Raises Refusal."""
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    if len(prompts) > most:
        raise Refusal(400, "invalid_value", [Fault("prompt", f"at most {most} prompts",
                                                   f"prompt: has {len(prompts)} prompts, at most {most} are taken")])
    if any(isinstance(one, list) and not one for one in prompts):
        raise Refusal(400, "invalid_value", [Fault("prompt", "at least 1 token", "prompt: has no token")])
    return prompts


@router.post("/v1/completions", **takes(CompletionRequest))
@router.post("/completions", include_in_schema=False)
async def complete(request: Request) -> Response:
    """Continue a text."""
    body = await read_body(request, CompletionRequest)
    name = check_model(request, body.model)
    settings = desk_of(request).settings
    prompts = split_prompts(body.prompt, settings.max_choices)
    if len(prompts) * body.n > settings.max_choices:
        raise Refusal(400, "invalid_value", [Fault("n", f"at most {settings.max_choices} answers", f"n: {len(prompts)} prompts "
                                                   f"of {body.n} answers each, at most {settings.max_choices} are taken")])
    asks = choices_of(body.given_options(), prompts, "prompt", body.n)
    made = {"id": f"cmpl-{request_id(request)}", "object": "text_completion", "created": int(time.time()), "model": name,
            "system_fingerprint": FINGERPRINT}

    def opening(answers: Answers, i: int) -> str:
        if not body.echo:
            return ""
        prompt = prompts[i // body.n]
        return prompt if isinstance(prompt, str) else answers.llm.tokenizer.decode(prompt)

    def whole(answers: Answers) -> dict[str, Any]:
        choices = [{"index": i, "text": opening(answers, i) + completion.text, "logprobs": None,
                    "finish_reason": finish_reason(completion)} for i, completion in enumerate(answers.completions)]
        return {**made, "choices": choices, "usage": write_usage(answers), "timings": write_timings(answers.completions[0])}

    def piece(i: int, text: str, reason: str | None = None) -> bytes:
        usage = {"usage": None} if body.stream_options.include_usage else {}
        return event({**made, **usage, "choices": [{"index": i, "text": text, "logprobs": None, "finish_reason": reason}]})

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        for i in range(len(asks)):
            if text := opening(answers, i):
                yield piece(i, text)
        async for batch in answers.batches():
            for token in batch.tokens:
                if token.text:
                    yield piece(batch.index, token.text)
            if batch.is_last:
                yield piece(batch.index, "", finish_reason(answers.completions[batch.index]))
        if body.stream_options.include_usage:
            yield event({**made, "choices": [], "usage": write_usage(answers)})
        yield DONE

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> Response:
    """The model of this server."""
    llm = desk_of(request).keeper.llm
    meta = None if llm is None else {"n_vocab": llm.model.config.vocab_size, "n_ctx": llm.engine.context,
                                     "n_ctx_train": llm.model.config.max_position_embeddings}
    return Json({"object": "list", "data": [_model(request, name) | {"meta": meta} for name in served_names(request)]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One model by its name."""
    return Json(_model(request, check_model(request, name)))


def _model(request: Request, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(request.app.state.started), "owned_by": "mlx_llama"}
