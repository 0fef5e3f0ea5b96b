"""Reading of regular files alone, within limits; writing of whole files alone."""

from __future__ import annotations

import errno
import os
import stat
from unittest.mock import Mock

import pytest

from mlx_llama.core.system import files
from mlx_llama.core.system.files import open_file, read_file, write_file

CONTENT = bytes(range(256)) * 3 + b"\r\n\x1a end"


def irregular(tmp_path) -> list[str]:
    """A pipe without a writer, and a device without an end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    return [str(tmp_path / "pipe"), str(tmp_path / "link"), "/dev/zero"]


def test_a_file_is_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    assert read_file(tmp_path / "file", len(CONTENT)) == CONTENT
    with open_file(str(tmp_path / "file")) as file:
        assert file.read(10) == CONTENT[:10]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_pipes_and_devices_are_refused_at_once(tmp_path):
    for path in irregular(tmp_path):
        for read in (open_file, lambda name: read_file(name, 100)):
            with pytest.raises(OSError, match="is not a regular file") as caught:
                read(path)
            assert caught.value.strerror == "is not a regular file"
            assert caught.value.filename == path


def test_long_files_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    with pytest.raises(
        OSError, match=f"{len(CONTENT)} bytes or more, expected at most {len(CONTENT) - 1}"
    ):
        read_file(tmp_path / "file", len(CONTENT) - 1)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="/proc is Linux's")
def test_files_that_report_no_length_are_limited(tmp_path):
    assert os.stat("/proc/self/smaps").st_size == 0
    with pytest.raises(OSError, match="expected at most 100"):
        read_file("/proc/self/smaps", 100)


def test_missing_files_folders_and_names(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 100)
    with pytest.raises(OSError):
        read_file(tmp_path, 100)
    for act in (open_file, lambda path: write_file(path, b"")):
        with pytest.raises(ValueError):
            act("nul\0")
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "none" / "file", b"")
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path, b"")


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "file"
    for content in (CONTENT, b"", CONTENT * 2):
        write_file(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_permissions(tmp_path):
    def mode(name: str) -> int:
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    (tmp_path / "usual").touch()
    write_file(tmp_path / "new", b"")
    write_file(tmp_path / "secret", b"", is_private=True)
    assert mode("new") == mode("usual") and mode("secret") == 0o600
    (tmp_path / "old").touch(0o640)
    (tmp_path / "old").chmod(0o604)
    write_file(tmp_path / "old", b"x")
    assert mode("old") == 0o604
    write_file(tmp_path / "old", b"x", is_private=True)
    assert mode("old") == 0o600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_links_stay_and_devices_are_never_replaced(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "alias").symlink_to("target")
    write_file(tmp_path / "alias", b"new")
    assert (tmp_path / "alias").is_symlink() and (tmp_path / "target").read_bytes() == b"new"
    for path in irregular(tmp_path):
        before = os.stat(path)
        with pytest.raises(OSError, match="is not a regular file"):
            write_file(path, b"new")
        assert (os.stat(path).st_mode, os.stat(path).st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize(
    "module, name, error",
    [
        (files.shutil, "copymode", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        (files.os, "replace", KeyboardInterrupt()),
    ],
    ids=["write", "rename"],
)
def test_a_failure_keeps_the_old_file(module, name, error, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(module, name, Mock(side_effect=error))
    with pytest.raises(type(error)):
        write_file(tmp_path / "file", CONTENT)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"old"


def test_a_full_disk_keeps_the_old_file(full_disk, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with full_disk(1000), pytest.raises(OSError):
        write_file(tmp_path / "file", b"x" * 5000)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"old"
