"""The weights of a folder: model.safetensors, or shards by model.safetensors.index.json. The index
is checked entry by entry: the doctor continues after a bad entry, and pydantic keeps an error of 1
kB for each (an index of 12 MB took 0.9 GB).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlx_llama.core.errors import CheckpointError, Report, refuse, show
from mlx_llama.core.system.files import read_json

from .safetensors import open_safetensors
from .tensor import Stored

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
