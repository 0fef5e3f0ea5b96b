"""OpenAI's Responses: text in, text out, nothing kept."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Completion
from mlx_llama.core.text.tools import ToolCall

from .answers import Answers, Ask
from .faults import Refusal, bad_field
from .fields import Body, OptionFields, read_body
from .guard import request_id
from .openai import join_parts
from .replies import check_model, event, reply_stream, reply_whole
from .schemas import takes
from .tooling import FunctionBody, Reader, Toolbox, build_toolbox, check_schema, read_answer

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
    """A message, a call or its result among the input."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str = Field("", max_length=512)
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    call_id: str = Field("", max_length=256)
    name: str = Field("", max_length=64)
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    @model_validator(mode="after")
    def _check_type(self):
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
                  "function_call_output": ("call_id", "output")}[self.type]
        missing = [
            name
            for name in needed
            if getattr(self, name) in (None, "")
            and name not in ("content", "output", "arguments")
            or getattr(self, name) is None
        ]
        given = {"role", "content", "call_id", "name", "arguments", "output"} & self.model_fields_set
        if missing:
            raise ValueError(f"{self.type} needs {', '.join(missing)}")
        if given - set(needed):
            raise ValueError(f"{self.type} has no {', '.join(sorted(given - set(needed)))}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value):
        return {name: found for name, found in value.items() if found is not None} if isinstance(value, dict) else value


class TextFormat(Body):
    """Any text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = Field("", max_length=64)
    description: str = Field("", max_length=1 << 16, description="has no effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="has no effect: the schema is always enforced")

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is for the type json_schema, which needs it")
        if self.schema_ is not None:
            check_schema(self.schema_)
        return self

    def options(self) -> dict[str, Any]:
        """The option that enforces the format."""
        return {} if self.type == "text" else {"schema": {"type": "object"} if self.schema_ is None else self.schema_}


class TextConfig(Body):
    """Format of the answer."""

    format: TextFormat = TextFormat.model_validate({})


class ResponsesTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class ResponsesChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(OptionFields):
    """POST /v1/responses."""

    renamed: ClassVar = {"max_output_tokens": "max_tokens"}
    unsupported: ClassVar[Mapping[str, str]] = {
        "previous_response_id": "answers are not kept: send the conversation as input",
        "conversation": "answers are not kept: send the conversation as input",
        **dict.fromkeys(
            (
                "reasoning",
                "prompt",
                "max_tool_calls",
                "background",
                "stream_options",
                "top_logprobs",
                "moderation",
                "context_management",
                "prompt_cache_retention",
            ),
            "",
        ),
    }

    input: str | list[InputItem] = Field(min_length=1)
    instructions: str = ""
    model: str | None = Field(None, max_length=512)
    stream: bool = False
    text: TextConfig = TextConfig()
    tools: list[ResponsesTool] = []
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice = "auto"
    parallel_tool_calls: bool = True
    store: Literal[False] = Field(False, description="answers are not kept")
    truncation: Literal["disabled"] = "disabled"
    include: list[Any] = Field([], max_length=0)
    service_tier: Literal["auto", "default"] = "auto"
    metadata: dict[str, str] = Field({}, max_length=16, description="comes back with the answer")
    user: str | None = Field(None, max_length=512, description="has no effect")
    safety_identifier: str | None = Field(None, max_length=512, description="has no effect")
    prompt_cache_key: str | None = Field(None, max_length=512, description="has no effect: every prefix is known")

    def plain(self) -> list[dict[str, Any]]:
        """The conversation as templates take it. Raises Refusal."""
        items: list[dict[str, Any]] = []
        for item in (
            [InputItem.model_validate({"role": "user", "content": self.input})]
            if isinstance(self.input, str)
            else self.input
        ):
            if item.type == "function_call":
                call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
                if items and items[-1]["role"] == "assistant":  # one message of the assistant has text and calls
                    items[-1].setdefault("tool_calls", []).append(call)
                else:
                    items.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif item.type == "function_call_output":
                items.append({"role": "tool", "content": join_parts(item.output), "tool_call_id": item.call_id})
            else:
                role = "system" if item.role == "developer" else item.role
                items.append({"role": role, "content": join_parts(item.content)})
        if not any(item["role"] == "user" for item in items):
            raise bad_field("input", "a message of the user", "input: has no message of the user")
        return [*([{"role": "system", "content": self.instructions}] if self.instructions else []), *items]

    def given_options(self) -> dict[str, Any]:
        return super().given_options() | self.text.format.options()

    def toolbox(self) -> Toolbox:
        """The tools. Raises Refusal."""
        choice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.name
        return build_toolbox([tool.described() for tool in self.tools], choice, self.parallel_tool_calls)


@router.post("/v1/responses", **takes(ResponsesRequest))
@router.post("/responses", include_in_schema=False)
async def respond(request: Request) -> Response:
    """Answer an input."""
    body = await read_body(request, ResponsesRequest)
    name = check_model(request, body.model)
    box = body.toolbox()
    asks = [Ask(body.plain(), "input", body.given_options(), box)]
    identity, created = request_id(request), int(time.time())

    def response(answers: Answers, status: str, output: list[Any]) -> dict[str, Any]:
        completion = answers.completions[0]
        options = completion.options
        is_over = status not in ("in_progress", "queued")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions or None,
            "max_output_tokens": options.get("max_tokens"),
            "model": name,
            "output": output,
            "parallel_tool_calls": box.many,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": options.get("temperature"),
            "text": body.text.model_dump(exclude_none=True),
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": options.get("top_p"),
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata,
            "usage": write_usage(completion) if is_over else None,
        }

    def item(status: str, content: list[Any]) -> dict[str, Any]:
        return {"type": "message", "id": f"msg_{identity}", "status": status, "role": "assistant", "content": content}

    def part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def called(call: Any, status: str) -> dict[str, Any]:
        return {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name,
                "arguments": call.arguments, "status": status}

    def whole(answers: Answers) -> dict[str, Any]:
        completion = answers.completions[0]
        status = status_of(completion)
        text, calls = read_answer(answers.llm, box, completion)
        output = [item(status, [part(text)])] if text or not calls else []
        return response(answers, status, [*output, *(called(call, "completed" if call.is_complete else "incomplete")
                                                     for call in calls)])

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        number = -1
        reader = Reader(answers.llm, box)
        output: list[dict[str, Any]] = []  # items that have ended
        text: str | None = None  # of the open message
        call: ToolCall | None = None  # the open call

        def told(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number, **fields}, kind)

        def place() -> dict[str, Any]:
            return {"item_id": f"msg_{identity}", "output_index": len(output), "content_index": 0}

        def begin_text() -> Iterator[bytes]:
            nonlocal text
            text = ""
            yield told("response.output_item.added", output_index=len(output), item=item("in_progress", []))
            yield told("response.content_part.added", **place(), part=part(""))

        def end(status: str) -> Iterator[bytes]:
            """End the open item."""
            nonlocal text, call
            if text is not None:
                yield told("response.output_text.done", **place(), text=text, logprobs=[])
                yield told("response.content_part.done", **place(), part=part(text))
                done = item(status, [part(text)])
                yield told("response.output_item.done", output_index=len(output), item=done)
                output.append(done)
            if call is not None:
                done = called(call, "completed" if call.is_complete else "incomplete")
                yield told("response.function_call_arguments.done", item_id=done["id"], output_index=len(output),
                           name=call.name, arguments=call.arguments)
                yield told("response.output_item.done", output_index=len(output), item=done)
                output.append(done)
            text = call = None

        yield told("response.created", response=response(answers, "in_progress", []))
        yield told("response.in_progress", response=response(answers, "in_progress", []))
        if not box.offered:
            for one in begin_text():
                yield one
        async for batch in answers.batches():
            pieces = [piece for token in batch.tokens for piece in reader.push(token.text)]
            for piece in pieces + (reader.push("", is_last=True) if batch.is_last else []):
                if isinstance(piece, str):
                    if text is None:
                        for one in [*end("completed"), *begin_text()]:
                            yield one
                    text = (text or "") + piece
                    yield told("response.output_text.delta", **place(), delta=piece, logprobs=[])
                    continue
                if piece.name is not None:
                    for one in end("completed"):
                        yield one
                    call = reader.calls[piece.index]
                    begun = called(call, "in_progress") | {"arguments": ""}
                    yield told("response.output_item.added", output_index=len(output), item=begun)
                if piece.arguments and call:
                    yield told("response.function_call_arguments.delta", item_id=f"fc_{call.id}", output_index=len(output),
                               delta=piece.arguments)
        status = status_of(answers.completions[0])
        if not output and text is None and call is None:
            for one in begin_text():
                yield one
        for one in end(status):
            yield one
        yield told(f"response.{status}", response=response(answers, status, output))

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
