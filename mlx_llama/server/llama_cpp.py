"""llama-server's own routes, for its clients and scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import anyio
from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.errors import LlamaError
from mlx_llama.core.generation.completion import Completion, Token
from mlx_llama.core.generation.llm import LLM
from mlx_llama.core.generation.options import FIELDS, resolve
from mlx_llama.core.text.tools import add_tools

from .answers import Answers, Ask, refuse
from .faults import Fault, Refusal, bad_field
from .fields import Body, OptionFields, read_body
from .openai import Message, fail, split_prompts
from .replies import FINGERPRINT, Json, check_model, desk_of, event, reply_stream, reply_whole, served_names, write_timings
from .schemas import takes
from .tooling import FunctionTool, build_toolbox, list_logprobs, tool_format

router = APIRouter(tags=["llama-server"])
Result = TypeVar("Result")

_STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit", "context": "limit"}


class LlamaCompletionRequest(OptionFields):
    """POST /completion. Without a value an option has the server's default, which is not llama-server's."""

    renamed: ClassVar = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty",
                         "repeat_last_n": "repetition_context_size", "json_schema": "schema", "n_probs": "logprobs"}
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("n_indent", "n_cmpl", "min_keep", "t_max_predict_ms", "samplers", "return_progress",
                         "post_sampling_probs", "multimodal_data", "image_data", "dry_sequence_breakers", "grammar_lazy",
                         "grammar_triggers", "preserved_tokens", "reasoning_format", "nodes"), ""),
        "lora": "adapters are not loaded",
    }

    prompt: str | list[str | int | list[str | int]] = Field(description="a text, token ids, both mixed, or a list of these")
    max_tokens: int = Field(256, ge=-1, le=2**31, description="most tokens to generate; -1: as many as the context holds")
    seed: int = Field(-1, ge=-1, lt=2**64, description="seed of the random numbers; -1: drawn anew")
    stream: bool = False
    model: str | None = Field(None, max_length=512)
    cache_prompt: Literal[True] = Field(True, description="known prefixes are always used; the answer is the same")
    ignore_eos: bool = Field(False, description="go on after end tokens")
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[str] = Field([], max_length=64, description="fields of the answer, as a/b within objects")
    id_slot: Literal[-1] = Field(-1, description="the server picks the row")
    n_keep: Literal[0] = Field(0, description="no prompt is cut, so nothing of it is kept")
    logit_bias: dict[int, float] = Field({}, description="of token ids; also a list of [id or text, bias or false]")
    # Values that switch off what does not exist here
    dynatemp_range: float = Field(0, ge=0, le=0)
    dynatemp_exponent: float = Field(1, description="has no effect without dynatemp_range")
    typical_p: float = Field(1, ge=1, le=1)
    xtc_probability: float = Field(0, ge=0, le=0)
    xtc_threshold: float = Field(0.1, description="has no effect without xtc_probability")
    dry_multiplier: float = Field(0, ge=0, le=0)
    dry_base: float = Field(1.75, description="has no effect without dry_multiplier")
    dry_allowed_length: int = Field(2, description="has no effect without dry_multiplier")
    dry_penalty_last_n: int = Field(-1, description="has no effect without dry_multiplier")
    mirostat: Literal[0] = 0
    mirostat_tau: float = Field(5, description="has no effect without mirostat")
    mirostat_eta: float = Field(0.1, description="has no effect without mirostat")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _parse_biases(cls, value):
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list) or len(pairs) > 4096:
            raise ValueError("a list of at most 4096 pairs [token id, bias], or an object")
        biases = {}
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError("pairs [token id, bias]")
            token, bias = pair
            if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < 16:
                token = int(token)
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError("token ids; POST /tokenize tells those of a text")
            biases[token] = -1e6 if bias is False else bias
        return biases


def _plain(value: Any) -> bool:
    return isinstance(value, str) or isinstance(value, int) and not isinstance(value, bool)


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
    """Token ids of a prompt that mixes ids and texts; other prompts as they are."""
    if isinstance(prompt, str) or all(isinstance(one, int) for one in prompt):
        return prompt
    ids: list[int] = []
    for one in prompt:
        ids += llm.tokenizer.encode(one, add_bos=not ids) if isinstance(one, str) else [one]
    return ids


@router.post("/completion", **takes(LlamaCompletionRequest))
async def completion(request: Request) -> Response:
    """Continue a text."""
    body = await read_body(request, LlamaCompletionRequest)
    name = check_model(request, body.model)
    prompts = _split(body.prompt, desk_of(request).settings.max_choices)
    options = body.given_options()
    if options.get("seed") == -1:
        del options["seed"]
    if not options.get("logprobs"):
        options.pop("logprobs", None)  # n_probs: 0
    if options.get("max_tokens") == -1:
        options["max_tokens"] = 2**31
    if any(not isinstance(prompt, str) for prompt in prompts):
        prompts = await with_model(request, lambda llm: [join_mixed(llm, prompt) for prompt in prompts], "prompt")
    if body.ignore_eos:
        await with_model(request, lambda llm: options.update(logit_bias={
            **dict.fromkeys(llm.engine.eos, -1e6), **options.get("logit_bias", {})}))
    asks = [Ask(prompt, "prompt", options) for prompt in prompts]

    def last(answers: Answers, i: int, content: str) -> dict[str, Any]:
        found = answers.completions[i]
        shown = answers.llm.tokenizer.decode(prompts[i]) if not isinstance(prompts[i], str) else prompts[i]
        full = {"index": i, "content": content, "tokens": list(map(int, found.tokens)) if body.return_tokens else [],
                "id_slot": -1, "stop": True, "model": name, "tokens_predicted": len(found.tokens),
                "tokens_evaluated": found.prompt_tokens, "generation_settings": _settings(found), "prompt": shown,
                "has_new_line": "\n" in found.text, "truncated": False,
                "stop_type": _STOP_TYPES.get(found.finish_reason, "none"), "stopping_word": found.stop or "",
                "tokens_cached": found.prompt_tokens + len(found.tokens), "timings": write_timings(found),
                **_write_probabilities(answers.llm, body.logprobs, found.tokens)}
        return _pick(full, body.response_fields)

    def whole(answers: Answers) -> Any:
        found = [last(answers, i, one.text) for i, one in enumerate(answers.completions)]
        return found if isinstance(body.prompt, list) and len(found) > 1 else found[0]

    async def events(answers: Answers) -> AsyncIterator[bytes]:
        counts = [0] * len(asks)
        async for batch in answers.batches():
            found = answers.completions[batch.index]
            for token in batch.tokens:
                counts[batch.index] += 1
                if token.text or body.return_tokens:
                    yield event({"index": batch.index, "content": token.text, "tokens": [int(token)], "stop": False,
                                 "id_slot": -1, "tokens_predicted": counts[batch.index],
                                 "tokens_evaluated": found.prompt_tokens,
                                 **_write_probabilities(answers.llm, body.logprobs, [token]),
                                 **({"timings": write_timings(found)} if body.timings_per_token else {})})
            if batch.is_last:
                yield event(last(answers, batch.index, ""))

    if body.stream:
        return await reply_stream(request, asks, events, fail)
    return await reply_whole(request, asks, whole)


def _write_probabilities(llm: LLM, count: int | None, tokens: Sequence[Token]) -> dict[str, Any]:
    """completion_probabilities, where n_probs asks for them."""
    if not count:
        return {}
    return {
        "completion_probabilities": [
            {"id": int(token), **found}
            for token, found in zip(
                [token for token in tokens if token not in llm.engine.eos and token.logprobs is not None],
                list_logprobs(llm, tokens),
            )
        ]
    }


def _split(prompt: Any, most: int) -> list[Any]:
    """One prompt, or several. A list with an id in it is one prompt; a list of texts and lists is several."""
    if isinstance(prompt, list) and prompt and all(_plain(one) for one in prompt) and any(
            not isinstance(one, str) for one in prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and any(not isinstance(one, (str, list)) for one in prompt):
        raise bad_field("prompt", "one prompt or several", "prompt: mixes token ids and lists", prompt)
    return split_prompts(prompt, most)


def _pick(full: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields that `names` list; a/b is the field b of the object a. Unknown ones are left out, as llama-server does."""
    if not names:
        return full
    picked = {}
    for name in names:
        value: Any = full
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            picked[name.split("/")[-1]] = value
    return picked


def _settings(found: Completion) -> dict[str, Any]:
    """Options in force, by llama-server's names and ours."""
    options = found.options
    bias = [[token, value] for token, value in options.get("logit_bias", {}).items()]
    return {**options, "logit_bias": bias, "stop": list(options.get("stop", ())), "n_predict": options.get("max_tokens"),
            "repeat_penalty": options.get("repetition_penalty"), "repeat_last_n": options.get("repetition_context_size")}


# Text and tokens


class TokenizeRequest(Body):
    """POST /tokenize."""

    content: str
    add_special: bool = Field(False, description="put the model's first token before the text")
    parse_special: bool = Field(True, description="read special tokens in the text as such")
    with_pieces: bool = False


@router.post("/tokenize", **takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text."""
    body = await read_body(request, TokenizeRequest)

    def work(llm: LLM) -> list[Any]:
        tokenizer = llm.tokenizer
        ids = tokenizer.encode(
            body.content, add_bos=body.add_special and bool(body.content), parse_special=body.parse_special
        )
        return [{"id": one, "piece": _piece(llm, one)} for one in ids] if body.with_pieces else ids

    return Json({"tokens": await with_model(request, work, "content")})


def _piece(llm: LLM, token: int) -> str | list[int]:
    """The text of a token, or its bytes where they are no text."""
    found = llm.tokenizer.piece(token)
    data = found.data if found else b""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[int]


@router.post("/detokenize", **takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest)
    return Json({"content": await with_model(request, lambda llm: llm.tokenizer.decode(body.tokens, skip_special=False),
                                             "tokens")})


class TemplateRequest(Body):
    """POST /apply-template."""

    unsupported: ClassVar[Mapping[str, str]] = {"chat_template_kwargs": ""}

    messages: list[Message] = Field(min_length=1)
    tools: list[FunctionTool] = []
    add_generation_prompt: bool = True


@router.post("/apply-template", **takes(TemplateRequest))
async def apply_template(request: Request) -> Response:
    """The text that the chat template makes of a conversation."""
    body = await read_body(request, TemplateRequest)
    messages = [message.plain() for message in body.messages]
    box = build_toolbox([tool.function.described() for tool in body.tools], "auto", True)

    def work(llm: LLM) -> str:
        if not box.tools:
            return llm.require_template().render(messages, body.add_generation_prompt)
        told, extras = add_tools(tool_format(llm), messages, box.tools)
        return llm.require_template().render(told, body.add_generation_prompt, **extras)

    return Json({"prompt": await with_model(request, work, "messages")})


# The server


@router.get("/props")
async def props(request: Request) -> Response:
    """The model, its context, its template and the options in force without others."""
    desk = desk_of(request)
    llm = await desk.keeper.enter()
    try:
        resolved = resolve(dict(desk.settings.options), llm.checkpoint.generation_config)
        dumped = resolved.options.model_dump()
        options = {name: dumped[name] for name in FIELDS}  # in the order of the table
        if "seed" not in desk.settings.options:
            options["seed"] = None
        bos = llm.tokenizer.named
        return Json(
            {
                "default_generation_settings": {"n_ctx": llm.engine.context, "params": options},
                "total_slots": llm.scheduler.max_rows,
                "model_alias": served_names(request)[0],
                "model_path": str(llm.checkpoint.path),
                "n_ctx_train": llm.model.config.max_position_embeddings,
                "modalities": {"vision": False, "audio": False},
                "chat_template": llm.template.source if llm.template else "",
                "bos_token": bos.get("bos_token", ""),
                "eos_token": bos.get("eos_token", ""),
                "build_info": FINGERPRINT,
                "backend": llm.backend.name,
                "device": llm.backend.device_name,
                "dtype": llm.backend.runtime.dtype_name(llm.model.dtype),
                "is_sleeping": False,
            }
        )
    finally:
        desk.keeper.leave()


@router.get("/slots")
async def slots(request: Request) -> Response:
    """Rows of the cache: running ones first. ?fail_on_no_slot=1: 503 if all are taken."""
    desk = desk_of(request)
    if not desk.settings.serves_slots:
        raise Refusal(404, "not_found", message="slots are off: start the server with --slots")
    llm = desk.keeper.require()
    scheduler = llm.scheduler
    running = list(scheduler.running)
    rows = [{"id": i, "n_ctx": llm.engine.context, "is_processing": i < len(running), **(_slot(running[i]) if i < len(
        running) else {})} for i in range(scheduler.max_rows)]
    if request.query_params.get("fail_on_no_slot") and len(running) >= scheduler.max_rows:
        raise Refusal(503, "no_slot", [Fault("fail_on_no_slot", "a free slot", "all rows are taken")])
    return Json(rows)


class SlotRequest(Body):
    """POST /slots/{slot}."""

    filename: str = Field(pattern=r"^[\w-][\w.-]{0,127}$")


@router.post("/slots/{slot}", **takes(SlotRequest))
async def change_slot(request: Request, slot: str) -> Response:
    """Save the cache of the last answer (?action=save), or restore a saved one (?action=restore)."""
    folder = desk_of(request).settings.slot_folder
    if folder is None:
        raise Refusal(404, "not_found", message="caches are not saved: start the server with --slot-save-path")
    action = request.query_params.get("action")
    if action not in ("save", "restore"):
        raise bad_field(
            "action", "one of save, restore", "action: must be save or restore; rows are freed by themselves", action
        )
    body = await read_body(request, SlotRequest)
    file = Path(folder) / body.filename

    def work(llm: LLM) -> dict[str, Any]:
        if llm.scheduler.max_rows != 1 or slot != "0":
            raise bad_field(
                "slot", "0", "slot: with several rows the server picks them: start it with --parallel 1 and take 0", slot
            )
        if action == "save":
            llm.save_cache(file)
            return {"id_slot": 0, "filename": body.filename, "n_written": file.stat().st_size}
        return {"id_slot": 0, "filename": body.filename, "n_restored": llm.load_cache(file), "n_read": file.stat().st_size}

    return Json(await with_model(request, work, "filename"))


def _slot(sequence: Any) -> dict[str, Any]:
    """State of a running row, without its text."""
    done = len(sequence.text) - sequence.prompt_length
    return {"id_task": sequence.number, "n_prompt_tokens": sequence.prompt_length,
            "params": sequence.options.model_dump(exclude={"stop"}),
            "next_token": [{"has_next_token": True, "n_remain": sequence.left, "n_decoded": done}]}
