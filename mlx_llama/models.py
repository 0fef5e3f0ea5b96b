"""python -m mlx_llama.models: list, fetch and remove models of the hub's cache."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: interrupted, they would end in a traceback
    from mlx_llama.__main__ import start

    start("models")

import json
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from .cli.flags import Parser
from .core.errors import CheckpointError, LlamaError, OptionsError
from .core.files import hub
from .core.files.checkpoint import find_model, open_checkpoint
from .core.files.quantized import AffineWeight
from .core.system import cache_folder
from .core.system.machine import format_bytes

EXAMPLES = """
pull Qwen/Qwen3-4B-GGUF:Q4_K_M
rm Qwen/Qwen3-4B-GGUF:Q4_K_M
"""
ARGUMENTS = {"list": 0, "names": 0, "pull": 1, "rm": 1}  # names that each action takes


def parser() -> Parser:
    """The command line. Actions are named as in Ollama."""
    result = Parser("models", __doc__, EXAMPLES, "[ACTION] [NAME]")
    add = result.add_argument
    add(
        "action",
        metavar="ACTION",
        nargs="?",
        default="list",
        help="list (the default): models in the hub's cache; names: short names of models on the "
        "hub; pull: fetch a model, or resume an interrupted download; rm: remove a model from the "
        "hub's cache",
    )
    add("model", metavar="NAME", nargs="?", help="a hub id, hub id:TYPE or short name")
    add("--revision", metavar="REVISION", help="branch, tag or commit of a hub id")
    add("--json", action="store_true", help="print the list as JSON")
    return result


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError."""
    args = parser().parse_args(arguments)
    if ARGUMENTS.get(args.action) != (args.model is not None):
        raise OptionsError("models takes list, names, pull NAME or rm NAME (see --help)")
    if args.revision is not None and args.action != "pull":
        raise OptionsError("--revision is for models pull: leave it out")
    if args.json and args.action != "list":
        raise OptionsError("--json is for models list: leave it out")
    if args.action == "names":
        for short, name in hub.SHORT_NAMES.items():
            print(f"{short:<14}{name}")
    elif args.action == "pull":
        pull(args.model, args.revision)
    elif args.action == "rm":
        print(f"removed {args.model}: {format_bytes(remove(args.model))}")
    elif args.json:
        print(json.dumps(list(map(asdict, find_models())), indent=2))
    else:
        list_models()
    return 0


def list_models() -> None:
    """Print a line per model, and the size of the cache folder."""
    models = find_models()
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        used = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        state = f"does not run: {model.error}" if model.error else f"runs, {model.kind}"
        line = f"{model.name:<{width}}  {format_bytes(model.nbytes):>8}  used {used}  {state}"
        print(line[: max(80, shutil.get_terminal_size().columns)])
    kept = sum(size for _, _, size in cache_folder.files())
    print(f"{len(models)} models; packed weights and kernels: {format_bytes(kept)}")


def pull(name: str, revision: str | None) -> None:
    """Fetch a model with a progress bar on stderr; print its path. Raises as `find_model`."""
    if hub.hub_name(name) is None:
        raise CheckpointError(f"{name}: is not a hub id (org/name, org/name:TYPE) or a short name")
    label, path = find_model(name, revision)
    print(f"{path}  ({label})" if path.is_file() else path)


# The hub's cache folder on this disk


@dataclass(frozen=True)
class CachedModel:
    """A folder of a hub id, or a GGUF file in it."""

    name: str  # "org/name" or "org/name:FILE.gguf"
    nbytes: int  # on the disk, all parts of a split file
    last_used: float  # seconds since 1970
    kind: str  # the format of most weights, "" if it does not run
    error: str  # the reason why it does not run here, else ""


def find_models() -> list[CachedModel]:
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
