"""The doctor: check whether a model runs on this machine, from headers and settings alone.

It reads no weights and imports no framework: under a second for a model of any size.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import shlex
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from mlx_llama.api.llm import context_size
from mlx_llama.core.backends import selection
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.backends.positions import position_nbytes, state_nbytes
from mlx_llama.core.errors import CheckpointError, ConfigError, LlamaError, OptionsError, show
from mlx_llama.core.files.checkpoint import find_model, open_checkpoint
from mlx_llama.core.files.fit import misfits
from mlx_llama.core.files.gguf import GGUFFile
from mlx_llama.core.files.safetensors import find_weights
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.options import resolve
from mlx_llama.core.system import cache_folder, machine
from mlx_llama.core.system.files import read_json
from mlx_llama.core.system.machine import Gpus
from mlx_llama.core.text.template import ChatTemplate, encode_messages, missing_template
from mlx_llama.core.text.tokenizer import Tokenizer

from .diagnosis import Diagnosis, OpenedModel, fit_backends

# else norms
_GROUPS = {"embed_tokens": "embedding", "self_attn": "attention", "lm_head": "head"}
_GROUPS |= dict.fromkeys(("conv", "linear_attn"), "recurrent")
_GROUPS |= dict.fromkeys(("mlp", "block_sparse_moe", "feed_forward"), "mlp")
# figures of a model: field of its config
_FIELDS = {
    "architecture": "architecture", "layers": "num_hidden_layers", "hidden_size": "hidden_size",
    "heads": "num_attention_heads", "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim", "intermediate_size": "mlp_size", "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok", "vocab_size": "vocab_size",
    "rope_type": "rope.type", "rope_theta": "rope.theta", "rope_factor": "rope.factor",
    "context_length": "max_position_embeddings", "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings", "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}  # fmt: skip


def diagnose(
    name: str | os.PathLike | None = None,
    revision: str | None = None,
    ctx_size: int | str | None = None,
    cache_bits: int | None = None,
) -> Diagnosis:
    """Examine this machine and a model, as `open_checkpoint` names it; of a hub id, cached files.
    Every fault becomes a finding. ctx_size, cache_bits: load options. Raises ContextError for a
    ctx_size beyond the model's limit.
    """
    gpus = Gpus()  # nvidia-smi runs while the model is examined
    diagnosis = Diagnosis({}, [], "", "guide" if name is None else os.fspath(name))
    opened = _open(diagnosis, name, revision)
    if opened is not None:
        _describe(diagnosis, opened)
        check_text(diagnosis, opened)
    diagnosis.machine = {"system": platform.system(), "machine": platform.machine()}
    diagnosis.machine["python"] = platform.python_version()
    diagnosis.machine["physical_cores"] = machine.physical_cores()
    diagnosis.machine["free_memory_bytes"] = machine.free_memory()
    if (folder := cache_folder.cache_folder()) is not None:
        sizes = [size for _, _, size in cache_folder.files()]
        cache = {"folder": str(folder), "files": len(sizes), "nbytes": sum(sizes)}
        try:
            diagnosis.machine["cache"] = {**cache, "limit_bytes": cache_folder.size_limit()}
        except OptionsError as error:
            diagnosis.add("error", "machine", error)
    if gpus.first:
        diagnosis.machine["gpu"] = {"name": gpus.first[0], "free_memory_bytes": gpus.first[1]}
    diagnosis.backends = take_stock(gpus)
    diagnosis.auto = predict_auto(diagnosis.backends)
    for facts in diagnosis.backends:
        if facts.name == "cpu" and not facts.available:  # every machine can have it
            diagnosis.add("warning", "machine", facts.reason)
    if opened is not None and opened.checkpoint is not None:
        warn = functools.partial(diagnosis.add, "warning", "config")
        wanted = None if ctx_size is None else context_size(opened.checkpoint, ctx_size, warn)
        fit_backends(diagnosis, opened.checkpoint, revision, wanted, name is None, cache_bits)
    return diagnosis


# The machine


def take_stock(gpus: Gpus) -> list[BackendFacts]:
    """Describe the backends (mlx, cpu, cuda); facts that need a framework are unknown."""
    stock = []
    for name in selection.PACKAGES:
        facts, packages = selection.import_file(name, "facts"), {}
        for package in facts.DISTRIBUTIONS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                packages[package] = importlib.metadata.version(package)
        reason = selection.missing(name)
        missing = BackendFacts(name, False, reason, packages)
        stock.append(missing if reason else facts.describe(packages, gpus))
    return stock


def predict_auto(backends: list[BackendFacts]) -> str:
    """Predict selection.auto(), which imports torch. backends: as of `take_stock`."""
    mlx, _, cuda = backends
    if platform.system() == "Darwin" and platform.machine() == "arm64" and mlx.available:
        return "mlx"
    return "cuda" if cuda.available and cuda.gpu is not False else "cpu"


# The model


def _open(
    diagnosis: Diagnosis, name: str | os.PathLike | None, revision: str | None
) -> OpenedModel | None:
    try:
        _, path = find_model(name, revision, local_only=True)
    except LlamaError as error:
        diagnosis.add("error", "weights", error)
        return None
    diagnosis.path = str(path)
    try:
        checkpoint = open_checkpoint(path)
        config, metadata = checkpoint.config, checkpoint.gguf_metadata
        return OpenedModel(path, checkpoint, config, config, metadata)
    except LlamaError as error:
        first = error
    open_in_part = _open_gguf_in_part if path.is_file() else _open_folder_in_part
    opened = open_in_part(diagnosis, path)
    diagnosis.add("error", "config" if isinstance(first, ConfigError) else "weights", first)
    return opened


def _open_folder_in_part(diagnosis: Diagnosis, folder: Path) -> OpenedModel:
    config, stand_in, source = None, _stand_in(), folder / "config.json"
    invalid: list[LlamaError] = []
    try:
        stand_in = LlamaConfig.from_dict(
            read_json(source, ConfigError), str(source), invalid.append
        )
        config = None if invalid else stand_in
    except ConfigError as error:  # no such file, or an unsupported architecture
        invalid.append(error)
    for fault in invalid:
        diagnosis.add("error", "config", fault)
    damaged: list[LlamaError] = []
    try:
        weights = find_weights(folder, damaged.append)
        if config is not None:
            damaged += misfits(weights, config, folder, complete=not damaged)
    except CheckpointError as error:
        damaged.append(error)
    for fault in damaged:
        diagnosis.add("error", "weights", fault)
    return OpenedModel(folder, None, config, stand_in)


def _open_gguf_in_part(diagnosis: Diagnosis, path: Path) -> OpenedModel | None:
    refused: list[LlamaError] = []
    try:
        file = GGUFFile(path, refused.append)
    except CheckpointError as error:
        refused.append(error)
        file = None
    for fault in refused:
        diagnosis.add("error", "weights", fault)
    if file is None:
        return None
    try:
        config = file.config
    except LlamaError as error:
        diagnosis.add("error", "config", error)
        tokens = file.metadata.get("tokenizer.ggml.tokens", ())
        size = 0 if isinstance(tokens, (str, int, float)) else len(tokens)
        return OpenedModel(path, None, None, _stand_in(size), file.metadata)
    for fault in misfits(file.weights, config, path, "its metadata", complete=not refused):
        diagnosis.add("error", "weights", fault)
    return OpenedModel(path, None, config, config, file.metadata)


def _stand_in(vocab_size: int = 0) -> LlamaConfig:
    """A small config for a tokenizer of `vocab_size`, or of any size if 0."""
    sizes = {"hidden_size": 2, "head_dim": 2, "vocab_size": vocab_size or 1 << 24}
    ones = ("num_attention_heads", "intermediate_size", "num_hidden_layers")
    fields: dict[str, Any] = {"model_type": "llama", **sizes, **dict.fromkeys(ones, 1)}
    fields |= {"eos_token_id": None, "bos_token_id": None}
    return LlamaConfig.from_dict(fields)


# Description


def _describe(diagnosis: Diagnosis, opened: OpenedModel) -> None:
    """Add sizes of the model, and its tensors by group."""
    config = opened.config
    if config is None:
        return
    for notice in config.notices:
        diagnosis.add("note", "config", notice)
    shapes = config.tensor_shapes()
    diagnosis.model = {
        **{name: attrgetter(field)(config) for name, field in _FIELDS.items()},
        "parameters": sum(map(math.prod, shapes.values())),
        "longest_context": rope.max_context(config),
        "cache_bytes_per_token": {
            "8_bits": position_nbytes(config, 2, 8),
            "16_bits": position_nbytes(config, 2),
            "32_bits": position_nbytes(config, 4),
        },
        "state_bytes": state_nbytes(config),
    }
    if opened.checkpoint is None:
        return
    diagnosis.model |= {"dtype": opened.checkpoint.dtype, "nbytes": opened.checkpoint.nbytes}
    groups: dict[str, dict[str, Any]] = {}
    for name, tensor in opened.checkpoint.tensors.items():
        part = next((group for key, group in _GROUPS.items() if f".{key}." in f".{name}"), "norms")
        group = groups.setdefault(part, {"group": part, "tensors": 0, "nbytes": 0, "formats": {}})
        group["tensors"] += 1
        group["nbytes"] += tensor.nbytes
        kinds = group["formats"]
        kinds[tensor.description] = kinds.get(tensor.description, 0) + 1
    diagnosis.groups = list(groups.values())


_QUESTION, _ANSWER = "Hello", "Fine."


# Tokenizer, end tokens and chat template


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
