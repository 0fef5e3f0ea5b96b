"""DecodedTensor: a matrix in a format that no backend multiplies, decoded to numbers at load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np

from mlx_llama.core.system.forks import make_lock

from .tensor import NUMBERS, Pages, Stored, Tensor, as_bits

_SLAB = 1 << 18  # weights decoded at once; a few float32 arrays of this size fit a core's cache
# (first row, row after the last) -> the rows, of a dtype of NUMBERS
Decode = Callable[[int, int], np.ndarray]


def notice_decoded(tensors: Iterable[object]) -> str:
    """Notice of matrices that take more memory than in the file; "" if there are none."""
    decoded = [tensor for tensor in tensors if isinstance(tensor, DecodedTensor)]
    if not decoded:
        return ""
    formats = ", ".join(sorted({tensor.format for tensor in decoded}))
    dtypes = " and ".join(sorted({tensor.dtype for tensor in decoded}))
    before = sum(tensor.nbytes for tensor in decoded)
    after = sum(math.prod(tensor.shape) * NUMBERS[tensor.dtype].itemsize for tensor in decoded)
    return (
        f"{len(decoded)} matrices ({formats}) are loaded as {dtypes}: {after / 1e9:.2f} GB, in the "
        f"files {before / 1e9:.2f} GB"
    )


def open_numbers(
    path: Path,
    name: str,
    code: str,
    shape: tuple[int, ...],
    array: Callable[[], tuple[np.ndarray, Pages]],
) -> Stored:
    """Stored, where float64 is float32: matrices when they are read, other tensors from the first
    use on.
    """
    if code != "F64":
        return Stored(path, name, code, shape, array)

    def narrow(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # writers refuse values that are not finite
            return values.astype(np.float32)

    @cache
    def rounded() -> tuple[np.ndarray, Pages]:
        values = narrow(array()[0])
        values.flags.writeable = False
        return values, ()

    def decode(name: str) -> DecodedTensor:
        view, pages = array()

        def rows(start: int, stop: int) -> np.ndarray:
            return narrow(view[start:stop])

        return DecodedTensor(name, "float32", shape, rows, code, view.nbytes, pages)

    return Stored(path, name, "F32", shape, rounded, decode if len(shape) == 2 else None)


class DecodedTensor(Tensor):
    """A matrix [N, K] of `dtype`, decoded at the first read, kept until all rows are released."""

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        decode: Decode,
        format: str,
        file_bytes: int,
        pages: Pages = (),
    ):
        """format: in the file, for users. file_bytes: there."""
        self.name, self.dtype, self.shape, self.pages = name, dtype, shape, pages
        self.format, self.file_bytes, self._decode = format, file_bytes, decode
        self._kept: np.ndarray | None = None
        self._released = 0  # rows released since decoding
        self._lock = make_lock()

    @property
    def stored(self) -> np.ndarray:
        with self._lock:
            if self._kept is None:
                self.check_file()
                kept = np.empty(self.shape, NUMBERS[self.dtype])
                step = max(1, _SLAB // self.shape[1])
                for start in range(0, len(kept), step):
                    kept[start : start + step] = self._decode(start, min(start + step, len(kept)))
                kept.flags.writeable = False
                self._kept, self._released = as_bits(kept), 0
            return self._kept

    @property
    def description(self) -> str:
        return f"{self.format} as {self.dtype}"

    def part(self, name: str, start: int, stop: int) -> DecodedTensor:
        shape = stop - start, self.shape[1]
        return self._derive(name, shape, lambda a, b: self._decode(start + a, start + b))

    def columns(self, start: int, stop: int) -> DecodedTensor:
        def decode(first: int, last: int) -> np.ndarray:
            return np.ascontiguousarray(self._decode(first, last)[:, start:stop])

        return self._derive(self.name, (self.shape[0], stop - start), decode)

    def reorder(self, order: np.ndarray) -> DecodedTensor:
        def decode(first: int, last: int) -> np.ndarray:
            rows = order[first:last]
            low, high = int(rows.min()), int(rows.max()) + 1
            return self._decode(low, high)[rows - low]

        return self._derive(self.name, (len(order), *self.shape[1:]), decode)

    def _derive(self, name: str, shape: tuple[int, ...], decode: Decode) -> DecodedTensor:
        share = self.nbytes * math.prod(shape) // math.prod(self.shape)
        return DecodedTensor(name, self.dtype, shape, decode, self.format, share, self.pages)

    def release(self, first: int = 0, last: int | None = None) -> None:
        """Free the numbers once all rows are released; the pages of a part may be shared."""
        with self._lock:
            self._released += self.shape[0] if last is None else last - first
            if self._released >= self.shape[0]:
                self._kept, self._released = None, 0
                super().release()

    def read(self, first: int, last: int) -> None:
        """As Mapped.read; decoding reads the file."""
        self.check_file()
