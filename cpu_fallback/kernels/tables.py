"""Embeddings in the file, whose rows are written to buffers before a program runs."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mlx_llama.core.files.quantized import AffineWeight

from .. import ops
from .layouts import ROWS
from .panels import Plan, weight_layout
from .program import Code
from .workspace import Buffer


class Table:
    """Writes rows of an embedding to a buffer, times a factor. weight: [V, N], in the file."""

    def __init__(self, weight: ops.Matrix, code: Code, out: Buffer, factor: float = 1.0):
        self.weight, self._out, self._factor = weight, out, factor
        self._rows = out.array[:, : weight.shape[1]]
        self._first_row = self._rows[0]
        # numbers that NumPy converts to float32
        self._numbers = weight if isinstance(weight, np.ndarray) else None
        if self._numbers is not None and self._numbers.dtype == np.uint16:
            self._numbers = self._numbers.view(ml_dtypes.bfloat16)
        # the function that dequantises rows; None for NumPy's
        self._dequantise = None
        if isinstance(weight, AffineWeight):
            plan = Plan(weight, weight_layout(weight))
            self._dequantise = code.embed.get((plan.layout, plan.source))
        if self._dequantise:
            blocks = weight.blocks
            if weight.order is not None or blocks.strides[1] != 1:
                raise ValueError(
                    f"{weight.name}: machine code cannot look up reordered rows, or rows with "
                    f"strides {blocks.strides}"
                )
            # blocks and bytes of a row, address
            self._place = plan.blocks, blocks.strides[0], blocks.ctypes.data
            self._addresses = np.zeros(ROWS, np.int64)

    def embed(self, tokens: np.ndarray) -> None:
        """Write the rows of up to CHUNK tokens, int32 [T]."""
        if self._numbers is not None and len(tokens) == 1:
            self._first_row[...] = self._numbers[tokens[0]]
        elif self._dequantise is None:
            self._rows[: len(tokens)] = ops.embed(tokens[None], self.weight)[0]
        elif len(tokens) == 1:
            self._embed_rows(int(tokens[0]), 1, 0)
        else:
            for first in range(0, len(tokens), ROWS):
                part = tokens[first : first + ROWS]
                self._embed_rows(np.resize(part, ROWS).astype(np.int64), len(part), first)
        if self._factor != 1:
            self._rows[: len(tokens)] *= np.float32(self._factor)

    def _embed_rows(self, tokens: np.ndarray | int, count: int, first: int) -> None:
        """Write `count` rows from row `first` of the buffer on. tokens: [16] or one id."""
        blocks, row_bytes, start = self._place
        self._addresses[:] = start + row_bytes * tokens
        out = self._out.address + first * self._out.row_bytes
        self._dequantise(self._addresses.ctypes.data, count, blocks, out, self._out.row_bytes)
