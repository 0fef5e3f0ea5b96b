"""llama-server's routes besides completions, for its clients and scripts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.api.cache_file import read_cache, write_cache
from mlx_llama.api.llm import LLM
from mlx_llama.core.answers.thinking import has_switch
from mlx_llama.core.files.hub import read_examples

from .admission import make_counter, render_chat
from .faults import Fault, Refusal, bad_field
from .fields import Body, read_body
from .llama_completion import write_settings
from .openai import ChatFields
from .replies import FINGERPRINT, Json, admission_of, check_model, with_notes
from .schemas import serves, takes
from .settings import Settings
from .slots import Slots, Task

router = APIRouter(tags=["llama-server"])

# Text and tokens


class TokenizeRequest(Body):
    """POST /tokenize."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt"))  # vLLM's name
    add_special: bool = Field(False, description="put the model's first token before the text")
    parse_special: bool = Field(True, description="parse special tokens in the text")
    with_pieces: bool = False


@serves(router, TokenizeRequest, "/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Encode a text as token ids."""

    def work(llm: LLM) -> list[Any]:
        make_counter(llm.engine)(llm.tokenizer.count_at_least(body.content))
        add_bos, how = body.add_special and bool(body.content), body.parse_special
        ids = llm.tokenizer.encode(body.content, add_bos=add_bos, parse_special=how)
        if not body.with_pieces:
            return ids
        pieces = [(token, llm.tokenizer.piece(token)) for token in ids]
        return [
            {"id": token, "piece": _show(piece.data if piece else b"")} for token, piece in pieces
        ]

    return Json({"tokens": await admission_of(request).run(work, "content")})


def _show(data: bytes) -> str | list[int]:
    """Return UTF-8 as text, other bytes as numbers."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[int]


@serves(router, DetokenizeRequest, "/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Decode token ids."""
    text = await admission_of(request).run(
        lambda llm: llm.tokenizer.decode(body.tokens, skip_special=False), "tokens"
    )
    return Json({"content": text})


class TemplateRequest(ChatFields):
    """POST /apply-template."""

    add_generation_prompt: bool = True


@serves(router, TemplateRequest, "/apply-template")
async def apply_template(request: Request, body: TemplateRequest) -> Response:
    """Render a conversation with the chat template."""
    check_model(request, body.model)
    ask, settings = with_notes(request, body.messages_ask()), admission_of(request).settings
    text = await admission_of(request).run(
        lambda llm: render_chat(llm, ask, settings, body.add_generation_prompt), "messages"
    )
    return Json({"prompt": text})


# The server


@router.get("/props")
async def props(request: Request) -> Response:
    """Describe the model, its context, template and default options. An idle model stays idle."""
    admission = admission_of(request)
    facts = admission.holder.facts
    if not (is_idle := admission.holder.state == "idle"):
        facts = await admission_of(request).run(lambda llm: describe_model(llm, admission.settings))
    return Json({**facts, "model_alias": admission.names[0], "is_sleeping": is_idle})


def describe_model(llm: LLM, settings: Settings) -> dict[str, Any]:
    """Return the part of /props that remains available while the model is unloaded."""
    resolved = llm.defaults.resolve(settings.options)
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
        "thinking_switch": bool(llm.template and has_switch(llm.template.source)),
        "bos_token": named.get("bos_token", ""),
        "eos_token": named.get("eos_token", ""),
        "has_asides": llm.on_question is not None,  # texts beside its answers
        "examples": read_examples(llm.checkpoint.path),  # questions to try, by the card
        "build_info": FINGERPRINT,
        "backend": llm.backend.name,
        "device": llm.backend.device_name,
        "dtype": llm.model.dtype_name,
    }


def _require(is_on: bool, text: str, flag: str) -> None:
    """Refuse what the server's flags switch off, with llama-server's status."""
    if not is_on:
        raise Refusal(501, "not_supported", message=f"{text} off: start the server with {flag}")


@router.get("/slots")
async def list_slots(request: Request) -> Response:
    """List the slots, one for each request that can run, and their state.

    ?fail_on_no_slot=1: 503 if none is free. An idle slot reports the length of its last prompt and
    answer. Texts are shown with --log-prompts only.
    """
    admission = admission_of(request)
    _require(admission.settings.serves_slots, "slots are", "--slots")
    llm = admission.holder.require()
    texts, running = admission.holder.slots.texts, admission.holder.slots.running
    if request.query_params.get("fail_on_no_slot") and len(running) >= len(texts):
        fault = Fault("fail_on_no_slot", "a free slot", "all slots are taken")
        raise Refusal(503, "no_slot", [fault])
    described = []
    for slot, text in enumerate(texts):
        state = {"n_ctx": llm.engine.context, "is_processing": slot in running}
        described.append({"id": slot, **state, "n_tokens": len(text)})
        if slot in running:
            described[slot] |= _describe(
                llm, running[slot], list(text), admission.settings.logs_prompts
            )
    return Json(described)


def _describe(llm: LLM, task: Task, text: list[int], shows_text: bool) -> dict[str, Any]:
    """Describe a running request. text: prompt and answer."""
    options, length = task.request.options.options, len(task.request.prompt)
    limit, count = min(options.max_tokens, llm.engine.context - length), len(text) - length
    completion = task.completion
    parts = {"prompt": text[:length], "generated": text[length:]} if shows_text else {}
    return {
        "id_task": task.number,
        "speculative": completion.options.get("speculate", "none") != "none",
        "n_prompt_tokens": length,
        "n_prompt_tokens_cache": completion.reused_tokens,
        "params": options.model_dump(exclude={"stop"}),
        "next_token": [{"has_next_token": True, "n_remain": limit - count, "n_decoded": count}],
        **{name: llm.tokenizer.decode(part) for name, part in parts.items()},
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
    settings, slots = admission_of(request).settings, admission_of(request).holder.slots
    action = request.query_params.get("action")
    if action not in ("save", "restore", "erase"):
        text = "must be save, restore or erase"
        raise bad_field("action", "one of save, restore, erase", text, action)
    is_on = action == "erase" or settings.slot_folder is not None
    _require(is_on, "saving caches is", "--slot-save-path")
    _require(settings.serves_slots, "slots are", "--slots")
    name = "" if action == "erase" else (await read_body(request, SlotRequest)).filename

    def work(llm: LLM) -> dict[str, Any]:
        last = llm.loop.max_rows - 1
        if slot not in map(str, range(last + 1)):
            raise bad_field("slot", f"0 to {last}", f"must be 0 to {last} (--max-rows)", slot)
        number = int(slot)
        if action == "erase":
            return {"id_slot": number, "n_erased": llm.loop.erase(slots.texts[number])}
        began, change = time.perf_counter(), _save_slot if action == "save" else _restore_slot
        facts = change(llm, slots, number, _find_file(settings.slot_folder, name))
        spent = round((time.perf_counter() - began) * 1e3, 3)
        return {"id_slot": number, "filename": name, **facts, "timings": {f"{action}_ms": spent}}

    return Json(await admission_of(request).run(work, "filename"))


def _find_file(folder: str | None, name: str) -> Path:
    """Return a file's path in the folder. Raises Refusal for a link that leaves it."""
    file = Path(folder or "", name)
    if file.resolve().parent != file.parent.resolve():
        raise bad_field("filename", "a file of --slot-save-path", "links to another folder", name)
    return file


def _save_slot(llm: LLM, slots: Slots, slot: int, file: Path) -> dict[str, Any]:
    if not (state := llm.loop.export(slots.texts[slot])):
        reason = f"nothing is cached for slot {slot}: it had no request yet, or was evicted"
        raise bad_field("slot", "a slot with a cache", reason, slot)
    write_cache(file, state, llm.identify_cache(0))
    return {"n_saved": len(state["tokens"]), "n_written": file.stat().st_size}


def _restore_slot(llm: LLM, slots: Slots, slot: int, file: Path) -> dict[str, Any]:
    if slot in slots.running:
        text = f"slot {slot} is running a request: wait, or use another slot"
        raise bad_field("slot", "an idle slot", text, slot)
    state = read_cache(file, llm.identify_cache(0))
    tokens = state["tokens"].tolist()
    llm.loop.install(state)
    slots.put(slot, tokens)
    return {"n_restored": len(tokens), "n_read": file.stat().st_size}
