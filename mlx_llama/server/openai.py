"""OpenAI's chat completions, completions and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.answers.completion import Token
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.text.thoughts import Thought

from .admission import PromptRequest
from .completions import CommonFields, OpenAIWriter
from .conversations import (
    MESSAGES,
    FunctionTool,
    Message,
    NamedSchema,
    OpenAIFields,
    SchemaBody,
    format_options,
    plain_messages,
)
from .faults import bad_field
from .fields import HIDDEN, Notes, SchemaValue, spell, unavailable
from .replies import Events, choices_of, count_prompt, list_logprobs, reply
from .schemas import serves
from .slots import Task

router = APIRouter(tags=["OpenAI"])


class ResponseFormat(SchemaBody):
    """Format of the answer: text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: SchemaValue | None = Field(
        default=None, alias="schema", description="for json_object, as in llama-server"
    )

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "type json_schema needs the field json_schema; other types have no such field"
            )
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("only the type json_object has a schema")
        return self


class ChatFields(OpenAIFields):
    """Fields of a conversation on any route."""

    model_config = spell(max_tokens="max_completion_tokens", top_logprobs="n_probs")
    schema_places: ClassVar[Sequence[str]] = (
        "response_format.json_schema.schema",
        "response_format.schema",
    )
    format_field: ClassVar = "response_format"

    messages: list[Message] = MESSAGES
    logprobs: bool = Field(False, description="report the log-probability of each token")  # type: ignore[assignment]
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] = []
    modalities: list[Literal["text"]] = ["text"]
    audio: Annotated[Any, unavailable(reason=""), HIDDEN] = None

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if isinstance(functions := values.get("functions"), list):
            tools = [{"type": "function", "function": function} for function in functions]
            values.setdefault("tools", tools)
            del values["functions"]
        if (choice := values.pop("function_call", None)) is not None:
            is_name = isinstance(choice, dict)
            values.setdefault("tool_choice", {"type": "function", **choice} if is_name else choice)
        if values.get("tool_choice") == "any":  # Mistral's word
            values["tool_choice"] = "required"
        super().adapt(values, notes)
        name = "n_probs" if "n_probs" in values else "top_logprobs"
        if values.get(name) is not None and values.get("logprobs", False) is False:
            if "logprobs" in values or not values[name]:
                del values[name]
                notes.note(name)
            else:
                values["logprobs"] = True
        if values.get("continue_final_message") is True:
            _adapt_continuation(values)

    def requested_options(self) -> dict[str, Any]:
        return super().requested_options() | {
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None
        }

    def form(self) -> dict[str, Any]:
        if (form := self.response_format) is None:
            return {}
        if (named := form.json_schema) is not None:
            return format_options(form.type, named.schema_, named.strict)
        return format_options(form.type, form.schema_)

    def messages_ask(self) -> PromptRequest:
        """Translate the conversation. Raises Refusal."""
        return self.ask(plain_messages(self.messages))


class ChatRequest(ChatFields, CommonFields):
    """POST /v1/chat/completions."""

    model_config = ChatFields.model_config


def _adapt_continuation(values: dict[str, Any]) -> None:
    """Remove vLLM's continue_final_message where it says what is done anyway: a last message of the
    assistant is continued. Raises Refusal.
    """
    if values.get("add_generation_prompt") is True:
        text = "contradicts add_generation_prompt: send only one"
        raise bad_field("continue_final_message", "one of both", text, True)
    match values.get("messages"):
        case [*_, {"role": "assistant"}]:
            del values["continue_final_message"]
            values.pop("add_generation_prompt", None)


class ChatWriter(OpenAIWriter):
    prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    empty: Mapping[str, Any] = {"delta": {}}

    def choice(self, task: Task) -> dict[str, Any]:
        text, calls = task.answer.text, [call.as_dict() for call in task.answer.calls]
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message["content"] = text if text or not calls else None
        if task.completion.reasoning:
            message["reasoning_content"] = task.completion.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self.logprobs(task, task.completion.tokens)}

    def logprobs(self, task: Task, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Write log-probabilities, if they are asked for."""
        if not self.body.logprobs:
            return None
        return {"content": list_logprobs(task, tokens), "refusal": None}

    def begin(self, tasks: Sequence[Task]) -> Events:
        for task in tasks:
            yield self.part(task, {"delta": {"role": "assistant", "content": None}})

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        logprobs = None if token is None else self.logprobs(task, [token])
        if logprobs and logprobs["content"] and not pieces:
            pieces = [""]  # a token without text still has a log-probability
        for piece in pieces:
            yield self.part(task, {"delta": write_piece(piece)}, None, logprobs)
            logprobs = None


def write_piece(piece: Piece) -> dict[str, Any]:
    """Write the delta of text, a thought, or a part of a call."""
    if isinstance(piece, Thought):
        return {"reasoning_content": piece.text}
    if isinstance(piece, str):
        return {"content": piece}
    begun = {"id": piece.id, "type": "function"} if piece.id else {}
    name = {"name": piece.name} if piece.name else {}
    function = {**name, "arguments": piece.arguments}
    return {"tool_calls": [{"index": piece.index, **begun, "function": function}]}


@serves(router, ChatRequest, "/v1/chat/completions", "/chat/completions")
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    writer = ChatWriter(request, body)
    ask = body.messages_ask()
    return await reply(request, choices_of(ask, [ask.prompt], body.n), writer, body.stream)


@serves(router, ChatRequest, "/v1/chat/completions/input_tokens", "/chat/completions/input_tokens")
async def count_chat(request: Request, body: ChatRequest) -> Response:
    """Count the tokens of a conversation, as the model sees it."""
    return await count_prompt(request, body.model, body.messages_ask())
