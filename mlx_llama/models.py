"""python -m mlx_llama.models: list, fetch and remove models of the hub's cache."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: interrupted, they would end in a traceback
    from mlx_llama.__main__ import start

    start("models")

import dataclasses
import json
import shutil
import time

from .cli.flags import Parser
from .core.errors import CheckpointError, OptionsError
from .core.files import hub, hub_cache
from .core.files.checkpoint import find_model
from .core.system import cache_folder
from .core.system.machine import format_bytes

EXAMPLES = """
pull Qwen/Qwen3-4B-GGUF:Q4_K_M
rm Qwen/Qwen3-4B-GGUF:Q4_K_M
"""
FLAGS = """
action [ACTION]: list (the default): models in the hub's cache; names: short names of models on the
  hub; pull: fetch a model, or resume an interrupted download; rm: remove a model from the hub's
  cache
model [NAME]: a hub id, hub id:TYPE or short name
--revision REVISION: branch, tag or commit of a hub id
--json: print the list as JSON
"""
ARGUMENTS = {"list": 0, "names": 0, "pull": 1, "rm": 1}  # of each action


def parser() -> Parser:
    """The command line. Actions are named as in Ollama."""
    result = Parser("models", __doc__, EXAMPLES, "[ACTION] [NAME]")
    result.add_flags(FLAGS, action={"default": "list"})
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
        print(f"removed {args.model}: {format_bytes(hub_cache.remove(args.model))}")
    elif args.json:
        print(json.dumps(list(map(dataclasses.asdict, hub_cache.list_models())), indent=2))
    else:
        list_models()
    return 0


def list_models() -> None:
    """Print a line per model, and the size of the cache folder."""
    models = hub_cache.list_models()
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
