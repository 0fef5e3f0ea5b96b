"""The identity of a checkpoint, for files that belong to one: golden traces and prompt caches."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from mlx_llama.core.models.config import LlamaConfig, RopeConfig

from .checkpoint import Checkpoint
from .tensor import Tensor

_SAMPLED = 64  # rows of each tensor


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 over the config and, of every tensor, its name, shape, format and up to 64 rows spread over it.

    Not over all bytes: it takes a moment for a checkpoint of any size, and other weights differ in all rows.
    """
    found = hashlib.sha256()
    found.update(json.dumps(_hashed_fields(checkpoint.config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        rows = np.unique(np.linspace(0, tensor.shape[0] - 1, min(_SAMPLED, tensor.shape[0])).astype(np.int64))
        if isinstance(tensor, Tensor):
            kind, parts = tensor.dtype, [tensor.bits[rows]]
        else:
            kind, parts = tensor.format, [tensor.take(rows)]
        found.update(f"{name} {list(tensor.shape)} {kind}".encode())
        for part in parts:
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def _hashed_fields(config: LlamaConfig) -> dict[str, Any]:
    """The config's fields. Those added since the first traces count only if set: their hashes must hold."""
    values = {one.name: (getattr(config, one.name), one.default) for one in fields(config)}
    values["rope"] = _describe_rope(config.rope), MISSING
    return {name: value for name, (value, default) in values.items()
            if default is MISSING or name == "quantization" or value != default}


def _describe_rope(rope: RopeConfig) -> str:
    """Its fields as the first traces have them, and later ones that are set."""
    later = ("short_factor", "long_factor", "dim")
    values = {one.name: getattr(rope, one.name) for one in fields(rope)}
    return f"RopeConfig({', '.join(f'{name}={value!r}' for name, value in values.items() if name not in later or value is not None)})"
