"""OpenAI's chat completions, completions and models."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Token
from mlx_llama.core.generation.options import FIELDS
from mlx_llama.core.generation.tool_use import Toolbox
from mlx_llama.core.text.thoughts import Thought

from .answers import Answers, Ask
from .faults import Fault, Refusal, bad_field
from .fields import (
    RULES,
    Body,
    CacheKey,
    Identity,
    Likeliest,
    ModelName,
    Note,
    OptionFields,
    TemplateVariables,
    TokenIds,
    find_conflict,
    list_places,
    read_body,
)
from .guard import request_id
from .replies import (
    DONE,
    FINGERPRINT,
    Json,
    check_model,
    choices_of,
    desk_of,
    event,
    reply_stream,
    reply_whole,
    served_adapters,
    served_names,
    write_openai,
    write_timings,
    write_usage,
)
from .schemas import takes
from .tooling import (
    Call,
    FunctionTool,
    NamedChoice,
    Piece,
    Reader,
    ResponseFormat,
    build_toolbox,
    check_rule,
    finish_reason,
    list_logprobs,
    read_answer,
    write_logprobs,
)

router = APIRouter(tags=["OpenAI"])


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str = Field("", max_length=256, description="for templates that show it")
    reasoning_content: str = Field(
        "", description="of an assistant's message, for templates that show it"
    )
    tool_calls: list[Call] = Field([], max_length=128)
    tool_call_id: str = Field("", max_length=4096)
    refusal: Literal[""] = ""  # clients send assistants' messages back with these, empty
    annotations: list[Any] = Field([], max_length=0)

    @model_validator(mode="after")
    def _check_role(self):
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant can have tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required")
        if self.reasoning_content and self.role != "assistant":
            raise ValueError("only the assistant can have reasoning_content")
        if (self.role == "tool") != bool(self.tool_call_id):
            raise ValueError("the role tool needs tool_call_id, and others have none")
        return self

    def plain(self) -> dict[str, Any]:
        """Convert to a message for templates."""
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": join_parts(self.content or "")}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        if role == "tool":
            plain["tool_call_id"] = self.tool_call_id
        return plain | {
            name: value for name in ("name", "reasoning_content") if (value := getattr(self, name))
        }


def join_parts(content: Any) -> str:
    """Join the text of a message's parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class CommonFields(OptionFields):
    """Fields of both kinds of completion."""

    noted: ClassVar = list_places(
        "user stream_options best_of store service_tier metadata safety_identifier "
        "prompt_cache_key parallel_tool_calls messages.refusal messages.annotations "
        "messages.name messages.reasoning_content messages.tool_calls.type "
        "tools.function.strict"
    )

    model: ModelName = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(
        1, ge=1, le=16, description="answers per prompt; with a seed, answer i uses seed + i"
    )
    user: Identity = None

    ignore_eos: bool = Field(False, description="go on after end tokens")
    cache_prompt: bool = Field(
        True, description="reuse cached prefixes; false: compute the whole prompt"
    )

    def apply(self, ask: Ask) -> Ask:
        """Apply these fields to an ask."""
        return replace(ask, reuses=self.cache_prompt, ignores_eos=self.ignore_eos)

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        if values.get("stream", False) is False and values.pop("stream_options", None):
            note("stream_options")

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        if "stream_options" in values and values.get("stream", False) is False:
            text = "stream_options: only with stream: true"
            return [
                Fault("stream_options", "only with stream: true", text, values["stream_options"])
            ]
        return []


class ChatRequest(CommonFields):
    """POST /v1/chat/completions."""

    renamed: ClassVar = OptionFields.renamed | {
        "max_completion_tokens": "max_tokens",
        "n_probs": "top_logprobs",
    }
    places: ClassVar[Mapping[str, Sequence[str]]] = {
        "schema": ("response_format.json_schema.schema", "response_format.schema"),
        "logprobs": ("top_logprobs",),
    }
    refused: ClassVar = {"audio": ""}

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = Field(False, description="report the log-probability of each token")  # type: ignore[assignment]
    top_logprobs: Likeliest = None
    response_format: ResponseFormat = ResponseFormat.model_validate({"type": "text"})
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = Field(
        "auto", description="stop strings do not end a required call"
    )
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = {}
    modalities: list[Literal["text"]] = ["text"]
    store: Literal[False] = Field(False, description="answers are not kept")
    service_tier: Literal["auto", "default"] = "auto"
    metadata: dict[str, str] = Field({}, max_length=16, description="has no effect without store")
    safety_identifier: Identity = None
    prompt_cache_key: CacheKey = None

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        adapt_thinking(values, note)
        if (functions := values.pop("functions", None)) and isinstance(functions, list):
            values.setdefault(
                "tools", [{"type": "function", "function": function} for function in functions]
            )
        if (choice := values.pop("function_call", None)) is not None:
            values.setdefault(
                "tool_choice",
                {"type": "function", "function": choice} if isinstance(choice, dict) else choice,
            )
        if values.get("tool_choice") == "any":  # Mistral's word
            values["tool_choice"] = "required"
        adapt_allowed_tools(values)
        if values.get("tool_choice") == "none" and not values.get("tools"):
            del values["tool_choice"]
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

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> list[Fault]:
        faults = super().check_together(values)
        if "top_logprobs" in values and values.get("logprobs", False) is False:
            rule = "only with logprobs: true"
            value = values["top_logprobs"]
            faults.append(Fault("top_logprobs", rule, f"top_logprobs: {rule}", value))
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
        return options | self.response_format.options()

    def toolbox(self) -> Toolbox:
        """Build the toolbox. Raises Refusal."""
        choice = (
            self.tool_choice
            if isinstance(self.tool_choice, str)
            else self.tool_choice.function.name
        )
        return build_toolbox(
            [tool.function.described() for tool in self.tools], choice, self.parallel_tool_calls
        )


@router.post("/v1/chat/completions", **takes(ChatRequest))
@router.post("/chat/completions", include_in_schema=False)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    name = check_model(request, body.model)
    messages = [message.plain() for message in body.messages]
    box, options = body.toolbox(), body.requested_options()
    check_rule(box, options, "response_format" if body.response_format.options() else "")
    asks = [
        replace(body.apply(ask), variables=body.chat_template_kwargs)
        for ask in choices_of(options, [messages], "messages", body.n, box)
    ]
    made = {
        "id": f"chatcmpl-{request_id(request)}",
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": FINGERPRINT,
    }

    def whole(answers: Answers) -> dict[str, Any]:
        choices, thought_tokens = [], 0
        for i, completion in enumerate(answers.completions):
            text, calls, thought, count = read_answer(answers, i, box)
            thought_tokens += count
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text if text or not calls else None,
                "refusal": None,
            }
            if thought:
                message["reasoning_content"] = thought
            if calls:
                message["tool_calls"] = [call.as_dict() for call in calls]
            choices.append(
                {
                    "index": i,
                    "message": message,
                    "logprobs": write_logprobs(answers.llm, completion.tokens)
                    if body.logprobs
                    else None,
                    "finish_reason": finish_reason(completion, calls),
                }
            )
        return {
            **made,
            "object": "chat.completion",
            "choices": choices,
            "usage": write_usage(answers, thought_tokens),
            "timings": write_timings(answers.completions[0]),
        }

    def delta(
        i: int, content: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        usage = {"usage": None} if body.stream_options.include_usage else {}
        choice = {"index": i, "delta": content, "logprobs": logprobs, "finish_reason": reason}
        return event({**made, "object": "chat.completion.chunk", **usage, "choices": [choice]})

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        for i in range(body.n):
            yield delta(i, {"role": "assistant", "content": ""})
        readers = [Reader(answers, i, box) for i in range(len(asks))]
        async for batch in answers.batches():
            i = batch.index
            for token in batch.tokens:
                pieces = readers[i].push(token.text, token.thought)
                logprobs = write_logprobs(answers.llm, [token]) if body.logprobs else None
                if logprobs and logprobs["content"] and not pieces:
                    # a token without text still has a log-probability
                    pieces = [""]
                for piece in pieces:
                    yield delta(i, write_piece(piece), None, logprobs)
                    logprobs = None
            if batch.is_last:
                for piece in readers[i].push("", is_last=True):
                    yield delta(i, write_piece(piece))
                yield delta(i, {}, finish_reason(answers.completions[i], readers[i].calls))
        if body.stream_options.include_usage:
            usage = write_usage(answers, sum(reader.thought_tokens for reader in readers))
            yield event(
                {
                    **made,
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": usage,
                    "timings": write_timings(answers.completions[0]),
                }
            )
        yield DONE

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


def is_forced(choice: Any) -> bool:
    """True for a tool_choice that demands a call."""
    return choice == "required" or isinstance(choice, dict)


def is_rule(form: Any) -> bool:
    """True for a format that demands more than text."""
    return isinstance(form, dict) and form.get("type") != "text"


def adapt_thinking(values: dict[str, Any], note: Note) -> None:
    """Turn the fields by which APIs control thinking into options and variables of the template."""
    if values.get("reasoning_format") == "none":
        values["reasoning"] = values.get("reasoning") or "raw"
        del values["reasoning_format"]
    variables = values.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        return
    chosen: dict[str, Any] = {}
    reasoning = values.get("reasoning")
    if reasoning is not None and reasoning not in get_args(FIELDS["reasoning"].annotation):
        parts = reasoning if isinstance(reasoning, dict) else {"": reasoning}
        del values["reasoning"]
        values.setdefault("reasoning_effort", parts.get("effort"))
        for name in parts.keys() - {"effort"}:
            note(f"reasoning.{name}")
    if isinstance(effort := values.pop("reasoning_effort", None), str):
        chosen = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    elif effort is not None:
        note("reasoning_effort")
    if (thinking := values.pop("thinking", None)) is not None:
        parts = thinking if isinstance(thinking, dict) else {"": thinking}
        if parts.get("type") in ("enabled", "adaptive", "disabled"):
            chosen["enable_thinking"] = parts["type"] != "disabled"
        if isinstance(budget := parts.get("budget_tokens"), int):
            values.setdefault("reasoning_budget", budget)
        read = {"budget_tokens"} if "reasoning_budget" in values else set()
        for name in parts.keys() - read - ({"type"} if "enable_thinking" in chosen else set()):
            note(f"thinking.{name}")
    if (wanted := values.pop("enable_thinking", None)) is not None:
        chosen["enable_thinking"] = wanted
    if chosen or variables:
        values["chat_template_kwargs"] = chosen | variables


def adapt_allowed_tools(values: dict[str, Any]) -> None:
    """Keep only the tools that a tool_choice of type allowed_tools lists."""
    choice, tools = values.get("tool_choice"), values.get("tools")
    if (
        not isinstance(choice, dict)
        or choice.get("type") != "allowed_tools"
        or not isinstance(tools, list)
    ):
        return
    allowed = choice.get("allowed_tools", choice)
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        names = [_tool_name(tool) for tool in allowed["tools"]]
        values["tools"] = [tool for tool in tools if _tool_name(tool) in names]
        values["tool_choice"] = allowed.get("mode", "auto")


def _tool_name(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def adapt_messages(messages: list[Any]) -> list[Any]:
    """Convert messages of older and other clients: missing ids of calls, arguments as objects, the
    role function, contents that are null.
    """
    adapted: list[Any] = []
    waiting: list[str] = []  # ids of calls without a result
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            adapted.append(message)
            continue
        message = {name: value for name, value in message.items() if value is not None}
        if isinstance(call := message.pop("function_call", None), dict):
            message.setdefault("tool_calls", [{"type": "function", "function": call}])
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [
                _adapt_call(call, f"call_{number}_{i}") for i, call in enumerate(calls)
            ]
            waiting = [call["id"] for call in message["tool_calls"] if isinstance(call, dict)]
        if message.get("role") == "function":
            message["role"] = "tool"
        if message.get("role") == "tool":
            identity = message.setdefault(
                "tool_call_id", waiting[0] if waiting else f"call_{number}"
            )
            waiting = [other for other in waiting if other != identity]
        if message.get("role") in ("user", "assistant", "tool", "system", "developer"):
            message.setdefault("content", "")
        if isinstance(parts := message.get("content"), list):
            message["content"] = [_adapt_part(part) for part in parts]
        adapted.append(message)
    return adapted


def _adapt_call(call: Any, identity: str) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if isinstance(function, dict):
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and not _is_object(arguments):
            arguments = {"raw": arguments}  # an unfinished call: templates need an object
        if isinstance(arguments, dict):
            function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**call, "id": call.get("id") or identity, "function": function}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _adapt_part(part: Any) -> Any:
    """Convert a text part of any API."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    is_text = isinstance(part, dict) and part.get("type") in (
        "input_text",
        "output_text",
        "refusal",
    )
    return (
        {**part, "type": "text", "text": part.get("text", part.get("refusal"))} if is_text else part
    )


def write_piece(piece: Piece) -> dict[str, Any]:
    """Write the delta of text, a thought, or a part of a call."""
    if isinstance(piece, Thought):
        return {"reasoning_content": piece.text}
    if isinstance(piece, str):
        return {"content": piece}
    begun = {"id": piece.id, "type": "function"} if piece.id else {}
    name = {"name": piece.name} if piece.name else {}
    return {
        "tool_calls": [
            {"index": piece.index, **begun, "function": {**name, "arguments": piece.arguments}}
        ]
    }


def fail(refusal: Refusal) -> bytes:
    """Write an error within a stream."""
    return event(write_openai(refusal))


class CompletionRequest(CommonFields):
    """POST /v1/completions."""

    renamed: ClassVar = OptionFields.renamed | {"n_probs": "logprobs", "json_schema": "schema"}
    refused: ClassVar = {"suffix": "the model continues a text: POST /infill fills a gap"}

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool = Field(False, description="put the prompt before the answer")

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        if values.get("suffix") == "":
            del values["suffix"]

    @model_validator(mode="after")
    def _check_echo(self):
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not with logprobs, which are not computed for the prompt")
        return self


def split_prompts(prompt: Any, limit: int, count: int, field: str) -> list[Any]:
    """Return the prompts of a field that holds a prompt or several. Raises Refusal.

    limit: of answers, `count` per prompt. field: the name of the count.
    """
    are_many = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts = prompt if are_many else [prompt]
    if len(prompts) > limit:
        text = f"prompt: has {len(prompts)} prompts, the maximum is {limit}"
        raise bad_field("prompt", f"at most {limit} prompts", text)
    if len(prompts) * count > limit:
        text = f"{field}: {len(prompts)} prompts of {count} answers each, the maximum is {limit}"
        raise bad_field(field, f"at most {limit} answers", text, count)
    if any(isinstance(item, list) and not item for item in prompts):
        raise bad_field("prompt", "at least 1 token", "prompt: has no tokens")
    return prompts


def spell_token(entry: Mapping[str, Any]) -> str:
    """Write a token's text; invalid UTF-8 as bytes:\\xe2\\x82, so that keys differ."""
    data = bytes(entry["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@router.post("/v1/completions", **takes(CompletionRequest))
@router.post("/completions", include_in_schema=False)
async def complete(request: Request) -> Response:
    """Continue a text."""
    body = await read_body(request, CompletionRequest)
    name = check_model(request, body.model)
    prompts = split_prompts(body.prompt, desk_of(request).settings.max_choices, body.n, "n")
    asks = [
        body.apply(ask) for ask in choices_of(body.requested_options(), prompts, "prompt", body.n)
    ]
    made = {
        "id": f"cmpl-{request_id(request)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": FINGERPRINT,
    }

    def opening(answers: Answers, i: int) -> str:
        if not body.echo:
            return ""
        prompt = prompts[i // body.n]
        return prompt if isinstance(prompt, str) else answers.llm.tokenizer.decode(prompt)

    def whole(answers: Answers) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "text": opening(answers, i) + completion.text,
                "logprobs": logprobs(answers, completion.tokens, len(opening(answers, i))),
                "finish_reason": finish_reason(completion),
            }
            for i, completion in enumerate(answers.completions)
        ]
        return {
            **made,
            "choices": choices,
            "usage": write_usage(answers),
            "timings": write_timings(answers.completions[0]),
        }

    def logprobs(answers: Answers, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """Write the older format: parallel lists, and top logprobs as an object."""
        if body.logprobs is None:
            return None
        entries = list_logprobs(answers.llm, tokens)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        is_listed = [
            token.logprobs is not None and token not in answers.llm.engine.eos for token in tokens
        ]
        return {
            "tokens": [spell_token(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {spell_token(other): other["logprob"] for other in entry["top_logprobs"]}
                for entry in entries
            ],
            "text_offset": list(itertools.compress(offsets, is_listed)),
        }

    def piece(
        i: int, text: str, reason: str | None = None, entries: dict[str, Any] | None = None
    ) -> bytes:
        usage = {"usage": None} if body.stream_options.include_usage else {}
        choice = {"index": i, "text": text, "logprobs": entries, "finish_reason": reason}
        return event({**made, **usage, "choices": [choice]})

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        for i in range(len(asks)):
            if text := opening(answers, i):
                yield piece(i, text)
        offsets = [len(opening(answers, i)) for i in range(len(asks))]
        async for batch in answers.batches():
            for token in batch.tokens:
                entries = logprobs(answers, [token], offsets[batch.index])
                offsets[batch.index] += len(token.text)
                if token.text or (entries and entries["tokens"]):
                    yield piece(batch.index, token.text, None, entries)
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
    """List the model and its adapters."""
    llm = desk_of(request).keeper.llm
    meta = llm and {
        "n_vocab": llm.model.config.vocab_size,
        "n_ctx": llm.engine.context,
        "n_ctx_train": llm.model.config.max_position_embeddings,
    }
    names = (*served_names(request), *served_adapters(request))
    data = [_model(request, name) | {"meta": meta} for name in names]
    return Json({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Return a model by its name."""
    if not desk_of(request).is_name(name):
        raise Refusal(
            404,
            "model_not_found",
            message=f"there is no model {name!r:.100} here: this server has "
            f"{', '.join((*served_names(request), *served_adapters(request)))}",
        )
    return Json(_model(request, check_model(request, name)))


def _model(request: Request, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(request.app.state.started),
        "owned_by": "mlx_llama",
    }
