"""Write a checkpoint as a folder with low-bit weights, the same that mlx_lm.convert writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import CheckpointError, ConfigError, OptionsError
from mlx_llama.core.models.config import QUANTIZED_BITS, QUANTIZED_GROUPS, read_json
from mlx_llama.core.system import progress

from . import gguf_folder
from .checkpoint import Checkpoint
from .quantized import AffineWeight, pack_stream
from .tensor import NUMBERS, Tensor
from .writing import Written, count_weights, encode, notice_requantised, notice_unquantised, replace_when_done, slabs

BITS, GROUP_SIZES = QUANTIZED_BITS, QUANTIZED_GROUPS
SHARD_BYTES = 5 << 30  # mlx_lm's largest file

# Copied along with config.json and the weights
_COMPANIONS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
               "added_tokens.json", "chat_template.jinja", "generation_config.json")
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def affine(weights: np.ndarray, bits: int, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and biases of mx.quantize, mode "affine", bit for bit (mlx/backend/cpu/quantized.cpp).

    The value of largest magnitude in a group becomes its bias and is represented exactly; the scale is adjusted so that
    zero is too.

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
        zeros = np.rint(edges / scales)  # the code of zero, counted from the edge
        scales = np.where(zeros != 0, edges / zeros, scales)
        biases = np.where(zeros != 0, edges, np.float32(0))
        codes = groups - biases[..., None]
        codes /= scales[..., None]
        np.rint(codes, out=codes)
        np.clip(codes, 0, top, out=codes)
    return codes.astype(np.uint8).reshape(weights.shape), scales, biases


def write_mlx(checkpoint: Checkpoint, out: str | os.PathLike, bits: int = 4, group_size: int = 64) -> Written:
    """Write the folder that mlx_lm.convert writes: the same matrices quantised, to the same bits, the rest copied.

    Raises:
        OptionsError: bits or group size that mx.quantize lacks; a group size that divides the rows of no matrix.
        CheckpointError: `out` exists and is not empty, cannot be written or does not fit the disk; a weight is not
            finite.
        ConfigError, TokenizerError, TemplateError: a GGUF source whose rope, tokenizer or template a folder cannot hold.
    """
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise OptionsError(f"--bits {bits} --group-size {group_size}: MLX has {_join(BITS)} bits and groups of "
                           f"{_join(GROUP_SIZES)}")
    config, companions = _read_config(checkpoint), _read_companions(checkpoint)
    plan = {name: _TensorPlan(tensor, _pick_dtype(tensor, checkpoint, config), bits, group_size)
            for name, tensor in checkpoint.tensors.items()}
    odd = [name for name, one in plan.items() if len(one.tensor.shape) == 2 and not one.is_quantised]
    if not any(one.is_quantised for one in plan.values()):
        raise OptionsError(f"--group-size {group_size}: divides the rows of no matrix of {checkpoint.name} (the first, "
                           f"{odd[0]}, has rows of {plan[odd[0]].tensor.shape[1]}): give a smaller one")
    # {name in the file: (dtype code, shape, bytes)}
    arrays = {array: spec for name, one in plan.items() for array, spec in one.arrays(name).items()}
    nbytes = sum(spec[2] for spec in arrays.values())
    scheme = {"group_size": group_size, "bits": bits, "mode": "affine"}
    config = {**config, "quantization": scheme, "quantization_config": scheme}
    notices = notice_requantised(checkpoint)
    notices += notice_unquantised(odd, checkpoint, plan[odd[0]].dtype if odd else "", f"groups of {group_size}")

    with replace_when_done(Path(out), nbytes, folder=True) as folder:
        _write_json(folder / "config.json", dict(sorted(config.items())))
        for file, content in companions.items():
            (folder / file).write_bytes(content)
        shards = _split_shards({name: sum(spec[2] for spec in one.arrays(name).values()) for name, one in plan.items()})
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
class _TensorPlan:
    """One tensor and its form in the folder. dtype: of its values, or of its scales and biases."""

    tensor: Tensor | AffineWeight
    dtype: str
    bits: int
    group_size: int

    @property
    def is_quantised(self) -> bool:
        return len(self.tensor.shape) == 2 and self.tensor.shape[1] % self.group_size == 0

    def arrays(self, name: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """{name: (safetensors dtype code, shape, bytes)} of the arrays to write."""
        width, code = NUMBERS[self.dtype].itemsize, _CODES[self.dtype]
        if not self.is_quantised:
            return {name: (code, self.tensor.shape, math.prod(self.tensor.shape) * width)}
        (n, k), base = self.tensor.shape, name.removesuffix(".weight")
        packed, groups = k * self.bits // 32, k // self.group_size
        return {name: ("U32", (n, packed), n * packed * 4), f"{base}.scales": (code, (n, groups), n * groups * width),
                f"{base}.biases": (code, (n, groups), n * groups * width)}

    def values(self, name: str, advance: Callable[[int], None]) -> dict[str, np.ndarray]:
        """The arrays to write. Raises CheckpointError for weights that are not finite at `dtype`."""
        if not self.is_quantised:
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


def _pick_dtype(tensor: Tensor | AffineWeight, checkpoint: Checkpoint, config: Mapping[str, Any]) -> str:
    """mlx_lm.convert's choice: config.json's torch_dtype, else the stored dtype."""
    if config.get("torch_dtype") in _CODES:
        return config["torch_dtype"]
    quantised = any(isinstance(one, AffineWeight) for one in checkpoint.tensors.values())
    return tensor.dtype if isinstance(tensor, Tensor) and not quantised else checkpoint.dtype


def _split_shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in order, in shards of at most SHARD_BYTES. sizes: {name: bytes}."""
    shards: list[list[str]] = []
    total = 0
    for name, nbytes in sizes.items():
        if not shards or total + nbytes > SHARD_BYTES:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += nbytes
    return shards


class _SafetensorsWriter:
    """A safetensors file written array by array, in any order; the library's writer takes all of them at once."""

    def __init__(self, path: Path, arrays: Mapping[str, tuple[str, tuple[int, ...], int]]):
        """arrays: {name: (dtype code, shape, bytes)}."""
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        self._offsets, at = {}, 0
        # Align all arrays: the ones with four bytes per value come first.
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


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", "utf-8")


def _read_companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """{file name: content} of the settings beside config.json.

    Raises CheckpointError, TokenizerError, TemplateError.
    """
    if checkpoint.gguf_metadata is not None:
        return gguf_folder.make_companions(checkpoint)
    try:
        paths = [checkpoint.path / name for name in _COMPANIONS]
        return {path.name: path.read_bytes() for path in paths if path.exists()}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from None


def _read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json without the fields of an earlier quantisation."""
    if checkpoint.gguf_metadata is not None:
        return gguf_folder.make_config(checkpoint)
    raw = read_json(checkpoint.path / "config.json", ConfigError)
    return {name: value for name, value in raw.items()
            if name not in ("quantization", "quantization_config", "_name_or_path")}


def _join(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
