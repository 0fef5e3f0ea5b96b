"""Random matrices of every stored format, with values from reference dequantisers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from making import to_bfloat16
from making_gguf import LOW_BIT, dequantise, random_blocks

from cpu_fallback.kernels.target import available
from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight, FloatWeight, GGUFWeight, MLXWeight
from mlx_llama.core.models.quantization import FLOAT_MODES

FLOATS = ("float32", "float16", "bfloat16")
# every width with every group size, dtypes of scales in turn
MLX = tuple(
    f"mlx {bits} {group} {FLOATS[(i + j) % 3]}"
    for (i, bits), (j, group) in itertools.product(
        enumerate((2, 3, 4, 5, 6, 8)), enumerate((32, 64, 128))
    )
)
KINDS = (*FLOATS, *LOW_BIT, *MLX, *(f"mlx {mode}" for mode in FLOAT_MODES))
FEW = (*FLOATS, *"Q4_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q6_K IQ4_XS MXFP4".split())
FEW += ("mlx nvfp4", "mlx mxfp8", "mlx 4 64 float32", "mlx 8 128 float16", "mlx 6 64 bfloat16")
assert set(FEW) <= set(KINDS)


def of_target(name: str, *rest):
    """Parameters of a test; quick tests run those of the best target here."""
    return pytest.param(name, *rest, marks=[pytest.mark.slow] * (name != available()[0]))


TARGETS = [of_target(name) for name in available()]


@dataclass(frozen=True)
class Matrix:
    """exact: float64 [N, K] by the reference dequantiser; size: sum of the magnitudes of each
    weight's terms, for bounds.
    """

    tensor: Tensor | AffineWeight
    exact: np.ndarray
    size: np.ndarray


def columns(kind: str) -> int:
    """Columns that are no multiple of the kernels' blocks, if the format allows it."""
    if kind.removeprefix("mlx ") in FLOAT_MODES:
        return 96
    if kind.startswith("mlx"):
        return 3 * int(kind.split()[2])
    if kind in FLOATS:
        return 72
    return 96 if gguf.GGML_QUANT_SIZES[Type[kind]][0] == 32 else 512


def tensor_of(x: np.ndarray, dtype: str) -> Tensor:
    stored = to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype)
    return Tensor("a.weight", dtype, x.shape, stored)


def gguf_weight(blocks: np.ndarray, kind: str, order: np.ndarray | None = None) -> GGUFWeight:
    weights, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    return GGUFWeight(
        "a.weight", kind, (len(blocks), blocks.shape[1] // nbytes * weights), blocks, order
    )


def mlx_weight(
    packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group: int, dtype: str
) -> MLXWeight:
    stored = [to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype) for x in (scales, biases)]
    return MLXWeight("a.weight", bits, group, packed, *stored)


def mlx_judge(weight: MLXWeight) -> np.ndarray:
    """float32 [N, K] by mx.dequantize, scales and biases widened."""
    import mlx.core as mx

    def wide(stored: np.ndarray) -> mx.array:
        array = mx.array(stored)
        return (array.view(mx.bfloat16) if stored.dtype == np.uint16 else array).astype(mx.float32)

    with mx.stream(mx.cpu):
        return np.array(
            mx.dequantize(
                mx.array(weight.packed),
                wide(weight.scales),
                wide(weight.biases),
                group_size=weight.group_size,
                bits=weight.bits,
            )
        )


def random_float_weight(mode: str, rows: int, k: int, rng: np.random.Generator) -> FloatWeight:
    """Weights around 0.1, without NaN; odd rows of twice as many are left out."""
    bits, group = FLOAT_MODES[mode]
    codes = rng.integers(0, 256, (2 * rows, k * bits // 8), dtype=np.uint8)
    low, high = {"mxfp4": (120, 124), "nvfp4": (20, 40), "mxfp8": (112, 116)}[mode]
    if bits == 8:
        codes[codes & 127 == 127] = 0
    scales = rng.integers(low, high, (2 * rows, k // group), dtype=np.uint8)
    packed = codes.view(np.uint32)
    return FloatWeight("a.weight", mode, packed, scales, np.arange(0, 2 * rows, 2))


def float_judge(weight: FloatWeight) -> np.ndarray:
    """float32 [N, K] by mx.dequantize."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        arrays = [mx.array(part[weight.order]) for part in (weight.packed, weight.scales)]
        return np.array(mx.dequantize(*arrays, mode=weight.mode, dtype=mx.float32))


def with_sizes(tensor: Tensor | AffineWeight, exact: np.ndarray) -> Matrix:
    exact = exact.astype(np.float64)
    size = np.abs(exact)
    if isinstance(tensor, AffineWeight) and tensor.mode != "mxfp8":
        rows = tensor.rows(0, tensor.shape[0])
        n, groups = rows.scales.shape
        size = np.abs(rows.codes.reshape(n, groups, -1) - np.float64(rows.offset)) * np.abs(
            rows.scales[..., None]
        )
        size = (size if rows.biases is None else size + np.abs(rows.biases[..., None])).reshape(
            n, -1
        )
    return Matrix(tensor, exact, size)


def random_matrix(kind: str, rows: int, rng: np.random.Generator, k: int | None = None) -> Matrix:
    k = k or columns(kind)
    if kind in FLOATS:
        tensor = tensor_of(rng.standard_normal((rows, k), np.float32), kind)
        return with_sizes(tensor, tensor.float32())
    if not kind.startswith("mlx"):
        blocks = random_blocks(kind, rows, k, rng)
        order = rng.permutation(rows)
        return with_sizes(gguf_weight(blocks, kind, order), dequantise(blocks, kind)[order])
    if (mode := kind.removeprefix("mlx ")) in FLOAT_MODES:
        float_weight = random_float_weight(mode, rows, k, rng)
        return with_sizes(float_weight, float_judge(float_weight))
    _, bits, group, dtype = kind.split()
    bits, group = int(bits), int(group)
    packed = rng.integers(0, 1 << 32, (rows, k * bits // 32), dtype=np.uint32)
    scales, biases = (rng.standard_normal((rows, k // group), np.float32) for _ in range(2))
    weight = mlx_weight(packed, scales, biases, bits, group, dtype)
    return with_sizes(weight, mlx_judge(weight))
