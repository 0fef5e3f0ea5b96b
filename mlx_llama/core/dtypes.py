"""The dtypes of weights, activations and caches, by name."""

from __future__ import annotations

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number


def dtype_name(dtype: object) -> str:
    """The name of a dtype of NumPy, MLX or torch."""
    return str(dtype).rpartition(".")[2]
