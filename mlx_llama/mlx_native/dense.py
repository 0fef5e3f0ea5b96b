"""DenseMatrix: a matrix of floating-point numbers, transposed at load."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix [N, K], stored as its transpose, which saves a primitive of each product."""

    columns: mx.array  # [K, N], in either order in memory

    @property
    def shape(self) -> tuple[int, int]:
        return self.columns.shape[1], self.columns.shape[0]

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes

    def matmul(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        """x @ w.T + bias. x: [..., K]; bias: [N]; returns [..., N]."""
        return x @ self.columns if bias is None else mx.addmm(bias, x, self.columns)
