"""Checks of tokenizer, end tokens and chat template for the doctor."""

from __future__ import annotations

import shlex
from functools import partial
from typing import Any

from mlx_llama.core.errors import ConfigError, LlamaError, show
from mlx_llama.core.options import resolve
from mlx_llama.core.system.files import read_json
from mlx_llama.core.text.template import ChatTemplate, encode_messages, missing_template
from mlx_llama.core.text.tokenizer import Tokenizer

from .diagnosis import Diagnosis, OpenedModel

_QUESTION, _ANSWER = "Hello", "Fine."


def check_text(diagnosis: Diagnosis, opened: OpenedModel) -> None:
    """Add findings about the tokenizer, end tokens, template and generation_config.json."""
    files, config = opened.files, opened.config
    generation = _read_generation_config(diagnosis, opened)
    try:
        tokenizer = files.tokenizer
    except LlamaError as error:
        diagnosis.add("error", "tokenizer", error)
        return
    diagnosis.tokenizer = {
        "kind": "byte-level BPE" if tokenizer.byte_level else "SentencePiece",
        "file": str(tokenizer.path),
        "vocab_size": tokenizer.vocab_size,
    }
    for notice in tokenizer.notices:
        diagnosis.add("warning", "tokenizer", notice)
    if config is not None and tokenizer.vocab_size < config.vocab_size:
        level, remark = "note", "the others are padding without text"
        # padding adds a few hundred rows to tens of thousands of tokens
        if tokenizer.vocab_size < 0.9 * config.vocab_size:
            level = "warning"
            remark = (
                "more than padding explains, and tokens beyond them have no text; take tokenizer "
                "and model from the same place"
            )
        known = f"{tokenizer.path}: knows {tokenizer.vocab_size} tokens, and the model's embedding"
        diagnosis.add(level, "tokenizer", f"{known} has {config.vocab_size} rows: {remark}")
    ends = _check_ends(diagnosis, opened, tokenizer, generation)
    try:
        template = files.template
        if template is None:
            diagnosis.add("warning", "template", missing_template(diagnosis.name))
        else:
            _check_template(diagnosis, opened, tokenizer, template, ends)
    except LlamaError as error:
        diagnosis.add("error", "template", error)


def _read_generation_config(diagnosis: Diagnosis, opened: OpenedModel) -> dict[str, Any]:
    path = opened.path / "generation_config.json"
    if opened.metadata is not None or not path.exists():
        return {}
    try:
        generation = read_json(path, ConfigError)
        for notice in resolve({}, generation, str(path)).notices:
            field = notice.removeprefix("generation_config.json ")
            diagnosis.add("note", "generation", f"{path}: {field}; it has no effect")
    except LlamaError as error:
        diagnosis.add("error", "generation", error)
        return {}
    return generation


def _quote(tokenizer: Tokenizer, token: int) -> str:
    piece = tokenizer.piece(token)
    return "no token" if piece is None else show(piece.data.decode("utf-8", "replace"), 40)


def _check_ends(
    diagnosis: Diagnosis, opened: OpenedModel, tokenizer: Tokenizer, generation: dict[str, Any]
) -> frozenset[int]:
    """Check the end tokens of config, generation_config and tokenizer; returns their ids."""
    note, warn = (partial(diagnosis.add, level, "tokenizer") for level in ("note", "warning"))
    raw = _read_raw_config(opened)
    source = opened.path / "config.json" if opened.metadata is None else opened.path
    in_config = () if opened.config is None else opened.config.eos_token_ids
    listed = generation.get("eos_token_id")
    listed = listed if isinstance(listed, list) else [listed]
    listed = [token for token in listed if isinstance(token, int)]
    ends = frozenset((*in_config, *listed, *tokenizer.eos_ids))
    if opened.checkpoint is not None:
        ends = opened.checkpoint.eos_token_ids
    vocab = max(opened.tokenizer_config.vocab_size, tokenizer.vocab_size)
    named = {*ends, tokenizer.bos_id} - {None}
    sources = {"config": list(in_config), "generation_config": listed}
    sources["tokenizer"] = list(tokenizer.eos_ids)
    texts = {token: _quote(tokenizer, token) for token in sorted(named) if 0 <= token < vocab}
    diagnosis.tokenizer |= {"bos": tokenizer.bos_id, "adds_bos": tokenizer.adds_bos}
    diagnosis.tokenizer |= {"eos": sorted(ends), "eos_of": sources, "texts": texts}
    if not ends:
        warn(
            f"{source}: neither it nor the tokenizer has an end token (eos_token_id): every "
            f"answer continues until `max_tokens`; {_end_remedy(opened)}"
        )
    for token in sorted(ends - set(tokenizer.special_ids.values())):
        if not 0 <= token < vocab or tokenizer.piece(token) is None:
            note(
                f"{source}: end token {token} is not in {tokenizer.path.name}; it is never written"
            )
            continue
        is_default = token in in_config and "eos_token_id" not in raw and opened.metadata is None
        field = "has no eos_token_id, and its default" if is_default else "eos_token_id"
        warn(
            f"{source}: {field} {token} is {_quote(tokenizer, token)}, not a special token: "
            f"answers end wherever the model writes it; {_end_remedy(opened)}"
        )
    bos = raw.get("bos_token_id")
    if isinstance(bos, int) and tokenizer.bos_id is not None and bos != tokenizer.bos_id:
        note(
            f"{source}: bos_token_id is {bos}, the tokenizer's BOS is {tokenizer.bos_id} "
            f"({_quote(tokenizer, tokenizer.bos_id)}); the tokenizer's is used"
        )
    return ends


def _read_raw_config(opened: OpenedModel) -> dict[str, Any]:
    if opened.metadata is not None:
        return {}
    try:
        return read_json(opened.path / "config.json", ConfigError)
    except ConfigError:
        return {}


def _end_remedy(opened: OpenedModel, token: int | None = None) -> str:
    """The remedy that makes a token end answers; None for the right token."""
    if opened.metadata is None:
        which = "the id of the token that ends a turn" if token is None else token
        return f"put {which} into eos_token_id of {opened.path / 'generation_config.json'}"
    if "tokenizer.ggml.eos_token_id" in opened.metadata:
        return (
            f"set it with: gguf-set-metadata {shlex.quote(str(opened.path))} "
            f"tokenizer.ggml.eos_token_id {'ID' if token is None else token}"
        )
    return "convert the model again, with tokenizer.ggml.eos_token_id"


def _check_template(
    diagnosis: Diagnosis,
    opened: OpenedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    ends: frozenset[int],
) -> None:
    """Check both ends of a rendered exchange. Raises TemplateError, TokenizerError."""
    note, warn = (partial(diagnosis.add, level, "template") for level in ("note", "warning"))
    question = {"role": "user", "content": _QUESTION}
    if template.notice:
        warn(template.notice)
    prompt = template.render([question])
    ids = encode_messages(tokenizer, template, [question])
    bos = None if tokenizer.bos_id is None else _quote(tokenizer, tokenizer.bos_id)
    count = next((i for i, token in enumerate(ids) if token != tokenizer.bos_id), len(ids))
    text = tokenizer.named.get("bos_token", "")
    writes = bool(text) and prompt.lstrip().startswith(text)
    diagnosis.template = {"name": template.name, "writes_bos": writes, "bos_tokens": count}
    diagnosis.template |= {"prompt": show(prompt, 200), "turn_end": None}
    if count > 1:
        warn(
            f"{template.name}: begins a conversation with BOS ({bos}) {count} times, expected "
            "once; remove it from the template"
        )
    elif writes and tokenizer.adds_bos:
        note(
            f"{template.name}: writes BOS ({bos}), which the tokenizer would add, too; it is "
            "added once"
        )
    elif bos and count == 0:
        note(
            f"{template.name}: writes no BOS ({bos}), and the tokenizer adds none: "
            "conversations begin without it"
        )

    whole = template.render(
        [question, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False
    )
    head, separator, tail = whole.rpartition(_ANSWER)
    tail = tail.strip()
    if not separator or not tail:
        return  # the template marks no end of a turn
    before = tokenizer.encode_parts([head + separator])
    end = next(iter(tokenizer.encode_parts([head + separator, tail])[len(before) :]), None)
    if end is None or end not in tokenizer.added_ids.values():
        warn(
            f"{template.name}: ends a turn with {show(tail, 40)}, which is text, not a token of "
            f"this tokenizer: answers may run on into the next turn; stop there with `stop` "
            f"{shlex.quote(tail[:40])}"
        )
        return
    diagnosis.template["turn_end"] = end
    if end not in ends:
        warn(
            f"{template.name}: ends a turn with {_quote(tokenizer, end)} ({end}), which is not "
            f"among the end tokens ({', '.join(map(str, sorted(ends))) or 'none'}): answers run "
            f"on into the next turn; {_end_remedy(opened, end)}"
        )
