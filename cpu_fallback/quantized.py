"""Products of low-bit matrices in NumPy, dequantised by blocks of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_llama.core.files.quantized import AffineWeight

_BLOCK = 1 << 17  # weights dequantised at a time; their float32 values fit a core's L2 cache


@dataclass(frozen=True)
class QuantizedMatrix:
    """weight: [N, K] of any low-bit format."""

    weight: AffineWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.weight.nbytes

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """Dequantise rows. tokens: int32 [B, T]; returns float32 [B, T, K]."""
        return self.weight.take(tokens.reshape(-1)).reshape(*tokens.shape, -1)

    def matmul(self, x: np.ndarray) -> np.ndarray:
        """x @ weight.T. x: float32 [M, K]; returns float32 [M, N]."""
        n, k = self.shape
        out = np.empty((len(x), n), np.float32)
        step = max(1, _BLOCK // k)
        for start in range(0, n, step):
            stop = min(start + step, n)
            out[:, start:stop] = x @ self.weight.rows(start, stop).float32().T
        return out
