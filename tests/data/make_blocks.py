"""Write gguf-blocks.npz: weights, and the blocks that llama.cpp's quantiser makes of them, by type.

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

KINDS = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def quantize_by_llama_cpp(rows: np.ndarray, kind: str) -> np.ndarray:
    """Blocks uint8 [n, bytes per row] of rows float32 [n, K], by ggml_quantize_chunk without an
    importance matrix.
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
    written = function(int(number), rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, None)
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


if __name__ == "__main__":
    weights = make_weights(1, 0)
    np.savez_compressed(
        Path(__file__).with_name("gguf-blocks.npz"),
        weights=weights,
        **{kind: quantize_by_llama_cpp(weights, kind) for kind in KINDS},
    )
