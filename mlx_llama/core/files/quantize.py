"""Writes a checkpoint anew with low-bit weights: as mlx_lm.convert does (a folder), or as a GGUF file.

Tensors stream through one by one, in slabs of rows, so that the peak of memory is the largest tensor's new form and not
the model. What is written appears under its own name only when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import CheckpointError, ConfigError, OptionsError
from mlx_llama.core.models.config import read_json
from mlx_llama.core.system import progress

from . import gguf_folder
from .checkpoint import Checkpoint
from .quantized import AffineWeight, pack_stream
from .tensor import NUMBERS, Tensor

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # what mx.quantize knows, mode "affine"
SHARD_BYTES = 5 << 30  # mlx_lm's largest file

# What a model's folder holds beside config.json and weights
_COMPANIONS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
               "added_tokens.json", "chat_template.jinja", "generation_config.json")
_SLAB = 1 << 18  # weights worked on at a time: a few float32 arrays of this size fit a core's cache
_SPARE = 16 << 20  # bytes for headers, vocabularies and the file system
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Written:
    """What was written: nbytes of tensors for so many weights; notices say what a user should know of it."""

    path: Path
    nbytes: int
    weights: int
    notices: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.weights


def affine(weights: np.ndarray, bits: int, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and biases of mx.quantize, mode "affine", bit for bit (mlx/backend/cpu/quantized.cpp).

    The group's value of largest magnitude is met exactly: it becomes the bias, and the scale is rounded so that zero
    is met too.

    weights: float32 [n, K], K a multiple of group_size. Returns uint8 [n, K], float32 [n, K / group_size] twice.
    """
    groups = weights.reshape(len(weights), -1, group_size)
    top = np.float32((1 << bits) - 1)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    downward = np.abs(low) > np.abs(high)
    edges = np.where(downward, low, high)
    with np.errstate(all="ignore"):
        scales = np.maximum((high - low) / top, np.float32(1e-7))
        scales = np.where(downward, scales, -scales)
        zeros = np.rint(edges / scales)  # the code that stands for zero, counted from the edge
        scales = np.where(zeros != 0, edges / zeros, scales)
        biases = np.where(zeros != 0, edges, np.float32(0))
        codes = groups - biases[..., None]
        codes /= scales[..., None]
        np.rint(codes, out=codes)
        np.clip(codes, 0, top, out=codes)
    return codes.astype(np.uint8).reshape(weights.shape), scales, biases


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> "float32", "float16" or "bfloat16" (of ml_dtypes), rounded to nearest even; overflow gives infinity."""
    with np.errstate(all="ignore"):  # ml_dtypes warns of NaN too
        return values.astype(NUMBERS[dtype])


def write_mlx(checkpoint: Checkpoint, out: str | os.PathLike, bits: int = 4, group_size: int = 64) -> Written:
    """A folder with what mlx_lm.convert writes: the same layers quantised, to the same bits, the rest copied.

    Raises:
        OptionsError: bits or group size are not mx.quantize's, or no matrix has rows that the group size divides.
        CheckpointError: `out` exists and is not empty, cannot be written or does not fit the disk; a weight is not
            finite.
    """
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise OptionsError(f"--bits {bits} --group-size {group_size}: MLX has {_listed(BITS)} bits and groups of "
                           f"{_listed(GROUP_SIZES)}")
    config, companions = _raw_config(checkpoint), _companions(checkpoint)
    plan = {name: _MLXTensor(tensor, _mlx_dtype(tensor, checkpoint, config), bits, group_size)
            for name, tensor in checkpoint.tensors.items()}
    odd = [name for name, one in plan.items() if len(one.tensor.shape) == 2 and not one.quantised]
    if not any(one.quantised for one in plan.values()):
        raise OptionsError(f"--group-size {group_size}: divides the rows of no matrix of {checkpoint.name} (the first, "
                           f"{odd[0]}, has rows of {plan[odd[0]].tensor.shape[1]}): give a smaller one")
    # per array, as in the file: its dtype code, shape and bytes
    arrays = {array: spec for name, one in plan.items() for array, spec in one.arrays(name).items()}
    nbytes = sum(spec[2] for spec in arrays.values())
    scheme = {"group_size": group_size, "bits": bits, "mode": "affine"}
    config = {**config, "quantization": scheme, "quantization_config": scheme}
    notices = requantised(checkpoint)
    if odd:
        lengths = ", ".join(sorted({str(plan[name].tensor.shape[1]) for name in odd}))
        notices.append(f"{count_of(odd, 'matrix', 'matrices')} kept at {plan[odd[0]].dtype}: groups of {group_size} do "
                       f"not divide rows of {lengths}")

    with appearing(Path(out), nbytes, folder=True) as folder:
        _write_json(folder / "config.json", dict(sorted(config.items())))
        for file, content in companions.items():
            (folder / file).write_bytes(content)
        shards = _shards({name: sum(spec[2] for spec in one.arrays(name).values()) for name, one in plan.items()})
        advance, weight_map = progress.meter(checkpoint.nbytes), {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            here = {array: arrays[array] for name in names for array in plan[name].arrays(name)}
            with _SafetensorsWriter(folder / file, here) as shard:
                for name in names:
                    for array, values in plan[name].values(name, advance).items():
                        shard.write(array, values)
                    plan[name].tensor.release()
            weight_map |= dict.fromkeys(here, file)
        index = {"metadata": {"total_size": nbytes, "total_parameters": count_weights(checkpoint)},
                 "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    return Written(Path(out), nbytes, count_weights(checkpoint), tuple(notices))


@dataclass(frozen=True)
class _MLXTensor:
    """One tensor on its way into an MLX folder. dtype: of its values, or of its scales and biases."""

    tensor: Tensor | AffineWeight
    dtype: str
    bits: int
    group_size: int

    @property
    def quantised(self) -> bool:
        return len(self.tensor.shape) == 2 and self.tensor.shape[1] % self.group_size == 0

    def arrays(self, name: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """{name: (safetensors dtype code, shape, bytes)} of the arrays that it becomes."""
        width, code = 4 if self.dtype == "float32" else 2, _CODES[self.dtype]
        if not self.quantised:
            return {name: (code, self.tensor.shape, math.prod(self.tensor.shape) * width)}
        (n, k), base = self.tensor.shape, name.removesuffix(".weight")
        packed, groups = k * self.bits // 32, k // self.group_size
        return {name: ("U32", (n, packed), n * packed * 4), f"{base}.scales": (code, (n, groups), n * groups * width),
                f"{base}.biases": (code, (n, groups), n * groups * width)}

    def values(self, name: str, advance: Any) -> dict[str, np.ndarray]:
        """The arrays themselves. Raises CheckpointError for weights that are not finite at `dtype`."""
        if not self.quantised:
            parts = [encode(values, self.dtype) for _, values in slabs(self.tensor, advance, dtype=self.dtype)]
            return {name: np.concatenate(parts)}
        (n, k), base = self.tensor.shape, name.removesuffix(".weight")
        packed = np.empty((n, k * self.bits // 32), np.uint32)
        scales, biases = np.empty((2, n, k // self.group_size), NUMBERS[self.dtype])
        for start, values in slabs(self.tensor, advance, dtype=self.dtype):
            here = slice(start, start + len(values))
            codes, *scaling = affine(values, self.bits, self.group_size)
            packed[here] = pack_stream(codes, self.bits)
            scales[here], biases[here] = (encode(one, self.dtype) for one in scaling)
        return {name: packed, f"{base}.scales": scales, f"{base}.biases": biases}


def slabs(tensor: Tensor | AffineWeight, advance: Any, order: np.ndarray | None = None,
          dtype: str = "float32") -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows float32 [n, ...]) for all rows of a tensor, a slab at a time; values rounded to `dtype`.

    advance: of core.progress, told the source's bytes. order: int [N], which row comes when. Raises CheckpointError for
    values that are not finite at `dtype`.
    """
    rows, array = tensor.shape[0], tensor.array if isinstance(tensor, Tensor) else None
    step = max(1, _SLAB // math.prod(tensor.shape[1:]))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        here = slice(start, stop) if order is None else order[start:stop]
        if array is not None:
            values = array[here].astype(np.float32)
        else:
            values = tensor.rows(start, stop).float32() if order is None else tensor.take(here)
        finite = np.isfinite(values).all()
        if finite and dtype != "float32" and not (isinstance(tensor, Tensor) and tensor.dtype == dtype):
            values = encode(values, dtype).astype(np.float32)
            finite = np.isfinite(values).all()
        if not finite:
            raise CheckpointError(f"tensor {tensor.name} holds a value that is not finite at {dtype}, in rows {start} "
                                  f"to {stop - 1}: it cannot be quantised; fetch the model again"
                                  + ("" if dtype == "float32" else ", or take its float32 or bfloat16 version"))
        yield start, values
        advance(tensor.nbytes * stop // rows - tensor.nbytes * start // rows)


def _mlx_dtype(tensor: Tensor | AffineWeight, checkpoint: Checkpoint, config: Mapping[str, Any]) -> str:
    """mlx_lm.convert's choice: torch_dtype of config.json, else as stored."""
    if config.get("torch_dtype") in _CODES:
        return config["torch_dtype"]
    quantised = any(isinstance(one, AffineWeight) for one in checkpoint.tensors.values())
    return tensor.dtype if isinstance(tensor, Tensor) and not quantised else checkpoint.dtype


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in order, put together as long as they stay below SHARD_BYTES."""
    shards: list[list[str]] = []
    held = 0
    for name, nbytes in sizes.items():
        if not shards or held + nbytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    return shards


class _SafetensorsWriter:
    """A safetensors file whose arrays are written one by one, in any order."""

    def __init__(self, path: Path, arrays: Mapping[str, tuple[str, tuple[int, ...], int]]):
        """arrays: {name: (dtype code, shape, bytes)}."""
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        self._offsets, at = {}, 0
        # arrays of four bytes per value first: so all lie at multiples of their width
        for name, (code, shape, nbytes) in sorted(arrays.items(), key=lambda item: item[1][0] not in ("U32", "F32")):
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            self._offsets[name] = at
            at += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = open(path, "xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> _SafetensorsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, name: str, values: np.ndarray) -> None:
        self._file.seek(self._start + self._offsets[name])
        self._file.write(np.ascontiguousarray(values).view(np.uint8).data)  # bfloat16 arrays export no buffer


@contextmanager
def appearing(out: Path, nbytes: int, folder: bool) -> Iterator[Path]:
    """A temporary name beside `out`, which becomes `out` when all went well and is removed when it did not.

    Raises CheckpointError: `out` is there (an empty folder may be, where a folder is to be written), the disk has not
    `nbytes` free, or anything the system says while writing.
    """
    try:
        out = Path(os.path.abspath(os.path.expanduser(out)))
        if os.path.lexists(out) and not (folder and out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
            raise CheckpointError(f"{out}: is there already; name a new {'folder' if folder else 'file'}, or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < nbytes + _SPARE:
            raise CheckpointError(f"{out}: takes {(nbytes + _SPARE) / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB "
                                  f"free; make room, or name another place")
        partial = out.with_name(f".{out.name[:200]}.{secrets.token_hex(4)}.partial")
        try:
            if folder:
                partial.mkdir()
            yield partial
            if folder and out.exists():
                out.rmdir()  # Windows renames onto nothing only
            os.rename(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True) if folder else partial.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"{out}: cannot be written ({getattr(error, 'strerror', None) or error}); check the free "
                              f"space and the permissions") from None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", "utf-8")


def _companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """{file name: content} of the settings beside config.json. Raises CheckpointError, TokenizerError."""
    if checkpoint.gguf_metadata is not None:
        return gguf_folder.companions(checkpoint)
    try:
        paths = [checkpoint.path / name for name in _COMPANIONS]
        return {path.name: path.read_bytes() for path in paths if path.exists()}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from None


def _raw_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json without what it says of an earlier quantisation."""
    if checkpoint.gguf_metadata is not None:
        return gguf_folder.config_json(checkpoint)
    raw = read_json(checkpoint.path / "config.json", ConfigError)
    return {name: value for name, value in raw.items()
            if name not in ("quantization", "quantization_config", "_name_or_path")}


def requantised(checkpoint: Checkpoint) -> list[str]:
    formats = sorted({weight_format(one) for one in checkpoint.tensors.values() if isinstance(one, AffineWeight)})
    if not formats:
        return []
    return [f"{checkpoint.name} is quantised already ({', '.join(formats)}): each matrix was dequantised and quantised "
            f"anew, which adds an error of its own; start from the 16-bit model where there is one"]


def weight_format(weight: AffineWeight) -> str:
    """A low-bit matrix's format for people: "Q4_K", or "affine 4-bit, groups of 64"."""
    if weight.format != "affine":
        return weight.format
    return f"affine {weight.bits}-bit, groups of {weight.group_size}"


def count_weights(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def count_of(names: list[str], one: str, many: str) -> str:
    return f"1 {one} ({names[0]}) is" if len(names) == 1 else f"{len(names)} {many} (such as {names[0]}) are"


def _listed(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
