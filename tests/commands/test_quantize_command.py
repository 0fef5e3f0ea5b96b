"""python -m mlx_llama.quantize: its models load and answer."""

from __future__ import annotations

import signal as signals
import subprocess
import sys

import pytest
from machine import device_of
from making import make_checkpoint

from mlx_llama import generate
from mlx_llama.core.files import hub
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize import command as quantize


@pytest.mark.slow_for("cpu-arguments1", "cpu-arguments4")
@pytest.mark.parametrize(
    "arguments, name, bits",
    [
        ((), "out", "affine"),
        (("--bits", "8", "--group-size", "32"), "out", "affine"),
        (("--format", "mlx:mxfp4"), "out", "mxfp4"),
        (("--format", "gguf:Q8_0"), "out.gguf", "Q8_0"),
        (("--format", "gguf:Q4_0"), "out.gguf", "Q4_0"),
        (("--format", "gguf:Q4_K_M"), "out.gguf", "Q5_0"),
        (("--format", "gguf:Q6_K"), "out.gguf", "Q8_0"),
    ],
)
def test_written_models_answer(arguments, name, bits, backend, toy, tmp_path, door):
    out = tmp_path / name
    done = door(quantize.main, toy, out, *arguments)
    assert done.code == 0 and done.out == "", done.err
    assert f"{out}: " in done.err and "bits each" in done.err and "times smaller" in done.err
    assert open_checkpoint(out).tensors["model.layers.0.self_attn.q_proj.weight"].format == bits
    flags = f"--model {out} --backend {backend.name} --device {device_of(backend)} -m 5 --stats -p"
    done = door(generate.main, *flags.split(), "Once upon")
    assert done.code == 0 and "5 tokens" in done.err, done.err


def test_a_quantised_gguf_file_keeps_its_width_unless_told(toy, tmp_path, door):
    assert door(quantize.main, toy, tmp_path / "in.gguf", "--format", "gguf:Q8_0").code == 0
    name = "model.layers.0.self_attn.q_proj.weight"
    for flags, bits in (("", (8, 32)), ("--bits 4", (4, 64)), ("--group-size 32", (4, 32))):
        out = tmp_path / str(bits)
        done = door(quantize.main, tmp_path / "in.gguf", out, *flags.split())
        assert done.code == 0 and ("quantised already" in done.err) == bool(flags), done.err
        weight = open_checkpoint(out).tensors[name]
        assert (weight.bits, weight.group_size) == bits


def test_matrices_kept_at_full_width_are_named(toy, tmp_path, door):
    done = door(quantize.main, toy, tmp_path / "out")
    words = "are kept at float32: groups of 64 do not divide rows of 96)\n"
    assert f"(2 matrices (such as model.layers.0.mlp.down_proj.weight) {words}" in done.err
    done = door(quantize.main, tmp_path / "out", tmp_path / "again", "--group-size", "32")
    assert "is quantised already (affine 4-bit, groups of 64)" in done.err


def test_the_guide_and_hub_ids(toy, tmp_path, door, monkeypatch):
    assert door(quantize.main, "guide", tmp_path / "guide").code == 0
    monkeypatch.setattr(hub, "fetch", lambda name, revision, *rest, **named: toy)
    assert door(quantize.main, "org/name", tmp_path / "out", "--revision", "main").code == 0
    assert open_checkpoint(tmp_path / "out").tensors


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("signal, code", [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("out, arguments", [("out", []), ("out.gguf", ["--format", "gguf:Q8_0"])])
def test_a_signal_while_writing_leaves_nothing_behind(signal, code, out, arguments, toy, tmp_path):
    script = f"""
import sys, time
from mlx_llama import cli
from mlx_llama.quantize import command as quantize
from mlx_llama.quantize import writing

def convert_slabs(*_, **__):
    print("writing", flush=True)
    time.sleep(60)

writing.convert_slabs = convert_slabs
sys.exit(cli.run(quantize.main, {[str(toy), str(tmp_path / out), *arguments]!r}))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "writing\n"
        assert [path.name.startswith(f".{out}.") for path in tmp_path.iterdir()] == [True]
        child.send_signal(getattr(signals, signal))
        _, error = child.communicate(timeout=60)
    assert (child.returncode, error, list(tmp_path.iterdir())) == (code, "", [])


def test_loading_reports_every_byte(backend, tmp_path):
    """Every backend reports progress to the last byte."""
    from mlx_llama.core.system import progress
    from mlx_llama.quantize.mlx_folder import write_mlx

    source = make_checkpoint(tmp_path / "in", dtype="bfloat16")
    write_mlx(open_checkpoint(source), tmp_path / "out", 4, 32)
    for path in (source, tmp_path / "out"):
        seen = []
        with progress.reported(lambda done, total: seen.append((done, total))):
            backend.load(open_checkpoint(path))
        assert all(done <= total for done, total in seen)
        if seen:  # backends that use the mapped file may report nothing
            assert seen[-1][0] == seen[-1][1]
    assert seen, "low-bit weights are repacked everywhere"


def test_calibration_measures_writes_and_reads_an_importance_matrix(toy, tmp_path, door):
    text, matrix = tmp_path / "text.txt", tmp_path / "matrix.gguf"
    text.write_text("Once upon a time there was a little llama who lived on a hill. " * 60)
    options = ("--format", "gguf:IQ4_XS")
    done = door(
        quantize.main, toy, tmp_path / "a.gguf", *options, "--calibrate", text, "--imatrix", matrix
    )
    assert done.code == 0 and matrix.exists(), done.err
    assert door(quantize.main, toy, tmp_path / "b.gguf", *options, "--imatrix", matrix).code == 0
    assert door(quantize.main, toy, tmp_path / "c.gguf", *options).code == 0
    files = [(tmp_path / f"{name}.gguf").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
