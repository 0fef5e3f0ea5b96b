"""The GGUF file format: checked headers, metadata, and tensors that are views of the mapped file.

Own code: the gguf library's reader builds a NumPy array for every string of the vocabulary, which
takes seconds, and trusts the header. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md - little-endian: "GGUF", a version, the
numbers of tensors and of metadata entries, the entries (key, type, value), the tensors (name,
dimensions, type, offset), padding, the data.

Tensors get their Hugging Face names and row order here, by the table of core/models/families/family.py.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import CheckpointError, ConfigError, Report, refuse, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES, find_gguf
from mlx_llama.core.models.parts import NUMBERS_OF_XIELU
from mlx_llama.core.system.files import open_file, reading
from mlx_llama.core.system.forks import cached_property
from mlx_llama.core.system.machine import map_file

from .quantized import GGUF_FORMATS, GGUFWeight
from .tensor import DTYPES, Pages, Stored, Tensor, open_numbers

_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """True if a regular file begins as a GGUF file does, whatever its name."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


_VERSIONS = (2, 3)  # version 3 adds big-endian files, nothing else
_COUNT_LIMIT = 1 << 16  # metadata entries, tensors, parts; real models: tens, hundreds, a few
_NAME_LIMIT = 1 << 16  # bytes of a key or a tensor's name; the format's own limit for keys
# bytes of all keys, names and strings outside arrays; chat templates have thousands
_TEXT_LIMIT = 1 << 24
# items of all arrays in the metadata; the largest vocabularies have a million, merges included
_ITEM_LIMIT = 3 << 20
# numbers of an array passed to the config: one per layer, and one too many
_LAYER_LIMIT = (1 << 12) + 1
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32  # default of general.alignment

# metadata value types, by their number
_NUMBERS: dict[int, np.dtype] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

# tensor types by number (gguf.GGMLQuantizationType); unsupported ones are refused by name
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_PLAIN: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
}  # fmt: skip
# type -> (weights per block, bytes per block)
_BLOCKS = {name: (1, storage.itemsize) for name, storage in _PLAIN.items()} | {
    name: (layout.block_size, layout.nbytes) for name, layout in GGUF_FORMATS.items()
}

# {tensor: its name for LlamaConfig.from_gguf}
_ROPE_FACTORS = {
    "rope_freqs.weight": "",
    "rope_factors_short.weight": "short",
    "rope_factors_long.weight": "long",
}
# Frequencies that early conversions stored (gguf.MODEL_TENSOR_SKIP); the metadata defines them.
_LEFTOVER = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?", re.ASCII)
# Scales of whole NVFP4 matrices; those of inputs are for products in 4 bits.
_FACTORS = re.compile(r"(.+)\.(input_)?scale", re.ASCII)

# in names of GGUF files that llama.cpp writes beside models
_NO_MODEL = re.compile(r"(mmproj|imatrix)[^/]*$", re.IGNORECASE)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class StringArray(Sequence[str]):
    """A metadata array of strings, decoded lazily."""

    def __init__(self, data: mmap.mmap, starts: np.ndarray, where: str):
        """starts: int64 [n + 1], offsets of each string's length in `data`, then of the last end.
        where: file and field, for errors.
        """
        self._data, self._starts, self._where = data, starts, where

    def __repr__(self) -> str:
        return f"{len(self)} texts"

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return self._decode(self._starts[i : i + 2].tolist(), i)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decode(self._starts.tolist()))

    def _decode(self, starts: list[int], first: int = 0) -> list[str]:
        data = self._data
        try:
            return [data[begin + 8 : end].decode() for begin, end in pairwise(starts)]
        except UnicodeDecodeError as e:
            i = [data[begin + 8 : end] for begin, end in pairwise(starts)].index(e.object)
            raise CheckpointError(
                f"{self._where}[{first + i}] is {show(e.object)}, expected UTF-8 text; fetch "
                "the file again"
            ) from None


class GGUFFile:
    """A model in one GGUF file, or in all the parts of a split one.

    metadata: {key: value}: int, float, bool or str; arrays of numbers as NumPy views of the file,
    arrays of strings as StringArray. weights: by Hugging Face names. config: by the
    metadata and the tensors' shapes. report: called with the error of each unsupported tensor type;
    where it returns, the file opens without those tensors.

    Raises CheckpointError: a part is missing, truncated or corrupt; anything that `report` raises.
    """

    def __init__(self, path: str | os.PathLike, report: Report = refuse):
        self.path = Path(path)
        first = _Part(self.path, report)
        self._parts = [first] if first.count == 1 else _open_parts(first, report)
        self.metadata: dict[str, Any] = self._parts[0].metadata
        # The names of an unsupported architecture do not matter: the config refuses it.
        self._names = (find_gguf(self.metadata) or FAMILIES["LlamaForCausalLM"]).names
        self._tensors: dict[str, Stored] = {}  # by Hugging Face name
        self._rope_factors: dict[str, Stored] = {}
        self._factors: dict[str, Stored] = {}  # factors on NVFP4 matrices' scales, by matrix
        for part in self._parts:
            for stored, entry in part.tensors.items():
                if stored in _ROPE_FACTORS:
                    self._rope_factors[_ROPE_FACTORS[stored]] = entry
                elif not _LEFTOVER.fullmatch(stored):
                    name = self._names.hugging_face(stored) or stored
                    if name in self._tensors:
                        other = self._tensors[name].path.name
                        raise part.corrupt(f"tensor {show(stored)} is in {other} already")
                    if name.endswith("shared_expert_gate.weight") and len(entry.shape) == 1:
                        entry = _make_row(entry)
                    self._tensors[name] = entry
        for name in list(self._tensors):
            if match := _FACTORS.fullmatch(name):
                matrix = self._names.hugging_face(f"{match[1]}.weight")
                if matrix in self._tensors and self._tensors[matrix].dtype == "NVFP4":
                    entry = self._tensors.pop(name)
                    if not match[2]:
                        self._factors[matrix] = entry

    @cached_property
    def config(self) -> LlamaConfig:
        """The model's config. Raises ConfigError: a metadata field is missing, of the wrong type,
        out of range or unsupported.
        """
        embedding = self._tensors.get("model.embed_tokens.weight")
        dtype = DTYPES.get(embedding.dtype, "float16") if embedding else "float16"
        divisors = {}
        for key, entry in self._rope_factors.items():
            # the config checks the exact number
            few = math.prod(entry.shape) < _LAYER_LIMIT
            factors = entry.tensor(entry.name).float32().reshape(-1).tolist() if few else ()
            divisors[key] = tuple(factors)
        metadata = {
            key: value[:_LAYER_LIMIT].tolist() if isinstance(value, np.ndarray) else value
            for key, value in self.metadata.items()
        }
        shapes = {name: entry.shape for name, entry in self._tensors.items()}
        return LlamaConfig.from_gguf(metadata, shapes, divisors, dtype, str(self.path))

    @cached_property
    def weights(self) -> dict[str, Stored]:
        """All tensors by Hugging Face name, rows in Hugging Face's order; of a low-bit stack [X, N,
        K] all X N rows. Weights are not read. Raises ConfigError as `config`. Reading a tensor
        raises CheckpointError for a low-bit type of a vector, such as a norm.
        """
        stored = self._tensors.items()
        weights = {name: replace(x, decode=partial(self._decode, name)) for name, x in stored}
        # To llama.cpp each bias is optional; the config has all biases of a block or none. Absent
        # ones are zero.
        if any(name.endswith(".bias") for name in weights):
            for name, shape in self.config.stored_shapes().items():
                if name.endswith(".bias") and name not in weights and ".experts." not in name:
                    weights[name] = self._constant(name, 0.0, shape)
        for name in filter(self._names.is_logarithm, weights):
            weights[name] = _take_logarithm(weights[name])
        return weights | self._numbers()

    def _constant(self, name: str, value: float, shape: tuple[int, ...]) -> Stored:
        values = np.broadcast_to(np.float32(value), shape)
        return Stored(self.path, name, "F32", shape, lambda: (values, ()))

    def _numbers(self) -> dict[str, Stored]:
        """Tensors of a number each, which the metadata has by layer, or as one for all."""
        if "xielu.alpha_p" not in self.metadata:
            return {}
        shapes, numbers, count = self.config.tensor_shapes(), {}, self.config.num_hidden_layers
        for key in (f"xielu.{name}" for name in NUMBERS_OF_XIELU):
            values = np.asarray(self.metadata.get(key, np.nan))
            is_fit = values.dtype.kind == "f" and values.shape in ((), (count,))
            if not is_fit or not np.isfinite(values).all():
                raise ConfigError(
                    f"{self.path}: {key} is {show(self.metadata.get(key))}, expected {count} "
                    "numbers, one for each layer; take another conversion of the model"
                )
            for layer, value in zip(self.config.layers, np.broadcast_to(values, count)):
                for name in layer.mlp.xielu if layer.mlp else ():
                    if name.endswith(key.removeprefix("xielu.")):
                        numbers[name] = self._constant(name, value, shapes[name])
        return numbers

    def _decode(self, stored: str, name: str) -> Tensor | GGUFWeight:
        """The tensor with the Hugging Face name `stored`, called `name`."""
        order, entry = None, self._tensors[stored]
        if self._names.is_permuted(stored) and entry.shape[0] % self.config.head_dim == 0:
            order = row_order(entry.shape[0], self.config.head_dim)
        if entry.dtype in _PLAIN:
            tensor = entry.tensor(name)
            return tensor if order is None else tensor.reorder(order)
        if len(entry.shape) not in (2, 3):
            raise CheckpointError(
                f"{entry.path}: tensor {entry.name} has type {entry.dtype} and shape "
                f"{list(entry.shape)}, expected {', '.join(_PLAIN)} for a vector; convert the "
                "model again"
            )
        blocks, pages = entry.array()
        factors = self._read_factors(stored, len(blocks)) if stored in self._factors else None
        shape = len(blocks), entry.shape[-1]
        return GGUFWeight(name, entry.dtype, shape, blocks, order, pages, factors)

    def _read_factors(self, name: str, rows: int) -> np.ndarray:
        """The factor of each row's scales, float32 [rows]: one for a matrix, or each of a stack."""
        entry, stack = self._factors[name], self._tensors[name].shape[:-2]
        if entry.dtype not in _PLAIN or math.prod(entry.shape) not in (1, math.prod(stack)):
            raise CheckpointError(
                f"{entry.path}: tensor {entry.name} has type {entry.dtype} and shape "
                f"{list(entry.shape)}, expected a number for each matrix; convert the model again"
            )
        factors = entry.tensor(entry.name).float32().reshape(-1)
        return np.repeat(factors, rows // len(factors))


def _take_logarithm(rates: Stored) -> Stored:
    """The logarithm of what llama.cpp's converter stored as -exp of it."""

    def decode(name: str) -> Tensor:
        with np.errstate(all="ignore"):
            values = np.log(-rates.tensor(name).float32())
        values.flags.writeable = False
        return Tensor(name, "float32", rates.shape, values)

    return replace(rates, decode=decode)


def _make_row(vector: Stored) -> Stored:
    """The matrix of one row that llama.cpp's converter stored as a vector."""

    def array() -> tuple[np.ndarray, Any]:
        view, pages = vector.array()
        return view[None], pages

    return replace(vector, shape=(1, *vector.shape), array=array)


def part_names(name: str) -> list[str]:
    """Names of all parts of a split file, by the name of one; of any other file, its name."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[3]) <= _COUNT_LIMIT:
        return [name]
    return [f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]


def list_models(names: Iterable[str]) -> list[str]:
    """Those of a folder's or repository's files that are GGUF models, shortest first: no projectors
    of images (mmproj) nor importance matrices. llama.cpp leaves out the same.
    """
    files = (name for name in names if name.endswith(".gguf"))
    return sorted((x for x in files if not _NO_MODEL.search(x)), key=lambda x: (len(x), x))


def pick_type(names: Iterable[str], kind: str) -> str | None:
    """The shortest name of a model with the type between its separators; a split file's first
    part.
    """
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(kind)}(?:[-./]|$)", re.IGNORECASE)
    return next(filter(pattern.search, list_models(names)), None)


def _open_parts(named: _Part, report: Report) -> list[_Part]:
    """All parts of a split file in order, `named` among them."""
    paths = [named.path.with_name(name) for name in part_names(named.path.name)]
    here = paths[named.number : named.number + 1]
    if len(paths) != named.count or here != [named.path]:
        raise CheckpointError(
            f"{named.path}: is part {named.number + 1} of {named.count} in its metadata, "
            "expected a name that ends in "
            f"-{named.number + 1:05d}-of-{named.count:05d}.gguf; restore the parts' original names"
        )
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{named.path}: is part {named.number + 1} of {named.count}, but "
            f"{', '.join(missing[:3])}{more} cannot be found beside it; fetch all parts"
        )
    parts = [named if path == named.path else _Part(path, report) for path in paths]
    for i, part in enumerate(parts):
        if (part.number, part.count) != (i, named.count):
            raise part.corrupt(
                f"split.no is {part.number} and split.count {part.count}, expected {i} and "
                f"{named.count} as in its name"
            )
    count = sum(part.tensor_count for part in parts)
    expected = named.metadata.get("split.tensors.count", count)
    if count != expected:
        raise named.corrupt(
            f"split.tensors.count is {show(expected)}, but the {named.count} parts hold {count} "
            "tensors"
        )
    return parts


def row_order(rows: int, head_dim: int) -> np.ndarray:
    """int64 [rows]: Hugging Face's row n of a permuted matrix is the file's row order[n]. Inverts
    `permute` of llama.cpp's conversion/llama.py: the file stores the rows i and i + head_dim / 2 of
    each head side by side.
    """
    return np.arange(rows, dtype=np.int64).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


class _Part:
    """One mapped file, its whole header checked against the file's size. data: the map. metadata:
    as GGUFFile's. tensors: {the file's own name: Stored}. number, count: the part's number, from 0,
    and the number of parts. tensor_count: of the file, refused types included.
    """

    def __init__(self, path: Path, report: Report = refuse):
        self.path = path
        with reading(path, CheckpointError), open_file(path) as file:
            self._size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if not head:
                raise CheckpointError(f"{path}: is empty, expected a GGUF file; fetch it again")
            if head[:4] != _MAGIC:
                raise CheckpointError(
                    f"{path}: begins with {show(head[:4])}, expected {show(_MAGIC)}: not GGUF; "
                    "fetch the file again"
                )
            if self._size < 24:
                raise self.corrupt(f"{self._size} bytes long, expected at least 24 for a header")
            little, big = (int.from_bytes(head[4:], order) for order in ("little", "big"))
            if little not in _VERSIONS:
                fault = f"has GGUF version {little}, expected {' or '.join(map(str, _VERSIONS))}"
                if big in _VERSIONS:
                    fault = "is a big-endian GGUF file, expected little-endian"
                raise CheckpointError(f"{path}: {fault}; convert the model again")
            self.data = map_file(file)
        self._at, self._text_left, self._items_left = 8, _TEXT_LIMIT, _ITEM_LIMIT
        self.tensor_count = self._count("the number of tensors")
        entries = self._count("the number of metadata entries")
        self.metadata: dict[str, Any] = {}
        for i in range(entries):
            key = self._text(f"key of metadata entry {i}")
            if not key or key in self.metadata:
                fault = "occurs twice" if key else "is empty"
                raise self.corrupt(f"metadata key {show(key)} {fault}")
            self.metadata[key] = self._value(key, self._number(_NUMBERS[4], key))
        self.number, self.count = self._split("split.no", 0), self._split("split.count", 1) or 1
        self.tensors = self._read_tensors(report)

    def corrupt(self, what: str) -> CheckpointError:
        fault = f"{what}; the file is truncated or corrupt, fetch it again"
        return CheckpointError(f"{self.path}: {fault}")

    # Each read advances self._at, never past the end of the file.

    def _take(self, nbytes: int, what: str) -> int:
        """Offset of the next `nbytes` bytes, which are skipped."""
        begin, left = self._at, self._size - self._at
        if nbytes > left:
            raise self.corrupt(
                f"{what} takes {nbytes} bytes at byte {begin}, expected at most {left}"
            )
        self._at = begin + nbytes
        return begin

    def _number(self, storage: np.dtype, what: str) -> Any:
        begin = self._take(storage.itemsize, what)
        return np.frombuffer(self.data, storage, 1, begin)[0].item()

    def _count(self, what: str, limit: int = _COUNT_LIMIT) -> int:
        count = self._number(_NUMBERS[10], what)
        if count > limit:
            raise self.corrupt(f"{what} is {count}, expected at most {limit}")
        return count

    def _text(self, what: str, limit: int = _NAME_LIMIT) -> str:
        length = self._count(f"the length of {what}", limit)
        self._text_left -= length
        if self._text_left < 0:
            raise self.corrupt(
                f"keys, names and strings up to {what} take more than {_TEXT_LIMIT} bytes"
            )
        begin = self._take(length, what)
        raw = self.data[begin : begin + length]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} is {show(raw)}, expected UTF-8 text") from None

    def _value(self, key: str, kind: int) -> Any:
        field = f"metadata {show(key)}"
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], field)
        if kind == _BOOL:
            return self._number(_NUMBERS[0], field) != 0
        if kind == _STRING:
            return self._text(field, _TEXT_LIMIT)
        if kind != _ARRAY:
            raise self.corrupt(f"{field} has value type {kind}, expected 0 to 12")
        kind, count = self._number(_NUMBERS[4], field), self._number(_NUMBERS[10], field)
        self._items_left -= count
        if self._items_left < 0:
            raise self.corrupt(
                f"{field} is an array of {count} items, and all arrays may have {_ITEM_LIMIT}"
            )
        if kind == _STRING:
            return StringArray(self.data, self._walk_strings(count, field), f"{self.path}: {field}")
        if kind not in _NUMBERS and kind != _BOOL:
            raise self.corrupt(
                f"{field} is an array of value type {kind}, expected numbers or text"
            )
        storage = _NUMBERS.get(kind, np.dtype("u1"))
        values = np.frombuffer(
            self.data, storage, count, self._take(count * storage.itemsize, field)
        )
        return values != 0 if kind == _BOOL else values

    def _walk_strings(self, count: int, what: str) -> np.ndarray:
        """Offsets of the next `count` strings, then of the last one's end, int64 [count + 1].

        A vocabulary has hundreds of thousands of strings; a Python loop over them takes too long.
        Each length takes 8 bytes, the upper seven nearly always zero, and text has no runs of
        zeros. So runs of seven zeros in a stretch of the file are candidates; one counts only if
        the string before it ends exactly there. The rest of the stretch, from the first mismatch,
        is walked string by string.
        """
        if count > (most := (self._size - self._at) // 8):
            raise self.corrupt(f"{what} has {count} strings, expected at most {most}")
        data, unpack = np.frombuffer(self.data, np.uint8), struct.Struct("<Q").unpack_from
        runs: list[np.ndarray] = []
        left, at = count, self._at
        while left:
            stretch = data[at : at + (1 << 16)]
            stop = at + len(stretch)
            zero = stretch[1:] == 0
            two = zero[:-1] & zero[1:]
            four = two[:-2] & two[2:]
            starts = np.flatnonzero(four[:-3] & four[3:])
            if len(starts) and starts[0] == 0:
                ends = starts + 8 + stretch[starts]
                broken = np.flatnonzero(starts[1:] != ends[:-1])
                good = min(int(broken[0]) + 1 if len(broken) else len(starts), left)
                runs.append(starts[:good] + at)
                at, left = at + int(ends[good - 1]), left - good
            walked = array("q")
            while left and at < stop:
                if at + 8 > self._size:
                    break
                walked.append(at)
                at += 8 + unpack(self.data, at)[0]
                left -= 1
            runs.append(np.frombuffer(walked, np.int64) if walked else np.empty(0, np.int64))
            if at > self._size or (left and at + 8 > self._size):
                text = f"{what}[{count - left}] is text"
                raise self.corrupt(f"{text} beyond the end of the file at byte {self._size}")
        self._at = at
        return np.concatenate([*runs, np.array([at])])

    def _split(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int or not 0 <= value <= _COUNT_LIMIT:
            raise self.corrupt(
                f"metadata {key} is {show(value)}, expected a number from 0 to {_COUNT_LIMIT}"
            )
        return value

    def _read_tensors(self, report: Report) -> dict[str, Stored]:
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.corrupt(
                f"metadata general.alignment is {show(alignment)}, expected a power of two"
            )
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        refused: set[str] = set()
        for i in range(self.tensor_count):
            name = self._text(f"name of tensor {i}")
            what = f"tensor {show(name)}"
            dimensions = self._number(_NUMBERS[4], what)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self.corrupt(
                    f"{what} has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}"
                )
            # The file has the innermost dimension first.
            shape = tuple(self._number(_NUMBERS[10], what) for _ in range(dimensions))[::-1]
            code, offset = self._number(_NUMBERS[4], what), self._number(_NUMBERS[10], what)
            kind = _TYPES.get(code, f"number {code}")
            if kind not in _BLOCKS:
                if kind not in refused:
                    refused.add(kind)
                    kinds = ", ".join(_BLOCKS)
                    report(
                        CheckpointError(
                            f"{self.path}: {what} has type {kind}, expected one of {kinds}; load "
                            "another quantisation of this model"
                        )
                    )
                continue
            if min(shape) < 1 or shape[-1] % _BLOCKS[kind][0]:
                raise self.corrupt(
                    f"{what} has shape {show(list(shape))}, expected sizes from 1 and rows of a "
                    f"multiple of {_BLOCKS[kind][0]} for {kind}"
                )
            if offset % alignment:
                raise self.corrupt(
                    f"{what} begins at byte {offset} of the data, expected a multiple of "
                    f"{alignment}"
                )
            entries.append((name, kind, shape, offset))
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, Stored] = {}
        reached = 0
        for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
            weights, nbytes = _BLOCKS[kind]
            nbytes *= math.prod(shape) // weights
            what = f"tensor {show(name)} ({kind} {show(list(shape))})"
            if name in tensors:
                raise self.corrupt(f"{what} occurs twice")
            if nbytes > self._size - start - offset:
                raise self.corrupt(
                    f"{what} takes {nbytes} bytes from byte {start + offset}, but the file "
                    f"ends at byte {self._size}"
                )
            if offset < reached:
                raise self.corrupt(
                    f"{what} begins at byte {offset} of the data, expected {reached} or later: "
                    "it overlaps"
                )
            reached = offset + nbytes
            array = partial(self._read_array, kind, shape, start + offset, nbytes)
            tensors[name] = open_numbers(self.path, name, kind, shape, array)
        return {name: tensors[name] for name, *_ in entries}

    def _read_array(
        self, kind: str, shape: tuple[int, ...], begin: int, nbytes: int
    ) -> tuple[np.ndarray, Pages]:
        """Stored.array: numbers, or rows of blocks, uint8."""
        storage, rows = _PLAIN.get(kind, np.dtype("u1")), (math.prod(shape[:-1]), -1)
        view = np.frombuffer(self.data, storage, nbytes // storage.itemsize, begin)
        view = view.reshape(shape if kind in _PLAIN else rows)
        return view, ((self.data, begin, nbytes),)
