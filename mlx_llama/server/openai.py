"""OpenAI's chat completions, completions and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Token
from mlx_llama.core.text.thoughts import Thought

from .conversations import (
    AnswerFields,
    FunctionTool,
    Message,
    NamedSchema,
    OpenAIFields,
    SchemaBody,
    adapt_messages,
    format_options,
    is_forced,
    is_rule,
)
from .faults import Fault, bad_field, fault_of, not_found
from .fields import (
    RULES,
    Body,
    Count,
    Identity,
    Note,
    OptionFields,
    find_conflict,
    list_places,
)
from .replies import (
    DONE,
    FINGERPRINT,
    Events,
    Json,
    Writer,
    check_model,
    choices_of,
    count_prompt,
    desk_of,
    list_progress,
    reply,
    write_timings,
    write_usage,
)
from .schemas import serves
from .tooling import Piece, Reader, list_logprobs

router = APIRouter(tags=["OpenAI"])


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFormat(SchemaBody):
    """Format of the answer: text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(
        default=None, alias="schema", description="for json_object, as in llama-server"
    )

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema needs json_schema, and others have none")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("only the type json_object has a schema")
        return self


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        default=False, description="the usage so far in every event, as in vLLM; with include_usage"
    )
    include_obfuscation: Literal[False] = False


class CommonFields(AnswerFields):
    """Fields of both kinds of completion."""

    noted: ClassVar = list_places(
        "user stream_options best_of store service_tier metadata safety_identifier "
        "prompt_cache_key parallel_tool_calls messages.refusal messages.annotations "
        "messages.name messages.reasoning_content messages.tool_calls.type "
        "tools.function.strict truncation"
    )

    stream_options: StreamOptions = StreamOptions()
    n: Count = 1
    user: Identity = None
    return_progress: bool = Field(
        False, description="report in a stream how much of the prompt is processed"
    )
    verbose: bool = Field(
        False, description="report the prompt with its template, as __verbose.prompt"
    )

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        if values.get("stream", False) is False and values.pop("stream_options", None):
            note("stream_options")

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        return super().check_together(values) + cls.needs(values, "stream_options", "stream")

    @staticmethod
    def needs(values: Mapping[str, Any], field: str, switch: str) -> list[Fault]:
        """Return the fault of a field without its switch."""
        if field not in values or values.get(switch, False) is not False:
            return []
        rule = f"only with {switch}: true"
        return [fault_of(field, rule, rule, values[field])]


class OpenAIWriter(Writer):
    """Writes both kinds of completion."""

    last = DONE
    kind = chunk_kind = "text_completion"
    empty: Mapping[str, Any] = {"text": ""}  # a part of an answer without text

    def __init__(self, request: Request, body: Any):
        super().__init__(request, body)
        self.shows_progress = body.return_progress

    def made(self, kind: str) -> dict[str, Any]:
        """Write the fields of every object."""
        made = {"id": self.identity, "object": kind, "created": self.created, "model": self.name}
        return made | {"system_fingerprint": FINGERPRINT}

    def choice(self, reader: Reader) -> dict[str, Any]:
        """Write a completed answer, without index and finish_reason."""
        raise NotImplementedError

    def whole(self, readers: Sequence[Reader]) -> dict[str, Any]:
        choices = [
            {"index": reader.index, "finish_reason": finish_reason(reader), **self.choice(reader)}
            for reader in readers
            if reader.finish()
        ]
        fields = {**self.statistics(readers), **self.verbose(readers[0])}
        return {**self.made(self.kind), "choices": choices, **fields}

    def statistics(self, readers: Sequence[Reader]) -> dict[str, Any]:
        """Write usage and timings."""
        timings = write_timings(readers[0].completion)
        return {"usage": write_usage(readers), "timings": timings}

    def verbose(self, reader: Reader) -> dict[str, Any]:
        """Write the prompt as the model saw it, if the body asks for it."""
        if not self.body.verbose:
            return {}
        prompt = reader.answers.prompts[reader.index]
        return {"__verbose": {"prompt": reader.llm.tokenizer.decode(prompt, skip_special=False)}}

    def chunk(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Write an event."""
        usage = {"usage": None} if self.body.stream_options.include_usage else {}
        return {**self.made(self.chunk_kind), **usage, "choices": choices, **more}

    def part(
        self, reader: Reader, content: Any, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        """Write an event with a part of an answer."""
        fields = {"logprobs": logprobs, "finish_reason": reason}
        options = self.body.stream_options
        is_counted = options.include_usage and options.continuous_usage_stats
        usage = {"usage": write_usage([reader])} if is_counted else {}
        return self.chunk({"index": reader.index, **content, **fields}, **usage)

    def progress(self, reader: Reader, processed: int) -> Events:
        for progress in list_progress(reader, processed):
            yield self.part(reader, self.empty) | {"prompt_progress": progress}

    def end(self, reader: Reader) -> Events:
        yield self.part(reader, self.empty, finish_reason(reader)) | self.verbose(reader)

    def finish(self, readers: Sequence[Reader]) -> Events:
        if self.body.stream_options.include_usage:
            yield self.chunk(**self.statistics(readers))


def finish_reason(reader: Reader) -> str:
    """Return OpenAI's finish_reason."""
    return "length" if reader.is_cut else "tool_calls" if reader.has_called else "stop"


class ChatRequest(CommonFields, OpenAIFields):
    """POST /v1/chat/completions."""

    renamed: ClassVar = OptionFields.renames(
        max_completion_tokens="max_tokens", n_probs="top_logprobs", json_schema="schema"
    )
    places: ClassVar[Mapping[str, Sequence[str]]] = {
        "schema": ("response_format.json_schema.schema", "response_format.schema"),
        "logprobs": ("top_logprobs",),
    }
    refused: ClassVar = {"audio": ""}
    format_field: ClassVar = "response_format"

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = Field(False, description="report the log-probability of each token")  # type: ignore[assignment]
    response_format: ResponseFormat = ResponseFormat.model_validate({"type": "text"})
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = Field(
        "auto", description="stop strings do not end a required call"
    )
    modalities: list[Literal["text"]] = ["text"]
    store: Literal[False] = Field(False, description="answers are not kept")
    metadata: dict[str, str] = Field({}, max_length=16, description="has no effect without store")

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        if (functions := values.pop("functions", None)) and isinstance(functions, list):
            tools = [{"type": "function", "function": function} for function in functions]
            values.setdefault("tools", tools)
        if (choice := values.pop("function_call", None)) is not None:
            is_name = isinstance(choice, dict)
            named = {"type": "function", "function": choice} if is_name else choice
            values.setdefault("tool_choice", named)
        if values.get("tool_choice") == "any":  # Mistral's word
            values["tool_choice"] = "required"
        super().adapt(values, note)
        if is_forced(values.get("tool_choice")) and is_rule(values.get("response_format")):
            del values["response_format"]
            note("response_format")
        if values.get("top_logprobs") is not None and values.get("logprobs", False) is False:
            if "logprobs" in values or not values["top_logprobs"]:
                del values["top_logprobs"]
                note("top_logprobs")
            else:
                values["logprobs"] = True
        if isinstance(messages := values.get("messages"), list):
            values["messages"] = adapt_messages(messages)
        if values.get("continue_final_message") is True:
            _adapt_continuation(values)

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        faults = super().check_together(values) + cls.needs(values, "top_logprobs", "logprobs")
        form = values.get("response_format")
        return faults + (find_conflict("response_format", form, values) if is_rule(form) else [])

    def requested_options(self) -> dict[str, Any]:
        options = super().requested_options()
        options.pop("logprobs", None)
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        if "response_format" in self.model_fields_set and self.response_format.type == "text":
            # lift the server's rule
            options = {**dict.fromkeys(RULES), **options}
        return options | self.form()

    def form(self) -> dict[str, Any]:
        form = self.response_format
        if (named := form.json_schema) is not None:
            return format_options(form.type, named.schema_, named.strict)
        return format_options(form.type, form.schema_)

    def choice(self) -> tuple[str, bool]:
        choice = self.tool_choice
        name = choice if isinstance(choice, str) else choice.function.name
        return name, self.parallel_tool_calls


def _adapt_continuation(values: dict[str, Any]) -> None:
    """Remove vLLM's continue_final_message where it says what is done anyway: a last message of the
    assistant is continued. Raises Refusal.
    """
    if values.get("add_generation_prompt") is True:
        text = "contradicts add_generation_prompt: send only one"
        raise bad_field("continue_final_message", "one of both", text, True)
    last = (values.get("messages") or [None])[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        del values["continue_final_message"]
        values.pop("add_generation_prompt", None)


class ChatWriter(OpenAIWriter):
    """Writes chat completions."""

    prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    empty: Mapping[str, Any] = {"delta": {}}

    def choice(self, reader: Reader) -> dict[str, Any]:
        text, calls = reader.text, [call.as_dict() for call in reader.calls]
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message["content"] = text if text or not calls else None
        if reader.thought:
            message["reasoning_content"] = reader.thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self.logprobs(reader, reader.completion.tokens)}

    def logprobs(self, reader: Reader, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Write log-probabilities, if they are asked for."""
        if not self.body.logprobs:
            return None
        return {"content": list_logprobs(reader, tokens), "refusal": None}

    def begin(self, readers: Sequence[Reader]) -> Events:
        for reader in readers:
            yield self.part(reader, {"delta": {"role": "assistant", "content": None}})

    def write(self, reader: Reader, token: Token | None, pieces: list[Piece]) -> Events:
        logprobs = None if token is None else self.logprobs(reader, [token])
        if logprobs and logprobs["content"] and not pieces:
            pieces = [""]  # a token without text still has a log-probability
        for piece in pieces:
            yield self.part(reader, {"delta": write_piece(piece)}, None, logprobs)
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
    ask = body.apply(body.ask([message.plain() for message in body.messages]))
    return await reply(request, choices_of(ask, [ask.prompt], body.n), writer, body.stream)


class ChatTokensRequest(ChatRequest):
    """POST /v1/chat/completions/input_tokens."""


@serves(
    router,
    ChatTokensRequest,
    "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens",
)
async def count_chat(request: Request, body: ChatTokensRequest) -> Response:
    """Count the tokens of a conversation, as the model sees it."""
    check_model(request, body.model)
    ask = body.prompt_ask([message.plain() for message in body.messages])
    return Json({"input_tokens": await count_prompt(request, ask)})


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> Response:
    """List the model and its adapters."""
    llm = desk_of(request).keeper.llm
    meta = llm and {
        "n_vocab": llm.model.config.vocab_size,
        "n_ctx": llm.engine.context,
        "n_ctx_train": llm.model.config.max_position_embeddings,
    }
    data = [_model(request, name) | {"meta": meta} for name in desk_of(request).listed]
    return Json({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Return a model by its name."""
    if not desk_of(request).is_name(name):
        served = ", ".join(desk_of(request).served)
        text = f"there is no model {name!r:.100} here: this server has {served}"
        raise not_found(text, "model_not_found")
    return Json(_model(request, check_model(request, name)))


def _model(request: Request, name: str) -> dict[str, Any]:
    created = int(request.app.state.started)
    return {"id": name, "object": "model", "created": created, "owned_by": "mlx_llama"}
