"""Each backend's facts, read without its framework, against its behaviour."""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
import subprocess
from types import SimpleNamespace

import psutil
import pytest
import torch
from launching import run_python
from machine import device_of
from making_gguf import make_gguf

from backends.conftest import matrices_of
from cuda_fallback import facts as cuda
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.backends.selection import PACKAGES, import_file
from mlx_llama.core.dtypes import dtype_name
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.system import machine
from mlx_llama.core.system.machine import Gpus
from mlx_llama.doctor.diagnose import diagnose
from mlx_llama.mlx_native import facts as mlx


@pytest.mark.parametrize("name", PACKAGES)
def test_facts_import_no_framework(name):
    code = (
        f"import sys; import {PACKAGES[name]}.facts; print(sorted({{'mlx.core', 'torch', "
        f"'triton'}} & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow_for("cpu-Q6_K", "cpu-MXFP4", "mlx-F16", "mlx-Q8_0")
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_packed_weights_take_the_bytes_that_are_foretold(kind, backend, tmp_path):
    """Planned bytes are within 3 % of a loaded model's."""
    path = tmp_path / "m.gguf"
    make_gguf(
        path,
        kinds=kind,
        hidden_size=512,
        intermediate_size=1024,
        vocab_size=4096,
        head_dim=64,
        num_attention_heads=8,
    )
    on_gpu = device_of(backend) == "gpu"
    checkpoint, facts = open_checkpoint(path), import_file(backend.name, "facts")
    estimate = facts.weights_nbytes(checkpoint.tensors.values(), checkpoint.dtype, on_gpu)
    before = 0
    if backend.name == "mlx":
        import mlx.core as mx

        gc.collect()  # free models of other tests
        before = mx.get_active_memory()
    model = backend.load(checkpoint)
    if backend.name == "mlx":
        held = mx.get_active_memory() - before
    else:
        embedding = [model.decoder.embedding.weight] if backend.name == "cuda" else []  # not mapped
        held = sum(part.nbytes for part in (*matrices_of(model), *embedding))
    assert 0.97 * estimate <= held <= 1.03 * estimate


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_the_plan_names_the_dtypes_of_the_model(kind, backend, tmp_path):
    """The dtypes of activations and of low-bit products, which is that of the scales in MLX."""
    path = tmp_path / "m.gguf"
    make_gguf(
        path, kinds=kind, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1
    )
    checkpoint, on_gpu = open_checkpoint(path), device_of(backend) == "gpu"
    facts = BackendFacts(backend.name, True, "", {}, on_gpu, kernels="some")
    plan = import_file(backend.name, "facts").plan_weights(checkpoint, facts)
    model = backend.load(checkpoint)
    assert plan.dtype == model.dtype_name
    if backend.name == "mlx":
        matrix = model.decoder.embedding.weight
        product = matrix.product
        assert plan.low_bit_operand == dtype_name(product)


@pytest.mark.parametrize(
    "name, has_bfloat16, exceeds_float16, expected",
    [
        ("cuda", True, False, "bfloat16"),
        ("cuda", True, True, "bfloat16"),
        ("cuda", False, False, "float16"),
        ("cuda", False, True, "float32"),
        ("mlx", True, False, "float16"),
        ("mlx", True, True, "bfloat16"),
        ("cpu", True, True, "float32"),
    ],
)
def test_the_dtype_that_auto_takes_for_ggufs_low_bit_weights(
    name, has_bfloat16, exceeds_float16, expected, tmp_path
):
    make_gguf(tmp_path / "m.gguf", kinds="Q8_0", num_hidden_layers=1)
    config = SimpleNamespace(exceeds_float16=exceeds_float16)
    checkpoint = dataclasses.replace(open_checkpoint(tmp_path / "m.gguf"), config=config)
    facts = BackendFacts(name, True, "", {}, True, has_bfloat16=has_bfloat16)
    assert import_file(name, "facts").plan_weights(checkpoint, facts).dtype == expected
    plain = SimpleNamespace(tensors={}, dtype="bfloat16", config=config)  # no low-bit weights
    if name == "cuda" and not exceeds_float16:
        assert cuda.plan_weights(plain, facts).dtype == expected


def test_torch_without_cuda_is_told_from_its_version_file(tmp_path, monkeypatch):
    assert cuda._torch_has_gpus() is (
        torch.version.cuda is not None or torch.version.hip is not None
    )
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text("")
    for text, expected in (
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda = None\nhip = '6.4'\n", True),
        ("cuda: Optional[str] = None\n", False),
        ("x = 1", True),
    ):
        (fake / "version.py").write_text(text)
        spec = cuda.importlib.util.spec_from_file_location("torch", fake / "__init__.py")
        monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: spec)
        assert cuda._torch_has_gpus() is expected


@pytest.mark.parametrize(
    "limit, total, expected",
    [("0", 16, 16 * 2 / 3), ("0", 64, 48), ("20480", 32, 20), ("", 8, 16 / 3)],
)
def test_metals_share_of_a_macs_memory(limit, total, expected, monkeypatch):
    answers = {"iogpu.wired_limit_mb": limit}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total << 30))
    monkeypatch.setattr(mlx.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(mlx.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **kw: subprocess.CompletedProcess(
            command, 0, answers[command[-1]] + "\n", ""
        ),
    )
    described = mlx.describe({}, Gpus())
    assert described.gpu is True and described.memory_is == "an estimate"
    assert described.memory_bytes == pytest.approx(expected * (1 << 30), rel=1e-6)


LOAD = """
import ctypes, gc, sys
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint

class Count(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keepcost".split()]

def taken():
    if sys.argv[1] == "cpu":  # maps its memory by itself
        return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) * 1024
    # malloc's own count: what the system counts contains 10 to 20 MB that are free between blocks
    count = mallinfo2()
    return count.hblkhd + count.used

mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo2:
    mallinfo2.restype = Count
def resident(field):
    return int(open("/proc/self/status").read().split(field)[1].split()[0]) * 1024

backend, models = select(*sys.argv[1:3]), []
for path in sys.argv[3:]:  # libraries take what they need with the first
    before, at_rest = taken(), resident("VmRSS:")
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    models.append(backend.load(open_checkpoint(path)))
    print(taken() - before, resident("VmHWM:") - at_rest)
    backend.runtime.to_numpy(models[-1].forward([[1, 2, 3]], 0, models[-1].make_cache(8)))
    gc.collect()
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="a process's own memory, through /proc and glibc"
)
def test_the_doctors_figure_is_what_a_process_takes(backend, tmp_path):
    """Its weights, within 3 % of what loading took by the system's own count. The peak of loading
    is the file's pages, and the weights in the backend's layout: no copy in 16 bits.
    """
    device = device_of(backend)
    if device == "gpu":
        pytest.skip(
            "the system counts no memory of a GPU; "
            "test_packed_weights_take_the_bytes_that_are_foretold does"
        )
    small, path = tmp_path / "small.gguf", tmp_path / "large.gguf"  # some 15 MB and 170 MB
    for file, layers, vocabulary in ((small, 1, 2048), (path, 3, 16384)):
        make_gguf(
            file,
            kinds="Q6_K",
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=layers,
            vocab_size=vocabulary,
            num_attention_heads=32,
            num_key_value_heads=8,
            tokenizer=None,
        )
    (fit,) = [fit for fit in diagnose(path).fits if fit.backend == backend.name]
    done = run_python(
        "-c",
        LOAD,
        backend.name,
        device,
        small,
        path,
        timeout=300,
        env=os.environ | {"MLX_LLAMA_CACHE_SIZE": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    taken, peak = map(int, done.stdout.split()[-2:])
    assert fit.weights_bytes == pytest.approx(taken, rel=0.03)
    assert taken < peak < 1.3 * (taken + path.stat().st_size)
