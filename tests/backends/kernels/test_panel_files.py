"""Cached panels: the bytes that packing makes, from any complete file of this key; every other file
is as none.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from launching import run_python
from making_gguf import make_gguf

from backends.conftest import matrices_of
from cpu_fallback.kernels import panel_files, panels
from cpu_fallback.model import Llama
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.system import cache_folder, machine

FIELDS = dict(kinds="Q4_K", hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> Path:
    """A cache folder with the machine code of `model`."""
    home = tmp_path_factory.mktemp("code")
    make_gguf(home / "m.gguf", **FIELDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_LLAMA_CACHE", str(home / "cache"))
        Llama.load(open_checkpoint(home / "m.gguf"))
    return home / "cache"


@pytest.fixture
def folder(code, tmp_path, monkeypatch) -> Path:
    """A cache folder for panels of any size, on a system that maps files in huge pages."""
    shutil.copytree(code, tmp_path / "cache")
    monkeypatch.setenv("MLX_LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(panel_files, "LEAST_BYTES", 1)
    monkeypatch.setattr(machine, "has_huge_pages", lambda address, nbytes: True)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model.gguf"
    make_gguf(path, **FIELDS)
    return path


def load(path: Path) -> Llama:
    """The model, once its panels are saved."""
    model = Llama.load(open_checkpoint(path))
    for writer in list(panel_files._writers):
        writer.join()
    return model


def arena_of(model: Llama) -> panels.Arena:
    return model.decoder.head.weight.arena


def is_mapped(model: Llama) -> bool:
    return not arena_of(model).bytes.flags.writeable


def logits(model: Llama) -> np.ndarray:
    return model.forward(np.arange(1, 12)[None], 0, model.make_cache(20))


def cached(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.panels"))


def test_later_loads_map_the_same_panels(folder, model):
    first, second = load(model), load(model)
    assert not is_mapped(first) and is_mapped(second) and len(cached(folder)) == 1
    np.testing.assert_array_equal(arena_of(second).bytes, arena_of(first).bytes)
    np.testing.assert_array_equal(logits(second), logits(first))
    assert not arena_of(second).bytes.flags.writeable
    assert cached(folder)[0].stat().st_mode & 0o777 == 0o600


def flip(content: bytearray, at: int) -> None:
    content[at] ^= 1


DAMAGE = {
    "any byte": lambda content: flip(content, 12345),
    "magic": lambda content: flip(content, len(content) - 128),
    "key": lambda content: flip(content, len(content) - 100),
    "trailer": lambda content: flip(content, len(content) - 1),
    "a page of zeros": lambda content: content.__setitem__(slice(4096, 8192), bytes(4096)),
    "two words swapped": lambda content: content.__setitem__(
        slice(0, 8), content[4:8] + content[0:4]
    ),
    "shorter": lambda content: content.__delitem__(slice(-4096, None)),
    "empty": lambda content: content.clear(),
}


@pytest.mark.slow_for("*e")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_as_none(folder, model, damage):
    first = load(model)
    file = cached(folder)[0]
    before = file.read_bytes()
    content = bytearray(before)
    DAMAGE[damage](content)
    assert content != before
    file.write_bytes(content)
    again = load(model)
    assert not is_mapped(again)
    np.testing.assert_array_equal(arena_of(again).bytes, arena_of(first).bytes)
    assert file.read_bytes() == before and is_mapped(load(model))  # written anew


@pytest.mark.slow
def test_a_file_cut_while_it_is_mapped_is_as_none(folder, model, monkeypatch):
    """Its missing pages must not be touched: that would kill the process."""
    first = load(model)
    file, read = cached(folder)[0], machine.read_pages

    def cut(mapped, offset, nbytes):
        os.truncate(file, 4096)
        return read(mapped, offset, nbytes)

    monkeypatch.setattr(machine, "read_pages", cut)
    in_order = sorted(matrices_of(first), key=lambda part: part.start)
    plans = [part.plan for part in in_order]
    arena = panel_files.find(plans, len(arena_of(first).bytes), None)
    arena._checksum = lambda *_: pytest.fail("read")
    with ThreadPoolExecutor(1) as pool:
        assert arena.open(pool) is None
    assert not file.exists()


@pytest.mark.slow
def test_a_model_file_that_changed_has_other_panels(folder, model, tmp_path):
    first = load(model)
    status = model.stat()
    make_gguf(tmp_path / "other.gguf", **FIELDS, seed=1)
    model.write_bytes((tmp_path / "other.gguf").read_bytes())  # the same inode and size
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert model.stat().st_mtime_ns == status.st_mtime_ns and model.stat().st_size == status.st_size
    second = load(model)
    assert not is_mapped(second) and (arena_of(second).bytes != arena_of(first).bytes).any()
    assert len(cached(folder)) == 2


@pytest.mark.slow
def test_a_file_of_another_user_is_as_none(folder, model):
    load(model)
    cached(folder)[0].chmod(0o666)
    assert not is_mapped(load(model))


@pytest.mark.slow
def test_small_pages_are_not_used_in_place(folder, model, monkeypatch):
    load(model)
    monkeypatch.setattr(machine, "has_huge_pages", lambda address, nbytes: False)
    assert not is_mapped(load(model))


@pytest.mark.slow
def test_the_least_recently_used_goes_first(folder, tmp_path, monkeypatch):
    models = []
    for number in range(3):
        models.append(tmp_path / f"{number}.gguf")
        make_gguf(models[-1], **FIELDS, seed=number)
    load(models[0])
    size = cached(folder)[0].stat().st_size
    code = sum(file.stat().st_size for file in folder.glob("*.o"))
    monkeypatch.setenv("MLX_LLAMA_CACHE_SIZE", f"{code + 2 * size + 100}")
    load(models[1])
    os.utime(cached(folder)[0], (1, 1)), os.utime(cached(folder)[1], (2, 2))
    assert is_mapped(load(models[0]))  # used now
    load(models[2])
    assert [is_mapped(load(model)) for model in (models[0], models[2])] == [True, True]
    assert len(cached(folder)) == 2
    monkeypatch.setenv("MLX_LLAMA_CACHE_SIZE", "0")
    assert not is_mapped(load(models[0]))
    monkeypatch.setenv("MLX_LLAMA_CACHE_SIZE", "many")
    with pytest.raises(
        LlamaError, match="MLX_LLAMA_CACHE_SIZE='many': must be a size such as 20GB"
    ):
        load(models[0])


@pytest.mark.slow
def test_a_full_disk_costs_only_time(folder, model, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(panel_files.os, "replace", full)
    assert not is_mapped(load(model)) and not is_mapped(load(model))
    assert not [file for file in folder.iterdir() if file.suffix != ".o"]


def test_clear_removes_what_this_package_wrote(folder, model):
    load(model)
    (folder / ".new-abandoned").write_bytes(b"1")
    (folder / "notes.txt").write_text("mine")
    taken = sum(size for _, _, size in cache_folder.files())
    assert cache_folder.clear() == taken - 4
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_model_may_go_before_its_panels_are_saved(folder, model, monkeypatch):
    """The writer's machine code stays."""
    may_write, room = threading.Event(), cache_folder.make_room
    monkeypatch.setattr(cache_folder, "make_room", lambda *args: may_write.wait(30) and room(*args))
    code = weakref.ref(Llama.load(open_checkpoint(model)).runner.code.compiled)
    gc.collect()
    assert code() is not None  # called by the writer alone
    may_write.set()
    for writer in list(panel_files._writers):
        writer.join()
    gc.collect()
    assert code() is None and is_mapped(load(model))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of files are Linux's")
def test_a_process_saves_panels_before_it_ends(tmp_path, model):
    """Without any help of this test: where the folder's files come in huge pages, the second
    process maps them.
    """
    code = (
        "import sys; from cpu_fallback.kernels import panel_files; panel_files.LEAST_BYTES = 1\n"
        "from cpu_fallback.model import Llama; from mlx_llama.core.files.checkpoint import "
        "open_checkpoint\n"
        "print(Llama.load(open_checkpoint(sys.argv[1])).decoder.head.weight.arena.bytes.flags.writeable)"
    )
    env = os.environ | {"MLX_LLAMA_CACHE": str(tmp_path / "cache")}
    model_file = tmp_path / "large.gguf"
    make_gguf(model_file, kinds="F16", hidden_size=1024, intermediate_size=4096)
    printed = [
        run_python("-c", code, model_file, env=env, check=True).stdout.strip() for _ in range(2)
    ]
    assert printed == ["True", str(not machine.maps_huge_files(tmp_path))]
