"""Matrices of 8-bit floats (OCP's E4M3) with scales, decoded to bfloat16. w[n, k] = weight[n, k] *
scale, of the matrix, of row n, or of a block: `weight_scale_inv` in DeepSeek's files (a factor,
despite its name), else `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.models.config import LlamaConfig

from .decoded import DecodedTensor
from .tensor import Stored, as_numbers

CODE = "F8_E4M3"
BLOCK = (128, 128)  # rows and columns of a scale, unless config.json says otherwise
_SCALES = ("weight_scale_inv", "weight_scale")
_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
# Scales of activations, keys and values, which are not rounded here
_LEFTOVERS = tuple(f".{name}_scale" for name in "input activation output q k v".split())
_LEFTOVERS += (".input_scale_ub",)
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _decode(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], start: int, stop: int
) -> np.ndarray:
    """Rows start .. stop - 1 in bfloat16. codes: uint8 [N, K]; scales: float32, broadcast with the
    blocks of the matrix.
    """
    values, (height, width) = _VALUES[codes[start:stop]], block
    if len(scales) > 1:
        scales = scales[np.arange(start, stop) // height]
    if scales.shape[1] > 1:
        scales = np.repeat(scales, width, axis=1)[:, : values.shape[1]]
    values *= scales
    return values.astype(ml_dtypes.bfloat16)


def take_float8(
    weights: Mapping[str, Stored], config: LlamaConfig, block: tuple[int, int] | None
) -> Mapping[str, Stored]:
    """Join the stored tensors of each matrix of 8-bit floats, and drop the scales of activations.
    Raises CheckpointError: scales are missing, or have another dtype or shape.
    """
    shapes = config.stored_shapes()
    matrices = [
        name
        for name, stored in weights.items()
        if stored.dtype == CODE and len(stored.shape) == len(shapes.get(name, ())) == 2
    ]
    if not matrices:
        return weights
    result = {name: stored for name, stored in weights.items() if not name.endswith(_LEFTOVERS)}
    for name in matrices:
        module = name.removesuffix(".weight")
        scale = next((key for part in _SCALES if (key := f"{module}.{part}") in result), None)
        if scale is None:
            raise CheckpointError(
                f"{weights[name].path}: tensor {module}.weight_scale is missing, which {name} "
                f"({CODE}) needs; fetch the model again"
            )
        result[name] = _join(result[name], scale, result.pop(scale), block)
    return result


def _join(stored: Stored, scale: str, factors: Stored, block: tuple[int, int] | None) -> Stored:
    """The matrix with its scales, the tensor `scale`."""
    if factors.dtype not in _DTYPES:
        raise CheckpointError(
            f"{factors.path}: tensor {scale} has dtype {factors.dtype}, expected "
            f"{' or '.join(_DTYPES)}"
        )
    (codes, pages), (scales, more) = stored.array(), factors.array()
    (N, K), shape = codes.shape, scales.shape
    height, width = block or BLOCK
    blocks = (-(-N // height), -(-K // width))
    if scales.size == 1:
        grid = (1, 1)
    elif shape in ((N,), (N, 1)):
        grid, height = (N, 1), 1
    elif shape == blocks:
        grid = blocks
    else:
        raise CheckpointError(
            f"{factors.path}: tensor {scale} has shape {list(shape)}, expected one number, {N} of "
            f"the rows, or {list(blocks)} of blocks of {height} x {width}"
        )
    if factors.dtype == "F8_E8M0":
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    numbers = as_numbers(scales).astype(np.float32).reshape(grid)
    decode = partial(_decode, codes, numbers, (height, width))
    nbytes = codes.nbytes + numbers.nbytes

    def read(name: str) -> DecodedTensor:
        return DecodedTensor(name, "bfloat16", (N, K), decode, "fp8", nbytes, (*pages, *more))

    return replace(stored, dtype="BF16", decode=read)
