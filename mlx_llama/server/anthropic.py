"""Anthropic's Messages, and the count of their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.answers.completion import Completion, Token
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import ToolCall, ToolDelta

from .conversations import (
    MESSAGES,
    Conversing,
    FunctionBody,
    SchemaBody,
    TextPart,
    adapt_arguments,
    adapt_parts,
    format_options,
    plain_call,
    plain_message,
    prefer_call,
)
from .faults import Refusal, fault_of, write_anthropic
from .fields import Body, Notes, TextOr, name_kind, spell
from .replies import Events, Writer, count_prompt, event, reply, text_of
from .schemas import serves
from .slots import Task

router = APIRouter(tags=["Anthropic"])

# Answers


class MessagesWriter(Writer):
    """Writes messages: blocks of thoughts, text and calls."""

    prefix = "msg_"
    index: int | None = None  # the open block's; None before the first token
    kind = ""  # the open block's

    def encode(self, value: Any) -> bytes:
        return event(value, value["type"])

    def fail(self, refusal: Refusal) -> bytes:
        return event(write_anthropic(refusal), "error")

    def message(self, content: list[Any], ending: dict[str, Any], usage: Any) -> dict[str, Any]:
        """Write a message. ending: stop_reason and stop_sequence."""
        head = {"id": self.identity, "type": "message", "role": "assistant", "model": self.name}
        return {**head, "content": content, **ending, "usage": usage}

    def whole(self, tasks: Sequence[Task]) -> dict[str, Any]:
        task = tasks[0]
        task.answer.finish()
        content = (
            [write_block("thinking", task.completion.reasoning)]
            if task.completion.reasoning
            else []
        )
        if task.answer.text or not task.answer.calls:
            content.append(write_block("text", task.answer.text))
        content += [write_call(call.id, call.name, read_values(call)) for call in task.answer.calls]
        return self.message(content, write_ending(task), write_usage(task.completion))

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        if self.index is None:  # the first event counts the reused tokens, known only now
            self.index = -1
            usage = write_usage(task.completion) | {"output_tokens": 0}
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
            kind = "thinking" if isinstance(piece, Thought) else "text"
            if kind != self.kind:
                yield from self.open(write_block(kind, ""))
            yield self.delta(f"{kind}_delta", kind, text_of(piece))

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

    def end(self, task: Task) -> Events:
        if not self.kind:  # an empty answer still has a block
            yield from self.open(write_block("text", ""))
        yield {"type": "content_block_stop", "index": self.index}
        usage = write_usage(task.completion)
        yield {"type": "message_delta", "delta": write_ending(task), "usage": usage}
        yield {"type": "message_stop"}


def write_block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def write_call(identity: str | None, name: str, values: dict[str, Any]) -> dict[str, Any]:
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


def write_ending(task: Task) -> dict[str, Any]:
    """Write the reason of an answer's end, and the stop string that matched."""
    reason = _REASONS.get(task.completion.finish_reason or "", "end_turn")
    if task.has_called and task.completion.finish_reason in ("eos", "stop"):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": task.stop_string}


def write_usage(completion: Completion) -> dict[str, int]:
    """Write Anthropic's usage, whose input_tokens exclude reused ones."""
    return {
        "input_tokens": completion.prompt_tokens - completion.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.reused_tokens,
        "output_tokens": len(completion.tokens),
    }


# Requests


class Thinking(Body):
    """A thought of the assistant."""

    type: Literal["thinking"]
    thinking: str


class ToolUse(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(max_length=4096)
    name: str = Field(max_length=128)
    input: dict[str, Any]


class ToolResult(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=4096)
    content: TextOr[list[TextPart]] = ""


# Blocks that a message of a role cannot have
_FOREIGN = {
    "assistant": ("tool_result",),
    "user": ("tool_use",),
    "system": ("tool_use", "tool_result"),
}


_Block = Annotated[
    Annotated[TextPart, Tag("as:text")]
    | Annotated[Thinking, Tag("as:thinking")]
    | Annotated[ToolUse, Tag("as:tool_use")]
    | Annotated[ToolResult, Tag("as:tool_result")],
    Discriminator(name_kind),
]


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[list[_Block]]

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        """Drop blocks of server-side tools, and thoughts that have no text."""
        if not isinstance(blocks := values.get("content"), list):
            return
        adapted = values["content"] = []
        for block in blocks:
            kind = str(block.get("type")) if isinstance(block, dict) else ""
            text = block.get(_TEXTS[kind]) if kind in _TEXTS else None
            is_foreign = kind == "thinking" and (not text or values.get("role") != "assistant")
            is_text = isinstance(text, str) and not is_foreign
            if kind.endswith("_tool_result") or (kind in _PASSED_OVER and not is_text):
                notes.note(f"content[].{kind:.40}")
            else:
                adapted.append(_adapt_block(block, notes))

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
        results, texts, calls, thoughts = [], [], [], []
        for block in self.content:
            if isinstance(block, ToolResult):
                identity = block.tool_use_id
                results.append(plain_message("tool", block.content, tool_call_id=identity))
            elif isinstance(block, ToolUse):
                calls.append(plain_call(block.id, block.name, block.input))
            elif isinstance(block, Thinking):
                thoughts.append(block.thinking)
            else:
                texts.append(block)
        message = plain_message(self.role, texts)
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
            return [message]
        return [*results, *([message] if message["content"] or not results else [])]


class AnthropicTool(FunctionBody):
    """A tool that the model may call."""

    type: Literal["custom"] = "custom"
    parameters: dict[str, Any] = Field(alias="input_schema")


class AnthropicChoice(Body):
    """Choice of whether and which tool to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self):
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type tool needs a name; other types have none")
        return self


class OutputFormat(SchemaBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Format of the answer."""

    format: OutputFormat | None = None


class MessagesRequest(Conversing):
    """POST /v1/messages, and the count of its tokens."""

    model_config = spell(stop="stop_sequences")
    schema_places: ClassVar[Sequence[str]] = ("output_config.format.schema",)
    format_field: ClassVar = "output_config.format"

    messages: list[AnthropicMessage] = MESSAGES
    system: TextOr[list[TextPart]] = ""
    tools: list[AnthropicTool] = []
    tool_choice: AnthropicChoice = Field(
        AnthropicChoice(type="auto"), description="stop sequences do not end a required call"
    )
    output_config: OutputConfig = OutputConfig()

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        super().adapt(values, notes)
        if "thread" in values:  # clients with threads then send the messages
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            text = "conversations are not kept: send the messages"
            fault = fault_of("thread", "unsupported", text)
            raise Refusal(400, "unsupported", [fault], details=details)
        config = values.get("output_config", {})
        if (form := values.pop("output_format", None)) is not None and isinstance(config, dict):
            values["output_config"] = {"format": form, **config}
        prefer_call(values, cls.format_field, notes.note)
        tools, choice = values.get("tools"), values.get("tool_choice")
        named = choice.get("name") if isinstance(choice, dict) else None
        if isinstance(tools, list):
            ours = values["tools"] = []
            for tool in tools:
                kind = tool.get("type") if isinstance(tool, dict) else None
                if kind in (None, "custom") or tool.get("name") == named:
                    ours.append(tool)
                else:  # it runs on Anthropic's servers
                    notes.note(f"tools[].{kind!s:.40}")

    @classmethod
    def check_together(cls, values: Mapping[str, Any], notes: Notes) -> None:
        super().check_together(values, notes)
        if "logprobs" in values:
            text = "not available in this API: use /v1/chat/completions"
            notes.refuse("logprobs", "unsupported", text, values["logprobs"])

    def choice(self) -> tuple[str, bool]:
        choice = self.tool_choice
        name = {"any": "required", "tool": choice.name or ""}.get(choice.type, choice.type)
        return name, not choice.disable_parallel_tool_use

    def form(self) -> dict[str, Any]:
        form = self.output_config.format
        return format_options(form.type, form.schema_) if form else {}

    def plain(self) -> list[dict[str, Any]]:
        """Convert to messages for templates."""
        system = plain_message("system", self.system)
        messages = [plain for message in self.messages for plain in message.plain()]
        return [system, *messages] if system["content"] else messages


# Thoughts, and blocks about tools that run on Anthropic's servers
_PASSED_OVER = (
    "thinking redacted_thinking server_tool_use mcp_tool_use mcp_tool_listing container_upload "
    "tool_addition tool_removal fallback compaction"
).split()


_TEXTS = {"compaction": "content", "thinking": "thinking"}  # fields of those that may have a text


def _adapt_block(block: Any, notes: Notes) -> Any:
    """Turn documents and search results of text into text; read calls with broken arguments."""
    match block:
        case (
            {"type": "document", "source": {"type": "text", "data": text}}
            | {"type": "document", "source": {"type": "content", "content": text}}
            | {"type": "search_result", "content": text}
        ):
            parts = text if isinstance(text, list) else [{"text": text}]
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            if all(isinstance(part, str) for part in texts) and len(texts) == len(parts):
                for name in block.keys() - {"type", "source", "content", "title"}:
                    notes.note(f"content[].{name:.40}")
                title = [block["title"]] if block.get("title") else []
                return {"type": "text", "text": "".join(f"{line}\n" for line in [*title, *texts])}
        case {"type": "compaction", "content": text}:  # the summary of earlier messages
            for name in block.keys() - {"type", "content"}:
                notes.note(f"content[].{name:.40}")
            return {"type": "text", "text": text}
        case {"type": "tool_use"} if not isinstance(block.get("input"), dict):
            arguments = adapt_arguments(block.get("input") or {})
            is_text = isinstance(arguments, str)
            return {**block, "input": json.loads(arguments) if is_text else arguments}
        case {"type": "tool_result", "content": list(content)}:
            block = {**block, "content": [_adapt_block(part, notes) for part in content]}
            notes.path.append("content[]")
            adapt_parts(block, "content", "text", notes)
            notes.path.pop()
    return block


@serves(router, MessagesRequest, "/v1/messages")
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    writer = MessagesWriter(request, body)
    return await reply(request, [body.ask(body.plain())], writer, body.stream)


@serves(router, MessagesRequest, "/v1/messages/count_tokens")
async def count_tokens(request: Request, body: MessagesRequest) -> Response:
    """Count the tokens of a prompt, as the model sees it."""
    return await count_prompt(request, body.model, body.ask(body.plain()))
