"""Named tensors of mapped files, as views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.system import machine

# (map, offset, bytes) of each array of equal rows
Pages = Sequence[tuple[machine.FileMap, int, int]]

# {Tensor.dtype: NumPy dtype}
NUMBERS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def as_numbers(bits: np.ndarray) -> np.ndarray:
    """View uint16 bit patterns as bfloat16; float32 and float16 pass unchanged."""
    return bits.view(ml_dtypes.bfloat16) if bits.dtype == np.uint16 else bits


class Mapped:
    """A tensor's pages in mapped files."""

    name: str
    shape: tuple[int, ...]  # (rows, ...)
    pages: Pages
    # int64 [rows]: row n is row order[n] of the file; None if they agree
    order: np.ndarray | None = None

    @property
    def stored_rows(self) -> int:
        """Rows of the file's arrays; more than `shape` has if `order` leaves some out."""
        return self.shape[0]

    def read(self, first: int, last: int) -> None:
        """Read rows first .. last - 1 of the file into memory. Raises CheckpointError for a
        truncated file.
        """
        if not all(machine.read_pages(*part) for part in self.pages_of(first, last)):
            raise self._truncated()

    def check_file(self) -> None:
        """Raise CheckpointError for a truncated file: touching pages beyond its end kills the
        process.
        """
        if any(mapped.size() < offset + nbytes for mapped, offset, nbytes in self.pages):
            raise self._truncated()

    def read_ahead(self, first: int, last: int) -> None:
        """Read rows first .. last - 1 of the file in the background."""
        for part in self.pages_of(first, last):
            machine.read_ahead(*part)

    def release(self, first: int = 0, last: int | None = None) -> None:
        """Let the system evict rows first .. last - 1 of the file (all rows for None), but not
        pages shared with others.
        """
        for part in self.pages if last is None else self.pages_of(first, last):
            machine.release_pages(*part)

    def _truncated(self) -> CheckpointError:
        return CheckpointError(
            f"{self.name}: its file was truncated after it was opened; fetch it again"
        )

    def rows_in_file(self, start: int, stop: int) -> tuple[int, int, np.ndarray | None]:
        """(first, last, order): the file's rows first .. last - 1 hold rows start .. stop - 1, in
        `order` among them.
        """
        if self.order is None:
            return start, stop, None
        # neighbouring rows lie anywhere between the first and the last in the file
        order = self.order[start:stop]
        first = int(order.min())
        return first, int(order.max()) + 1, order - first

    def pages_of(self, first: int, last: int) -> Iterator[tuple[machine.FileMap, int, int]]:
        """`pages` of rows first .. last - 1 of the file."""
        for mapped, offset, nbytes in self.pages:
            row = nbytes // self.stored_rows
            yield mapped, offset + first * row, (last - first) * row


@dataclass(frozen=True)
class Tensor(Mapped):
    """A named tensor of a mapped file, which is read when `bits` is touched."""

    name: str
    dtype: str  # "float32", "float16" or "bfloat16"
    shape: tuple[int, ...]
    # Read-only view [shape] of the file. bfloat16 is uint16 patterns, which torch and MLX take
    # without a copy.
    bits: np.ndarray = field(repr=False, compare=False)
    pages: Pages = field(default=(), repr=False, compare=False)

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
        """View of `bits` in the file's order, which may be misaligned."""
        return self.bits

    @property
    def description(self) -> str:
        """The format for users."""
        return self.dtype

    column_unit = 1  # columns that must stay together

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 of a matrix, or numbers of a vector, as a tensor called `name`."""
        first, last, order = self.rows_in_file(start, stop)
        pages = tuple(self.pages_of(first, last))
        return self._narrow(name, self.stored[first:last], pages, order)

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns start .. stop - 1 of a matrix."""
        return self._narrow(self.name, self.stored[:, start:stop], self.pages, self.order)

    def _narrow(
        self, name: str, view: np.ndarray, pages: Pages, order: np.ndarray | None
    ) -> Tensor:
        tensor = Tensor(name, self.dtype, view.shape, view, pages)
        return tensor if order is None and view.flags.aligned else CopiedTensor(tensor, order)

    def reorder(self, order: np.ndarray) -> Tensor:
        """The tensor whose row n is row order[n] of this one, which is in the file's order."""
        return CopiedTensor(self, order)

    def flat(self) -> Tensor:
        """View a stack of matrices [X, N, K] as a matrix [X N, K]; of vectors, as a vector."""
        view = self.stored.reshape(-1, *self.shape[2:])
        return Tensor(self.name, self.dtype, view.shape, view, self.pages)


class CopiedTensor(Tensor):
    """A tensor with permuted rows or a misaligned start, so that `bits` copies at each access."""

    _view: np.ndarray

    def __init__(self, view: Tensor, order: np.ndarray | None):
        """order: as in `Mapped`."""
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
