"""Products of low-bit matrices as Triton compiles them."""

from __future__ import annotations

import pytest

from cuda_fallback.quantized import PLANES, SUPER_GROUP, QuantizedMatrix

torch = pytest.importorskip("torch")


# bits, group size, two levels, biases; the most instructions per weight of a program of up to 8, 16
# and 32 rows (2 and 3 bits: of 16)
LOW_BIT = {
    "Q4_0": ((4, 32, False, False), (2.8, 3.3, 5.0)),
    "Q4_K": ((4, 32, True, True), (3.9, 4.9, 7.1)),
    "Q5_K": ((5, 32, True, True), (5.0, 6.1, 8.5)),
    "Q6_K": ((6, 16, True, False), (4.6, 5.6, 7.9)),
    "Q3_K": ((3, 16, True, False), (3.95, 5.1, 5.1)),
    "Q2_K": ((2, 16, True, True), (3.8, 5.5, 5.5)),
    "Q8_0": ((8, 32, False, False), (3.5, 4.4, 5.3)),
    "mxfp4": ((4, 32, False, False), (3.6, 4.0, 5.4)),
    "nvfp4": ((4, 16, False, False), (4.1, 4.7, 6.5)),
    "mxfp8": ((8, 32, False, False), (4.2, 5.1, 5.7)),
    "mlx": ((4, 64, False, True), (3.0, 3.5, 5.5)),
}


EXPONENTS = {"mxfp4": 2, "nvfp4": 2, "mxfp8": 4}  # exponent bits of floating-point codes


def low_bit(name: str, N: int, K: int, dtype=torch.float16):
    """A QuantizedMatrix on the meta device."""
    (bits, group, two_level, has_biases), _ = LOW_BIT[name]
    (low, high), steps = PLANES[bits], -(-K * PLANES[bits][0] // 512)

    def empty(columns: int, kind: torch.dtype, exists: bool = True):
        return torch.empty((N, columns), dtype=kind, device="meta") if exists else None

    exponent = EXPONENTS.get(name, 0)
    kind = torch.bfloat16 if name == "mlx" or exponent else torch.float16
    return QuantizedMatrix(
        (N, K),
        bits,
        group,
        0 if has_biases or exponent else 1 << (bits - 1),
        empty(steps * 16, torch.int32),
        empty(steps * 16 * high // low, torch.int32, high > 0),
        empty(K // group, torch.int8 if two_level else kind),
        empty(K // group, torch.uint8 if two_level else kind, has_biases),
        empty(K // SUPER_GROUP, torch.float16, two_level),
        empty(K // SUPER_GROUP, torch.float16, two_level and has_biases),
        dtype,
        exponent=exponent,
    )
