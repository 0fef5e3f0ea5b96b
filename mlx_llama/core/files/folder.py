"""The weight files of a folder: model.safetensors, or the shards that model.safetensors.index.json lists.

The index is checked entry by entry, not by a pydantic model: the doctor reads on after a bad entry, and pydantic keeps an
error for each of them (1 kB: an index of 12 MB took 0.9 GB).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlx_llama.core.errors import CheckpointError, Report, refuse, show
from mlx_llama.core.system.files import read_json

from .safetensors import SafetensorsFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Frequencies that early conversions stored; the config defines them.
LEFTOVER = re.compile(r"(.*\.)?rotary_emb\.inv_freq")

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONVERT = (
    'convert it once on a machine where you trust it: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('DIR').save_pretrained('NEW_DIR')\""
)
# A shard lies beside its index: no separators, no parent, no drive.
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")


def find_weights(folder: Path, report: Report = refuse) -> dict[str, tuple[SafetensorsFile, str]]:
    """{tensor name: (its file, its name there)} of one file, or of all shards.

    report: called with the error of each bad shard or entry; where it returns, the others are read all the same.

    Raises:
        CheckpointError: no weights; a damaged single file or index; anything that `report` raises.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        file = SafetensorsFile(single)
        return {name: (file, name) for name in file.names}
    if not index.exists():
        raise _no_weights(folder)

    weight_map = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is {show(weight_map)}, expected {{tensor: file}}; fetch it again")
    files: dict[str, SafetensorsFile | None] = {}  # None: an unreadable shard
    found: dict[str, tuple[SafetensorsFile, str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            report(CheckpointError(
                f"{index}: weight_map[{show(name)}] is {show(shard)}, expected the plain name of a .safetensors file "
                "in the same folder; fetch the index again"
            ))  # fmt: skip
            continue
        if shard not in files:
            files[shard] = None
            try:
                if not os.path.exists(folder / shard):  # False for too long a name, too
                    raise CheckpointError(
                        f"{index}: lists the shard {show(shard)}, which is not in {folder}; fetch the missing file"
                    )
                files[shard] = SafetensorsFile(folder / shard)
            except CheckpointError as error:
                report(error)
        file = files[shard]
        if file is None:
            continue
        if name not in file.names:
            report(CheckpointError(f"{index}: lists {show(name)} in {shard}, which does not hold it; fetch both again"))
            continue
        found[name] = (file, name)
    for shard, file in files.items():
        for name in file.names if file is not None else ():
            if name not in weight_map and not LEFTOVER.fullmatch(name):
                report(CheckpointError(
                    f"{folder / shard}: holds {show(name)}, which {INDEX} does not list; fetch both again"
                ))  # fmt: skip
    return found


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles and (folder / "pytorch_model.bin.index.json").exists():
        pickles = ["pytorch_model.bin.index.json"]
    if pickles:
        return CheckpointError(
            f"{folder}: holds {pickles[0]} but no {SINGLE}; pickle can run code and is never read: {_CONVERT}"
        )
    return CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}; fetch the model again, weights included")
