"""Models in the hub's cache folder on this disk: list and remove."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mlx_llama.core.errors import CheckpointError, LlamaError

from . import hub
from .checkpoint import open_checkpoint
from .quantized import AffineWeight


@dataclass(frozen=True)
class CachedModel:
    """A folder of a hub id, or a GGUF file in it."""

    name: str  # "org/name" or "org/name:FILE.gguf"
    nbytes: int  # on the disk, all parts of a split file
    last_used: float  # seconds since 1970
    kind: str  # the format of most weights, "" if it does not run
    error: str  # the reason why it does not run here, else ""


def list_models() -> list[CachedModel]:
    """The models of the newest revision of each repository, by name; reads only headers."""
    import huggingface_hub
    from huggingface_hub import constants

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return []
    models = []
    for repository in huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        revision = max(repository.revisions, key=lambda revision: revision.last_modified)
        files = {
            file.file_path.relative_to(revision.snapshot_path).as_posix(): file
            for file in revision.files
        }
        groups = {
            f"{repository.repo_id}:{name}": [p for p in hub.parts_of(name) if p in files]
            for name in files
            if name.endswith(".gguf") and hub.parts_of(name)[0] == name
        }
        if "config.json" in files:
            groups[repository.repo_id] = [name for name in files if not name.endswith(".gguf")]
        for name, members in groups.items():
            path = revision.snapshot_path / (members[0] if ":" in name else "")
            error, kind = "", ""
            try:
                kind = _most_common_format(path)
            except LlamaError as fault:
                error = str(fault)
            nbytes = sum(files[member].size_on_disk for member in members)
            last_used = max(files[member].blob_last_accessed for member in members)
            models.append(CachedModel(name, nbytes, last_used, kind, error))
    return sorted(models, key=lambda model: model.name.lower())


def _most_common_format(path: Path) -> str:
    nbytes: Counter[str] = Counter()
    for tensor in open_checkpoint(path).tensors.values():
        kind = tensor.description if isinstance(tensor, AffineWeight) else tensor.dtype
        nbytes[kind] += tensor.nbytes
    return nbytes.most_common(1)[0][0]


def remove(name: str) -> int:
    """Remove a model from the hub's cache: "org/name" with all its files and revisions, or a GGUF
    file of it; returns the bytes that were freed. Raises CheckpointError if there is none.
    """
    named = hub.hub_name(name)
    if named is None:
        raise CheckpointError(f"{name}: is not a hub id: delete local files yourself")
    model, _, file = named.partition(":")
    try:
        folder = hub.fetch(model, patterns=("*",), skip=(), local_only=True)
    except CheckpointError:
        text = f"{named}: not in the local cache; `mlx_llama models` lists what is"
        raise CheckpointError(text) from None
    if not file:
        repository = folder.parents[1]
        freed = sum(blob.stat().st_size for blob in (repository / "blobs").glob("*"))
        shutil.rmtree(repository)
        return freed
    if not file.endswith(".gguf"):
        file = hub.find_gguf(named, local_only=True).partition(":")[2]
    freed = 0
    for link in (folder / part for part in hub.parts_of(file)):
        if link.exists():
            freed += link.stat().st_size
            link.resolve().unlink()
            link.unlink(missing_ok=True)
    return freed
