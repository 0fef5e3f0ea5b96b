"""OpenAI's Responses: text in, text out."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Completion, Token
from mlx_llama.core.generation.schema import Schema
from mlx_llama.core.generation.tool_use import Toolbox
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import ToolCall

from .answers import Answers, Ask
from .faults import Refusal
from .fields import (
    ENDLESS,
    RULES,
    Body,
    CacheKey,
    Identity,
    Likeliest,
    ModelName,
    Note,
    OptionFields,
    TemplateVariables,
    list_places,
    read_body,
)
from .guard import request_id
from .kept import KeptResponses
from .openai import adapt_allowed_tools, adapt_thinking, is_forced, is_rule, join_parts
from .replies import Json, check_model, count_prompt, event, reply_stream, reply_whole
from .schemas import takes
from .tooling import (
    FunctionBody,
    Piece,
    Reader,
    are_complete,
    build_toolbox,
    check_rule,
    check_schema,
    list_logprobs,
)

router = APIRouter(tags=["OpenAI"])


class InputPart(Body):
    """A text part of an item, from a question or an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: list[Any] = Field([], description="has no effect")


class InputItem(Body):
    """A message, a call or its result in the input."""

    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str = Field("", max_length=512)
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    call_id: str = Field("", max_length=4096)
    name: str = Field("", max_length=64)
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    @model_validator(mode="after")
    def _check_type(self):
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "item_reference": (),
        }[self.type]
        missing = [
            name
            for name in needed
            if (
                getattr(self, name) in (None, "") and name not in ("content", "output", "arguments")
            )
            or getattr(self, name) is None
        ]
        fields = {"role", "content", "call_id", "name", "arguments", "output"}
        present = fields & self.model_fields_set
        if missing:
            raise ValueError(f"{self.type} needs {', '.join(missing)}")
        if present - set(needed):
            raise ValueError(f"{self.type} cannot have {', '.join(sorted(present - set(needed)))}")
        return self


class TextFormat(Body):
    """Format of the answer: text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = Field("", max_length=64)
    description: str = Field("", max_length=1 << 16, description="has no effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="has no effect: the schema is always enforced")

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("the type json_schema needs a schema, and others have none")
        if self.schema_ is not None:
            check_schema(self.schema_)
        return self

    def options(self) -> dict[str, Any]:
        """Return the option that enforces the format."""
        if self.type == "text":
            return {}
        schema = {"type": "object"} if self.schema_ is None else self.schema_
        # strict: relax nothing
        return {"schema": Schema.of(schema) if self.strict else schema}


class TextConfig(Body):
    """Format of the answer."""

    format: TextFormat = TextFormat.model_validate({})
    verbosity: Literal["medium"] = "medium"  # others are not supported

    def as_dict(self) -> dict[str, Any]:
        """Write the format as a response repeats it."""
        form = self.format
        named = {
            "name": form.name,
            "description": form.description or None,
            "schema": form.schema_,
            "strict": form.strict,
        }
        return {
            "format": {"type": form.type, **(named if form.type == "json_schema" else {})},
            "verbosity": self.verbosity,
        }


class Reasoning(Body):
    """No reasoning."""

    effort: Literal["none"] = "none"


class ResponsesTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class ResponsesChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(OptionFields):
    """POST /v1/responses."""

    renamed: ClassVar = OptionFields.renamed | {
        "max_output_tokens": "max_tokens",
        "json_schema": "schema",
    }
    places: ClassVar[Mapping[str, Sequence[str]]] = {"schema": ("text.format.schema",)}
    noted: ClassVar = list_places(
        "reasoning store truncation include service_tier metadata user safety_identifier "
        "prompt_cache_key text.verbosity parallel_tool_calls top_logprobs "
        "input.content.annotations input.content.logprobs input.status input.id tools.strict"
    )
    refused: ClassVar[Mapping[str, str]] = {
        "conversation": "use previous_response_id, or send the conversation as input",
        "prompt": "prompts are not kept: send instructions and input",
    }

    input: str | list[InputItem] = Field(min_length=1)
    instructions: str = ""
    model: ModelName = None
    stream: bool = False
    text: TextConfig = TextConfig()
    tools: list[ResponsesTool] = []
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice = Field(
        "auto", description="stop strings do not end a required call"
    )
    parallel_tool_calls: bool = True
    background: Literal[False] = False
    reasoning: Reasoning = Reasoning()  # type: ignore[assignment]  # in place of the option
    chat_template_kwargs: TemplateVariables = {}
    previous_response_id: str | None = Field(
        None,
        max_length=512,
        description="continue this response, which is kept in memory for an hour; its instructions "
        "do not carry over",
    )
    store: bool = Field(True, description="keep the response for previous_response_id")
    truncation: Literal["disabled"] = "disabled"
    include: list[Literal["message.output_text.logprobs"]] = []
    top_logprobs: Likeliest = None
    service_tier: Literal["auto", "default"] = "auto"
    metadata: dict[str, str] = Field({}, max_length=16, description="returned with the answer")
    user: Identity = None
    safety_identifier: Identity = None
    prompt_cache_key: CacheKey = None

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        adapt_thinking(values, note)
        adapt_allowed_tools(values)
        if isinstance(tools := values.get("tools"), list):
            values["tools"] = _adapt_tools(tools, values.get("tool_choice"), note)
        if values.get("tool_choice") == "none" and not values.get("tools"):
            del values["tool_choice"]
        text = values.get("text")
        is_ruled = isinstance(text, dict) and is_rule(text.get("format"))
        if is_ruled and is_forced(values.get("tool_choice")):
            values["text"] = {name: value for name, value in text.items() if name != "format"}
            note("text.format")
        if "message.output_text.logprobs" not in (values.get("include") or ()) and values.pop(
            "top_logprobs", None
        ):
            note("top_logprobs")
        if isinstance(items := values.get("input"), list):
            values["input"] = [item for item in map(_adapt_item, items) if item is not None]
            if len(values["input"]) < len(items):
                note("input[]")

    @model_validator(mode="after")
    def _check_options(self):
        if self.text.format.options() and any(getattr(self, name) is not None for name in RULES):
            raise ValueError("text: cannot be combined with schema, regex or grammar")
        if self.top_logprobs is not None and not self.include:
            raise ValueError('top_logprobs: only with include: ["message.output_text.logprobs"]')
        return self

    def items(self, kept: KeptResponses) -> list[InputItem]:
        """Return the conversation: the kept items, and the input. Raises Refusal."""
        earlier = (
            kept.get(self.previous_response_id, "previous_response_id").items
            if self.previous_response_id
            else ()
        )
        items = self.input
        if isinstance(items, str):
            items = [InputItem(role="user", content=items)]
        return [
            *map(InputItem.model_validate, earlier),
            *(
                InputItem.model_validate(kept.find_item(item.id))
                if item.type == "item_reference"
                else item
                for item in items
            ),
        ]

    def plain(self, conversation: Sequence[InputItem]) -> list[dict[str, Any]]:
        """Convert a conversation to messages for templates."""
        items: list[dict[str, Any]] = []
        for item in conversation:
            if item.type == "function_call":
                call = {
                    "id": item.call_id,
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
                # text and calls share a message of the assistant
                if items and items[-1]["role"] == "assistant":
                    items[-1].setdefault("tool_calls", []).append(call)
                else:
                    items.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif item.type == "function_call_output":
                result = join_parts(item.output)
                items.append({"role": "tool", "content": result, "tool_call_id": item.call_id})
            else:
                role = "system" if item.role == "developer" else item.role
                items.append({"role": role, "content": join_parts(item.content)})
        return [
            *([{"role": "system", "content": self.instructions}] if self.instructions else []),
            *items,
        ]

    def requested_options(self) -> dict[str, Any]:
        logprobs = {"logprobs": self.top_logprobs or 0} if self.include else {}
        form = self.text.format
        lifts = "format" in self.text.model_fields_set and form.type == "text"
        lifted = dict.fromkeys(RULES) if lifts else {}
        options = super().requested_options()
        options.pop("reasoning", None)  # OpenAI's object, not the option
        return logprobs | lifted | options | form.options()

    def toolbox(self) -> Toolbox:
        """Build the toolbox. Raises Refusal."""
        choice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.name
        return build_toolbox(
            [tool.described() for tool in self.tools], choice, self.parallel_tool_calls
        )


def _adapt_tools(tools: list[Any], choice: Any, note: Note) -> list[Any]:
    """Pick the functions among tools, including those of namespaces. Drop tools that run on
    OpenAI's servers, unless the choice requires them.
    """
    functions: list[Any] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            functions += _adapt_tools(tool["tools"], choice, note)
        # in the format of chat completions
        elif kind == "function" and isinstance(tool.get("function"), dict):
            functions.append({"type": "function", **tool["function"]})
        elif kind in (None, "function") or (
            isinstance(choice, dict) and choice.get("type") == kind
        ):
            functions.append(tool)
        else:
            note(f"tools[].{kind!s:.40}")
    return functions


def _adapt_item(item: Any) -> Any:
    """Convert an input item; None for thoughts, and for calls that ran on OpenAI's servers."""
    if not isinstance(item, dict):
        return item
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message")
    if kind == "reasoning" or (kind.endswith("_call") and kind != "function_call"):
        return None
    if kind == "function_call" and isinstance(item.get("arguments"), dict):
        item["arguments"] = json.dumps(item["arguments"], ensure_ascii=False)
    for name in ("content", "output"):
        if isinstance(parts := item.get(name), list):
            item[name] = [
                {**part, "type": "input_text", "text": part.get("text", part.get("refusal"))}
                if isinstance(part, dict) and part.get("type") in ("text", "refusal")
                else part
                for part in parts
            ]
    return item


@router.post("/v1/responses", **takes(ResponsesRequest))
@router.post("/responses", include_in_schema=False)
async def respond(request: Request) -> Response:
    """Answer an input."""
    body = await read_body(request, ResponsesRequest)
    name = check_model(request, body.model)
    box, options = body.toolbox(), body.requested_options()
    check_rule(box, options, "text.format" if body.text.format.options() else "")
    kept: KeptResponses = request.app.state.kept_responses
    conversation = body.items(kept)
    asks = [
        Ask(body.plain(conversation), "input", options, box, variables=body.chat_template_kwargs)
    ]
    identity, created = request_id(request), int(time.time())

    def response(
        answers: Answers, status: str, output: list[Any], thought_tokens: int = 0
    ) -> dict[str, Any]:
        completion = answers.completions[0]
        options = completion.options
        limit = options.get("max_tokens")
        is_over = status not in ("in_progress", "queued")
        is_cut = status == "incomplete" and completion.finish_reason in ("length", "context")
        reason = {"reason": "max_output_tokens"} if is_cut else None
        return {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions or None,
            "max_output_tokens": None if limit == ENDLESS else limit,
            "model": name,
            "output": output,
            "parallel_tool_calls": box.many,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store,
            "temperature": options.get("temperature"),
            "text": body.text.as_dict(),
            "tool_choice": body.tool_choice
            if isinstance(body.tool_choice, str)
            else body.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": options.get("top_p"),
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata,
            "usage": write_usage(completion, thought_tokens) if is_over else None,
        }

    def whole(answers: Answers) -> dict[str, Any]:
        completion = answers.completions[0]
        writer = OutputWriter(answers, box, identity)
        for _ in [*writer.push(completion.tokens), *writer.finish(completion)]:
            pass
        return keep(
            response(
                answers, status_of(completion, writer.calls), writer.output, writer.thought_tokens
            )
        )

    def keep(made: dict[str, Any]) -> dict[str, Any]:
        if body.store:
            kept.put(
                made,
                [item.model_dump(exclude_none=True, exclude_unset=True) for item in conversation],
            )
        return made

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        number = -1
        writer = OutputWriter(answers, box, identity)

        def write(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number, **fields}, kind)

        for kind in ("response.created", "response.in_progress"):
            yield write(kind, response=response(answers, "in_progress", []))
        for kind, fields in writer.begin():
            yield write(kind, **fields)
        async for batch in answers.batches():
            for kind, fields in writer.push(batch.tokens):
                yield write(kind, **fields)
        completion = answers.completions[0]
        for kind, fields in writer.finish(completion):
            yield write(kind, **fields)
        status = status_of(completion, writer.calls)
        yield write(
            f"response.{status}",
            response=keep(response(answers, status, writer.output, writer.thought_tokens)),
        )

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """Return a kept response."""
    return Json(request.app.state.kept_responses.get(response_id, "response_id").response)


@router.delete("/v1/responses/{response_id}")
async def forget(request: Request, response_id: str) -> Response:
    """Forget a response."""
    request.app.state.kept_responses.get(response_id, "response_id")
    request.app.state.kept_responses.drop(response_id)
    return Json({"id": response_id, "object": "response", "deleted": True})


class InputTokensRequest(ResponsesRequest):
    """POST /v1/responses/input_tokens."""


@router.post("/v1/responses/input_tokens", **takes(InputTokensRequest))
async def count_input(request: Request) -> Response:
    """Count the tokens of an input, as the model sees it."""
    body = await read_body(request, InputTokensRequest)
    check_model(request, body.model)
    prompt = body.plain(body.items(request.app.state.kept_responses))
    variables = body.chat_template_kwargs
    ask = Ask(prompt, "input", {}, body.toolbox(), variables=variables)
    counted = await count_prompt(request, ask)
    return Json({"object": "response.input_tokens", "input_tokens": counted})


Event = tuple[str, dict[str, Any]]  # its kind and fields


class OutputWriter:
    """Turns tokens into the items of an answer: thoughts, messages and calls.

    Its methods yield the events of a stream.
    """

    def __init__(self, answers: Answers, toolbox: Toolbox, identity: str):
        self.output: list[dict[str, Any]] = []  # finished items
        self._llm, self._identity = answers.llm, identity
        self._reader = Reader(answers, 0, toolbox)
        # An answer without tools and thoughts opens its message at once.
        self._opens_late = bool(toolbox.offered) or self._reader.may_think
        self._thought: str | None = None  # of the open item
        self._text: str | None = None  # of the open message
        self._logprobs: list[dict[str, Any]] = []  # of the open message
        # text and logprobs of tokens since the last piece
        self._waiting: list[tuple[str, list[dict[str, Any]]]] = []
        self._call: ToolCall | None = None  # the open call

    @property
    def calls(self) -> list[ToolCall]:
        """Calls so far."""
        return self._reader.calls

    @property
    def thought_tokens(self) -> int:
        """Tokens of thoughts so far."""
        return self._reader.thought_tokens

    def begin(self) -> Iterator[Event]:
        """Open the message of an answer without thoughts and tools."""
        if not self._opens_late:
            yield from self._open_text()

    def push(self, tokens: Sequence[Token]) -> Iterator[Event]:
        """Read tokens."""
        for token in tokens:
            self._waiting.append((token.text, list_logprobs(self._llm, [token])))
            for piece in self._reader.push(token.text, token.thought):
                yield from self._take(piece)

    def finish(self, completion: Completion) -> Iterator[Event]:
        """End the answer."""
        for piece in self._reader.push("", is_last=True):
            yield from self._take(piece)
        if self._text is None and self._call is None and self._thought is None and not self.output:
            yield from self._open_text()
        if self._text is not None:
            self._logprobs += [entry for _, entries in self._waiting for entry in entries]
        yield from self._end(status_of(completion, self.calls))

    def _take(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, Thought):
            self._waiting = []
            if self._thought is None:
                self._thought = ""
                yield (
                    "response.output_item.added",
                    {"output_index": len(self.output), "item": self._write_thought("in_progress")},
                )
            self._thought += piece.text
            yield "response.reasoning_text.delta", {**self._place_thought(), "delta": piece.text}
            return
        if isinstance(piece, str):
            if self._text is None:
                yield from self._end("completed")
                yield from self._open_text()
            logprobs = self._take_logprobs(len(piece))
            self._text = (self._text or "") + piece
            self._logprobs += logprobs
            yield (
                "response.output_text.delta",
                {**self._place(), "delta": piece, "logprobs": logprobs},
            )
            return
        self._waiting = []
        if piece.name is not None:
            yield from self._end("completed")
            self._call = self._reader.calls[piece.index]
            begun = _write_call(self._call, "in_progress") | {"arguments": ""}
            yield "response.output_item.added", {"output_index": len(self.output), "item": begun}
        if piece.arguments and self._call:
            place = {"item_id": f"fc_{self._call.id}", "output_index": len(self.output)}
            yield "response.function_call_arguments.delta", {**place, "delta": piece.arguments}

    def _take_logprobs(self, characters: int) -> list[dict[str, Any]]:
        """Take the log-probabilities of the latest `characters`; earlier ones belong to a call."""
        start = len(self._waiting)
        while start and (characters > 0 or not self._waiting[start - 1][0]):
            start -= 1
            characters -= len(self._waiting[start][0])
        logprobs = [entry for _, entries in self._waiting[start:] for entry in entries]
        self._waiting = []
        return logprobs

    def _open_text(self) -> Iterator[Event]:
        self._text, self._logprobs = "", []
        yield (
            "response.output_item.added",
            {"output_index": len(self.output), "item": self._write_message("in_progress", [])},
        )
        yield "response.content_part.added", {**self._place(), "part": _write_part("", [])}

    def _end(self, status: str) -> Iterator[Event]:
        """End the open item."""
        if self._thought is not None:
            yield "response.reasoning_text.done", {**self._place_thought(), "text": self._thought}
            done = self._write_thought(status)
            self._thought = None
            yield from self._close(done)
        if self._text is not None:
            part = _write_part(self._text, self._logprobs)
            yield (
                "response.output_text.done",
                {**self._place(), "text": self._text, "logprobs": self._logprobs},
            )
            yield "response.content_part.done", {**self._place(), "part": part}
            yield from self._close(self._write_message(status, [part]))
        if self._call is not None:
            call = self._call
            done = _write_call(call, "completed" if call.is_complete else "incomplete")
            place = {"item_id": done["id"], "output_index": len(self.output)}
            fields = {"name": call.name, "arguments": call.arguments}
            yield "response.function_call_arguments.done", {**place, **fields}
            yield from self._close(done)
        self._text = self._call = None

    def _close(self, item: dict[str, Any]) -> Iterator[Event]:
        yield "response.output_item.done", {"output_index": len(self.output), "item": item}
        self.output.append(item)

    def _place_thought(self) -> dict[str, Any]:
        index = len(self.output)
        return {
            "item_id": f"rs_{self._identity}_{index}",
            "output_index": index,
            "content_index": 0,
        }

    def _write_thought(self, status: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self._thought}] if self._thought else []
        return {
            "type": "reasoning",
            "id": f"rs_{self._identity}_{len(self.output)}",
            "summary": [],
            "content": content,
            "status": status,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self.output), "content_index": 0}

    @property
    def _message_id(self) -> str:
        return f"msg_{self._identity}" + (f"_{len(self.output)}" if self.output else "")

    def _write_message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._message_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }


def _write_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _write_call(call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def fail(refusal: Refusal) -> bytes:
    """Write an error within a stream."""
    error = {"code": refusal.code, "message": refusal.message, "param": None}
    return event({"type": "error", **error, "sequence_number": 0}, "error")


def status_of(completion: Completion, calls: Sequence[ToolCall]) -> str:
    """Return "completed", or "incomplete" for an answer or call that was cut."""
    is_cut = completion.finish_reason in ("length", "context") or (
        calls and not are_complete(calls)
    )
    return "incomplete" if is_cut else "completed"


def write_usage(completion: Completion, thought_tokens: int) -> dict[str, Any]:
    """Write the usage of a response."""
    read, written = completion.prompt_tokens, len(completion.tokens)
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": completion.reused_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": read + written,
    }
