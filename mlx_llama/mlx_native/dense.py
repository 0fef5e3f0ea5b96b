"""DenseMatrix: a matrix of floating-point numbers, transposed once."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class DenseMatrix:
    """One matrix [N, K], stored as its transpose: every product saves a primitive.

    columns: [K, N]. The matrix's rows lie in memory one after the other, or its columns do.
    """

    columns: mx.array

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.columns.shape[1], self.columns.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.columns.nbytes

    def matmul(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        """x @ w.T + bias. x: [..., K]; bias: [N]; returns [..., N]."""
        return x @ self.columns if bias is None else mx.addmm(bias, x, self.columns)
