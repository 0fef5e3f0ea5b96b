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
from operator import attrgetter
from pathlib import Path
from typing import Any

from mlx_llama.api.llm import context_size
from mlx_llama.core.backends import selection
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.backends.positions import position_nbytes
from mlx_llama.core.errors import CheckpointError, ConfigError, LlamaError, OptionsError
from mlx_llama.core.files.checkpoint import find_model, open_checkpoint
from mlx_llama.core.files.fit import misfits
from mlx_llama.core.files.folder import find_weights
from mlx_llama.core.files.gguf import GGUFFile
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import cache_folder, machine
from mlx_llama.core.system.files import read_json
from mlx_llama.core.system.gpus import Gpus

from .diagnosis import Diagnosis, OpenedModel
from .fits import fit_backends
from .text_checks import check_text

# else norms
_GROUPS = {"embed_tokens": "embedding", "self_attn": "attention", "lm_head": "head"}
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
    widths = {"8_bits": (2, 8), "16_bits": (2,), "32_bits": (4,)}
    diagnosis.model = {
        **{name: attrgetter(field)(config) for name, field in _FIELDS.items()},
        "parameters": sum(map(math.prod, shapes.values())),
        "longest_context": rope.max_context(config),
        "cache_bytes_per_token": {
            name: position_nbytes(config, *width) for name, width in widths.items()
        },
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
