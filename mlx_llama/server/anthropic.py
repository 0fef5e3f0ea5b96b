"""Anthropic's Messages, and the count of their tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Completion
from mlx_llama.core.generation.tool_use import Toolbox
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import ToolCall, ToolDelta

from .answers import Answers, Ask
from .faults import Fault, Refusal, write_anthropic
from .fields import (
    Body,
    ModelName,
    Note,
    OptionFields,
    Strict,
    TemplateVariables,
    find_conflict,
    list_places,
    read_body,
)
from .guard import request_id
from .openai import adapt_thinking, join_parts
from .replies import Json, check_model, count_prompt, event, reply_stream, reply_whole
from .schemas import takes
from .tooling import (
    TOOL_NAME,
    Reader,
    are_complete,
    build_toolbox,
    check_rule,
    check_schema,
    describe_function,
    read_answer,
)

router = APIRouter(tags=["Anthropic"])

CacheControl = Annotated[
    dict[str, Any] | None, Field(description="has no effect: every prefix is reused")
]


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] = Field([], max_length=0)


class ToolUse(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(max_length=4096)
    name: str = Field(max_length=128)
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = Field(None, description="has no effect")


class ToolResult(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=4096)
    content: str | list[TextBlock] = ""
    is_error: bool | None = Field(None, description="has no effect: the content reports it")
    cache_control: CacheControl = None


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[TextBlock | ToolUse | ToolResult, Field(discriminator="type")]]

    @model_validator(mode="after")
    def _check_blocks(self):
        foreign = {
            "assistant": ("tool_result",),
            "user": ("tool_use",),
            "system": ("tool_use", "tool_result"),
        }[self.role]
        if not isinstance(self.content, str) and any(
            block.type in foreign for block in self.content
        ):
            raise ValueError(f"a message of the {self.role} cannot have {' or '.join(foreign)}")
        return self

    def plain(self) -> list[dict[str, Any]]:
        """Convert to messages for templates: results of calls become separate messages."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {
                "role": "tool",
                "content": join_parts(block.content),
                "tool_call_id": block.tool_use_id,
            }
            for block in self.content
            if isinstance(block, ToolResult)
        ]
        text = join_parts([block for block in self.content if isinstance(block, TextBlock)])
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.input},
            }
            for block in self.content
            if isinstance(block, ToolUse)
        ]
        if calls:
            return [{"role": self.role, "content": text, "tool_calls": calls}]
        return [*results, *([{"role": self.role, "content": text}] if text or not results else [])]


class AnthropicTool(Body):
    """A tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=TOOL_NAME)
    description: str = Field("", max_length=1 << 18)
    input_schema: dict[str, Any]
    cache_control: CacheControl = None
    strict: Strict = None

    def described(self) -> dict[str, Any]:
        """Describe the tool for core."""
        return describe_function(self.name, self.description, self.input_schema)


class AnthropicChoice(Body):
    """Choice of whether and which tool to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self):
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("the type tool needs a name, and others have none")
        return self


class Thinking(Body):
    """No thinking."""

    type: Literal["disabled"]


class OutputFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    @model_validator(mode="after")
    def _check(self):
        check_schema(self.schema_)
        return self


class OutputConfig(Body):
    """Format of the answer."""

    format: OutputFormat | None = None


class Conversation(Body):
    """Fields of both routes."""

    noted: ClassVar = list_places(
        "thinking metadata service_tier speed cache_control system.citations system.cache_control "
        "messages.content.cache_control messages.content.citations messages.content.caller "
        "messages.content.is_error messages.content.content.cache_control "
        "messages.content.content.citations tools.cache_control tools.strict"
    )
    refused: ClassVar[Mapping[str, str]] = {
        "thread": "conversations are not kept: send the messages"
    }

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        adapt_thinking(values, note)
        if "thread" in values:  # clients with threads then send the messages
            text = f"thread: {cls.refused['thread']}"
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            fault = Fault("thread", "unsupported", text)
            raise Refusal(400, "unsupported", [fault], details=details)
        config = values.get("output_config", {})
        if (form := values.pop("output_format", None)) is not None and isinstance(config, dict):
            values["output_config"] = {"format": form, **config}
        tools, choice = values.get("tools"), values.get("tool_choice")
        named = choice.get("name") if isinstance(choice, dict) else None
        if isinstance(tools, list):
            values["tools"] = [
                tool
                for tool in tools
                if not isinstance(tool, dict)
                or tool.get("type") in (None, "custom")
                or tool.get("name") == named
            ]
            for tool in tools:
                if tool not in values["tools"]:  # it runs on Anthropic's servers
                    note(f"tools[].{tool['type']!s:.40}")
        if isinstance(messages := values.get("messages"), list):
            values["messages"] = [_adapt_message(message, note) for message in messages]

    model: ModelName = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[TextBlock] = ""
    thinking: Thinking | None = None
    tools: list[AnthropicTool] = []
    tool_choice: AnthropicChoice = Field(
        AnthropicChoice(type="auto"), description="stop sequences do not end a required call"
    )
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl = None
    speed: Literal["standard"] = "standard"
    chat_template_kwargs: TemplateVariables = {}

    def toolbox(self) -> Toolbox:
        """Build the toolbox. Raises Refusal."""
        choice = {"any": "required", "tool": self.tool_choice.name or ""}.get(
            self.tool_choice.type, self.tool_choice.type
        )
        many = not self.tool_choice.disable_parallel_tool_use
        return build_toolbox([tool.described() for tool in self.tools], choice, many)

    def plain(self) -> list[dict[str, Any]]:
        """Convert to messages for templates. Raises Refusal."""
        system = join_parts(self.system)
        return [
            *([{"role": "system", "content": system}] if system else []),
            *(plain for message in self.messages for plain in message.plain()),
        ]


class MessagesRequest(OptionFields, Conversation):
    """POST /v1/messages."""

    model_config = Body.model_config
    renamed: ClassVar = OptionFields.renamed | {"stop_sequences": "stop", "json_schema": "schema"}
    places: ClassVar[Mapping[str, Sequence[str]]] = {"schema": ("output_config.format.schema",)}

    stream: bool = False
    metadata: Mapping[str, Any] = Field({}, description="has no effect")
    service_tier: Literal["auto", "standard_only"] = "auto"

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        faults = super().check_together(values)
        if "logprobs" in values:
            text = "logprobs: not available in this API: use /v1/chat/completions"
            faults.append(Fault("logprobs", "unsupported", text, values["logprobs"]))
        config = values.get("output_config")
        if isinstance(config, dict) and (form := config.get("format")):
            faults += find_conflict("output_config", form, values)
        return faults

    def requested_options(self) -> dict[str, Any]:
        form = self.output_config.format
        return super().requested_options() | ({"schema": form.schema_} if form else {})

    @field_validator("metadata", mode="before")
    @classmethod
    def _take_metadata(cls, value):
        if not isinstance(value, dict) or set(value) - {"user_id"}:
            raise ValueError("must be an object with user_id")
        return value


def _adapt_message(message: Any, note: Note) -> Any:
    """Drop a message's thoughts and server-side tools; turn its text documents into text."""
    if not isinstance(message, dict) or not isinstance(blocks := message.get("content"), list):
        return message
    kept = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        source = block.get("source") if kind == "document" else None
        if isinstance(source, dict) and source.get("type") == "text":
            title = f"{block['title']}\n" if block.get("title") else ""
            kept.append({"type": "text", "text": f"{title}{source.get('data', '')}\n"})
        elif (
            kind in ("thinking", "redacted_thinking")
            or str(kind).endswith("_tool_result")
            or kind == "server_tool_use"
        ):
            note(f"messages[].content[].{kind:.40}")
        else:
            kept.append(block)
    return {**message, "content": kept}


@router.post("/v1/messages", **takes(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, MessagesRequest)
    name = check_model(request, body.model)
    box, options = body.toolbox(), body.requested_options()
    check_rule(box, options, "output_config.format" if body.output_config.format else "")
    asks = [Ask(body.plain(), "messages", options, box, variables=body.chat_template_kwargs)]
    made = {
        "id": f"msg_{request_id(request)}",
        "type": "message",
        "role": "assistant",
        "model": name,
    }

    def whole(answers: Answers) -> dict[str, Any]:
        completion = answers.completions[0]
        text, calls, thought, _ = read_answer(answers, 0, box)
        content: list[dict[str, Any]] = (
            [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        )
        content += [{"type": "text", "text": text}] if text or not calls else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": read_values(call)}
            for call in calls
        ]
        return {
            **made,
            "content": content,
            "stop_reason": stop_reason(completion, calls),
            "stop_sequence": stop_sequence(completion),
            "usage": write_usage(completion),
        }

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        completion = answers.completions[0]
        reader, begun = Reader(answers, 0, box), False
        index, kind = -1, ""  # the open block
        async for batch in answers.batches():
            if not begun:  # the reused tokens are known now
                begun = True
                empty: dict[str, Any] = {
                    **made,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": write_usage(completion) | {"output_tokens": 0},
                }
                yield named({"type": "message_start", "message": empty})
                yield named({"type": "ping"})
            for piece in reader.read(batch.tokens, batch.is_last):
                block: dict[str, Any] | None = None
                if isinstance(piece, Thought):
                    change = {"type": "thinking_delta", "thinking": piece.text}
                    if kind != "thinking":
                        block = {"type": "thinking", "thinking": "", "signature": ""}
                elif isinstance(piece, str):
                    change = {"type": "text_delta", "text": piece}
                    if kind != "text":
                        block = {"type": "text", "text": ""}
                else:
                    change = {"type": "input_json_delta", "partial_json": piece.arguments}
                    if piece.name is not None:
                        call: dict[str, Any] = {"id": piece.id, "name": piece.name, "input": {}}
                        block = {"type": "tool_use", **call}
                if block is not None:
                    if kind:
                        yield named({"type": "content_block_stop", "index": index})
                    index, kind = index + 1, block["type"]
                    yield named(
                        {"type": "content_block_start", "index": index, "content_block": block}
                    )
                if not isinstance(piece, ToolDelta) or piece.arguments:
                    yield named({"type": "content_block_delta", "index": index, "delta": change})
        if not kind:  # an empty answer is an empty block
            index = 0
            block = {"type": "text", "text": ""}
            yield named({"type": "content_block_start", "index": index, "content_block": block})
        yield named({"type": "content_block_stop", "index": index})
        reason = stop_reason(completion, reader.calls)
        yield named(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": stop_sequence(completion)},
                "usage": write_usage(completion),
            }
        )
        yield named({"type": "message_stop"})

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


def named(value: Mapping[str, Any]) -> bytes:
    """Write an event with its type as its name."""
    return event(value, value["type"])


def fail(refusal: Refusal) -> bytes:
    """Write an error within a stream."""
    return event(write_anthropic(refusal), "error")


def read_values(call: ToolCall) -> dict[str, Any]:
    """Parse the arguments of a call; {} if they are unfinished."""
    try:
        return call.values()
    except ValueError:
        return {}


def stop_reason(completion: Completion, calls: Sequence[ToolCall] = ()) -> str:
    """Return Anthropic's stop_reason."""
    if are_complete(calls) and completion.finish_reason in ("eos", "stop"):
        return "tool_use"
    return {
        "eos": "end_turn",
        "stop": "stop_sequence",
        "length": "max_tokens",
        "context": "model_context_window_exceeded",
    }.get(completion.finish_reason, "end_turn")


def stop_sequence(completion: Completion) -> str | None:
    """Return the stop string that matched, or None."""
    return completion.stop if isinstance(completion.stop, str) else None


def write_usage(completion: Completion) -> dict[str, int]:
    """Write Anthropic's usage, whose input_tokens exclude reused ones."""
    return {
        "input_tokens": completion.prompt_tokens - completion.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.reused_tokens,
        "output_tokens": len(completion.tokens),
    }


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens."""


@router.post("/v1/messages/count_tokens", **takes(CountRequest))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt, as the model sees it."""
    body = await read_body(request, CountRequest)
    check_model(request, body.model)
    variables = body.chat_template_kwargs
    ask = Ask(body.plain(), "messages", {}, body.toolbox(), variables=variables)
    return Json({"input_tokens": await count_prompt(request, ask)})
