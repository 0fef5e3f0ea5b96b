"""OpenAI's Responses: text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.answers.completion import Completion, Token
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.options import ENDLESS
from mlx_llama.core.text.thoughts import Thought, find_thoughts
from mlx_llama.core.text.tools import ToolCall, ToolDelta

from .admission import choose_template
from .conversations import (
    MESSAGES,
    FunctionBody,
    NamedSchema,
    OpenAIFields,
    format_options,
    plain_call,
    plain_message,
)
from .faults import Refusal
from .fields import BY_TYPE, HIDDEN, Body, Likeliest, Note, Noted, Notes, Text, spell, unavailable
from .items import InputItem, KeptResponses, is_passed_over
from .replies import (
    Events,
    Writer,
    admission_of,
    count_prompt,
    event,
    list_logprobs,
    reply,
    text_of,
)
from .schemas import serves
from .slots import Task

router = APIRouter(tags=["OpenAI"])

# Answers


# Fields of a request that its response repeats
_REPEATED = ("previous_response_id", "store", "user", "metadata")
# Items of an answer -> the beginning of their events' names
_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


class ResponseWriter(Writer):
    """Writes responses: items that are thoughts, messages and calls."""

    def __init__(self, request: Request, body: Any):
        super().__init__(request, body)
        self.kept: KeptResponses = request.app.state.kept_responses
        self.conversation = body.items(self.kept)
        self.output: list[dict[str, Any]] = []  # finished items
        self.truncation = "auto" if admission_of(request).settings.truncates else "disabled"
        self.number = -1  # the last event's
        self.kind = ""  # the open item's; "" if there is none
        self.text = ""  # the open item's
        self.call: ToolCall | None = None  # the open call
        self.logprobs: list[dict[str, Any]] = []  # the open message's
        # text and logprobs of tokens since the last piece
        self.waiting: list[tuple[str, list[dict[str, Any]]]] = []

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": kind, "sequence_number": self.number, **fields}

    def encode(self, value: Any) -> bytes:
        return event(value, value["type"])

    def fail(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code, "message": refusal.message, "param": None}
        return event({"type": "error", **error, "sequence_number": 0}, "error")

    # The response

    def response(self, task: Task, status: str) -> dict[str, Any]:
        body, completion, options = self.body, task.completion, task.completion.options
        limit, is_over = options.get("max_tokens"), status != "in_progress"
        is_limited = status == "incomplete" and task.is_cut
        choice = body.tool_choice
        return {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_limited else None,
            "instructions": body.instructions or None,
            "max_output_tokens": None if limit == ENDLESS else limit,
            "model": self.name,
            "output": self.output,
            "parallel_tool_calls": task.ask.toolbox.many,
            "reasoning": {"effort": None, "summary": None},
            "temperature": options.get("temperature"),
            "text": body.text.as_dict(),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": options.get("top_p"),
            "truncation": body.truncation or self.truncation,
            "usage": write_usage(completion) if is_over else None,
            **{name: getattr(body, name) for name in _REPEATED},
        }

    def complete(self, task: Task) -> dict[str, Any]:
        """Write the finished response, and keep it."""
        response = self.response(task, status_of(task))
        if self.body.store:
            how: Any = {"exclude_none": True, "exclude_unset": True}
            self.kept.put(response, [item.model_dump(**how) for item in self.conversation])
        return response

    def whole(self, tasks: Sequence[Task]) -> dict[str, Any]:
        list(self.drive(tasks[0], len(tasks[0].completion.tokens), is_last=True))
        return self.complete(tasks[0])

    # Events

    def begin(self, tasks: Sequence[Task]) -> Events:
        for kind in ("response.created", "response.in_progress"):
            yield self.event(kind, response=self.response(tasks[0], "in_progress"))
        # An answer without tools and thoughts opens its message at once.
        task = tasks[0]
        may_think = find_thoughts(choose_template(task.llm, task.ask).source)
        if not task.ask.toolbox.offered and not may_think:
            yield from self.open("message")

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        if token is not None:
            self.waiting.append((token.text, list_logprobs(task, [token])))
        for piece in pieces:
            fields: dict[str, Any] = {}
            if isinstance(piece, ToolDelta):
                if piece.name is not None:
                    yield from self.close("completed")
                    self.call = task.answer.calls[piece.index]
                    yield from self.open("function_call")
                text = piece.arguments
            else:
                kind = "reasoning" if isinstance(piece, Thought) else "message"
                text = text_of(piece)
                if kind != self.kind:
                    yield from self.close("completed")
                    yield from self.open(kind)
                self.text += text
                if kind == "message":
                    fields["logprobs"] = self.take_logprobs(len(text))
                    self.logprobs += fields["logprobs"]
            self.waiting = []
            if text:
                fields = {**self.place(), "delta": text, **fields}
                yield self.event(f"{_EVENTS[self.kind]}.delta", **fields)

    def take_logprobs(self, characters: int) -> list[dict[str, Any]]:
        """Take the log-probabilities of the latest `characters`; earlier ones belong to a call."""
        start = len(self.waiting)
        while start and (characters > 0 or not self.waiting[start - 1][0]):
            start -= 1
            characters -= len(self.waiting[start][0])
        return [entry for _, entries in self.waiting[start:] for entry in entries]

    def end(self, task: Task) -> Events:
        if not self.kind and not self.output:
            yield from self.open("message")
        if self.kind == "message":
            self.logprobs += [entry for _, entries in self.waiting for entry in entries]
        yield from self.close(status_of(task))

    def finish(self, tasks: Sequence[Task]) -> Events:
        response = self.complete(tasks[0])
        yield self.event(f"response.{response['status']}", response=response)

    # Items

    def open(self, kind: str) -> Events:
        self.kind, self.text, self.logprobs = kind, "", []
        place = {"output_index": len(self.output), "item": self.item("in_progress")}
        yield self.event("response.output_item.added", **place)
        if kind == "message":
            yield self.event(
                "response.content_part.added", **self.place(), part=self.content_part()
            )

    def close(self, status: str) -> Events:
        """End the open item."""
        if not self.kind:
            return
        place, fields = self.place(), {"text": self.text}
        if self.kind == "function_call" and self.call:
            fields = {"name": self.call.name, "arguments": self.call.arguments}
            status = "completed" if self.call.is_complete else "incomplete"
        logprobs = {"logprobs": self.logprobs} if self.kind == "message" else {}
        yield self.event(f"{_EVENTS[self.kind]}.done", **place, **fields, **logprobs)
        if self.kind == "message":
            yield self.event("response.content_part.done", **place, part=self.content_part())
        item = self.item(status)
        yield self.event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self.kind = ""

    def place(self) -> dict[str, Any]:
        """Write the place of the open item."""
        place = {"item_id": self.item("")["id"], "output_index": len(self.output)}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    def content_part(self) -> dict[str, Any]:
        """Write the part of the open message."""
        logprobs = {"logprobs": self.logprobs}
        return {"type": "output_text", "text": self.text, "annotations": [], **logprobs}

    def item(self, status: str) -> dict[str, Any]:
        is_begun, index, identity = status == "in_progress", len(self.output), self.identity
        item: dict[str, Any] = {"type": self.kind, "status": status}
        if self.kind == "function_call" and (call := self.call):
            item |= {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
            return item | {"arguments": "" if is_begun else call.arguments}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
            return item | {"id": f"rs_{identity}_{index}", "summary": [], "content": content}
        item["id"] = f"msg_{identity}_{index}" if index else f"msg_{identity}"
        return item | {"role": "assistant", "content": [] if is_begun else [self.content_part()]}


def status_of(task: Task) -> str:
    """Return "completed", or "incomplete" for an answer or call that was cut."""
    is_cut = task.is_cut or (task.answer.calls and not task.has_called)
    return "incomplete" if is_cut else "completed"


def write_usage(completion: Completion) -> dict[str, Any]:
    read, written = completion.prompt_tokens, len(completion.tokens)
    cached = {"cached_tokens": completion.reused_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": read,
        "input_tokens_details": cached,
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
        "total_tokens": read + written,
    }


# Requests


class TextFormat(NamedSchema):
    """Format of the answer: text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("type json_schema needs a schema; other types have none")
        return self


class TextConfig(Body):
    """Format of the answer."""

    format: TextFormat = TextFormat.model_validate({})
    verbosity: Noted[Literal["medium"]] = "medium"  # others are not supported

    def as_dict(self) -> dict[str, Any]:
        """Write the format as a response repeats it."""
        is_schema = self.format.type == "json_schema"
        form = self.format.model_dump() if is_schema else {"type": self.format.type}
        return {"format": form, "verbosity": self.verbosity}


class ResponsesTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(OpenAIFields):
    """POST /v1/responses."""

    model_config = spell(max_tokens="max_output_tokens")
    schema_places: ClassVar[Sequence[str]] = ("text.format.schema",)
    prompt_field: ClassVar = "input"
    format_field: ClassVar = "text.format"

    background: Annotated[
        Any,
        unavailable([False], "responses are not computed in the background: POST /v1/jobs is"),
        HIDDEN,
    ] = False
    conversation: Annotated[
        Any, unavailable([], "use previous_response_id, or send the conversation as input"), HIDDEN
    ] = None
    prompt: Annotated[
        Any, unavailable([], "prompts are not kept: send instructions and input"), HIDDEN
    ] = None
    input: Annotated[
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[InputItem], MESSAGES, Tag("as:array")],
        BY_TYPE,
    ]
    instructions: str = ""
    text: TextConfig = TextConfig()
    tools: list[ResponsesTool] = []
    previous_response_id: str | None = Field(
        None,
        max_length=512,
        description="continue this response, which is kept in memory for an hour; its instructions "
        "do not carry over",
    )
    store: Noted[bool] = Field(True, description="keep the response for previous_response_id")
    include: Noted[list[Literal["message.output_text.logprobs"]]] = []
    top_logprobs: Noted[Likeliest] = None
    metadata: Noted[dict[str, str]] = Field(
        {}, max_length=16, description="returned with the answer"
    )
    user: Noted[str | None] = Field(None, max_length=512, description="returned with the answer")

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if values.get("reasoning") == {}:
            del values["reasoning"]
        super().adapt(values, notes)
        if isinstance(tools := values.get("tools"), list):
            values["tools"] = _adapt_tools(tools, values.get("tool_choice"), notes.note)
        if values.get("tool_choice") == "none" and not values.get("tools"):
            del values["tool_choice"]
        include = values.get("include")
        if isinstance(include, list) and not notes.is_strict:
            values["include"] = [name for name in include if name == LOGPROBS]
            for _ in include[len(values["include"]) :]:
                notes.note("include[]")
        has_logprobs = isinstance(include, list) and LOGPROBS in include
        if not has_logprobs and values.pop("top_logprobs", None):
            notes.note("top_logprobs")
        if isinstance(items := values.get("input"), list):
            values["input"] = [item for item in items if not is_passed_over(item, notes)]

    def items(self, kept: KeptResponses) -> list[InputItem]:
        """Return the conversation: the kept items, and the input. Raises Refusal."""
        previous, items = self.previous_response_id, self.input
        if isinstance(items, str):
            items = [InputItem(role="user", content=items)]
        earlier = kept.get(previous, "previous_response_id").items if previous else ()
        conversation = [InputItem.model_validate(item) for item in earlier]
        for item in items:
            if item.type == "item_reference":
                item = InputItem.model_validate(kept.find_item(item.id))
            conversation.append(item)
        return conversation

    def translate(self, conversation: Sequence[InputItem]) -> list[dict[str, Any]]:
        """Convert a conversation to messages for templates."""
        plain: list[dict[str, Any]] = []
        thought = ""
        for item in conversation:
            if item.type == "reasoning":
                thought += str(item.content)
                continue
            if item.type == "function_call":
                # text and calls share a message of the assistant
                if thought or not plain or plain[-1]["role"] != "assistant":
                    plain.append(plain_message("assistant", ""))
                call = plain_call(item.call_id, item.name, item.arguments)
                plain[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                plain.append(plain_message("tool", item.output, tool_call_id=item.call_id))
            else:
                plain.append(plain_message(item.role, item.content))
            if thought and plain[-1]["role"] == "assistant":
                plain[-1].setdefault("reasoning_content", thought)
            thought = ""
        system = [plain_message("system", self.instructions)] if self.instructions else []
        return [*system, *plain]

    def form(self) -> dict[str, Any]:
        form, is_set = self.text.format, "format" in self.text.model_fields_set
        return format_options(form.type, form.schema_, form.strict) if is_set else {}

    def requested_options(self) -> dict[str, Any]:
        logprobs = {"logprobs": self.top_logprobs or 0} if self.include else {}
        return logprobs | super().requested_options()


def _adapt_tools(tools: list[Any], choice: Any, note: Note) -> list[Any]:
    """Pick the functions among tools, including those of namespaces. Drop tools that run on
    OpenAI's servers, unless the choice requires them.
    """
    functions: list[Any] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        is_chosen = isinstance(choice, dict) and choice.get("type") == kind
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            functions += _adapt_tools(tool["tools"], choice, note)
        elif kind == "function" and isinstance(tool.get("function"), dict):
            # in the format of chat completions
            functions.append({"type": "function", **tool["function"]})
        elif kind in (None, "function") or is_chosen:
            functions.append(tool)
        else:
            note(f"tools[].{kind!s:.40}")
    return functions


@serves(router, ResponsesRequest, "/v1/responses", "/responses")
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    writer = ResponseWriter(request, body)
    ask = body.ask(body.translate(writer.conversation))
    return await reply(request, [ask], writer, body.stream)


@serves(router, ResponsesRequest, "/v1/responses/input_tokens")
async def count_input(request: Request, body: ResponsesRequest) -> Response:
    """Count the tokens of an input, as the model sees it."""
    ask = body.ask(body.translate(body.items(request.app.state.kept_responses)))
    return await count_prompt(request, body.model, ask, object="response.input_tokens")
