"""Matrices of 8-bit floats (OCP's E4M3) with scales, decoded to bfloat16.

w[n, k] = weight[n, k] * scale, of the matrix, of row n, or of a block: `weight_scale_inv` in
DeepSeek's files (a factor, despite its name), else `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.models.config import LlamaConfig

from .decoded import DecodedTensor
from .tensor import Pages, as_numbers

CODE = "F8_E4M3"
BLOCK = (128, 128)  # rows and columns of a scale, unless config.json says otherwise
_SCALES = ("weight_scale_inv", "weight_scale")
_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
# Scales of activations, keys and values, which are not rounded here
_LEFTOVERS = tuple(f".{name}_scale" for name in "input activation output q k v".split())
_LEFTOVERS += (".input_scale_ub",)
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class _Place:
    """A matrix and its scales as a file with one tensor, `name`."""

    name: str
    codes: np.ndarray  # uint8 [N, K]
    scales: np.ndarray  # float32, broadcast with the blocks of the matrix
    block: tuple[int, int]
    pages: Pages
    path: Path

    def shape(self, name: str) -> tuple[int, ...]:
        return self.codes.shape

    def dtype(self, name: str) -> str:
        return "BF16"

    def tensor(self, name: str) -> DecodedTensor:
        nbytes = self.codes.nbytes + self.scales.nbytes
        shape = self.codes.shape
        return DecodedTensor(self.name, "bfloat16", shape, self._decode, "fp8", nbytes, self.pages)

    def _decode(self, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1, uint16 patterns."""
        values, (height, width) = _VALUES[self.codes[start:stop]], self.block
        scales = self.scales
        if len(scales) > 1:
            scales = scales[np.arange(start, stop) // height]
        if scales.shape[1] > 1:
            scales = np.repeat(scales, width, axis=1)[:, : values.shape[1]]
        values *= scales
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def take_float8(
    weights: Mapping[str, Any], config: LlamaConfig, block: tuple[int, int] | None
) -> Mapping[str, Any]:
    """Replace the stored tensors of each matrix of 8-bit floats by a place, and drop the scales of
    activations.

    Raises CheckpointError: scales are missing, or have another dtype or shape.
    """
    matrices = [
        name
        for name, shape in config.stored_shapes().items()
        if len(shape) == 2 and name in weights and _is_float8(*weights[name])
    ]
    if not matrices:
        return weights
    result = {name: place for name, place in weights.items() if not name.endswith(_LEFTOVERS)}
    for name in matrices:
        module = name.removesuffix(".weight")
        scale = next((key for part in _SCALES if (key := f"{module}.{part}") in result), None)
        if scale is None:
            raise CheckpointError(
                f"{weights[name][0].path}: tensor {module}.weight_scale is missing, which {name} "
                f"({CODE}) needs; fetch the model again"
            )
        result[name] = _open_matrix(name, result[name], scale, result.pop(scale), block), name
    return result


def _is_float8(file: Any, name: str) -> bool:
    return file.dtype(name) == CODE and len(file.shape(name)) == 2


def _open_matrix(
    name: str,
    place: tuple[Any, str],
    scale: str,
    scale_place: tuple[Any, str],
    block: tuple[int, int] | None,
) -> _Place:
    file, key = scale_place
    if (kind := file.dtype(key)) not in _DTYPES:
        raise CheckpointError(
            f"{file.path}: tensor {scale} has dtype {kind}, expected {' or '.join(_DTYPES)}"
        )
    (codes, page), (scales, scale_page) = place[0].array(place[1]), file.array(key)
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
            f"{file.path}: tensor {scale} has shape {list(shape)}, expected one number, {N} of the "
            f"rows, or {list(blocks)} of blocks of {height} x {width}"
        )
    if kind == "F8_E8M0":
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    numbers = as_numbers(scales).astype(np.float32).reshape(grid)
    pages = [part for part in (page, scale_page) if part]
    return _Place(name, codes, numbers, (height, width), pages, place[0].path)
