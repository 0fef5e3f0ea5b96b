"""Named tensors of mapped files: views, nothing copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.system import machine

# {Tensor.dtype: NumPy's}
NUMBERS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def as_numbers(bits: np.ndarray) -> np.ndarray:
    """The same memory, uint16 bit patterns seen as bfloat16; float32 and float16 unchanged."""
    return bits.view(ml_dtypes.bfloat16) if bits.dtype == np.uint16 else bits


class Mapped:
    """The pages of a tensor in mapped files.

    name: of the tensor. shape: (rows, ...). order: int64 [rows], row n is the file's row order[n]; None where they agree.
    pages: (map, offset, bytes) of each array of equal rows.
    """

    name: str
    shape: tuple[int, ...]
    pages: Sequence[tuple[machine.FileMap, int, int]]
    order = None  # int64 [rows]

    def read(self, first: int, last: int) -> None:
        """Read rows first .. last - 1 of the file into memory at once.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        if not all(machine.read_pages(*part) for part in self._parts(first, last)):
            raise self._truncated()

    def check_file(self) -> None:
        """Check the file's length before reading: touching pages beyond its end kills the process.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        if any(mapped.size() < offset + nbytes for mapped, offset, nbytes in self.pages):
            raise self._truncated()

    def read_ahead(self, first: int, last: int) -> None:
        """Have the system read rows first .. last - 1 of the file in the background."""
        for part in self._parts(first, last):
            machine.read_ahead(*part)

    def release(self, first: int = 0, last: int | None = None) -> None:
        """Let rows first .. last - 1 of the file leave memory; touching them reads the file again.

        Pages shared with neighbouring rows or tensors stay. last: None for all rows.
        """
        for part in self.pages if last is None else self._parts(first, last):
            machine.release_pages(*part)

    def _truncated(self) -> CheckpointError:
        return CheckpointError(f"{self.name}: its file was truncated after it was opened; fetch it again")

    def _parts(self, first: int, last: int) -> Iterator[tuple[machine.FileMap, int, int]]:
        for mapped, offset, nbytes in self.pages:
            row = nbytes // self.shape[0]
            yield mapped, offset + first * row, (last - first) * row


@dataclass(frozen=True)
class Tensor(Mapped):
    """One named tensor of a mapped file. Nothing is read before `bits` is touched.

    dtype: "float32", "float16" or "bfloat16".
    bits: read-only array [shape] over the file's own pages: float32 or float16 as it is, bfloat16 as uint16 patterns,
    which torch and MLX take without a copy.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray = field(repr=False, compare=False)
    pages: Sequence[tuple[machine.FileMap, int, int]] = field(default=(), repr=False, compare=False)

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

    @property
    def stored(self) -> np.ndarray:
        """`bits` in the file's order, perhaps misaligned; never a copy."""
        return self.bits

    def part(self, name: str, first: int, last: int) -> Tensor:
        """Rows first .. last - 1 as a tensor of that name."""
        view = self.stored[first:last]
        tensor = Tensor(name, self.dtype, view.shape, view, list(self._parts(first, last)))
        return tensor if view.flags.aligned else CopiedTensor(tensor, None)


    def flat(self) -> Tensor:
        """A stack of matrices [X, N, K] as one, [X N, K]."""
        view = self.stored.reshape(-1, self.shape[-1])
        return Tensor(self.name, self.dtype, view.shape, view, self.pages)


class CopiedTensor(Tensor):
    """A tensor whose bits cannot be a view of the file: permuted rows, or a misaligned start. Each access copies."""

    def __init__(self, view: Tensor, order: np.ndarray | None):
        """order: int64 [rows], row n is the file's row order[n]; None keeps the order."""
        for name in ("name", "dtype", "shape", "pages"):
            object.__setattr__(self, name, getattr(view, name))
        object.__setattr__(self, "_view", view.bits)
        object.__setattr__(self, "order", order)

    @property
    def bits(self) -> np.ndarray:
        bits = self._view.copy() if self.order is None else self._view[self.order]
        bits.flags.writeable = False
        return bits

    @property
    def stored(self) -> np.ndarray:
        return self._view

    @property
    def nbytes(self) -> int:
        return self._view.nbytes
