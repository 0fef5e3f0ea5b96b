"""Identity of a checkpoint, for files that belong to it: golden traces and prompt caches."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from mlx_llama.core.models.config import LlamaConfig, RopeConfig
from mlx_llama.core.models.quantization import Packing, Quantization

from .checkpoint import Checkpoint
from .tensor import Tensor

_SAMPLED = 64  # rows of each tensor


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 of the config and of all tensors' names, shapes, formats and up to 64 rows. Sampling
    takes a moment for a checkpoint of any size, and other weights differ in all rows.
    """
    facts = json.dumps(_hashed_fields(checkpoint.config), sort_keys=True, default=str)
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        count = tensor.shape[0]
        rows = np.unique(np.linspace(0, count - 1, min(_SAMPLED, count)).astype(np.int64))
        if isinstance(tensor, Tensor):
            kind, values = tensor.dtype, tensor.bits[rows]
        else:
            kind, values = tensor.format, tensor.take(rows)
        digest.update(f"{name} {list(tensor.shape)} {kind}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _hashed_fields(config: LlamaConfig) -> dict[str, Any]:
    """The config's fields. Later ones count only if set: hashes of the first traces stay valid."""
    compared = (field for field in fields(config) if field.compare)
    values = {field.name: (getattr(config, field.name), field.default) for field in compared}
    values["rope"] = _describe_rope(config.rope), MISSING
    if isinstance(config.quantization, Quantization):
        values["quantization"] = _describe_quantization(config.quantization), MISSING
    return {
        name: value
        for name, (value, default) in values.items()
        if default is MISSING or name == "quantization" or value != default
    }


def _describe_quantization(quantization: Quantization) -> str:
    """As the first traces have it, with the modes that they lack."""

    def describe(packing: Packing) -> tuple[Any, ...]:
        return packing[:2] if packing.mode == "affine" else tuple(packing)

    bits, group_size, *mode = describe(quantization.packing)
    layers = tuple(
        (module, packing and describe(packing)) for module, packing in quantization.layers
    )
    also = f", mode={mode[0]!r}" if mode else ""
    return f"Quantization(bits={bits}, group_size={group_size}, layers={layers!r}{also})"


def _describe_rope(rope: RopeConfig) -> str:
    """The fields that the first traces have, and later fields that are set."""
    later = ("short_factor", "long_factor", "dim")
    values = {field.name: getattr(rope, field.name) for field in fields(rope)}
    shown = (f"{n}={x!r}" for n, x in values.items() if n not in later or x is not None)
    return f"RopeConfig({', '.join(shown)})"
