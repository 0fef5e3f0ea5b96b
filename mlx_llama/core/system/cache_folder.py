"""The user's cache folder: machine code, and weights in the cpu backend's layout. Its size is
limited to MLX_LLAMA_CACHE_SIZE, else a quarter of the disk's free space. The least recently used
weights are evicted first. Failures are not errors: the files are made again.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

from platformdirs import user_cache_path

from mlx_llama.core.errors import OptionsError

from .machine import parse_size

FOLDER, SIZE = "MLX_LLAMA_CACHE", "MLX_LLAMA_CACHE_SIZE"  # environment variables
PARTIAL = ".new-"  # prefix of files being written
_STALE = 3600.0  # seconds after which the writer of a partial file is gone


def cache_folder() -> Path | None:
    """MLX_LLAMA_CACHE, else the system's cache folder; None if there is neither."""
    if setting := os.environ.get(FOLDER):
        return Path(setting)
    try:
        return user_cache_path("mlx_llama", appauthor=False)
    except RuntimeError:
        return None


def size_limit() -> int:
    """The folder's limit in bytes, by default a quarter of the disk's rest. Raises OptionsError."""
    if setting := os.environ.get(SIZE):
        if (size := parse_size(setting)) is None:
            raise OptionsError(
                f"{SIZE}={setting!r:.40}: must be a size such as 20GB or 512MB, or 0 for no "
                "cached weights"
            )
        return size
    folder = cache_folder()
    if folder is None:
        return 0
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return (shutil.disk_usage(folder).free + sum(size for _, _, size in files())) // 4
    except OSError:
        return 0


def files(suffix: str = "") -> list[tuple[Path, float, int]]:
    """(path, time of last use, bytes) of files ending with `suffix`, least recently used first."""
    folder, result = cache_folder(), []
    if folder is None:
        return []
    try:
        for entry in os.scandir(folder):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # another process removed it
                continue
            if stat.S_ISREG(status.st_mode) and entry.name.endswith(suffix):
                result.append((Path(entry.path), status.st_mtime, status.st_size))
    except OSError:
        return []
    return sorted(result, key=lambda item: item[1])


def make_room(nbytes: int, suffix: str) -> bool:
    """Remove least recently used files with `suffix` until `nbytes` fit; False if they cannot."""
    for path, used, _ in files():
        if path.name.startswith(PARTIAL) and time.time() - used > _STALE:
            remove(path)
    limit, taken = size_limit(), sum(size for _, _, size in files())
    removable = files(suffix)
    if taken - sum(size for _, _, size in removable) + nbytes > limit:
        return False
    for path, _, size in removable:
        if taken + nbytes <= limit:
            break
        if remove(path):
            taken -= size
    return taken + nbytes <= limit


def clear() -> int:
    """Remove all files that this package wrote; returns their bytes."""
    nbytes = 0
    for path, _, size in files():
        if path.suffix in (".o", ".panels") or path.name.startswith(PARTIAL):
            nbytes += size * remove(path)
    return nbytes


def remove(path: Path) -> bool:
    """Remove a file; False if that fails, as on Windows while a process maps it."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def is_private(status: os.stat_result) -> bool:
    """True for a regular file that no other user can write."""
    return stat.S_ISREG(status.st_mode) and (
        not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    )
