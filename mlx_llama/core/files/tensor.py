"""Named tensors of mapped files: views, nothing copied."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from mlx_llama.core.system.machine import release_pages

# {Tensor.dtype: NumPy's}
NUMBERS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def as_numbers(bits: np.ndarray) -> np.ndarray:
    """The same memory, uint16 bit patterns seen as bfloat16; float32 and float16 unchanged."""
    return bits.view(ml_dtypes.bfloat16) if bits.dtype == np.uint16 else bits


@dataclass(frozen=True)
class Tensor:
    """One named tensor of a mapped file. Nothing is read before `bits` is touched.

    dtype: "float32", "float16" or "bfloat16".
    bits: read-only array [shape] over the file's own pages: float32 or float16 as it is, bfloat16 as uint16 patterns,
    which torch and MLX take without a copy.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray = field(repr=False, compare=False)
    _map: mmap.mmap | None = field(default=None, repr=False, compare=False)
    _offset: int = field(default=0, repr=False, compare=False)

    @property
    def array(self) -> np.ndarray:
        """`bits` as numbers: float32, float16 or ml_dtypes.bfloat16, [shape], read-only."""
        return as_numbers(self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.bits.nbytes

    def float32(self) -> np.ndarray:
        """A new, writable float32 array [shape]; bfloat16 and float16 widen exactly."""
        return self.array.astype(np.float32)

    def release(self) -> None:
        """Let the tensor's pages leave memory, once a backend has its own copy; touching them reads the file again.

        Pages shared with a neighbouring tensor stay.
        """
        if self._map is not None:
            release_pages(self._map, self._offset, self.nbytes)


class CopiedTensor(Tensor):
    """A tensor whose bits cannot be a view of the file: permuted rows, or a misaligned start. Each access copies."""

    def __init__(self, view: Tensor, order: np.ndarray | None):
        """order: int64 [rows], row n is the file's row order[n]; None keeps the order."""
        for name in ("name", "dtype", "shape", "_map", "_offset"):
            object.__setattr__(self, name, getattr(view, name))
        object.__setattr__(self, "_view", view.bits)
        object.__setattr__(self, "_order", order)

    @property
    def bits(self) -> np.ndarray:
        bits = self._view.copy() if self._order is None else self._view[self._order]
        bits.flags.writeable = False
        return bits

    @property
    def nbytes(self) -> int:
        return self._view.nbytes
