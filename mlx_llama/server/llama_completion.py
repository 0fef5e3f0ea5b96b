"""llama-server's completions, for its clients and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.api.llm import LLM
from mlx_llama.core.answers.completion import Token
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.options import ENDLESS, FIELDS
from mlx_llama.core.text.infill import Infill

from .completions import PromptObject, join_mixed, split_prompts
from .conversations import AnswerFields
from .faults import TEXT_ONLY
from .fields import BY_TYPE, HIDDEN, Body, Count, Noted, Text, look_up, note, spell, unavailable
from .replies import (
    PING_SECONDS,
    Events,
    Writer,
    admission_of,
    choices_of,
    list_entries,
    reply,
    write_timings,
)
from .schemas import serves
from .slots import Task

router = APIRouter(tags=["llama-server"])

_IMAGES = TEXT_ONLY.format("image")
_STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit", "context": "limit"}


_Mixed = Annotated[
    Text
    | Annotated[int, Tag("as:integer")]
    | Annotated[PromptObject, Tag("as:object")]
    | Annotated[
        list[Annotated[Text | Annotated[int, Tag("as:integer")], BY_TYPE]], Tag("as:array")
    ],
    BY_TYPE,
]


class LlamaCompletionRequest(AnswerFields):
    """POST /completion. Defaults of options are this server's, not llama-server's."""

    model_config = spell(logprobs="n_probs", n_cmpl="n")

    # thoughts stay in the text
    reasoning_format: Noted[Annotated[Any, unavailable(["none"]), HIDDEN]] = "none"
    multimodal_data: Annotated[Any, unavailable(reason=_IMAGES), HIDDEN] = None
    image_data: Annotated[Any, unavailable([[]], reason=_IMAGES), HIDDEN] = []
    nodes: Annotated[Any, unavailable(reason=""), HIDDEN] = None
    prompt: Annotated[
        Text | Annotated[PromptObject, Tag("as:object")] | Annotated[list[_Mixed], Tag("as:array")],
        BY_TYPE,
    ] = Field(description="a text, token ids, both mixed, or a list of these")
    max_tokens: int = Field(
        -1, ge=-1, le=ENDLESS, description="number of tokens; -1: until the context is full"
    )
    n_cmpl: Count = 1
    sse_ping_interval: int = Field(
        PING_SECONDS,
        ge=-1,
        le=86400,
        description="seconds of silence before a stream sends a comment; 0 or -1: never",
    )
    t_max_predict_ms: int = Field(
        0,
        ge=0,
        le=2**31,
        description="milliseconds after the first token until an answer with a line break ends; "
        "0: no limit",
    )
    return_progress: bool = Field(
        False, description="report in a stream how much of the prompt is processed"
    )
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[str] = Field(
        [], max_length=64, description="fields of the answer, as a/b within objects"
    )
    id_slot: Noted[int] = Field(
        -1, ge=-1, description="preferred row; any row gives the same answer"
    )

    def requested_options(self) -> dict[str, Any]:
        return super().requested_options() | {"logprobs": self.logprobs or None}  # n_probs: 0

    def split(self, llm: LLM, limit: int) -> list[Any]:
        """Return the prompts. limit: maximum number of answers. Raises Refusal."""
        prompts = split_prompts(self.prompt, limit, self.n_cmpl, "n_cmpl")
        return [join_mixed(llm, prompt) for prompt in prompts]


class Chunk(Body):
    """A file, or a part of it, beside the one that is edited."""

    text: str
    filename: str = ""


class InfillRequest(LlamaCompletionRequest):
    """POST /infill."""

    prompt_field: ClassVar = "input_prefix"

    prompt: str = Field("", description="beginning of the answer, which is continued")
    input_prefix: str = Field(description="text before the answer")
    input_suffix: str = Field(description="text after the answer")
    input_extra: list[Chunk] = Field([], max_length=2048, description="the most relevant last")

    def split(self, llm: LLM, limit: int) -> list[Any]:
        files = [(chunk.filename, chunk.text) for chunk in self.input_extra]
        return [Infill(self.input_prefix, self.input_suffix, files, self.prompt)]


# Fields that generation_settings repeats although they are not options of the table.
_UNSAID = {*FIELDS, "prompt", "model", "response_fields", "sse_ping_interval", "lora"}
_UNSAID |= {"multimodal_data", "nodes"}
_ECHOED = [name for name in LlamaCompletionRequest.model_fields if name not in _UNSAID]


class LlamaWriter(Writer):
    """Writes completions as llama-server does."""

    def __init__(self, request: Request, body: LlamaCompletionRequest):
        super().__init__(request, body)
        if body.id_slot >= 0:
            note(request, "id_slot")
        self.shows_progress, self.ping = body.return_progress, body.sse_ping_interval

    def whole(self, tasks: Sequence[Task]) -> Any:
        receipts = [self.receipt(task) for task in tasks]
        return receipts if len(receipts) > 1 else receipts[0]

    def receipt(self, task: Task, is_streamed: bool = False) -> dict[str, Any]:
        """Write the final object, without the content of a stream."""
        body, completion = self.body, task.completion
        prompt, tokens = task.ask.prompt, [] if is_streamed else completion.tokens
        full = {
            "index": task.index,
            "content": "" if is_streamed else completion.text,
            "tokens": list(map(int, tokens)) if body.return_tokens else [],
            "id_slot": task.slot,
            "stop": True,
            "model": self.name,
            "tokens_predicted": len(completion.tokens),
            "tokens_evaluated": completion.prompt_tokens,
            "generation_settings": write_settings(completion.options, body),
            "prompt": prompt
            if isinstance(prompt, str)
            else task.llm.tokenizer.decode(task.prompt, skip_special=False),
            "has_new_line": "\n" in completion.text,
            "truncated": False,
            "stop_type": _STOP_TYPES.get(completion.finish_reason or "", "none"),
            "stopping_word": task.stop_string or "",
            "tokens_cached": completion.prompt_tokens + len(completion.tokens),
            "timings": write_timings(completion),
            **_write_probabilities(task, body.logprobs, tokens),
        }
        return _pick(full, body.response_fields)

    def part(self, task: Task, content: str = "", tokens: Sequence[int] = ()) -> dict[str, Any]:
        """Write the fields of an event before the last."""
        return {
            "index": task.index,
            "content": content,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": task.slot,
            "tokens_predicted": task.answer.count if tokens else 0,
            "tokens_evaluated": task.completion.prompt_tokens,
        }

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        if token is None:
            return
        if token.text or self.body.return_tokens:
            probabilities = _write_probabilities(task, self.body.logprobs, [token])
            fields = self.part(task, token.text, [int(token)]) | probabilities
            if self.body.timings_per_token:
                fields["timings"] = write_timings(task.completion)
            yield fields

    def end(self, task: Task) -> Events:
        yield self.receipt(task, is_streamed=True)


@serves(router, LlamaCompletionRequest, "/completion")
async def completion(request: Request, body: LlamaCompletionRequest) -> Response:
    """Continue a text."""
    writer = LlamaWriter(request, body)
    limit = admission_of(request).settings.max_choices
    prompts = await admission_of(request).run(lambda llm: body.split(llm, limit), "prompt")
    seconds = body.t_max_predict_ms / 1e3 or None
    ask = body.ask(None, decode_seconds=seconds)
    return await reply(request, choices_of(ask, prompts, body.n_cmpl), writer, body.stream)


@serves(router, InfillRequest, "/infill")
async def infill(request: Request, body: InfillRequest) -> Response:
    """Write the text between a prefix and a suffix, for editors. 501 for a model without tokens
    for it.
    """
    return await completion(request, body)


def _write_probabilities(task: Task, count: int | None, tokens: Sequence[Token]) -> dict[str, Any]:
    """Write completion_probabilities if n_probs asks for them, without end tokens."""
    entries = list_entries(task, tokens) if count else []
    return {"completion_probabilities": entries} if entries else {}


def _pick(full: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Pick fields by name; a/b is field b of object a. Skip unknown fields, like llama-server."""
    picked = {name: look_up(full, name.replace("/", ".")) for name in names}
    return {name: value for name, value in picked.items() if value is not None} if names else full


def write_settings(
    options: Mapping[str, Any], body: LlamaCompletionRequest | None = None
) -> dict[str, Any]:
    """Write effective options, by our names and llama-server's. body: None for the defaults."""
    bias = [[token, value] for token, value in options["logit_bias"].items()]
    fields = LlamaCompletionRequest.model_fields
    return {
        **{name: options[name] for name in FIELDS},  # in the order of the table
        "logit_bias": bias,
        "stop": list(options["stop"]),
        "grammar": options["grammar"] or "",
        "n_predict": -1 if options["max_tokens"] >= ENDLESS else options["max_tokens"],
        "repeat_penalty": options["repetition_penalty"],
        "repeat_last_n": options["repetition_context_size"],
        "json_schema": options["schema"],
        "n_probs": options["logprobs"] or 0,
        "lora": [item.model_dump() for item in (body and body.lora) or ()],
        **{name: getattr(body, name) if body else fields[name].get_default() for name in _ECHOED},
    }
