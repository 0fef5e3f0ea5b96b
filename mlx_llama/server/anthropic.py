"""Anthropic's Messages, and the count of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Completion, Token
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import ToolCall, ToolDelta

from .conversations import (
    Conversing,
    Description,
    SchemaBody,
    ToolName,
    adapt_thinking,
    describe_function,
    format_options,
    plain_call,
    plain_message,
)
from .faults import Fault, Refusal, fault_of, write_anthropic
from .fields import Body, ModelName, Note, OptionFields, Strict, find_conflict, list_places
from .replies import Events, Json, Writer, check_model, count_prompt, event, reply
from .schemas import serves
from .tooling import Piece, Reader, text_of

router = APIRouter(tags=["Anthropic"])

CacheControl = Annotated[
    dict[str, Any] | None, Field(description="has no effect: every prefix is reused")
]


class Block(Body):
    """A part of a message."""

    cache_control: CacheControl = None


class TextBlock(Block):
    """A block of text."""

    type: Literal["text"]
    text: str
    citations: list[Any] = Field([], max_length=0)


class ToolUse(Block):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(max_length=4096)
    name: str = Field(max_length=128)
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description="has no effect")


class ToolResult(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=4096)
    content: str | list[TextBlock] = ""
    is_error: bool | None = Field(None, description="has no effect: the content reports it")


# Blocks that a message of a role cannot have
_FOREIGN = {
    "assistant": ("tool_result",),
    "user": ("tool_use",),
    "system": ("tool_use", "tool_result"),
}


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[TextBlock | ToolUse | ToolResult, Field(discriminator="type")]]

    @model_validator(mode="after")
    def _check_blocks(self):
        foreign, blocks = _FOREIGN[self.role], [] if isinstance(self.content, str) else self.content
        if any(block.type in foreign for block in blocks):
            raise ValueError(f"a message of the {self.role} cannot have {' or '.join(foreign)}")
        return self

    def plain(self) -> list[dict[str, Any]]:
        """Convert to messages for templates: results of calls become separate messages."""
        if isinstance(self.content, str):
            return [plain_message(self.role, self.content)]
        results, texts, calls = [], [], []
        for block in self.content:
            if isinstance(block, ToolResult):
                identity = block.tool_use_id
                results.append(plain_message("tool", block.content, tool_call_id=identity))
            elif isinstance(block, ToolUse):
                calls.append(plain_call(block.id, block.name, block.input))
            else:
                texts.append(block)
        message = plain_message(self.role, texts)
        if calls:
            return [message | {"tool_calls": calls}]
        return [*results, *([message] if message["content"] or not results else [])]


class AnthropicTool(Block):
    """A tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: Description = ""
    input_schema: dict[str, Any]
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


class OutputFormat(SchemaBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Format of the answer."""

    format: OutputFormat | None = None


class Conversation(Conversing):
    """Fields of both routes."""

    noted: ClassVar = list_places(
        "thinking metadata service_tier speed cache_control truncation "
        "system.citations system.cache_control messages.content.cache_control "
        "messages.content.citations messages.content.caller messages.content.is_error "
        "messages.content.content.cache_control messages.content.content.citations "
        "tools.cache_control tools.strict"
    )
    refused: ClassVar[Mapping[str, str]] = {
        "thread": "conversations are not kept: send the messages"
    }
    format_field: ClassVar = "output_config.format"

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

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        adapt_thinking(values, note)
        if "thread" in values:  # clients with threads then send the messages
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            fault = fault_of("thread", "unsupported", cls.refused["thread"])
            raise Refusal(400, "unsupported", [fault], details=details)
        config = values.get("output_config", {})
        if (form := values.pop("output_format", None)) is not None and isinstance(config, dict):
            values["output_config"] = {"format": form, **config}
        tools, choice = values.get("tools"), values.get("tool_choice")
        named = choice.get("name") if isinstance(choice, dict) else None
        if isinstance(tools, list):
            ours: list[Any] = []
            values["tools"] = ours
            for tool in tools:
                kind = tool.get("type") if isinstance(tool, dict) else None
                if kind in (None, "custom") or tool.get("name") == named:
                    ours.append(tool)
                else:  # it runs on Anthropic's servers
                    note(f"tools[].{kind!s:.40}")
        if isinstance(messages := values.get("messages"), list):
            values["messages"] = [_adapt_message(message, note) for message in messages]

    def choice(self) -> tuple[str, bool]:
        choice = self.tool_choice
        name = {"any": "required", "tool": choice.name or ""}.get(choice.type, choice.type)
        return name, not choice.disable_parallel_tool_use

    def form(self) -> dict[str, Any]:
        form = self.output_config.format
        return format_options(form.type, form.schema_) if form else {}

    def plain(self) -> list[dict[str, Any]]:
        """Convert to messages for templates."""
        system = [plain_message("system", self.system)] if self.system else []
        system = [message for message in system if message["content"]]
        return [*system, *(plain for message in self.messages for plain in message.plain())]


class MessagesRequest(OptionFields, Conversation):
    """POST /v1/messages."""

    renamed: ClassVar = OptionFields.renames(stop_sequences="stop", json_schema="schema")
    places: ClassVar[Mapping[str, Sequence[str]]] = {"schema": ("output_config.format.schema",)}

    stream: bool = False
    metadata: Mapping[str, Any] = Field({}, description="has no effect")
    service_tier: Literal["auto", "standard_only"] = "auto"

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        faults = super().check_together(values)
        if "logprobs" in values:
            text = "not available in this API: use /v1/chat/completions"
            faults.append(fault_of("logprobs", "unsupported", text, values["logprobs"]))
        config = values.get("output_config")
        if isinstance(config, dict) and (form := config.get("format")):
            faults += find_conflict("output_config", form, values)
        return faults

    def requested_options(self) -> dict[str, Any]:
        return super().requested_options() | self.form()

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
        elif kind in ("thinking", "redacted_thinking", "server_tool_use") or str(kind).endswith(
            "_tool_result"
        ):
            note(f"messages[].content[].{kind:.40}")
        else:
            kept.append(block)
    return {**message, "content": kept}


class MessagesWriter(Writer):
    """Writes messages: blocks of thoughts, text and calls."""

    prefix = "msg_"
    index: int | None = None  # of the open block; None before the first token
    kind = ""  # of the open block

    def encode(self, value: Any) -> bytes:
        return event(value, value["type"])

    def fail(self, refusal: Refusal) -> bytes:
        return event(write_anthropic(refusal), "error")

    def message(self, content: list[Any], ending: dict[str, Any], usage: Any) -> dict[str, Any]:
        """Write a message. ending: stop_reason and stop_sequence."""
        made = {"id": self.identity, "type": "message", "role": "assistant", "model": self.name}
        return {**made, "content": content, **ending, "usage": usage}

    def whole(self, readers: Sequence[Reader]) -> dict[str, Any]:
        reader = readers[0].finish()
        content = [write_block("thinking", reader.thought)] if reader.thought else []
        if reader.text or not reader.calls:
            content.append(write_block("text", reader.text))
        content += [write_call(call.id, call.name, read_values(call)) for call in reader.calls]
        return self.message(content, write_ending(reader), write_usage(reader.completion))

    def write(self, reader: Reader, token: Token | None, pieces: list[Piece]) -> Events:
        if self.index is None:  # the reused tokens are known now
            self.index = -1
            usage = write_usage(reader.completion) | {"output_tokens": 0}
            ending = {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": self.message([], ending, usage)}
            yield {"type": "ping"}
        for piece in pieces:
            if isinstance(piece, ToolDelta):
                if piece.name is not None:
                    yield from self.open(write_call(piece.id, piece.name, {}))
                if piece.arguments:
                    yield self.delta("input_json_delta", "partial_json", piece.arguments)
                continue
            kind, text = "text", text_of(piece)
            if isinstance(piece, Thought):
                kind = "thinking"
            if kind != self.kind:
                yield from self.open(write_block(kind, ""))
            yield self.delta(f"{kind}_delta", kind, text)

    def open(self, block: dict[str, Any]) -> Events:
        """Open a block, and close the one before."""
        if self.kind:
            yield {"type": "content_block_stop", "index": self.index}
        self.index, self.kind = (self.index or 0) + 1 if self.kind else 0, block["type"]
        yield {"type": "content_block_start", "index": self.index, "content_block": block}

    def delta(self, kind: str, field: str, text: Any) -> dict[str, Any]:
        """Write a part of the open block."""
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def end(self, reader: Reader) -> Events:
        if not self.kind:  # an empty answer is an empty block
            yield from self.open(write_block("text", ""))
        yield {"type": "content_block_stop", "index": self.index}
        usage = write_usage(reader.completion)
        yield {"type": "message_delta", "delta": write_ending(reader), "usage": usage}
        yield {"type": "message_stop"}


def write_block(kind: str, text: str) -> dict[str, Any]:
    """Write a block of text or of a thought."""
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def write_call(identity: str | None, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Write a block with a call."""
    return {"type": "tool_use", "id": identity, "name": name, "input": values}


def read_values(call: ToolCall) -> dict[str, Any]:
    """Parse the arguments of a call; {} if they are unfinished."""
    try:
        return call.values()
    except ValueError:
        return {}


_REASONS = {
    "eos": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
}


def write_ending(reader: Reader) -> dict[str, Any]:
    """Write the reason of an answer's end, and the stop string that matched."""
    reason = _REASONS.get(reader.completion.finish_reason or "", "end_turn")
    if reader.has_called and reader.completion.finish_reason in ("eos", "stop"):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": reader.stop_string}


def write_usage(completion: Completion) -> dict[str, int]:
    """Write Anthropic's usage, whose input_tokens exclude reused ones."""
    return {
        "input_tokens": completion.prompt_tokens - completion.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.reused_tokens,
        "output_tokens": len(completion.tokens),
    }


@serves(router, MessagesRequest, "/v1/messages")
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    writer = MessagesWriter(request, body)
    return await reply(request, [body.ask(body.plain())], writer, body.stream)


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens."""


@serves(router, CountRequest, "/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountRequest) -> Response:
    """Count the tokens of a prompt, as the model sees it."""
    check_model(request, body.model)
    return Json({"input_tokens": await count_prompt(request, body.prompt_ask(body.plain()))})
