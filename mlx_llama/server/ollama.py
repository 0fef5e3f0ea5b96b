"""Ollama's API (docs/api.md in its repository): JSON lines, times in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama import __version__
from mlx_llama.core.generation.tool_use import Toolbox
from mlx_llama.core.text.thoughts import Thought

from .answers import Answers, Ask
from .faults import Refusal
from .fields import Body, ModelName, Note, OptionFields, read_body
from .llama_cpp import describe_model
from .openai import Message, adapt_messages
from .replies import (
    Json,
    check_model,
    desk_of,
    dump,
    reply_stream,
    reply_whole,
    served_adapters,
    served_names,
    write_ollama,
)
from .schemas import takes
from .tooling import FunctionTool, Reader, build_toolbox, check_rule, read_answer

router = APIRouter(prefix="/api", tags=["Ollama"])

# Names in `options` that differ from the options table's
_OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
}
_IMAGES = "models are text only"


class OllamaFields(OptionFields):
    """Fields of both routes; those of `options` move to the top level."""

    noted: ClassVar = frozenset(
        {"messages.thinking", "messages.tool_calls.function.index", "tools.function.strict"}
    )
    refused: ClassVar[Mapping[str, str]] = {"images": _IMAGES}

    model: ModelName = None
    stream: bool = True
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the chat template; think sets enable_thinking"
    )

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        if isinstance(options := values.pop("options", {}), dict):
            for name, value in options.items():
                ours = _OPTIONS.get(name, name)
                if ours not in cls.model_fields:
                    note(f"options.{name}")
                elif value is not None:
                    # -1 and -2: until the context is full
                    values[ours] = -1 if ours == "max_tokens" and value == -2 else value
        if (form := values.pop("format", None)) not in (None, ""):
            values["schema"] = {"type": "object"} if form == "json" else form
        if not values.get("images", True):
            del values["images"]
        if (think := values.pop("think", None)) is not None:  # true, false or an effort
            values["chat_template_kwargs"] = {"enable_thinking": bool(think)}
        super().adapt(values, note)


class OllamaChat(OllamaFields):
    """POST /api/chat."""

    messages: list[Message] = []
    tools: list[FunctionTool] = []

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        if isinstance(messages := values.get("messages"), list):
            for i, message in enumerate(messages):
                if isinstance(message, dict) and "tool_name" in message:
                    message.setdefault("name", message.pop("tool_name"))
                if isinstance(message, dict) and message.pop("images", None):
                    raise Refusal(400, "unsupported", message=f"messages[{i}].images: {_IMAGES}")
            values["messages"] = adapt_messages(messages)


class OllamaGenerate(OllamaFields):
    """POST /api/generate."""

    refused: ClassVar[Mapping[str, str]] = {
        "images": _IMAGES,
        "suffix": "the model only continues a text",
    }

    prompt: str = ""
    system: str = ""
    raw: bool = Field(False, description="continue the prompt without the chat template")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _tag(name: str) -> str:
    return name if ":" in name else f"{name}:latest"


def _write_end(answers: Answers) -> dict[str, Any]:
    """Write the statistics in the last line of an answer."""
    completion = answers.completions[0]
    reason = "length" if completion.finish_reason in ("length", "context") else "stop"
    return {
        "done": True,
        "done_reason": reason,
        "total_duration": int((time.monotonic() - answers.began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": completion.prompt_tokens,
        "prompt_eval_duration": int(completion.prefill_seconds * 1e9),
        "eval_count": len(completion.tokens),
        "eval_duration": int(completion.decode_seconds * 1e9),
    }


def fail(refusal: Refusal) -> bytes:
    """Write an error within a stream."""
    return dump(write_ollama(refusal)) + b"\n"


async def _reply(
    request: Request, body: OllamaFields, asks: Sequence[Ask], box: Toolbox, field: str
) -> Response:
    """Reply at once or line by line. field: "message" or "response", for the text."""
    name = check_model(request, body.model)

    def line(
        text: str, calls: Sequence[Any] = (), thought: str = "", **more: Any
    ) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        content: dict[str, Any] = {"response": text, **thinking}
        if field == "message":
            content = {"message": {"role": "assistant", "content": text, **thinking}}
        if calls:
            content["message"]["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.values()}} for call in calls
            ]
        return {"model": name, "created_at": _now(), **content, "done": False, **more}

    def whole(answers: Answers) -> dict[str, Any]:
        text, calls, thought, _ = read_answer(answers, 0, box)
        return line(
            text, [call for call in calls if call.is_complete], thought, **_write_end(answers)
        )

    async def lines(answers: Answers) -> AsyncIterator[bytes]:
        reader, sent = Reader(answers, 0, box), 0
        async for batch in answers.batches():
            pieces = reader.read(batch.tokens, batch.is_last)
            text = "".join(piece for piece in pieces if isinstance(piece, str))
            thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
            calls = [call for call in reader.calls[sent:] if call.is_complete]
            sent += len(calls)
            if text or calls or thought:
                yield dump(line(text, calls, thought)) + b"\n"
        yield dump(line("", **_write_end(answers))) + b"\n"

    if not asks:  # a request to load the model
        return Json(line("", done=True, done_reason="load"))
    if body.stream:
        return await reply_stream(request, asks, lines, fail, 0, "application/x-ndjson")
    return await reply_whole(request, asks, whole)


@router.post("/chat", **takes(OllamaChat))
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, OllamaChat)
    box = build_toolbox([tool.function.described() for tool in body.tools], "auto", True)
    options, messages = body.requested_options(), [message.plain() for message in body.messages]
    check_rule(box, options, "format")
    ask = Ask(messages, "messages", options, box, variables=body.chat_template_kwargs)
    return await _reply(request, body, [ask] if messages else [], box, "message")


@router.post("/generate", **takes(OllamaGenerate))
async def generate(request: Request) -> Response:
    """Answer a question, or continue a text if raw is set."""
    body = await read_body(request, OllamaGenerate)
    system = [{"role": "system", "content": body.system}] if body.system else []
    prompt = body.prompt if body.raw else [*system, {"role": "user", "content": body.prompt}]
    ask = Ask(prompt, "prompt", body.requested_options(), variables=body.chat_template_kwargs)
    return await _reply(request, body, [ask] if body.prompt else [], Toolbox(), "response")


# The model


def _facts(request: Request) -> dict[str, Any]:
    desk = desk_of(request)
    return describe_model(desk.keeper.llm, desk.settings) if desk.keeper.llm else desk.keeper.facts


def _describe(request: Request) -> dict[str, Any]:
    llm, path = desk_of(request).keeper.llm, str(_facts(request).get("model_path", ""))
    family = llm.model.config.architecture.removesuffix("ForCausalLM").lower() if llm else ""
    return {
        "format": "gguf" if path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
        "parent_model": "",
    }


@router.get("/tags")
@router.get("/ps", include_in_schema=False)
async def tags(request: Request) -> Response:
    """List the model and its adapters."""
    started = datetime.fromtimestamp(request.app.state.started, timezone.utc).isoformat()
    details = _describe(request)
    path = Path(str(_facts(request).get("model_path", "")))
    size = path.stat().st_size if path.is_file() else 0
    models = [
        {
            "name": _tag(name),
            "model": _tag(name),
            "modified_at": started,
            "expires_at": "2318-01-01T00:00:00Z",
            "size": size,
            "size_vram": 0,
            "digest": "",
            "details": details,
        }
        for name in (*served_names(request), *served_adapters(request))
    ]
    return Json({"models": models})


class ShowRequest(Body):
    """POST /api/show."""

    renamed: ClassVar = {"name": "model"}

    model: ModelName = None


@router.post("/show", **takes(ShowRequest))
async def show(request: Request) -> Response:
    """Describe the model and its capabilities."""
    body = await read_body(request, ShowRequest)
    check_model(request, body.model)
    facts = _facts(request)
    template, details = str(facts.get("chat_template", "")), _describe(request)
    info = {
        "general.architecture": details["family"],
        f"{details['family']}.context_length": facts.get("n_ctx_train"),
    }
    return Json(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": details,
            "model_info": info,
            "capabilities": ["completion", *(["tools"] if "tools" in template else [])],
        }
    )


@router.get("/version")
async def version() -> Response:
    """Return the version of this server."""
    return Json({"version": __version__})


@router.post("/{route}", include_in_schema=False)
async def missing(route: str) -> Response:
    """Refuse routes that manage models or compute embeddings."""
    if route.startswith("embed"):
        return Json({"error": "embeddings are not supported"}, 501)
    text = "models cannot be changed while the server runs: restart it with --model"
    return Json({"error": text}, 400)
