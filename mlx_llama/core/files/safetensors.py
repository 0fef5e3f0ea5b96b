"""The safetensors file format: a checked header, tensors that are views of the mapped file, and
folders of such files.

The safetensors library copies every tensor that it passes to NumPy; this reader does not. Format:
https://github.com/huggingface/safetensors#format - eight bytes little-endian header length N, N
bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}}, then the data.

The header is checked in plain code: pydantic keeps an error of 1 kB for each bad entry, and accepts
duplicate names.
"""

from __future__ import annotations

import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from mlx_llama.core.errors import CheckpointError, Report, refuse, show
from mlx_llama.core.system.files import open_file, read_json, reading
from mlx_llama.core.system.machine import FileMap, map_file

from .tensor import Pages, Stored, open_numbers

# bytes per element of every dtype of the format; a model's tensors have those of _STORAGE
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,  # noqa: E501
    "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_STORAGE = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32,
    "I32": np.int32, "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
# bytes: more than 40,000 tensors; JSON takes 30 times as much memory once it is parsed
_HEADER_LIMIT = 5_000_000


def open_safetensors(path: str | os.PathLike) -> dict[str, Stored]:
    """Map a file, whose tensors live as long as any array over it; by their names. Raises
    CheckpointError if it is missing, truncated or corrupt.
    """
    path = Path(path)
    with reading(path, CheckpointError), open_file(path) as file:
        entries, start = _read_header(file, os.fstat(file.fileno()).st_size, path)
        mapped = map_file(file)
    return {
        name: open_numbers(
            path, name, code, shape, partial(_read_array, mapped, start + at, code, shape)
        )
        for name, (code, shape, at) in entries.items()
    }


def _read_array(
    mapped: FileMap, offset: int, code: str, shape: tuple[int, ...]
) -> tuple[np.ndarray, Pages]:
    """Stored.array, of a dtype of _STORAGE. A misaligned tensor is copied and has no page."""
    view = np.frombuffer(mapped, _STORAGE[code], math.prod(shape), offset).reshape(shape)
    if view.flags.aligned:
        return view, ((mapped, offset, view.nbytes),)
    copied = view.copy()
    copied.flags.writeable = False
    return copied, ()


def _read_header(
    file: Any, size: int, path: Path
) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], int]:
    """({name: (dtype code, shape, begin)}, offset of the data), checked."""

    def corrupt(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {what}; the file is truncated or corrupt, fetch it again")

    if size < 8:
        raise corrupt(f"{size} bytes long, expected at least 8 for the header's length")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _HEADER_LIMIT):
        raise corrupt(f"header length is {length}, expected at most {min(size - 8, _HEADER_LIMIT)}")
    text = file.read(length)
    if not text.startswith(b"{"):
        raise corrupt(f"header starts with {show(text[:8])}, expected '{{'")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name occurs twice")
        return table

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise corrupt(f"header is not valid JSON ({show(str(e))})") from None
    header.pop("__metadata__", None)

    data = size - 8 - length
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        what = f"tensor {show(name)}"
        if not isinstance(entry, dict):
            raise corrupt(f"{what}: header entry is {show(entry)}, expected an object")
        code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(code, str) or code not in _SIZES:
            raise corrupt(f"{what}: dtype is {show(code)}, expected one of {', '.join(_SIZES)}")
        if not _are_sizes(shape):
            raise corrupt(f"{what}: shape is {show(shape)}, expected a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data:
            raise corrupt(
                f"{what}: data_offsets is {show(offsets)}, expected [begin, end] "
                f"within {data} bytes"
            )
        begin, end = offsets
        if math.prod(shape) * _SIZES[code] != end - begin:
            raise corrupt(
                f"{what}: data_offsets span {end - begin} bytes, shape {show(shape)} "
                f"of {code} takes {show(math.prod(shape) * _SIZES[code])}"
            )
        entries[name] = (code, tuple(shape), begin)
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            kind = "overlaps the tensor before it" if begin < reached else "leaves a hole before it"
            raise corrupt(
                f"tensor {show(name)}: begins at byte {begin}, expected {reached}: it {kind}"
            )
        reached = end
    if reached != data:
        raise corrupt(f"{data} bytes of data, the header describes {reached}")
    return entries, 8 + length


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """True for a list of at most 32 integers from 0 to 2**60 - 1."""
    if not isinstance(value, list) or len(value) > 32:
        return False
    return all(type(size) is int and 0 <= size < 1 << 60 for size in value)


# The weights of a folder: model.safetensors, or shards by model.safetensors.index.json. The index
# is checked entry by entry: the doctor continues after a bad entry, and pydantic keeps an error of
# 1 kB for each (an index of 12 MB took 0.9 GB).

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ONLY_SHARD = "model-00001-of-00001.safetensors"  # needs no index
_MISTRAL = "consolidated.safetensors"
# Frequencies that early conversions stored, and that the config defines
LEFTOVER = re.compile(r"(.*\.)?rotary_emb\.inv_freq")

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONVERT = (
    'convert it once on a machine where you trust it: python -c "from transformers import '
    "AutoModelForCausalLM as M; M.from_pretrained('DIR').save_pretrained('NEW_DIR')\""
)
# The plain name of a file beside the index: no separators, parents or drives
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")


def find_weights(folder: Path, report: Report = refuse) -> dict[str, Stored]:
    """Tensors by name, of the single file or of all shards. report: called with the error of each
    bad shard or entry; if it returns, reading continues. Raises CheckpointError: no weights; a
    damaged single file or index; anything that `report` raises.
    """
    single, index = find_single(folder), folder / INDEX
    if single is not None:
        return open_safetensors(single)
    if not index.exists():
        raise _no_weights(folder)

    weight_map = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map is {show(weight_map)}, expected {{tensor: file}}; fetch it again"
        )

    def complain(path: Path, fault: str) -> None:
        report(CheckpointError(f"{path}: {fault}"))

    files: dict[str, dict[str, Stored] | None] = {}  # None: an unreadable shard
    weights: dict[str, Stored] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            complain(
                index,
                f"weight_map[{show(name)}] is {show(shard)}, expected the plain name of a "
                ".safetensors file in the same folder; fetch the index again",
            )
            continue
        path = folder / shard
        if shard not in files:
            files[shard] = None
            try:
                if os.path.exists(path):  # False also for a name that is too long
                    files[shard] = open_safetensors(path)
                else:
                    complain(
                        index,
                        f"lists the shard {show(shard)}, which is not in {folder}; fetch the "
                        "missing file",
                    )
            except CheckpointError as error:
                report(error)
        file = files[shard]
        if file is not None and name in file:
            weights[name] = file[name]
        elif file is not None:
            complain(index, f"lists {show(name)} in {shard}, which lacks it; fetch both again")
    for shard, file in files.items():
        for name in file or ():
            if name not in weight_map and not LEFTOVER.fullmatch(name):
                complain(
                    folder / shard,
                    f"holds {show(name)}, which {INDEX} does not list; fetch both again",
                )
    return weights


def find_single(folder: Path) -> Path | None:
    """The file of all weights; None if they are in shards, or missing."""
    names = (SINGLE,) if (folder / INDEX).exists() else (SINGLE, _ONLY_SHARD)
    return next((folder / name for name in names if (folder / name).exists()), None)


def _no_weights(folder: Path) -> CheckpointError:
    if (folder / _MISTRAL).exists():
        return CheckpointError(
            f"{folder}: holds {_MISTRAL}, Mistral's own names of tensors, but no {SINGLE}; fetch "
            f"the model-*.safetensors and {INDEX} of the same repository"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles and (folder / "pytorch_model.bin.index.json").exists():
        pickles = ["pytorch_model.bin.index.json"]
    if pickles:
        return CheckpointError(
            f"{folder}: holds {pickles[0]} but no {SINGLE}; pickle can run code and is never "
            f"read: {_CONVERT}"
        )
    return CheckpointError(
        f"{folder}: holds neither {SINGLE} nor {INDEX}; fetch the model again, weights included"
    )
