"""Hub ids: recognised offline, downloaded through huggingface_hub into its shared cache.

"org/name" is a model's folder, "org/name:file.gguf" a file in it, with all parts of a split file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlx_llama.core.errors import CheckpointError, show

from .gguf import part_names

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_HUB_FILE = re.compile(r"([^:]+):((?:[\w-][\w. +-]*/)*[\w-][\w. +-]*\.gguf)", re.ASCII)
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+)(?::([\w.-]+))?"
    r"(?:/(?:blob|resolve|raw|tree)/([\w.-]+)(?:/([^?#]+\.gguf))?)?/?(?:[?#].*)?",
    re.ASCII,
)
SETTINGS = ("*.json", "*.jinja", "tokenizer.model")
WEIGHTS = ("*.safetensors",)
# Other formats of the same model: subfolders, and the originals of Meta and Mistral
_SKIP = ("*/*", "consolidated*")


def is_hub_id(name: str | os.PathLike) -> bool:
    """True for a hub id ("org/name"), judged by the name and the disk.

    A path exists, is absolute, starts with "." or "~", ends in a separator or ".gguf", or has a
    backslash or two slashes.
    """
    if not isinstance(name, str) or not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        return False
    return ".." not in name and "--" not in name and not os.path.exists(name)


def gguf_in_hub(name: str | os.PathLike) -> tuple[str, str] | None:
    """(hub id, file) of "org/name:file.gguf"; None for other names and existing paths."""
    match = (
        _HUB_FILE.fullmatch(name) if isinstance(name, str) and not os.path.exists(name) else None
    )
    return (match[1], match[2]) if match and is_hub_id(match[1]) else None


def read_address(text: str) -> str:
    """Name of the model at a web address, "org/name" or "org/name:file.gguf"; "" for any other
    text.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not _HUB_ID.fullmatch(match[1]):
        return ""
    model, tag, file = match[1], match[2], match[4] or match[2]
    if file and file.endswith(".gguf"):
        return f"{model}:{file}"
    return f"{model}:FILE.gguf" if tag else model


def fetch_gguf(name: str, revision: str | None = None, local_only: bool = False) -> Path:
    """The local file of "org/name:file.gguf", downloaded with its other parts if the cache lacks
    it.

    local_only: as in `fetch`.

    Raises CheckpointError: as `fetch`; the repository has no such file.
    """
    place = gguf_in_hub(name)
    assert place is not None
    model, file = place
    folder, _, base = file.rpartition("/")
    parts = tuple(f"{folder}/{part}" if folder else part for part in part_names(base))
    path = fetch(model, revision, parts, skip=(), local_only=local_only) / file
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
    """The local folder of a hub model, downloaded if the cache lacks it, with a progress bar on
    stderr.

    With HF_HUB_OFFLINE=1 or local_only, or if the hub cannot be reached, only the cache is
    searched.

    Raises CheckpointError: not on the hub, gated, no such revision, no network and not in the
    cache, disk full.
    """
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{name}@{revision}" if revision else name
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(skip),
                local_files_only=local_only,
            )
        )
    except errors.GatedRepoError:
        reason = "access is gated; accept its licence on huggingface.co, then run `hf auth login`"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {show(revision)}; leave it out or choose an existing revision"
    except errors.RepositoryNotFoundError:
        reason = "not found on the hub, or private; check the spelling, or run `hf auth login`"
    except errors.LocalEntryNotFoundError:
        cause, remedy = "the hub cannot be reached", "check the network"
        if local_only:
            cause, remedy = "", f"fetch it with `hf download {name}`"
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
    except Exception as e:  # of huggingface_hub's HTTP library, which differs between versions
        cause = f"{type(e).__name__}: {_first_line(e)}"
        reason = f"the hub cannot be reached ({cause}); check the network"
    raise CheckpointError(f"model {where}: {reason}") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
