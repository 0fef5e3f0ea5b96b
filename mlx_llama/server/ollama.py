"""Ollama's API (docs/api.md in its repository): JSON lines, times in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama import __version__
from mlx_llama.core.answers.completion import Token
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.text.infill import Infill
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import ToolCall

from .admission import PromptRequest
from .conversations import (
    Conversing,
    FunctionTool,
    Message,
    plain_message,
    plain_messages,
)
from .faults import TEXT_ONLY, Refusal, write_ollama
from .fields import HIDDEN, Body, ModelName, Notes, known_names, spell, spellings, unavailable
from .llama_cpp import describe_model
from .replies import Events, Json, Writer, admission_of, check_model, dump, reply
from .schemas import serves
from .slots import Task

router = APIRouter(prefix="/api", tags=["Ollama"])


_IMAGES = TEXT_ONLY.format("images")


class OllamaFields(Conversing):
    """Fields of both routes; those of `options` move to the top level."""

    model_config = spell(max_tokens="num_predict", schema="format")
    content: ClassVar[str] = "message"  # field of an answer with the text

    stream: bool = True
    images: Annotated[Any, unavailable([[]], reason=_IMAGES), HIDDEN] = []

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if isinstance(options := values.pop("options", {}), dict):
            for name, value in options.items():
                if name not in known_names(cls):
                    notes.note(f"options.{name}")
                elif value is not None:
                    # -1 and -2: until the context is full
                    is_limit = spellings(cls)[name] == "max_tokens"
                    values[name] = -1 if is_limit and value == -2 else value
        if (form := values.get("format")) == "":
            del values["format"]
        elif form == "json":
            values["format"] = {"type": "object"}
        if (think := values.pop("think", None)) is not None:  # true, false or an effort
            values["reasoning_effort" if isinstance(think, str) else "enable_thinking"] = think
        super().adapt(values, notes)


class OllamaMessage(Message):
    """A message; images are left out of a tool's result."""

    images: Annotated[Any, unavailable([[]], reason=_IMAGES), HIDDEN] = []

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if "tool_name" in values:
            values.setdefault("name", values.pop("tool_name"))
        if values.get("role") == "tool" and (images := values.pop("images", None)):
            parts = [{"type": "image"}] * (len(images) if isinstance(images, list) else 1)
            values["content"] = [str(values.get("content", "")), *parts]
        super().adapt(values, notes)


class OllamaChat(OllamaFields):
    """POST /api/chat."""

    messages: list[OllamaMessage] = Field([], max_length=2048)
    tools: list[FunctionTool] = []

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if isinstance(truncates := values.pop("truncate", None), bool):
            values.setdefault("truncation", "auto" if truncates else "disabled")
        super().adapt(values, notes)


class OllamaGenerate(OllamaFields):
    """POST /api/generate."""

    prompt_field: ClassVar = "prompt"
    content: ClassVar = "response"

    prompt: str = ""
    suffix: str = Field("", description="text after the answer, for models that can fill gaps")
    tools: list[FunctionTool] = Field([], max_length=0)
    system: str = ""
    raw: bool = Field(False, description="continue the prompt without the chat template")


class OllamaWriter(Writer):
    """Writes lines of JSON."""

    media_type, ping = "application/x-ndjson", 0
    sent = 0  # calls so far

    def encode(self, value: Any) -> bytes:
        return dump(value) + b"\n"

    def fail(self, refusal: Refusal) -> bytes:
        return self.encode(write_ollama(refusal))

    def line(self, text: str, calls: Sequence[ToolCall], thought: str) -> dict[str, Any]:
        """Write a part of an answer."""
        content: dict[str, Any] = {"thinking": thought} if thought else {}
        if self.body.content == "message":
            content = {"message": {"role": "assistant", "content": text, **content}}
        else:
            content["response"] = text
        if calls:
            content["message"]["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.values()}} for call in calls
            ]
        now = datetime.now(timezone.utc)
        made = {"model": self.name, "created_at": f"{now:%Y-%m-%dT%H:%M:%S.%fZ}"}
        return {**made, **content, "done": False}

    def whole(self, tasks: Sequence[Task]) -> dict[str, Any]:
        task = tasks[0]
        task.answer.finish()
        calls = [call for call in task.answer.calls if call.is_complete]
        return self.line(task.answer.text, calls, task.completion.reasoning) | _write_end(task)

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        calls = [call for call in task.answer.calls[self.sent :] if call.is_complete]
        self.sent += len(calls)
        if text or calls or thought:
            yield self.line(text, calls, thought)

    def end(self, task: Task) -> Events:
        yield self.line("", (), "") | _write_end(task)


def _write_end(task: Task) -> dict[str, Any]:
    """Write the statistics in the last line of an answer."""
    completion = task.completion
    return {
        "done": True,
        "done_reason": "length" if task.is_cut else "stop",
        "total_duration": int((time.monotonic() - task.began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": completion.prompt_tokens,
        "prompt_eval_duration": int(completion.prefill_seconds * 1e9),
        "eval_count": len(completion.tokens),
        "eval_duration": int(completion.decode_seconds * 1e9),
    }


async def _reply(request: Request, body: OllamaFields, ask: PromptRequest) -> Response:
    writer = OllamaWriter(request, body)
    if not ask.prompt:  # a request to load the model
        return Json(writer.line("", (), "") | {"done": True, "done_reason": "load"})
    return await reply(request, [ask], writer, body.stream)


@serves(router, OllamaChat, "/chat")
async def chat(request: Request, body: OllamaChat) -> Response:
    """Answer a conversation."""
    return await _reply(request, body, body.ask(plain_messages(body.messages)))


@serves(router, OllamaGenerate, "/generate")
async def generate(request: Request, body: OllamaGenerate) -> Response:
    """Answer a question, or continue a text if raw is set."""
    system = [plain_message("system", body.system)] if body.system else []
    messages = [*system, plain_message("user", body.prompt)] if body.prompt else []
    prompt: Any = body.prompt if body.raw else messages
    if not body.suffix:
        return await _reply(request, body, body.ask(prompt))
    ask = body.ask(Infill(body.prompt, body.suffix), field="suffix")
    if body.system:
        ask.note("system")
    return await _reply(request, body, ask)


def _facts(request: Request) -> dict[str, Any]:
    """Return the model's facts, and its `details` as Ollama writes them."""
    admission = admission_of(request)
    llm = admission.holder.llm
    facts = describe_model(llm, admission.settings) if llm else admission.holder.facts
    family = llm.model.config.architecture.removesuffix("ForCausalLM").lower() if llm else ""
    is_gguf = str(facts.get("model_path", "")).endswith(".gguf")
    details = {"format": "gguf" if is_gguf else "safetensors", "family": family}
    unknown = dict.fromkeys(("parameter_size", "quantization_level", "parent_model"), "")
    return {**facts, "details": {**details, "families": [family], **unknown}}


@router.get("/tags")
@router.get("/ps", include_in_schema=False)
async def tags(request: Request) -> Response:
    """List the model and its adapters."""
    facts, started = _facts(request), request.app.state.started
    path = Path(str(facts.get("model_path", "")))
    shared = {
        "modified_at": datetime.fromtimestamp(started, timezone.utc).isoformat(),
        "expires_at": "2318-01-01T00:00:00Z",
        "size": path.stat().st_size if path.is_file() else 0,
        "size_vram": 0,
        "digest": "",
        "details": facts["details"],
    }
    names = [name if ":" in name else f"{name}:latest" for name in admission_of(request).listed]
    return Json({"models": [{"name": name, "model": name, **shared} for name in names]})


class ShowRequest(Body):
    """POST /api/show."""

    model: ModelName = Field(None, validation_alias=AliasChoices("name", "model"))


@serves(router, ShowRequest, "/show")
async def show(request: Request, body: ShowRequest) -> Response:
    """Describe the model and its capabilities."""
    check_model(request, body.model)
    facts = _facts(request)
    template, details = str(facts.get("chat_template", "")), facts["details"]
    family, length = details["family"], facts.get("n_ctx_train")
    info = {"general.architecture": family, f"{family}.context_length": length}
    abilities = ["completion", *(["tools"] if "tools" in template else [])]
    shown = {"modelfile": "", "parameters": "", "template": template, "details": details}
    return Json({**shown, "model_info": info, "capabilities": abilities})


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
