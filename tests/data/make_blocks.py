"""Write gguf-blocks.npz: weights, and the blocks that llama.cpp's quantiser makes of them, by type,
plainly and with an importance of the columns.

    pip install -e ".[peers]"
    python tests/data/make_blocks.py

llama.cpp must be built without fused multiply-adds (GGML_NATIVE=OFF on x86-64): they round
differently.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np

KINDS = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
WEIGHED = (*KINDS, "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # types whose errors an importance weighs


def quantize_by_llama_cpp(
    rows: np.ndarray, kind: str, importance: np.ndarray | None = None
) -> np.ndarray:
    """Blocks uint8 [n, bytes per row] of rows float32 [n, K], by ggml_quantize_chunk. importance:
    float32 [K].
    """
    import llama_cpp

    function = llama_cpp.llama_cpp._lib.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    number = gguf.GGMLQuantizationType[kind]
    rows = np.ascontiguousarray(rows, np.float32)
    blocks = np.zeros(gguf.quants.quant_shape_to_byte_shape(rows.shape, number), np.uint8)
    pointer = None if importance is None else importance.ctypes.data
    written = function(int(number), rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, pointer)
    assert written == blocks.nbytes
    return blocks


def make_weights(rows: int, seed: int) -> np.ndarray:
    """float32 [7 * rows, 256]: normal, of one sign, with outliers, zeros, equal values, few values,
    tiny ones.
    """
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((rows, 256), np.float32) * np.float32(0.02)
    spread = normal * np.exp(3 * rng.standard_normal(normal.shape, np.float32))
    zeros = normal.copy()
    zeros[:, :100] = 0
    zeros[0] = 0
    equal = np.full_like(normal, -0.25)
    few = rng.integers(-8, 8, normal.shape).astype(np.float32)
    return np.concatenate(
        [normal, -np.abs(normal), spread, zeros, equal, few, normal * np.float32(1e-7)]
    )


def make_importance(seed: int) -> np.ndarray:
    """float32 [256], as uneven as those of activations."""
    rng = np.random.default_rng(seed)
    return np.exp(2 * rng.standard_normal(256)).astype(np.float32)


if __name__ == "__main__":
    weights, importance = make_weights(1, 0), make_importance(0)
    np.savez_compressed(
        Path(__file__).with_name("gguf-blocks.npz"),
        weights=weights,
        **{kind: quantize_by_llama_cpp(weights, kind) for kind in KINDS},
        **{f"{kind} weighed": quantize_by_llama_cpp(weights, kind, importance) for kind in WEIGHED},
    )
