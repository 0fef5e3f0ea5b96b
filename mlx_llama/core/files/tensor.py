"""Named tensors of mapped files, as views."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.system import machine
from mlx_llama.core.system.forks import make_lock
from mlx_llama.core.system.machine import FileMap, Guard

# (map, offset, bytes) of each array of equal rows
Pages = Sequence[tuple[machine.FileMap, int, int]]

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # {name in files: Tensor.dtype}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# {Tensor.dtype: NumPy dtype}
NUMBERS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def as_numbers(bits: np.ndarray) -> np.ndarray:
    """View uint16 bit patterns as bfloat16; float32 and float16 pass unchanged."""
    return bits.view(ml_dtypes.bfloat16) if bits.dtype == np.uint16 else bits


def as_bits(numbers: np.ndarray) -> np.ndarray:
    """View bfloat16 as uint16 bit patterns; float32 and float16 pass unchanged."""
    return numbers.view(np.uint16) if numbers.dtype == ml_dtypes.bfloat16 else numbers


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 to nearest even as a dtype (of ml_dtypes); overflow gives infinity."""
    with np.errstate(all="ignore"):  # ml_dtypes also warns of NaN
        return values.astype(NUMBERS[dtype])


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
        """Read rows of the file into memory. Raises CheckpointError for a truncated file."""
        pages = self.pages_of(first, last)
        if not all(machine.read_pages(mapped, at, nbytes) for mapped, at, nbytes in pages):
            raise self._truncated()

    def check_file(self) -> None:
        """Raise CheckpointError for a truncated file: touching pages beyond its end is fatal."""
        if any(mapped.size() < offset + nbytes for mapped, offset, nbytes in self.pages):
            raise self._truncated()

    def read_ahead(self, first: int, last: int) -> None:
        """Read rows first .. last - 1 of the file in the background."""
        for mapped, at, nbytes in self.pages_of(first, last):
            machine.read_ahead(mapped, at, nbytes)

    def release(self, first: int = 0, last: int | None = None) -> None:
        """Let the system evict rows of the file (None: all), but not pages shared with others."""
        for mapped, at, nbytes in self.pages if last is None else self.pages_of(first, last):
            machine.release_pages(mapped, at, nbytes)

    def _truncated(self) -> CheckpointError:
        return CheckpointError(
            f"{self.name}: its file was truncated after it was opened; fetch it again"
        )

    def rows_in_file(self, start: int, stop: int) -> tuple[int, int, np.ndarray | None]:
        """(first, last of the file's rows that hold rows start .. stop - 1, order among them)."""
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


@dataclass(eq=False)
class Tensor(Mapped):
    """A named tensor of a mapped file, which is read when `bits` is touched."""

    name: str
    dtype: str  # "float32", "float16" or "bfloat16"
    shape: tuple[int, ...]
    # read-only view of the file, in its order; bfloat16 is uint16 patterns, which all take as is. A
    # function computes it at each access.
    values: np.ndarray | Callable[[], np.ndarray] = field(repr=False)
    pages: Pages = field(default=(), repr=False)
    order: np.ndarray | None = field(default=None, repr=False)  # as in `Mapped`
    file_bytes: int | None = None  # in the file, unless they are those of `values`
    column_unit = 1  # columns that must stay together

    @property
    def stored_rows(self) -> int:
        return self.shape[0] if self.order is None else len(self.stored)

    @property
    def stored(self) -> np.ndarray:
        """`values`, computed if they are a function's."""
        return self.values() if callable(self.values) else self.values

    @property
    def bits(self) -> np.ndarray:
        """`stored` in this tensor's order, [shape], read-only; a copy at each access if the order
        is another than the file's, or not aligned there.
        """
        stored = self.stored
        if self.order is None and stored.flags.aligned:
            return stored
        bits = stored.copy() if self.order is None else stored[self.order]
        bits.flags.writeable = False
        return bits

    @property
    def array(self) -> np.ndarray:
        """`bits` as numbers: float32, float16 or ml_dtypes.bfloat16, [shape], read-only."""
        return as_numbers(self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes in the file, of those rows that `order` has."""
        if self.file_bytes is not None:
            return self.file_bytes
        stored = self.stored
        rows = None if self.order is None else len(self.order)
        return stored.nbytes if rows is None else stored.nbytes * rows // max(len(stored), 1)

    def float32(self) -> np.ndarray:
        """A new, writable float32 array [shape]; bfloat16 and float16 widen exactly."""
        return self.array.astype(np.float32)

    @property
    def description(self) -> str:
        """The format for users."""
        return self.dtype

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 of a matrix, or numbers of a vector, as a tensor called `name`."""
        first, last, order = self.rows_in_file(start, stop)
        view, pages = self.stored[first:last], tuple(self.pages_of(first, last))
        return Tensor(name, self.dtype, (stop - start, *view.shape[1:]), view, pages, order)

    def columns(self, start: int, stop: int) -> Tensor:
        view, shape = self.stored[:, start:stop], (self.shape[0], stop - start)
        return Tensor(self.name, self.dtype, shape, view, self.pages, self.order)

    def reorder(self, order: np.ndarray) -> Tensor:
        """The tensor whose row n is row order[n] of this one; rows may repeat."""
        order = order if self.order is None else self.order[order]
        return replace(self, order=order, shape=(len(order), *self.shape[1:]))

    def reshape(self, shape: tuple[int, ...]) -> Tensor:
        """The same rows with other axes. shape: [rows, ...]."""
        stored = self.stored
        return replace(self, values=stored.reshape((len(stored), *shape[1:])), shape=shape)

    def flat(self) -> Tensor:
        """View a stack of matrices [X, N, K] as a matrix [X N, K]; of vectors, as a vector."""
        view = self.stored.reshape((-1, *self.shape[2:]))
        return Tensor(self.name, self.dtype, view.shape, view, self.pages)


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it, which may be read under any name."""

    path: Path  # the file's
    name: str  # in the file
    dtype: str  # safetensors' code, such as "BF16"; GGUF's type
    shape: tuple[int, ...]
    # (read-only view of the file, its pages); bfloat16 and 8-bit floats are patterns
    array: Callable[[], tuple[np.ndarray, Pages]]
    decode: Callable[[str], Any] | None = None  # makes the tensor of a name, of other formats

    def take(self, i: int, count: int) -> tuple[np.ndarray, Pages]:
        """As `array`, of part `i` of a stack of `count`."""
        view, pages = self.array()
        size = view.nbytes // count
        return view[i], [(mapped, at + i * size, size) for mapped, at, _ in pages]

    def tensor(self, name: str) -> Any:
        """The tensor as `name`, zero-copy: a Tensor or AffineWeight. Raises CheckpointError: a
        dtype other than F64, F32, F16 and BF16.
        """
        if self.decode:
            return self.decode(name)
        if self.dtype not in DTYPES:
            hint = "convert the weights to one of them"
            if self.dtype in ("U8", "I8", "U32"):  # packed matrices
                hint = (
                    "config.json has no field quantization, which quantised weights need; fetch "
                    "both again"
                )
            raise CheckpointError(
                f"{self.path}: tensor {self.name} has dtype {self.dtype}, expected F64, F32, "
                f"F16 or BF16; {hint}"
            )
        view, pages = self.array()
        return Tensor(name, DTYPES[self.dtype], self.shape, view, pages)


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


# Files that are overwritten or truncated in place while a model is loaded

LOOK_SECONDS = 1.0  # between two looks at the times of modification


class FileWatch:
    """The files of loaded tensors, some of which stay mapped.

    A page beyond the end of a truncated file kills the process (SIGBUS) when it is touched, or is
    zeros with a guard, and an overwritten one gives other weights. A file that another one replaces
    by its name is not noticed and need not be: the mapped one stays as it was.
    """

    def __init__(self, models: Iterable[Mapping[str, Mapped]] = (), guard: Guard | None = None):
        tensors: Iterable[Mapped] = (tensor for model in models for tensor in model.values())
        maps = (mapped for tensor in tensors for mapped, _, _ in tensor.pages)
        self._maps: list[FileMap] = list({id(mapped): mapped for mapped in maps}.values())
        self._guard, self._next, self._fault = guard, 0.0, ""
        if guard:
            guard.install()
            for mapped in self._maps:
                mapped.protect(guard)

    def check(self) -> None:
        """Raise CheckpointError from the first change on. Truncated files are noticed at each call,
        before what was computed with them is used; others once a second.
        """
        for mapped in self._maps:
            if mapped.cut is None:
                is_damaged = mapped.size() < len(mapped)
            else:  # where a file ends within the last page, zeros follow, and no page is missing
                is_damaged = mapped.cut[0] != 0 or mapped[mapped.last] != mapped.byte
            if is_damaged:
                self._fault = (
                    self._fault or f"{os.path.basename(mapped.path)} {_describe_damage(mapped)}"
                )
        if (now := time.monotonic()) >= self._next:
            self._next = now + LOOK_SECONDS
            self._fault = self._fault or self._find_overwritten()
        if self._fault:
            raise CheckpointError(f"the model's file changed: {self._fault}: load the model again")

    def _find_overwritten(self) -> str:
        if self._guard:
            self._guard.install()
        for mapped in self._maps:
            if mapped.is_overwritten():
                return f"{os.path.basename(mapped.path)} was overwritten after it was loaded"
        return ""


def _describe_damage(mapped: FileMap) -> str:
    if mapped.is_truncated():
        return "was truncated after it was loaded"
    if mapped.is_overwritten():
        return "was overwritten after it was loaded"
    return "could not be read"
