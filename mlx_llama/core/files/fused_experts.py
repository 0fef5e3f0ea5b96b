"""Experts of gpt-oss and Llama 4 as transformers stores them: all in one tensor.

Matrices are transposed: `gate_up_proj` [X, E, 2 F], gates and ups interleaved or as halves, and
`down_proj` [X, F, E]. gpt-oss's published files have mxfp4: `NAME_blocks` uint8 [X, N, K / 32, 16]
and `NAME_scales` uint8 [X, N, K / 32]. Biases are `NAME_bias` [X, N].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.families import FAMILIES
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.machine import FileMap

from .quantized import AffineWeight, mxfp4_weight
from .safetensors import SafetensorsFile
from .tensor import CopiedTensor, Tensor

_ALL = slice(None)
_BLOCK = 32  # weights that share a scale


class _Part(CopiedTensor):
    """A part of a stored tensor with scattered rows: reading a few touches the pages of all."""

    def pages_of(self, first: int, last: int) -> Iterator[tuple[FileMap, int, int]]:
        yield from self.pages


@dataclass(frozen=True)
class FusedPart:
    """A file whose tensor of all experts reads as `name`, the tensor of expert `i`."""

    file: SafetensorsFile
    name: str
    i: int
    count: int  # of all experts
    rows: slice  # of the stored matrix
    # the file with the scales of mxfp4, and their name there
    scales: tuple[SafetensorsFile, str] | None = None

    @property
    def path(self) -> Any:
        return self.file.path

    def dtype(self, stored: str) -> str:
        """As SafetensorsFile.dtype."""
        return self.file.dtype(stored)

    def shape(self, stored: str) -> tuple[int, ...]:
        """Shape of the expert's tensor, or of a stored tensor of other dimensions."""
        count, *shape = whole = self.file.shape(stored)
        if count != self.count or len(shape) != (3 if self.scales else 2 - self._is_bias):
            return whole
        if self.scales:
            shape = [shape[0], shape[1] * _BLOCK]
        elif not self._is_bias:
            shape.reverse()
        return (len(range(*self.rows.indices(shape[0]))), *shape[1:])

    def tensor(self, stored: str) -> Tensor | AffineWeight:
        """The tensor, which is read lazily. Raises CheckpointError."""
        if self.scales:
            groups = self.file.shape(stored)[:-1]
            blocks, first = self._read_bytes(self.file, stored, (*groups, _BLOCK // 2))
            scales, second = self._read_bytes(*self.scales, groups)
            order = None if self.rows == _ALL else np.arange(len(blocks))[self.rows]
            return mxfp4_weight(self.name, blocks, scales, order, [*first, *second])
        whole, (view, pages) = self.file.tensor(stored), self._read(self.file, stored)
        view = (view if self._is_bias else view.T)[self.rows]
        return _Part(Tensor(self.name, whole.dtype, view.shape, view, pages), None)

    def array(self, stored: str) -> Any:
        """Raise CheckpointError: only quantised matrices are read as arrays, and these are not."""
        raise CheckpointError(
            f"{self.path}: tensor {stored} is not part of a quantised model; fetch it again"
        )

    @property
    def _is_bias(self) -> bool:
        return self.name.endswith(".bias")

    def _read_bytes(
        self, file: SafetensorsFile, stored: str, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, list[tuple[FileMap, int, int]]]:
        """As `_read`. Raises CheckpointError unless the tensor is bytes of that shape."""
        if (file.dtype(stored), file.shape(stored)) != ("U8", shape):
            raise CheckpointError(
                f"{file.path}: tensor {stored} is {file.dtype(stored)} {list(file.shape(stored))}, "
                f"expected U8 {list(shape)} for mxfp4; fetch it again"
            )
        return self._read(file, stored)

    def _read(
        self, file: SafetensorsFile, stored: str
    ) -> tuple[np.ndarray, list[tuple[FileMap, int, int]]]:
        """(view of expert i, its pages)."""
        whole, page = file.array(stored)
        nbytes = whole.nbytes // len(whole)
        return whole[self.i], [(page[0], page[1] + self.i * nbytes, nbytes)] if page else []


def split_fused(weights: Mapping[str, Any], config: LlamaConfig) -> Mapping[str, Any]:
    """Name each expert's tensors where the file has those of all experts in one."""
    modules = FAMILIES[config.architecture].experts
    if modules is None or not modules.fused_rows:
        return weights
    units = config.moe_intermediate_size
    gates, ups = (
        (slice(0, None, 2), slice(1, None, 2))
        if modules.fused_rows == "in turn"
        else (slice(0, units), slice(units, None))
    )
    result: dict[str, Any] = dict(weights)
    for spec in config.layers:
        if spec.experts is None:
            continue
        stack = spec.experts.gate[0].removesuffix(f".0.{modules.gate}")
        for names, fused, rows in (
            (spec.experts.gate, "gate_up_proj", gates),
            (spec.experts.up, "gate_up_proj", ups),
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
                    packed = weights[scales] if apart else None
                    result[full] = FusedPart(file, full, i, len(names), rows, packed), there
    return result
