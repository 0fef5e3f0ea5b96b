"""Read files within limits; write them atomically."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mlx_llama.core.errors import CheckpointError, LlamaError

_PIECE = 1 << 20  # bytes read at once
_POINTER, _POINTER_LIMIT = b"version https://git-lfs.github.com/spec/", 1024  # Git LFS's
_SPARE = 16 << 20  # bytes for headers, vocabularies and the file system
_JSON_LIMIT = 64 << 20  # bytes; the tokenizers library reads tokenizer.json, which may be larger


class PointerError(OSError):
    """A Git LFS pointer lies in the place of the file, as after a clone without git-lfs."""


def open_file(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading. Raises OSError: it cannot be opened, or is a folder, pipe or
    device, whose reading may never end, or a Git LFS pointer. ValueError: a NUL in the name.
    """
    file = open(path, "rb", opener=_open_nonblocking)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise _irregular(path)
    if status.st_size <= _POINTER_LIMIT:
        if file.read(len(_POINTER)) == _POINTER:
            file.close()
            text = "is a Git LFS pointer, run `git lfs pull` in its folder"
            raise PointerError(errno.EINVAL, text, os.fspath(path))
        file.seek(0)
    return file


def read_file(path: str | os.PathLike, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises as `open_file`; OSError if longer."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) <= limit:
            parts, size = [], 0
            # a file may be longer than its metadata says
            while size <= limit and (part := file.read(_PIECE)):
                parts.append(part)
                size += len(part)
            if size <= limit:
                return b"".join(parts)
    raise OSError(
        errno.EFBIG, f"has {size} bytes or more, expected at most {limit}", os.fspath(path)
    )


def read_text(path: str | os.PathLike, limit: int) -> str:
    """Read a UTF-8 file, without the byte order mark that editors put in front. Raises as
    `read_file`; UnicodeDecodeError.
    """
    return read_file(path, limit).decode("utf-8-sig")


@contextmanager
def reading(
    path: str | os.PathLike,
    error: type[LlamaError],
    missing: str = "fetch the model again, with this file in it",
) -> Iterator[None]:
    """Turn faults of reading a file into `error`. missing: the remedy for a missing file."""
    try:
        yield
    except FileNotFoundError:
        raise error(f"{path}: no such file; {missing}") from None
    except PointerError as e:
        remedy = "or download the file from the hub"
        raise error(f"{path}: {e.strerror}, {remedy}") from None
    except UnicodeDecodeError as e:
        raise error(f"{path}: not UTF-8 at byte {e.start}; fetch the file again") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        reason = getattr(e, "strerror", None) or e
        raise error(
            f"{path}: cannot be read ({reason}); check the file and its permissions"
        ) from None


@contextmanager
def writing(name: object, error: type[LlamaError], done: str = "written") -> Iterator[None]:
    """Turn faults of writing the file `name`, or of what is `done` with it, into `error`."""
    try:
        yield
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        reason = getattr(e, "strerror", None) or e
        raise error(f"{name}: cannot be {done}: {reason}") from None


def read_json(path: str | os.PathLike, error: type[LlamaError]) -> dict[str, Any]:
    """Read a JSON object. Raises `error` for a file that cannot be read or is no JSON object."""
    with reading(path, error):
        text = read_text(path, _JSON_LIMIT)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else e
        raise error(f"{path}: not JSON ({reason}); fetch the file again") from None
    if not isinstance(value, dict):
        raise error(
            f"{path}: contains a JSON {type(value).__name__}, expected an object with named fields"
        )
    return value


def write_file(path: str | os.PathLike, content: bytes, is_private: bool = False) -> None:
    """Write a file atomically, through a temporary file in its folder. Symbolic links stay.
    is_private: only the owner may read the file. Raises OSError: it cannot be written, or the path
    exists and is not a regular file. ValueError: a NUL in the name.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        raise _irregular(path)
    path = Path(os.path.realpath(path))
    with _partial(path) as partial:
        with open(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o666),
            "wb",
        ) as file:
            file.write(content)
        if path.exists() and not is_private:
            shutil.copymode(path, partial)


@contextmanager
def replace_when_done(
    out: Path, nbytes: int, folder: bool, overwrites: bool = False
) -> Iterator[Path]:
    """Yield a temporary path beside `out`; rename it to `out` on success, remove it on errors.

    overwrites: replace an existing file.

    Raises CheckpointError: `out` exists and must not be replaced (a folder may replace an empty
    folder); the disk has less than `nbytes` free; an error of the system while writing.
    """
    try:
        out = Path(os.path.abspath(os.path.expanduser(out)))
        is_free = overwrites or not os.path.lexists(out)
        if not is_free and not (
            folder and out.is_dir() and not out.is_symlink() and not any(out.iterdir())
        ):
            raise CheckpointError(
                f"{out}: exists already; choose a new {'folder' if folder else 'file'}, or "
                "remove it"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < nbytes + _SPARE:
            raise CheckpointError(
                f"{out}: takes {(nbytes + _SPARE) / 1e9:.2f} GB and the disk has {free / 1e9:.2f} "
                "GB free; make room, or choose another place"
            )
        with _partial(out) as partial:
            if folder:
                partial.mkdir()
            yield partial
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(
            f"{out}: cannot be written ({getattr(error, 'strerror', None) or error}); check the "
            "free space and the permissions"
        ) from None


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its place on success and goes on errors."""
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        if partial.is_dir() and path.exists():
            path.rmdir()  # Windows renames only to an unused name
        os.replace(partial, path)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for a writer


def _irregular(path: str | os.PathLike) -> OSError:
    return OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
