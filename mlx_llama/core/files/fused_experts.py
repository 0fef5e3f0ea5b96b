"""Experts of gpt-oss and Llama 4 as transformers stores them: all in one tensor.

Matrices are transposed: `gate_up_proj` [X, E, 2 F], gates and ups interleaved or as halves, and
`down_proj` [X, F, E]. gpt-oss's published files have mxfp4: `NAME_blocks` uint8 [X, N, K / 32, 16]
and `NAME_scales` uint8 [X, N, K / 32]. Biases are `NAME_bias` [X, N].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.system.machine import FileMap

from .quantized import AffineWeight, FloatWeight
from .tensor import Stored, Tensor

_ALL = slice(None)
_BLOCK = 32  # weights that share a scale


class _Part(Tensor):
    """A part of a stored tensor with scattered rows: reading a few touches the pages of all."""

    @property
    def bits(self) -> np.ndarray:
        return np.ascontiguousarray(super().bits)

    def pages_of(self, first: int, last: int) -> Iterator[tuple[FileMap, int, int]]:
        yield from self.pages


def _take_expert(
    whole: Stored, i: int, count: int, rows: slice, is_bias: bool, scales: Stored | None
) -> Stored:
    """The tensor of expert `i`: those rows of a stored one of all. scales: of mxfp4."""
    shape = list(whole.shape[1:])
    if whole.shape[:1] != (count,) or len(shape) != (3 if scales else 2 - is_bias):
        return whole
    if scales:
        shape = [shape[0], shape[1] * _BLOCK]
    elif not is_bias:
        shape.reverse()
    shape[0] = len(range(*rows.indices(shape[0])))

    def decode(name: str) -> Tensor | AffineWeight:
        if scales is None:
            number = whole.tensor(name)  # raises for another dtype
            view, pages = whole.take(i, count)
            view = (view if is_bias else view.T)[rows]
            return _Part(name, number.dtype, view.shape, view, pages)
        groups = whole.shape[:-1]
        for stored, wanted in ((whole, (*groups, _BLOCK // 2)), (scales, groups)):
            if (stored.dtype, stored.shape) != ("U8", wanted):
                raise CheckpointError(
                    f"{stored.path}: tensor {stored.name} is {stored.dtype} {list(stored.shape)}, "
                    f"expected U8 {list(wanted)} for mxfp4; fetch it again"
                )
        (blocks, first), (codes, second) = whole.take(i, count), scales.take(i, count)
        order = None if rows == _ALL else np.arange(len(blocks))[rows]
        packed = blocks.reshape(len(blocks), -1).view(np.uint32)  # neighbours in a byte each
        return FloatWeight(name, "mxfp4", packed, codes, order, [*first, *second])

    # no dtype: these are no parts of quantised matrices
    return replace(whole, dtype="", shape=tuple(shape), decode=decode)


def split_fused(weights: Mapping[str, Stored], config: LlamaConfig) -> Mapping[str, Stored]:
    """Name each expert's tensors where the file has those of all experts in one."""
    modules = FAMILIES[config.architecture].experts
    if modules is None or not modules.fused_rows:
        return weights
    units = config.moe_intermediate_size
    gates, ups = slice(0, units), slice(units, None)
    if modules.fused_rows == "in turn":
        gates, ups = slice(0, None, 2), slice(1, None, 2)
    result = dict(weights)
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
            blocks, packed = f"{whole}_blocks", None
            if blocks in weights and f"{whole}_scales" in weights:
                packed = result.pop(f"{whole}_scales", weights[f"{whole}_scales"])
            weight = whole if packed is None else blocks
            for kind, stored, scales in (
                ("weight", weight, packed),
                ("bias", f"{whole}_bias", None),
            ):
                result.pop(stored, None)
                for i, name in enumerate(names if stored in weights else ()):
                    result[f"{name}.{kind}"] = _take_expert(
                        weights[stored], i, len(names), rows, kind == "bias", scales
                    )
    return result
