"""What a GGUF file holds, by gguf's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


def gguf_tensors(path: Path) -> dict[str, np.ndarray]:
    """{name: float32} through gguf's own reader and dequantiser, rows in the file's order."""
    tensors = GGUFReader(path).tensors
    return {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}


def gguf_fields(path: Path) -> dict:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items() if field.data}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


ROPES = {
    "default": dict(rope_theta=500000.0),
    "linear": dict(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama3": dict(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64}),
    "yarn": dict(rope_scaling=YARN),
    "yarn, attention factor": dict(rope_scaling=YARN | {"attention_factor": 1.25}),
}
