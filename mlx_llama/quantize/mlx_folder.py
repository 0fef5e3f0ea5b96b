"""Write a checkpoint as a folder with low-bit weights, as mlx_lm.convert does."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mlx_llama.core.errors import CheckpointError, ConfigError, OptionsError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import FP8_NUMBERS, AffineWeight, pack_stream
from mlx_llama.core.files.tensor import CODES, NUMBERS, Tensor, encode
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.models.parts import GatedDelta
from mlx_llama.core.models.quantization import (
    FLOAT_MODES,
    QUANTIZED_BITS as BITS,
    QUANTIZED_GROUPS as GROUP_SIZES,
    Packing,
)
from mlx_llama.core.system import progress
from mlx_llama.core.system.files import read_file, read_json, reading, replace_when_done
from mlx_llama.core.text.template import NAMED_FILE, NAMES

from . import gguf_folder, writing

MODES = ("affine", *FLOAT_MODES)
SHARD_BYTES = 5 << 30  # mlx_lm's largest file

# Copied along with config.json and the weights
_COMPANIONS = (
    "tokenizer.json tekken.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json chat_template.jinja chat_template.json generation_config.json"
).split()
_COMPANIONS += map(NAMED_FILE.format, NAMES)
_COMPANION_LIMIT = 1 << 28  # bytes of each
# Between E2M1's numbers; a tie takes the smaller magnitude
_FP4_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)


def affine(
    weights: np.ndarray, bits: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """mx.quantize's codes, scales and biases, bit for bit (mlx/backend/cpu/quantized.cpp).

    A group's value of largest magnitude is its bias, and exact; the scale is adjusted so that zero
    is exact, too.

    weights: float32 [n, K], K a multiple of group_size. Returns uint8 [n, K], float32 [n, K /
    group_size] twice.
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


def floating_point(weights: np.ndarray, mode: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """mx.quantize's codes and scales in FLOAT_MODES, bit for bit (its quantized.cpp). weights:
    float32 [n, K], K a multiple of the group size, exact in `dtype`. Returns uint8 [n, K], and
    uint8 [n, K / group_size].
    """
    bits, group_size = FLOAT_MODES[mode]
    groups = weights.reshape(len(weights), -1, group_size)
    largest = np.abs(groups).max(axis=-1)
    with np.errstate(all="ignore"):
        top = np.float32(6 if bits == 4 else 448)
        wanted = encode(largest / top, dtype).astype(np.float32)
        if mode == "nvfp4":
            stored = np.minimum(wanted, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            scales = FP8_NUMBERS[stored]
        else:
            exponents = np.where(wanted > 0, np.ceil(np.log2(wanted)), 0).astype(np.int32)
            exponents = np.clip(exponents, -127, 127)
            stored = (exponents + 127).astype(np.uint8)
            scales = np.ldexp(np.float32(1), exponents)
        values = np.where(scales[..., None] == 0, np.float32(0), groups / scales[..., None])
    if bits == 8:
        codes = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        codes = np.searchsorted(_FP4_MIDPOINTS, np.abs(values)).astype(np.uint8)
        codes |= ((values < 0) & (codes > 0)).astype(np.uint8) << 3
    return codes.reshape(weights.shape), stored


def write_mlx(
    checkpoint: Checkpoint,
    out: str | os.PathLike,
    bits: int | None = 4,
    group_size: int = 64,
    mode: str = "affine",
    keep: bool = False,
) -> writing.Written:
    """Write the folder that mlx_lm.convert writes, bit for bit.

    bits: None quantises nothing and keeps the width. keep: low-bit matrices keep their width and,
    if MLX has their groups, their codes; others stay unchanged (bits and group_size are ignored).
    mode: of MODES; those with floating-point codes have one width and group size (FLOAT_MODES).

    Matrices of the same mode with floating-point codes, MXFP4 included, keep them. Matrices with
    one level of scales, at these bits and this group size, keep their codes: Q4_0,
    Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL at 4, 4, 5, 5, 8 and 8 bits in groups of 32, and affine
    matrices. With `keep`, Q4_K, Q5_K and IQ4_XS keep their codes at 4, 5 and 8 bits in groups of
    32, with scales rounded to the folder's width; Q2_K, Q3_K and Q6_K, whose groups of 16 MLX
    lacks, are quantised again with two more bits.

    Raises OptionsError: bits or group size that mx.quantize lacks; a group size that does not
    divide the rows of any matrix. CheckpointError: `out` exists and is not empty, cannot be written
    or does not fit the disk; a weight is not finite. ConfigError, TokenizerError, TemplateError: a
    GGUF source whose rope, tokenizer or template a folder cannot hold.
    """
    if mode in FLOAT_MODES:
        if (bits, group_size) != FLOAT_MODES[mode]:
            width, size = FLOAT_MODES[mode]
            raise OptionsError(
                f"`bits` {bits} and `group_size` {group_size}: {mode} has {width} bits in groups "
                f"of {size}"
            )
    elif (bits is not None and bits not in BITS) or group_size not in GROUP_SIZES:
        raise OptionsError(
            f"`bits` {bits} and `group_size` {group_size}: MLX has {_join(BITS)} bits and groups "
            f"of {_join(GROUP_SIZES)}"
        )
    config, companions = _read_config(checkpoint), _read_companions(checkpoint)
    offset = 0.0
    if checkpoint.gguf_metadata is not None:  # already added in GGUF files
        offset = FAMILIES[config["architectures"][0]].norm_offset - checkpoint.config.norm_offset
    if any(isinstance(mixer, GatedDelta) for mixer in checkpoint.config.recurrent):
        offset = -checkpoint.config.norm_offset  # mlx_lm stores the sum
    swaps = writing.swap_heads(checkpoint.config, tiled=False)
    # mlx_lm reads LFM2's in transformers' shape, too
    deltas = (mixer for mixer in checkpoint.config.recurrent if isinstance(mixer, GatedDelta))
    convolutions = {f"{mixer.conv}.weight" for mixer in deltas}
    tensors = writing.stack_experts(checkpoint)
    packing = None if bits is None else Packing(bits, group_size, mode)
    packings: Mapping[str, Packing | None]
    if keep:
        packings = {
            name.removesuffix(".weight"): _pick_packing(parts[0]) for name, parts in tensors.items()
        }
        used = Counter(filter(None, packings.values()))
        packing = used.most_common(1)[0][0] if used else None
    else:
        packings = _router_packings(checkpoint) if packing else {}
    plan, experts = {}, filter(None, (layer.experts for layer in checkpoint.config.layers))
    biases = {part.router.bias for part in experts}
    for name, parts in tensors.items():
        dtype = _pick_dtype(parts[0], checkpoint, config)
        if name in biases:  # mlx_lm keeps their width
            dtype = parts[0].dtype
        chosen = packings.get(name.removesuffix(".weight"), packing)
        shift = offset if checkpoint.config.is_shifted(name) else 0.0
        rows, columns = swaps.get(name, (None, None))
        if rows is not None:
            parts = (parts[0].reorder(rows),)
        if name in convolutions and isinstance(parts[0], Tensor):  # [C, W, 1] in mlx_lm
            parts = (parts[0].reshape((*parts[0].shape[::2], 1)),)
        plan[name] = _TensorPlan(parts, name != parts[0].name, dtype, chosen, shift, keep, columns)
    odd = [
        name
        for name, item in plan.items()
        if packing
        and not keep
        and len(item.tensor.shape) == 2
        and not item.is_quantised
        and item.packing
    ]
    if packing and not any(item.is_quantised for item in plan.values()):
        raise OptionsError(
            f"`group_size` {packing.group_size}: does not divide the rows of any matrix of "
            f"{checkpoint.name} (the first, {odd[0]}, has rows of "
            f"{plan[odd[0]].tensor.shape[1]}): choose a smaller size"
        )
    described = {name: item.arrays(name) for name, item in plan.items()}
    sizes = {name: sum(spec[2] for spec in specs.values()) for name, specs in described.items()}
    nbytes, weights = sum(sizes.values()), writing.count_weights(checkpoint)
    if packing:
        scheme: dict[str, Any] = _describe(packing) | {"mode": packing.mode}
        wrapper = FAMILIES[checkpoint.config.architecture].wrapper
        is_outer = wrapper is not None and config.get("model_type") == wrapper[1]
        prefix = "language_model." if is_outer else ""  # of mlx_lm's modules
        scheme |= {
            prefix + name: _describe(other)
            for name, other in packings.items()
            if other and (not keep or other != packing)
        }
        config = {**config, "quantization": scheme, "quantization_config": scheme}
    kept = [name for name, item in plan.items() if item.keeps_codes]
    notices = _notice_kept(plan) if keep else writing.notice_requantised(checkpoint, kept)
    if packing and odd:
        blocks = f"groups of {packing.group_size}"
        notices += writing.notice_unquantised(odd, checkpoint, plan[odd[0]].dtype, blocks)

    with replace_when_done(Path(out), nbytes, folder=True) as folder:
        _write_json(folder / "config.json", dict(sorted(config.items())))
        for file, content in companions.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)
        shards = _split_shards(sizes)
        advance = progress.meter(checkpoint.nbytes)
        weight_map: dict[str, str] = {}  # {array: file}
        for i, names in enumerate(shards):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            here = {array: spec for name in names for array, spec in described[name].items()}
            with _open_shard(folder / file, here) as write:
                for name in names:
                    for array, values in plan[name].values(name, advance).items():
                        write(array, values)
                    plan[name].release()
            weight_map |= dict.fromkeys(here, file)
        metadata = {"total_size": nbytes, "total_parameters": weights}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    return writing.Written(Path(out), nbytes, weights, tuple(notices))


@dataclass(frozen=True)
class _TensorPlan(writing.TensorPlan):
    """A tensor and its form in the folder."""

    dtype: str  # its values', or its scales' and biases'
    packing: Packing | None
    offset: float = 0.0  # to subtract from the values
    rounds_scales: bool = False  # two levels of scales may become a single level, rounded to dtype
    columns: np.ndarray | None = None  # the source's column for each, None for the same

    @property
    def is_quantised(self) -> bool:
        packing, shape = self.packing, self.tensor.shape
        return packing is not None and len(shape) == 2 and shape[1] % packing.group_size == 0

    @property
    def keeps_codes(self) -> bool:
        """True if codes and, unless `rounds_scales`, scales are those of the packed matrix."""
        if not self.is_quantised or self.packing is None or self.columns is not None:
            return False
        bits, group_size, mode = self.packing
        return all(
            isinstance(tensor, AffineWeight)
            and tensor.mode == mode
            and (mode != "affine" or (tensor.bits, tensor.group_size) == (bits, group_size))
            and (
                mode != "affine"
                or self.rounds_scales
                or (not tensor.two_level and self.dtype in (tensor.scale_dtype, "float32"))
            )
            for tensor in self.parts
        )

    def arrays(self, name: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """{name: (safetensors dtype code, shape, bytes)} of the arrays to write."""

        def describe(code: str, size: int, shape: tuple[int, ...]) -> tuple:
            whole = self.whole(shape)
            return code, whole, math.prod(whole) * size

        code, size = CODES[self.dtype], NUMBERS[self.dtype].itemsize
        if not self.is_quantised:
            return {name: describe(code, size, self.tensor.shape)}
        assert self.packing is not None
        (n, k), base = self.tensor.shape, name.removesuffix(".weight")
        codes = describe("U32", 4, (n, k * self.packing.bits // 32))
        groups = n, k // self.packing.group_size
        if self.packing.mode != "affine":
            return {name: codes, f"{base}.scales": describe("U8", 1, groups)}
        scaling = describe(code, size, groups)
        return {name: codes, f"{base}.scales": scaling, f"{base}.biases": scaling}

    def values(self, name: str, advance: Callable[[int], None]) -> dict[str, np.ndarray]:
        """The arrays to write. Raises CheckpointError for weights not finite at `dtype`."""
        dtypes = {"U32": np.dtype(np.uint32), "U8": np.dtype(np.uint8)}
        result = {
            array: np.empty(shape, dtypes.get(code, NUMBERS[self.dtype]))
            for array, (code, shape, _) in self.arrays(name).items()
        }
        for i, tensor in enumerate(self.parts):
            arrays = [
                np.atleast_1d(values[i] if self.is_stack else values) for values in result.values()
            ]

            def convert(start: int, values: np.ndarray, tensor=tensor, arrays=arrays) -> None:
                for array, rows in zip(arrays, self._convert(tensor, start, values)):
                    array[start : start + len(values)] = rows

            writing.convert_slabs(tensor, convert, advance, dtype=self.dtype)
        return result

    def _convert(
        self, tensor: Tensor | AffineWeight, start: int, values: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Rows of the arrays, for the tensor's rows from `start` on. Raises CheckpointError."""
        if self.columns is not None:
            values = values[:, self.columns]
        if not self.is_quantised:
            return (encode(values - np.float32(self.offset), self.dtype),)
        assert self.packing is not None
        bits, group_size, mode = self.packing
        if not self.keeps_codes:
            if mode != "affine":
                codes, stored = floating_point(values, mode, self.dtype)
                return pack_stream(codes, bits), stored
            codes, scales, biases = affine(values, bits, group_size)
        else:
            assert isinstance(tensor, AffineWeight)
            if mode != "affine":
                return tensor.mlx_rows(start, start + len(values))
            rows = tensor.rows(start, start + len(values))
            codes, scales = rows.codes, rows.scales
            biases = (0 if rows.biases is None else rows.biases) - np.float32(rows.offset) * scales
            if not np.isfinite(encode(biases, self.dtype)).all():
                raise CheckpointError(
                    f"tensor {tensor.name}: its scales are too large for {self.dtype} with {bits} "
                    f"bits in groups of {group_size}; choose others"
                )
        scaling = (encode(x, self.dtype) for x in (scales, biases))
        return pack_stream(codes, bits), *scaling


def _describe(packing: Packing) -> dict[str, Any]:
    """The settings of a module in config.json; without a mode they are affine."""
    settings: dict[str, Any] = {"group_size": packing.group_size, "bits": packing.bits}
    return settings if packing.mode == "affine" else settings | {"mode": packing.mode}


def _router_packings(checkpoint: Checkpoint) -> dict[str, Packing | None]:
    """{module: packing} of routers that mlx_lm.convert stores with more bits (Qwen, gpt-oss,
    Granite), or as they are (None: those with a bias).
    """
    config = checkpoint.config
    name = config.architecture.removesuffix("ForCausalLM")
    gated = name in ("Qwen3Next", "Qwen3_5Moe")
    is_wide = gated or name in ("Qwen3Moe", "GptOss", "GraniteMoe", "Lfm2Moe", "Gemma4")
    experts = [layer.experts for layer in config.layers if layer.experts]
    modules = [part.router.module for part in experts]
    modules += [part.shared_gate for part in experts if gated and part.shared_gate]
    packings: dict[str, Packing | None] = {
        part.router.module: None for part in experts if part.router.bias
    }
    if is_wide and config.hidden_size % 64 == 0:
        packings |= dict.fromkeys(modules, Packing(8, 64))
    return packings


def _pick_packing(tensor: Tensor | AffineWeight) -> Packing | None:
    """The packing that holds a stored tensor exactly or nearly; None for full width."""
    if not isinstance(tensor, AffineWeight):
        return None
    if tensor.mode != "affine":
        bits, group_size = FLOAT_MODES[tensor.mode]
        return Packing(bits, group_size, tensor.mode)
    if tensor.group_size in GROUP_SIZES:
        return Packing(tensor.bits, tensor.group_size)
    # a quarter of the stored step
    return Packing(min(width for width in BITS if width >= tensor.bits + 2), 32)


def _notice_kept(plan: Mapping[str, _TensorPlan]) -> list[str]:
    """Losses of `keep`, a line per kind."""
    rounded, again = {}, {}
    for item in plan.values():
        tensor = item.tensor
        if not isinstance(tensor, AffineWeight) or tensor.mode != "affine" or not item.packing:
            continue
        if not item.keeps_codes:
            again[tensor.format] = f"{tensor.format} as {item.packing.bits} bits"
        elif tensor.two_level or item.dtype not in (tensor.scale_dtype, "float32"):
            rounded[tensor.format] = item.dtype
    result = [
        f"{', '.join(sorted(rounded))}: the codes are kept, the scales are rounded to {dtype}"
        for dtype in sorted(set(rounded.values()))
    ]
    if again:
        kinds = ", ".join(again[name] for name in sorted(again))
        result.append(f"quantised again, since MLX has no groups of 16: {kinds} in groups of 32")
    return result


def _pick_dtype(
    tensor: Tensor | AffineWeight, checkpoint: Checkpoint, config: Mapping[str, Any]
) -> str:
    """mlx_lm.convert's choice: config.json's torch_dtype, else the stored dtype."""
    if config.get("torch_dtype") in CODES:
        return config["torch_dtype"]
    return tensor.dtype if not checkpoint.low_bit else checkpoint.dtype


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


@contextmanager
def _open_shard(
    path: Path, arrays: Mapping[str, tuple[str, tuple[int, ...], int]]
) -> Iterator[Callable[[str, np.ndarray], None]]:
    """Open a safetensors file to be written array by array; the library's writer needs all in
    memory. arrays: {name: (dtype code, shape, bytes)}. Yields the function that writes one.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offsets, at = {}, 0
    # To align all arrays, those with more bytes per value come first.
    for name, (code, shape, nbytes) in sorted(
        arrays.items(), key=lambda item: {"U8": 2, "U32": 0, "F32": 0}.get(item[1][0], 1)
    ):
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        offsets[name] = at
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)

        def write(name: str, values: np.ndarray) -> None:
            file.seek(8 + len(text) + offsets[name])
            # bfloat16 arrays have no buffer
            file.write(np.ascontiguousarray(values).view(np.uint8).data)

        yield write


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", "utf-8")


def _read_companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """{file name: content} of the settings beside config.json. Raises CheckpointError,
    TokenizerError, TemplateError.
    """
    if checkpoint.gguf_metadata is not None:
        return gguf_folder.make_companions(checkpoint)
    companions = {}
    for name in _COMPANIONS:
        if (path := checkpoint.path / name).exists():
            with reading(path, CheckpointError):
                companions[name] = read_file(path, _COMPANION_LIMIT)
    return companions


def _read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json without the fields of an earlier quantisation."""
    if checkpoint.gguf_metadata is not None:
        return gguf_folder.make_config(checkpoint)
    raw = read_json(checkpoint.path / "config.json", ConfigError)
    for name in ("quantization", "quantization_config", "_name_or_path"):
        raw.pop(name, None)
    return raw


def _join(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
