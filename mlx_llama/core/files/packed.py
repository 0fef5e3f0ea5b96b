"""Matrices of other quantisers: GPTQ's and AWQ's as affine groups, 8-bit floats (OCP's E4M3)
decoded to bfloat16.

8-bit floats: w[n, k] = weight[n, k] * scale, of the matrix, of row n, or of a block. The scale is
`weight_scale_inv` in DeepSeek's files (a factor, despite its name), else `weight_scale`.

GPTQ (Frantar et al. 2023, arXiv 2210.17323) and AWQ (Lin et al. 2024, arXiv 2306.00978) store a
linear layer [N, K] by columns, as four tensors (layouts: AutoGPTQ, AutoAWQ and AutoRound):

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = g_idx[k], or k // group_size

    scales   [groups, N]
    g_idx    int32 [K], GPTQ only
    qweight  GPTQ: int32 [K bits / 32, N], each column a stream of codes, low bits first
             AWQ: int32 [K, N / 8], each word the codes of rows 0 2 4 6 1 3 5 7, low bits first
    qzeros   GPTQ: int32 [groups, N bits / 32], each row a stream of zero - 1; "gptq_v2": of zero
             AWQ: int32 [groups, N / 8], as qweight
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.quantization import PackedQuantization
from mlx_llama.core.system.forks import cached_property

from .quantized import AffineWeight, Rows, unpack_stream
from .tensor import DTYPES, NUMBERS, DecodedTensor, Pages, Stored, as_numbers

BITS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "awq": (4,)}
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_GROUPS = (128, 64, 32)  # sizes that all backends multiply
_NAMES = {"gptq": "GPTQ", "gptq_v2": "GPTQ v2", "awq": "AWQ"}
# rows of the low and of the high four bits of a word's bytes
_AWQ_LOW, _AWQ_HIGH = [0, 4, 1, 5], [2, 6, 3, 7]


@dataclass(frozen=True)
class _Arrays:
    """The stored tensors of a matrix."""

    method: str  # a key of BITS
    bits: int
    codes: np.ndarray  # uint32, qweight
    zeros: np.ndarray  # uint32, qzeros
    scales: np.ndarray  # as in the file
    dtype: str  # the scales'
    groups: np.ndarray  # int [K / size]: the group of each run of `size` columns
    size: int
    shape: tuple[int, int]  # (N, K)
    pages: Pages

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.zeros.nbytes + self.scales.nbytes

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    def read_codes(self, rows: slice, columns: slice) -> np.ndarray:
        """uint8 [n, k]. columns: starts at a multiple of 32."""
        first, last, bits = rows.start, rows.stop, self.bits
        if self.method == "awq":
            words = self.codes[columns, first // 8 : -(-last // 8)]
            return np.ascontiguousarray(_unpack_awq(words)[:, first % 8 :][:, : last - first].T)
        words = self.codes[columns.start * bits // 32 : columns.stop * bits // 32, rows]
        return unpack_stream(np.ascontiguousarray(words.T), bits).reshape(last - first, -1)

    def read_zeros(self, rows: slice) -> np.ndarray:
        """uint8 [groups, n]."""
        first, last = rows.start, rows.stop
        if self.method == "awq":
            words = self.zeros[:, first // 8 : -(-last // 8)]
            return _unpack_awq(words)[:, first % 8 :][:, : last - first]
        start = first // 32  # 32 codes are whole words
        words = self.zeros[:, start * self.bits : -(-last // 32) * self.bits]
        zeros = unpack_stream(np.ascontiguousarray(words), self.bits).reshape(len(words), -1)
        zeros = zeros[:, first - 32 * start :][:, : last - first]
        return (zeros + np.uint8(self.method == "gptq")) & np.uint8((1 << self.bits) - 1)

    @cached_property
    def is_symmetric(self) -> bool:
        return bool((self.read_zeros(slice(0, self.shape[0])) == self.middle).all())

    def dequantise(self, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1, rounded to the scales' dtype."""
        rows = slice(start, stop)
        codes = self.read_codes(rows, slice(0, self.shape[1])).astype(np.float32)
        at = np.repeat(self.groups, self.size)
        codes -= self.read_zeros(rows)[at].T
        codes *= as_numbers(self.scales)[:, rows].astype(np.float32)[at].T
        return codes.astype(NUMBERS[self.dtype])


def _unpack_awq(words: np.ndarray) -> np.ndarray:
    """uint32 [k, n / 8] -> uint8 [k, n]."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape((*words.shape, 4))
    codes = np.empty((*words.shape, 8), np.uint8)
    codes[..., _AWQ_LOW], codes[..., _AWQ_HIGH] = packed & 15, packed >> 4
    return codes.reshape(len(words), -1)


class PackedWeight(AffineWeight):
    """A GPTQ or AWQ matrix whose groups are runs of columns. Codes and scales keep the file's bits.
    Zero points in the middle of the codes become `offset`; others become biases, -scale * zero, in
    float32, where they are exact.
    """

    two_level = False

    def __init__(self, name: str, arrays: _Arrays, rows: Any = None, columns: Any = None):
        """rows, columns: numbers of the stored matrix's, None for all: int64 [N], a range."""
        N, K = arrays.shape
        self.name, self._arrays = name, arrays
        self._rows = np.arange(N) if rows is None else rows
        self._columns = range(K) if columns is None else columns
        self.shape = len(self._rows), len(self._columns)
        self.format, self.bits, self.group_size = arrays.method, arrays.bits, arrays.size
        self.dtype, self.pages = arrays.dtype, arrays.pages
        self.nbytes = arrays.nbytes * math.prod(self.shape) // math.prod(arrays.shape)
        self.column_unit = math.lcm(arrays.size, 32)

    @cached_property
    def offset(self) -> int:  # type: ignore[override]
        return self._arrays.middle if self._arrays.is_symmetric else 0

    @cached_property
    def has_biases(self) -> bool:  # type: ignore[override]
        return not self._arrays.is_symmetric

    @cached_property
    def scale_dtype(self) -> str:  # type: ignore[override]
        return self.dtype if self._arrays.is_symmetric else "float32"

    @property
    def description(self) -> str:
        return f"{_NAMES[self.format]} {self.bits}-bit, groups of {self.group_size}"

    def part(self, name: str, start: int, stop: int) -> PackedWeight:
        return PackedWeight(name, self._arrays, self._rows[start:stop], self._columns)

    def reorder(self, order: np.ndarray) -> PackedWeight:
        return PackedWeight(self.name, self._arrays, self._rows[order], self._columns)

    def columns(self, start: int, stop: int) -> PackedWeight:
        return PackedWeight(self.name, self._arrays, self._rows, self._columns[start:stop])

    def read(self, first: int, last: int) -> None:
        """As Mapped.read. A row is spread over the whole file."""
        super().read(0, self.shape[0])

    def release(self, first: int = 0, last: int | None = None) -> None:
        """As Mapped.release, once all rows are released."""
        if last is None or (first, last) == (0, self.shape[0]):
            super().release()

    def _unpack(self, ids: np.ndarray | slice) -> Rows:
        rows, arrays = self._rows[ids], self._arrays
        low = int(rows.min(initial=arrays.shape[0] - 1))
        stored, at = slice(low, int(rows.max(initial=low)) + 1), rows - low
        columns = slice(self._columns.start, self._columns.stop)
        codes = arrays.read_codes(stored, columns)[at]
        groups = arrays.groups[columns.start // arrays.size : columns.stop // arrays.size]
        scales = as_numbers(arrays.scales)[:, stored].astype(np.float32)[groups].T[at]
        scales = np.ascontiguousarray(scales)
        if not self.has_biases:
            return Rows(codes, scales, None, self.offset)
        zeros = arrays.read_zeros(stored)[groups].T[at].astype(np.float32)
        return Rows(codes, scales, -scales * zeros)


def take_packed(
    weights: Mapping[str, Stored], config: LlamaConfig, settings: PackedQuantization
) -> dict[str, Stored]:
    """Join the stored tensors of each packed matrix to its `weight`. Raises CheckpointError: a part
    is missing, or has another dtype or shape; the order of columns is missing.
    """
    shapes = config.stored_shapes()
    result = dict(weights)
    for codes in [name for name in weights if name.endswith(".qweight")]:
        module = codes.removesuffix(".qweight")
        parts = {
            part: result.pop(f"{module}.{part}") for part in _PARTS if f"{module}.{part}" in result
        }
        name = f"{module}.weight"
        result[name] = _join(module, parts, settings, shapes.get(name, ()))
        bias = f"{module}.bias"
        if bias in result and bias not in shapes and not result[bias].array()[0].any():
            del result[bias]  # AutoGPTQ stored zeros for layers without a bias
    return result


def _join(
    module: str, parts: dict[str, Stored], settings: PackedQuantization, shape: tuple[int, ...]
) -> Stored:
    method, first = settings.method, parts["qweight"]
    N, K = shape if len(shape) == 2 else (0, 0)

    def refuse(part: str, fault: str) -> CheckpointError:
        return CheckpointError(f"{first.path}: tensor {module}.{part} {fault}")

    for part in _PARTS[:3]:
        if part not in parts:
            raise refuse(part, f"is missing, which {_NAMES[method]}'s codes beside it need")
    for part, stored in parts.items():
        wanted = tuple(DTYPES) if part == "scales" else ("I32", "U32")
        if stored.dtype not in wanted:
            raise refuse(part, f"has dtype {stored.dtype}, expected {' or '.join(wanted)}")
    length = math.prod(first.shape)
    bits = 4 if method == "awq" else length * 32 // max(N * K, 1)
    if N == 0:
        raise refuse("qweight", "belongs to no matrix of the model that config.json describes")
    if bits not in BITS[method] or length * 32 != bits * N * K:
        allowed = ", ".join(map(str, BITS[method]))
        raise refuse(
            "qweight",
            f"has shape {show(list(first.shape))}, expected that of a matrix [{N}, {K}] in "
            f"{_NAMES[method]}'s packing of {allowed} bits",
        )
    count = (*parts["scales"].shape, 0)[0]
    expected = {
        "qweight": (K, N // 8) if method == "awq" else (K * bits // 32, N),
        "qzeros": (count, N // 8 if method == "awq" else N * bits // 32),
        "scales": (count, N),
        "g_idx": (K,),
    }
    for part, stored in parts.items():
        if stored.shape != expected[part] or not count:
            fault = f"has shape {show(list(stored.shape))}, expected {list(expected[part])}"
            raise refuse(part, fault)
    if settings.has_order and "g_idx" not in parts and count > 1:
        raise refuse(
            "g_idx",
            "is missing, which has the order of the columns (config.json has desc_act); take a "
            "version without act-order",
        )
    (codes, zeros, scales), pages = zip(*(parts[part].array() for part in _PARTS[:3]))
    if "g_idx" in parts:
        order = parts["g_idx"].array()[0].astype(np.int64)
        if order.min() < 0 or order.max() >= count:
            raise refuse("g_idx", f"names groups outside the {count} that have scales")
    else:
        group = settings.group_size
        if group < 1 or -(-K // group) != count:
            group = -(-K // count)
        order = np.arange(K) // group
    size, groups = _find_runs(order)
    arrays = _Arrays(
        method,
        bits,
        codes=codes.view(np.uint32),
        zeros=zeros.view(np.uint32),
        scales=scales,
        dtype=DTYPES[parts["scales"].dtype],
        groups=groups,
        size=size,
        shape=(N, K),
        pages=[page for some in pages for page in some],
    )

    def decode(name: str) -> PackedWeight | DecodedTensor:
        if size > 1:
            return PackedWeight(name, arrays)
        kind = f"{_NAMES[method]} {bits}-bit with act-order"
        return DecodedTensor(
            name, arrays.dtype, (N, K), arrays.dequantise, kind, arrays.nbytes, arrays.pages
        )

    return replace(first, dtype="", shape=(N, K), decode=decode)


def _find_runs(order: np.ndarray) -> tuple[int, np.ndarray]:
    """Return (size, the group of each run of `size` columns), size 1 if the groups are not runs.
    order: the group of each column.
    """
    for size in _GROUPS:
        if len(order) % size == 0:
            runs = order.reshape(-1, size)
            if (runs == runs[:, :1]).all():
                return size, runs[:, 0]
    return 1, order


# 8-bit floats

CODE = "F8_E4M3"
BLOCK = (128, 128)  # rows and columns of a scale, unless config.json says otherwise
_SCALES = ("weight_scale_inv", "weight_scale")
_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
# Scales of activations, keys and values, which are not rounded here
_LEFTOVERS = tuple(f".{name}_scale" for name in "input activation output q k v".split())
_LEFTOVERS += (".input_scale_ub",)
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _decode(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], start: int, stop: int
) -> np.ndarray:
    """Rows start .. stop - 1 in bfloat16. codes: uint8 [N, K]; scales: float32, broadcast with the
    blocks of the matrix.
    """
    values, (height, width) = _VALUES[codes[start:stop]], block
    if len(scales) > 1:
        scales = scales[np.arange(start, stop) // height]
    if scales.shape[1] > 1:
        scales = np.repeat(scales, width, axis=1)[:, : values.shape[1]]
    values *= scales
    return values.astype(ml_dtypes.bfloat16)


def take_float8(
    weights: Mapping[str, Stored], config: LlamaConfig, block: tuple[int, int] | None
) -> Mapping[str, Stored]:
    """Join the stored tensors of each matrix of 8-bit floats, and drop the scales of activations.
    Raises CheckpointError: scales are missing, or have another dtype or shape.
    """
    shapes = config.stored_shapes()
    matrices = [
        name
        for name, stored in weights.items()
        if stored.dtype == CODE and len(stored.shape) == len(shapes.get(name, ())) == 2
    ]
    if not matrices:
        return weights
    result = {name: stored for name, stored in weights.items() if not name.endswith(_LEFTOVERS)}
    for name in matrices:
        module = name.removesuffix(".weight")
        scale = next((key for part in _SCALES if (key := f"{module}.{part}") in result), None)
        if scale is None:
            raise CheckpointError(
                f"{weights[name].path}: tensor {module}.weight_scale is missing, which {name} "
                f"({CODE}) needs; fetch the model again"
            )
        result[name] = _join_scale(result[name], scale, result.pop(scale), block)
    return result


def _join_scale(
    stored: Stored, scale: str, factors: Stored, block: tuple[int, int] | None
) -> Stored:
    """The matrix with its scales, the tensor `scale`."""
    if factors.dtype not in _DTYPES:
        raise CheckpointError(
            f"{factors.path}: tensor {scale} has dtype {factors.dtype}, expected "
            f"{' or '.join(_DTYPES)}"
        )
    (codes, pages), (scales, more) = stored.array(), factors.array()
    (N, K), shape = codes.shape, scales.shape
    height, width = block or BLOCK
    blocks = (-(-N // height), -(-K // width))
    if scales.size == 1:
        grid = (1, 1)
    elif shape in ((N,), (N, 1)):
        grid, height = (N, 1), 1
    elif shape == blocks:
        grid = blocks
    else:
        raise CheckpointError(
            f"{factors.path}: tensor {scale} has shape {list(shape)}, expected one number, {N} of "
            f"the rows, or {list(blocks)} of blocks of {height} x {width}"
        )
    if factors.dtype == "F8_E8M0":
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    numbers = as_numbers(scales).astype(np.float32).reshape(grid)
    decode = partial(_decode, codes, numbers, (height, width))
    nbytes = codes.nbytes + numbers.nbytes

    def read(name: str) -> DecodedTensor:
        return DecodedTensor(name, "bfloat16", (N, K), decode, "fp8", nbytes, (*pages, *more))

    return replace(stored, dtype="BF16", decode=read)
