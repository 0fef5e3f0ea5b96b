"""gpt-oss's experts as transformers stores them: rows of gates and ups in turn, in one tensor of all
experts.

Plain matrices are columns: `gate_up_proj` [X, E, 2 F] and `down_proj` [X, F, E]. The published
files have mxfp4 (OCP Microscaling Formats, version 1.0): `NAME_blocks` uint8 [X, N, K / 32, 16], two
codes of 4 bits in a byte, the first in its low half, and `NAME_scales` uint8 [X, N, K / 32],
exponents of two plus 127. Biases are `NAME_bias` [X, N].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.families import FAMILIES
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.machine import FileMap

from .safetensors import SafetensorsFile
from .tensor import CopiedTensor, Tensor

if TYPE_CHECKING:
    from .fit import Weights

_ALL, _GATES, _UPS = slice(None), slice(0, None, 2), slice(1, None, 2)
_BLOCK = 32  # weights that share a scale
# of codes 0 .. 15, float4 E2M1
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class _Part(CopiedTensor):
    """A part of a stored tensor, whose rows lie apart: reading some touches the pages of all."""

    def pages_of(self, first: int, last: int) -> Iterator[tuple[FileMap, int, int]]:
        yield from self.pages


class _MXFP4(_Part):
    """A matrix in mxfp4, dequantised to bfloat16 at each access, which is exact."""

    _scales: np.ndarray

    def __init__(self, name: str, blocks: np.ndarray, scales: np.ndarray, pages: Any):
        """blocks: uint8 [N, K / 32, 16]; scales: uint8 [N, K / 32]."""
        shape = (len(blocks), blocks.shape[1] * _BLOCK)
        super().__init__(Tensor(name, "bfloat16", shape, blocks, pages), None)
        object.__setattr__(self, "_scales", scales)

    @property
    def bits(self) -> np.ndarray:
        self.check_file()
        codes = np.stack([self._view & 15, self._view >> 4], axis=-1)
        values = _VALUES[codes.reshape(*self._scales.shape, _BLOCK)]
        # exponents below bfloat16's smallest number lie outside every real model
        wide = np.ldexp(values, self._scales.astype(np.int32)[..., None] - 127)
        return wide.reshape(self.shape).astype(ml_dtypes.bfloat16).view(np.uint16)

    @property
    def stored(self) -> np.ndarray:
        return self.bits

    @property
    def nbytes(self) -> int:
        return self._view.nbytes + self._scales.nbytes


@dataclass(frozen=True)
class FusedPart:
    """A tensor of expert `i`, called `name`, in a tensor of all experts. Reads as a file with it."""

    file: SafetensorsFile
    name: str
    i: int
    rows: slice  # of the stored matrix
    scales: str | None = None  # in the file, of mxfp4

    @property
    def path(self) -> Any:
        return self.file.path

    def dtype(self, stored: str) -> str:
        """As SafetensorsFile.dtype."""
        return self.file.dtype(stored)

    def shape(self, stored: str) -> tuple[int, ...]:
        """Shape of the expert's tensor; of the stored one if that has not the right dimensions."""
        count, *shape = whole = self.file.shape(stored)
        if self.i >= count or len(shape) != (3 if self.scales else 2 - self._is_bias):
            return whole
        if self.scales:
            shape = [shape[0], shape[1] * _BLOCK]
        elif not self._is_bias:
            shape.reverse()
        return (len(range(*self.rows.indices(shape[0]))), *shape[1:])

    def tensor(self, stored: str) -> Tensor:
        """The tensor, read when its bits are touched. Raises CheckpointError."""
        if self.scales:
            (blocks, first), (scales, second) = self._read(stored), self._read(self.scales)
            if blocks.shape != (*scales.shape, _BLOCK // 2):
                raise CheckpointError(
                    f"{self.path}: tensor {self.scales} has shape {list(scales.shape)} for each "
                    f"expert, expected {list(blocks.shape[:2])}; fetch the file again"
                )
            return _MXFP4(self.name, blocks[self.rows], scales[self.rows], [*first, *second])
        whole, (view, pages) = self.file.tensor(stored), self._read(stored)
        view = (view if self._is_bias else view.T)[self.rows]
        return _Part(Tensor(self.name, whole.dtype, view.shape, view, pages), None)

    def array(self, stored: str) -> Any:
        """As SafetensorsFile.array; only quantised files are asked, which have no such tensors."""
        raise CheckpointError(
            f"{self.path}: tensor {stored} is not part of a quantised model; fetch it again"
        )

    @property
    def _is_bias(self) -> bool:
        return self.name.endswith(".bias")

    def _read(self, stored: str) -> tuple[np.ndarray, list[tuple[FileMap, int, int]]]:
        """(view of expert i, its pages)."""
        whole, page = self.file.array(stored)
        nbytes = whole.nbytes // len(whole)
        return whole[self.i], [(page[0], page[1] + self.i * nbytes, nbytes)] if page else []


def split_fused(weights: Weights, config: LlamaConfig) -> Weights:
    """Name each expert's tensors where the file has all experts' gates and ups in one."""
    modules = FAMILIES[config.architecture].experts
    if modules is None or not modules.is_interleaved:
        return weights
    result: dict[str, Any] = dict(weights)
    for spec in config.layers:
        assert spec.experts is not None
        stack = spec.experts.stacks[0].rpartition(".")[0]
        for names, fused, rows in (
            (spec.experts.gate, "gate_up_proj", _GATES),
            (spec.experts.up, "gate_up_proj", _UPS),
            (spec.experts.down, "down_proj", _ALL),
        ):
            whole = f"{stack}.{fused}"
            blocks, scales = f"{whole}_blocks", f"{whole}_scales"
            is_packed = blocks in weights and scales in weights
            for kind, stored in (
                ("weight", blocks if is_packed else whole),
                ("bias", f"{whole}_bias"),
            ):
                if stored not in weights:
                    continue
                file, there = weights[stored]
                assert isinstance(file, SafetensorsFile)
                apart = kind == "weight" and is_packed
                for old in (stored, scales) if apart else (stored,):
                    result.pop(old, None)
                for i, name in enumerate(names):
                    full = f"{name}.{kind}"
                    packed = weights[scales][1] if apart else None
                    result[full] = FusedPart(file, full, i, rows, packed), there
    return result
