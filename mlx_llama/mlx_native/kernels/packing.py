"""How keys and values are stored: at a width, or as codes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_llama.core.backends.positions import CACHE_GROUP

Parts = tuple[mx.array, ...]  # keys or values of a layer: (numbers,), or (codes, scales, biases)


@dataclass(frozen=True)
class Packing:
    """Numbers [S, G, L, D]; or codes uint32 [S, G, L, D' / 4], scales and biases [S, G, L, D' /
    32], where D' is D rounded up to a multiple of CACHE_GROUP, 32.
    """

    # 8: codes, with scale and bias for every CACHE_GROUP; 16: two bytes; None: as `dtype`
    bits: int | None
    head_dim: int  # D
    dtype: mx.Dtype  # the activations'
    scale_dtype: mx.Dtype

    @property
    def number_dtype(self) -> mx.Dtype:
        """The dtype of stored numbers: with 16 bits, float16 for float32."""
        return mx.float16 if self.bits == 16 and self.dtype == mx.float32 else self.dtype

    @property
    def parts(self) -> list[tuple[int, mx.Dtype]]:
        """Last axis and dtype of each part."""
        if self.bits != 8:
            return [(self.head_dim, self.number_dtype)]
        groups = -(-self.head_dim // CACHE_GROUP)
        return [
            (groups * CACHE_GROUP // 4, mx.uint32),
            (groups, self.scale_dtype),
            (groups, self.scale_dtype),
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of a head's keys or values at one position."""
        return sum(size * dtype.size for size, dtype in self.parts)

    def pack(self, x: mx.array) -> Parts:
        """Convert keys or values [..., D] to stored parts [..., *]."""
        if self.bits != 8:
            return (x.astype(self.number_dtype),)
        if padding := -self.head_dim % CACHE_GROUP:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        return tuple(mx.quantize(x.astype(self.scale_dtype), group_size=CACHE_GROUP, bits=8))

    def unpack(self, parts: Parts) -> mx.array:
        """Convert stored parts to numbers [..., D]."""
        if self.bits != 8:
            return parts[0].astype(self.dtype)
        numbers = mx.dequantize(*parts, group_size=CACHE_GROUP, bits=self.bits)
        return numbers[..., : self.head_dim].astype(self.dtype)
