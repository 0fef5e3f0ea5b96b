"""Writing in both forms: memory, progress, and failures that leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launching import run_python
from making import config_fields, edit_json, make_checkpoint, random_tensors, write_hole

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import files, progress
from mlx_llama.quantize import writing
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx


def both(checkpoint, folder: Path):
    """The two forms, as (what writes, where to)."""
    return (
        (lambda: write_mlx(checkpoint, folder / "out", 4, 32), folder / "out"),
        (lambda: write_gguf(checkpoint, folder / "out.gguf"), folder / "out.gguf"),
    )


def test_what_is_there_is_never_overwritten(toy, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    (tmp_path / "out.gguf").write_text("precious")
    for write, out in both(open_checkpoint(toy), tmp_path):
        with pytest.raises(CheckpointError, match="exists already"):
            write()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.read_text() for path in files] == ["precious"] * 2


def test_an_empty_folder_may_be_there(toy, tmp_path):
    (tmp_path / "out").mkdir()
    write_mlx(open_checkpoint(toy), tmp_path / "out", 4, 32)
    assert open_checkpoint(tmp_path / "out").tensors


def spoil(folder: Path, name: str, value: float) -> Path:
    """A model with a weight of this value."""
    tensors = random_tensors(config_fields())
    tensors[name][5, 7] = value
    return make_checkpoint(folder, tensors=tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_leaves_nothing_behind(value, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    source = spoil(tmp_path / "in", name, value)
    for write, out in both(open_checkpoint(source), tmp_path):
        with pytest.raises(CheckpointError, match=f"{name} holds a value that is not fin"):
            write()
    assert list(tmp_path.iterdir()) == [source]


def test_weights_too_large_for_float16_scales(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    source = spoil(tmp_path / "in", name, 1e7)
    with pytest.raises(CheckpointError, match=f"{name}: holds weights too large for Q8_0"):
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    edit_json(source / "config.json", torch_dtype="float16")
    with pytest.raises(CheckpointError, match="not finite at float16"):
        write_mlx(open_checkpoint(source), tmp_path / "out", 4, 32)


def test_an_interruption_leaves_nothing_behind(toy, tmp_path):
    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    for write, out in both(open_checkpoint(toy), tmp_path):
        with progress.reported(interrupt), pytest.raises(KeyboardInterrupt):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_said_before_anything_is_written(toy, tmp_path, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for write, out in both(open_checkpoint(toy), tmp_path):
        with pytest.raises(CheckpointError, match="GB and the disk has 0.00 GB free"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(toy, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file/out", "file/out.gguf"):
        write = write_gguf if name.endswith("gguf") else write_mlx
        with pytest.raises(CheckpointError, match="cannot be written"):
            write(open_checkpoint(toy), tmp_path / name)


def test_slabs_change_nothing_and_progress_ends_at_its_total(toy, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(toy)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        for write, out in both(checkpoint, tmp_path / name):
            seen = []
            with progress.reported(lambda done, total: seen.append((done, total))):
                write()
            assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes) and seen == sorted(seen)
            assert len(seen) >= len(checkpoint.tensors) * (1 if name == "whole" else 5)
        monkeypatch.setattr(writing, "_SLAB", 1000)
    for file in ("out/model.safetensors", "out.gguf"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mlx", "gguf"])
def test_the_peak_of_memory_is_a_tensor_and_not_the_model(form, tmp_path):
    """A model of 400 MB, whose largest tensors are 16 MB, takes less than 60 MB more than a small
    one.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says how much memory a process has had since a given moment")
    fields = dict(
        hidden_size=1024, intermediate_size=8192, num_attention_heads=8, num_key_value_heads=4
    )
    source = make_checkpoint(tmp_path / "in", dtype="bfloat16", num_hidden_layers=1, **fields)
    edit_json(source / "config.json", num_hidden_layers=7)
    shapes = LlamaConfig.from_file(source).tensor_shapes()
    write_hole(source / "model.safetensors", shapes)
    small = make_checkpoint(tmp_path / "small")
    code = """
import sys
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.mlx_folder import write_mlx
from mlx_llama.quantize import writing
from mlx_llama.quantize.gguf_export import write_gguf
field = lambda name: int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
form, small, large, out = sys.argv[1:]
write = (lambda source, out: write_gguf(open_checkpoint(source), out + ".gguf")) if form == "gguf" else (
    lambda source, out: write_mlx(open_checkpoint(source), out, 4, 32))
write(small, out + "1")
before = field("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
write(large, out + "2")
print(field("VmHWM") - before)
"""  # noqa: E501
    done = run_python("-c", code, form, small, source, tmp_path / "out", timeout=300)
    assert (source / "model.safetensors").stat().st_size > 370e6
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 60e6
