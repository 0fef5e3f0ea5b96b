"""llama-server's routes, for its clients and scripts."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import anyio
from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.engine.request import Sequence as EngineSequence
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.generation.cache_file import read_cache, write_cache
from mlx_llama.core.generation.completion import Token
from mlx_llama.core.generation.llm import LLM
from mlx_llama.core.generation.options import FIELDS

from .answers import Answers, default_limit, find_template, refuse
from .faults import Fault, Refusal, bad_field
from .fields import ENDLESS, Body, ModelName, OptionFields, list_places, read_body
from .openai import Message, fail, split_prompts
from .replies import (
    FINGERPRINT,
    PING_SECONDS,
    Json,
    check_model,
    choices_of,
    desk_of,
    event,
    reply_stream,
    reply_whole,
    served_names,
    write_timings,
)
from .schemas import takes
from .settings import Settings
from .tooling import FunctionTool, build_toolbox, list_entries, tool_format

router = APIRouter(tags=["llama-server"])
Result = TypeVar("Result")

MOST_BIAS = 1e6
_STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit", "context": "limit"}


class PromptObject(Body):
    """A prompt as an object; models are text only."""

    prompt_string: str
    multimodal_data: list[Any] = Field([], max_length=0)


# llama-server's default lists; either names all samplers.
_SAMPLERS = (
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
)


class LlamaCompletionRequest(OptionFields):
    """POST /completion. Defaults of options are this server's, not llama-server's."""

    renamed: ClassVar = OptionFields.renamed | {
        "json_schema": "schema",
        "n_probs": "logprobs",
        "n": "n_cmpl",
    }
    # Unsupported samplers, and hints
    noted: ClassVar = list_places(
        "min_keep n_indent n_discard n_cache_reuse n_keep post_sampling_probs grammar_lazy "
        "grammar_triggers preserved_tokens reasoning_format top_n_sigma adaptive_target "
        "adaptive_decay dynatemp_range dynatemp_exponent typical_p "
        "mirostat mirostat_tau mirostat_eta samplers id_slot"
    )
    refused: ClassVar = dict.fromkeys(("multimodal_data", "nodes"), "")

    prompt: str | PromptObject | list[str | int | PromptObject | list[str | int]] = Field(
        description="a text, token ids, both mixed, or a list of these"
    )
    max_tokens: int = Field(
        -1,
        ge=-1,
        le=2**31,
        description="maximum number of tokens to generate; -1: until the context is full",
    )
    seed: int = Field(-1, ge=-1, lt=2**64, description="seed of the random numbers; -1: random")
    repetition_context_size: int = Field(
        20,
        ge=-1,
        le=65536,
        description="number of recent tokens that penalties consider; -1: all of the context",
    )
    grammar: str | None = Field(None, description='GBNF or Lark grammar of the answer; "": none')
    n_cmpl: int = Field(
        1,
        ge=1,
        le=16,
        description="answers to each prompt; with a seed, answer i draws with seed + i",
    )
    stream: bool = False
    sse_ping_interval: int = Field(
        PING_SECONDS,
        ge=-1,
        le=86400,
        description="seconds of silence before a comment in a stream; 0 or -1: none",
    )
    model: ModelName = None
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
    cache_prompt: bool = Field(
        True, description="use known prefixes; false: compute the whole prompt"
    )
    ignore_eos: bool = Field(False, description="go on after end tokens")
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[str] = Field(
        [], max_length=64, description="fields of the answer, as a/b within objects"
    )
    id_slot: int = Field(-1, ge=-1, description="preferred row; another gives the same answer")
    n_keep: int = Field(
        0, ge=-1, description="has no effect: an answer ends when the context is full"
    )
    logit_bias: dict[int | str, float] = Field(  # type: ignore[assignment]
        {},
        description="maps token ids or texts to biases; also a list of [id or text, bias or false]",
    )
    samplers: list[str] = Field(
        _SAMPLERS[0],
        description="llama-server's default lists only; the order is fixed: penalties, dry, "
        "temperature, top_k, top_p, min_p, xtc",
    )
    # Values that switch off unsupported features
    min_keep: Literal[0] = 0
    n_indent: Literal[0] = 0
    n_discard: Literal[0] = 0
    n_cache_reuse: Literal[0] = 0
    post_sampling_probs: Literal[False] = False
    lora: list[Any] = Field([], max_length=0, description="adapters are not loaded")
    image_data: list[Any] = Field([], max_length=0)
    grammar_lazy: Literal[False] = False
    grammar_triggers: list[Any] = Field([], max_length=0)
    preserved_tokens: list[Any] = Field([], max_length=0)
    reasoning_format: Literal["none"] = "none"
    top_n_sigma: float = Field(-1, le=0)
    adaptive_target: float = Field(-1, lt=0)
    adaptive_decay: float = Field(0.9, description="has no effect without adaptive_target")
    dynatemp_range: float = Field(0, ge=0, le=0)
    dynatemp_exponent: float = Field(1, description="has no effect without dynatemp_range")
    typical_p: float = Field(1, ge=1, le=1)
    mirostat: Literal[0] = 0
    mirostat_tau: float = Field(5, description="has no effect without mirostat")
    mirostat_eta: float = Field(0.1, description="has no effect without mirostat")

    @field_validator("grammar", mode="before")
    @classmethod
    def _drop_empty_grammar(cls, value):
        return value or None if isinstance(value, str) else value

    @field_validator("samplers")
    @classmethod
    def _check_samplers(cls, value):
        if value not in _SAMPLERS:
            raise ValueError(
                f"must be {json.dumps(_SAMPLERS[0])} or {json.dumps(_SAMPLERS[1])}: "
                "the order of samplers is fixed"
            )
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _parse_biases(cls, value):
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list) or len(pairs) > 4096:
            raise ValueError("must be at most 4096 pairs [token id or text, bias], or an object")
        biases = {}
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError("must have pairs [token id or text, bias]")
            token, bias = pair
            if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < 16:
                token = int(token)
            if isinstance(token, bool) or not isinstance(token, (int, str)):
                raise ValueError("must have token ids or texts")
            biases[token] = -MOST_BIAS if bias is False else bias
        return biases

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, value):
        if any(isinstance(token, int) and token < 0 for token in value):
            raise ValueError("token ids must not be negative")
        if any(abs(bias) > MOST_BIAS for bias in value.values()):
            raise ValueError("biases must be between -1e6 and 1e6")
        return value


# Fields that generation_settings repeats although they are not options of the table.
_ECHOED = [
    name
    for name in LlamaCompletionRequest.model_fields
    if name not in FIELDS
    and name not in ("prompt", "model", "response_fields", "sse_ping_interval")
]


def _is_text_or_id(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


async def with_model(request: Request, work: Callable[[LLM], Result], field: str = "") -> Result:
    """Run `work` with the model, outside the event loop. Raises Refusal."""
    keeper = desk_of(request).keeper
    llm = await keeper.enter()
    try:
        return await anyio.to_thread.run_sync(work, llm)
    except LlamaError as error:
        raise refuse(error, field, llm) from None
    finally:
        keeper.leave()


def join_mixed(llm: LLM, prompt: Any) -> Any:
    """Encode a prompt that mixes ids and texts; return other prompts unchanged."""
    if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
        return prompt
    ids: list[int] = []
    for part in prompt:
        ids += (
            llm.tokenizer.encode(part, add_bos=not ids, parse_special=True)
            if isinstance(part, str)
            else [part]
        )
    return ids


def bias_tokens(llm: LLM, biases: Mapping[int | str, float]) -> dict[int, float]:
    """Map token ids to biases: a text biases each of its tokens; biases of a token add up."""
    totals: dict[int, float] = {}
    for key, bias in biases.items():
        for token in [key] if isinstance(key, int) else llm.tokenizer.encode(key, add_bos=False):
            totals[token] = max(-MOST_BIAS, min(MOST_BIAS, totals.get(token, 0.0) + bias))
    return totals


def _read_options(body: LlamaCompletionRequest) -> dict[str, Any]:
    """Return a body's options with the table's conventions."""
    options = body.requested_options()
    if options.get("seed") == -1:
        del options["seed"]
    if not options.get("logprobs"):
        options.pop("logprobs", None)  # n_probs: 0
    if options.get("max_tokens") == -1:
        options["max_tokens"] = ENDLESS
    return options


def _settle(
    llm: LLM, body: LlamaCompletionRequest, prompts: list[Any], options: dict[str, Any]
) -> list[Any]:
    """Encode the prompts and resolve `options` in place, with the model. Raises Refusal."""
    if body.id_slot >= llm.loop.max_rows:
        raise bad_field(
            "id_slot",
            f"< {llm.loop.max_rows}",
            f"id_slot: must be less than {llm.loop.max_rows}, the number of rows",
            body.id_slot,
        )
    if options.get("repetition_context_size") == -1:
        options["repetition_context_size"] = min(llm.engine.context, 65536)
    if biases := options.get("logit_bias"):
        options["logit_bias"] = bias_tokens(llm, biases)
    return [join_mixed(llm, prompt) for prompt in prompts]


@router.post("/completion", **takes(LlamaCompletionRequest))
async def completion(request: Request) -> Response:
    """Continue a text."""
    body = await read_body(request, LlamaCompletionRequest)
    name = check_model(request, body.model)
    prompts = _split(body, desk_of(request).settings.max_choices)
    options = _read_options(body)
    prompts = await with_model(request, lambda llm: _settle(llm, body, prompts, options), "prompt")
    seconds = body.t_max_predict_ms / 1e3 or None
    asks = [
        replace(ask, reuses=body.cache_prompt, decode_seconds=seconds, ignores_eos=body.ignore_eos)
        for ask in choices_of(options, prompts, "prompt", body.n_cmpl)
    ]

    def last(answers: Answers, i: int, content: str | None = None) -> dict[str, Any]:
        """Write the final object. content: None for the answer's, "" after a stream."""
        completion = answers.completions[i]
        prompt = asks[i].prompt
        tokens = completion.tokens if content is None else []
        full = {
            "index": i,
            "content": completion.text if content is None else content,
            "tokens": list(map(int, tokens)) if body.return_tokens else [],
            "id_slot": answers.slots[i],
            "stop": True,
            "model": name,
            "tokens_predicted": len(completion.tokens),
            "tokens_evaluated": completion.prompt_tokens,
            "generation_settings": write_settings(completion.options, body),
            "prompt": prompt if isinstance(prompt, str) else answers.llm.tokenizer.decode(prompt),
            "has_new_line": "\n" in completion.text,
            "truncated": False,
            "stop_type": _STOP_TYPES.get(completion.finish_reason, "none"),
            "stopping_word": completion.stop if isinstance(completion.stop, str) else "",
            "tokens_cached": completion.prompt_tokens + len(completion.tokens),
            "timings": write_timings(completion),
            **_write_probabilities(answers.llm, body.logprobs, tokens),
        }
        return _pick(full, body.response_fields)

    def whole(answers: Answers) -> Any:
        receipts = [last(answers, i) for i in range(len(asks))]
        return receipts if len(receipts) > 1 else receipts[0]

    def part(
        answers: Answers, i: int, content: str, tokens: list[int], count: int
    ) -> dict[str, Any]:
        """Write the fields of an event before the last."""
        return {
            "index": i,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": answers.slots[i],
            "tokens_predicted": count,
            "tokens_evaluated": answers.completions[i].prompt_tokens,
        }

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        counts, processed = [0] * len(asks), [0] * len(asks)
        async for batch in answers.batches(body.return_progress):
            completion = answers.completions[batch.index]
            if body.return_progress and batch.processed > processed[batch.index]:
                processed[batch.index] = batch.processed
                progress = {
                    "total": completion.prompt_tokens,
                    "cache": completion.reused_tokens,
                    "processed": batch.processed,
                    "time_ms": round(completion.prefill_seconds * 1e3),
                }
                yield event(part(answers, batch.index, "", [], 0) | {"prompt_progress": progress})
            for token in batch.tokens:
                counts[batch.index] += 1
                if token.text or body.return_tokens:
                    count = counts[batch.index]
                    fields = part(answers, batch.index, token.text, [int(token)], count)
                    fields |= _write_probabilities(answers.llm, body.logprobs, [token])
                    if body.timings_per_token:
                        fields["timings"] = write_timings(completion)
                    yield event(fields)
            if batch.is_last:
                yield event(last(answers, batch.index, ""))

    if body.stream:
        return await reply_stream(request, asks, events, fail, body.sse_ping_interval)
    return await reply_whole(request, asks, whole)


def _write_probabilities(llm: LLM, count: int | None, tokens: Sequence[Token]) -> dict[str, Any]:
    """Write completion_probabilities if n_probs asks for them, without end tokens."""
    entries = list_entries(llm, tokens) if count else []
    return {"completion_probabilities": entries} if entries else {}


def _split(body: LlamaCompletionRequest, limit: int) -> list[Any]:
    """Split into prompts. A list with token ids is a prompt; one of texts and lists, several."""
    prompt: Any = body.prompt
    if isinstance(prompt, list):
        prompt = [part.prompt_string if isinstance(part, PromptObject) else part for part in prompt]
    elif isinstance(prompt, PromptObject):
        prompt = prompt.prompt_string
    is_list = isinstance(prompt, list)
    if is_list and any(not isinstance(part, (str, list)) for part in prompt):
        if all(_is_text_or_id(part) for part in prompt):
            return split_prompts([prompt], limit, body.n_cmpl, "n_cmpl")
        raise bad_field(
            "prompt", "one prompt or several", "prompt: mixes token ids and lists", prompt
        )
    return split_prompts(prompt, limit, body.n_cmpl, "n_cmpl")


def _pick(full: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Pick fields by name; a/b is field b of object a, under this name. Skip unknown fields, like
    llama-server.
    """
    if not names:
        return full
    picked = {}
    for name in names:
        value: Any = full
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            picked[name] = value
    return picked


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
        **{name: getattr(body, name) if body else fields[name].get_default() for name in _ECHOED},
    }


# Text and tokens


class TokenizeRequest(Body):
    """POST /tokenize."""

    renamed: ClassVar = {"prompt": "content"}  # vLLM's name

    content: str
    add_special: bool = Field(False, description="put the model's first token before the text")
    parse_special: bool = Field(True, description="parse special tokens in the text")
    with_pieces: bool = False


@router.post("/tokenize", **takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Encode a text as token ids."""
    body = await read_body(request, TokenizeRequest)

    def work(llm: LLM) -> list[Any]:
        tokenizer = llm.tokenizer
        ids = tokenizer.encode(
            body.content,
            add_bos=body.add_special and bool(body.content),
            parse_special=body.parse_special,
        )
        return (
            [{"id": token, "piece": _piece(llm, token)} for token in ids]
            if body.with_pieces
            else ids
        )

    return Json({"tokens": await with_model(request, work, "content")})


def _piece(llm: LLM, token: int) -> str | list[int]:
    """Return the text of a token, or its bytes if they are not valid UTF-8."""
    piece = llm.tokenizer.piece(token)
    data = piece.data if piece else b""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[int]


@router.post("/detokenize", **takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Decode token ids."""
    body = await read_body(request, DetokenizeRequest)

    def work(llm: LLM) -> str:
        return llm.tokenizer.decode(body.tokens, skip_special=False)

    return Json({"content": await with_model(request, work, "tokens")})


class TemplateRequest(Body):
    """POST /apply-template."""

    messages: list[Message] = Field(min_length=1)
    tools: list[FunctionTool] = []
    add_generation_prompt: bool = True


@router.post("/apply-template", **takes(TemplateRequest))
async def apply_template(request: Request) -> Response:
    """Render a conversation with the chat template."""
    body = await read_body(request, TemplateRequest)
    messages = [message.plain() for message in body.messages]
    box = build_toolbox([tool.function.described() for tool in body.tools], "auto", True)

    def work(llm: LLM) -> str:
        if not box.tools:
            return find_template(llm).render(messages, body.add_generation_prompt)
        prompted, extras = tool_format(llm).offer(messages, box.tools)
        return llm.require_template().render(prompted, body.add_generation_prompt, **extras)

    return Json({"prompt": await with_model(request, work, "messages")})


# The server


@router.get("/props")
async def props(request: Request) -> Response:
    """Describe the model, its context, template and default options. An idle model stays idle."""
    desk = desk_of(request)
    facts, is_idle = desk.keeper.facts, desk.keeper.state == "idle"
    if not is_idle:
        facts = await with_model(request, lambda llm: describe_model(llm, desk.settings))
    return Json({**facts, "model_alias": served_names(request)[0], "is_sleeping": is_idle})


def describe_model(llm: LLM, settings: Settings) -> dict[str, Any]:
    """Return the part of /props that remains available while the model is unloaded."""
    resolved = llm.defaults.resolve({**default_limit(llm), **settings.options})
    options = write_settings(resolved.options.model_dump())
    if "seed" not in settings.options:
        options["seed"] = None
    named = llm.tokenizer.named
    return {
        "default_generation_settings": {"n_ctx": llm.engine.context, "params": options},
        "total_slots": llm.loop.max_rows,
        "model_path": str(llm.checkpoint.path),
        "n_ctx_train": llm.model.config.max_position_embeddings,
        "modalities": {"vision": False, "audio": False},
        "chat_template": llm.template.source if llm.template else "",
        "bos_token": named.get("bos_token", ""),
        "eos_token": named.get("eos_token", ""),
        "build_info": FINGERPRINT,
        "backend": llm.backend.name,
        "device": llm.backend.device_name,
        "dtype": llm.backend.runtime.dtype_name(llm.model.dtype),
    }


@router.get("/slots")
async def slots(request: Request) -> Response:
    """List the slots, one for each request that can run, and their state.

    ?fail_on_no_slot=1: 503 if none is free. An idle slot reports the length of its last prompt and
    answer. Texts are shown with --log-prompts only.
    """
    desk = desk_of(request)
    if not desk.settings.serves_slots:
        raise Refusal(404, "not_found", message="slots are off: start the server with --slots")
    llm = desk.keeper.require()
    scheduler = llm.loop.scheduler
    running = {sequence.slot: sequence for sequence in scheduler.queues.admitted}
    if request.query_params.get("fail_on_no_slot") and len(running) >= scheduler.max_rows:
        raise Refusal(
            503, "no_slot", [Fault("fail_on_no_slot", "a free slot", "all slots are taken")]
        )
    shown = llm.tokenizer.decode if desk.settings.logs_prompts else None
    return Json(
        [
            {
                "id": slot,
                "n_ctx": llm.engine.context,
                "is_processing": slot in running,
                "n_tokens": len(text),
                **(_describe_running(running[slot], shown) if slot in running else {}),
            }
            for slot, text in enumerate(scheduler.slots.texts)
        ]
    )


def _describe_running(
    sequence: EngineSequence, decode: Callable[[list[int]], str] | None
) -> dict[str, Any]:
    """Describe a running request, with its text if `decode` is given."""
    length, text = sequence.prompt_length, list(sequence.tokens)
    shown = {"prompt": decode(text[:length]), "generated": decode(text[length:])} if decode else {}
    return {
        "id_task": sequence.number,
        "speculative": sequence.speculation.kind != "none",
        "n_prompt_tokens": length,
        "n_prompt_tokens_cache": sequence.writer.completion.reused_tokens,
        "params": sequence.options.model_dump(exclude={"stop"}),
        "next_token": [
            {"has_next_token": True, "n_remain": sequence.left, "n_decoded": len(text) - length}
        ],
        **shown,
    }


class SlotRequest(Body):
    """POST /slots/{slot}?action=save or restore."""

    filename: str = Field(pattern=r"^[\w-][\w.-]{0,127}$")


@router.post("/slots/{slot}", **takes(SlotRequest))
async def change_slot(request: Request, slot: str) -> Response:
    """Save the cache of a slot's last prompt and answer (?action=save), restore a saved cache
    (?action=restore), or forget it (?action=erase, without a body).

    Prompts in any slot reuse a restored prefix.
    """
    settings = desk_of(request).settings
    action = request.query_params.get("action")
    if action not in ("save", "restore", "erase"):
        raise bad_field(
            "action",
            "one of save, restore, erase",
            "action: must be save, restore or erase",
            action,
        )
    if action != "erase" and settings.slot_folder is None:
        raise Refusal(
            404, "not_found", message="saving caches is off: start the server with --slot-save-path"
        )
    if not settings.serves_slots:
        raise Refusal(404, "not_found", message="slots are off: start the server with --slots")
    name = "" if action == "erase" else (await read_body(request, SlotRequest)).filename

    def work(llm: LLM) -> dict[str, Any]:
        number = _find_slot(llm, slot)
        if action == "erase":
            erased = llm.loop.erase(llm.loop.scheduler.slots.texts[number])
            return {"id_slot": number, "n_erased": erased}
        began = time.perf_counter()
        change = _save_slot if action == "save" else _restore_slot
        facts = change(llm, number, _find_file(settings.slot_folder, name))
        spent = round((time.perf_counter() - began) * 1e3, 3)
        return {"id_slot": number, "filename": name, **facts, "timings": {f"{action}_ms": spent}}

    return Json(await with_model(request, work, "filename"))


def _find_slot(llm: LLM, slot: str) -> int:
    last = llm.loop.max_rows - 1
    if not (slot.isascii() and slot.isdecimal() and len(slot) < 10 and int(slot) <= last):
        raise bad_field(
            "slot", f"0 to {last}", f"slot: must be a number, 0 to {last} (--max-rows)", slot
        )
    return int(slot)


def _find_file(folder: str | None, name: str) -> Path:
    """Return a file's path in the folder. Raises Refusal for a link that leaves it."""
    file = Path(folder or "", name)
    if file.resolve().parent != file.parent.resolve():
        raise bad_field(
            "filename",
            "a file of --slot-save-path",
            "filename: links to a file outside of the folder",
            name,
        )
    return file


def _save_slot(llm: LLM, slot: int, file: Path) -> dict[str, Any]:
    text = llm.loop.scheduler.slots.texts[slot]
    state = llm.loop.export(text) if text else {}
    if not state:
        raise bad_field(
            "slot",
            "a slot with a cache",
            f"slot: nothing is cached for slot {slot}: it had no request yet, or was evicted",
            slot,
        )
    write_cache(file, state, llm.identify_cache(0))
    return {"n_saved": len(state["tokens"]), "n_written": file.stat().st_size}


def _restore_slot(llm: LLM, slot: int, file: Path) -> dict[str, Any]:
    if any(sequence.slot == slot for sequence in llm.loop.scheduler.queues.running):
        raise bad_field(
            "slot",
            "an idle slot",
            f"slot: slot {slot} is running a request: wait, or use another slot",
            slot,
        )
    state = read_cache(file, llm.identify_cache(0))
    tokens = state["tokens"].tolist()
    llm.loop.install(state)
    llm.loop.scheduler.slots.put(slot, tokens)
    return {"n_restored": len(tokens), "n_read": file.stat().st_size}
