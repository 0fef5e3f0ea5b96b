"""Each backend's facts, read without its framework, against its behaviour."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from machine import device_of
from making_gguf import make_gguf

from cuda_fallback import facts as cuda
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.backends.selection import PACKAGES, import_facts
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.system import machine
from mlx_llama.core.system.gpus import Gpus
from mlx_llama.mlx_native import facts as mlx


@pytest.mark.parametrize("name", PACKAGES)
def test_facts_import_no_framework(name):
    code = f"import sys; import {PACKAGES[name]}.facts; print(sorted({{'mlx.core', 'torch', 'triton'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K", "Q6_K"])
def test_packed_weights_take_the_bytes_that_are_foretold(kind, backend, tmp_path):
    """Planned bytes are within 5 % of a loaded model's; the cpu's estimate is a peak."""
    path = tmp_path / "m.gguf"
    make_gguf(path, kinds=kind, hidden_size=512, intermediate_size=1024, vocab_size=4096, head_dim=64,
              num_attention_heads=8)
    on_gpu = device_of(backend) == "gpu"
    checkpoint, facts = open_checkpoint(path), import_facts(backend.name)
    estimate = facts.weights_nbytes(checkpoint.tensors.values(), checkpoint.dtype, on_gpu)
    before = 0
    if backend.name == "mlx":
        import mlx.core as mx

        gc.collect()  # free models of other tests
        before = mx.get_active_memory()
    model = backend.load(checkpoint)
    if backend.name == "mlx":
        held = mx.get_active_memory() - before
    elif backend.name == "cuda":
        held = sum(_torch_bytes(value, set()) for value in (model.embedding, model.blocks, model.norm, model.head))
    else:
        matrices = [model.head.weight]
        for block in model.blocks:
            matrices += [*block.attention.qkv.weight, block.attention.out.weight, *block.mlp.gate_up.weight, block.mlp.down.weight]
        assert sum(part.nbytes for part in matrices) <= estimate
        return
    assert 0.95 * estimate <= held <= 1.05 * estimate


def _torch_bytes(value, seen):
    """Bytes of all tensors that an object refers to."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(_torch_bytes(one, seen) for one in value)
    inner = getattr(value, "__dict__", {}) if type(value).__module__.startswith("cuda_fallback") else {}
    return sum(_torch_bytes(one, seen) for one in inner.values())


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_the_plan_names_the_dtypes_of_the_model(kind, backend, tmp_path):
    """The dtypes of activations and of low-bit products, which is that of the scales in MLX."""
    path = tmp_path / "m.gguf"
    make_gguf(path, kinds=kind, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    checkpoint, on_gpu = open_checkpoint(path), device_of(backend) == "gpu"
    facts = BackendFacts(backend.name, True, "", {}, on_gpu, kernels="some")
    plan = import_facts(backend.name).plan_weights(checkpoint.tensors.values(), checkpoint.dtype, facts)
    model = backend.load(checkpoint)
    assert plan.dtype == backend.runtime.dtype_name(model.dtype)
    if backend.name == "mlx":
        scales = model.embedding.weight.scalings[0][0]
        assert plan.low_bit_operand == backend.runtime.dtype_name(scales.dtype)


def test_a_gpu_without_bfloat16_computes_in_float16(toy):
    old, new = (BackendFacts("cuda", True, "", {}, True, has_bfloat16=has) for has in (False, True))
    assert [cuda.plan_weights([], "bfloat16", facts).dtype for facts in (old, new)] == ["float16", "bfloat16"]


def test_torch_without_cuda_is_told_from_its_version_file(tmp_path, monkeypatch):
    assert cuda._torch_has_gpus() is (torch.version.cuda is not None or torch.version.hip is not None)
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text("")
    for text, expected in (("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
                           ("cuda = None\nhip = '6.4'\n", True), ("cuda: Optional[str] = None\n", False),
                           ("x = 1", True)):
        (fake / "version.py").write_text(text)
        spec = cuda.importlib.util.spec_from_file_location("torch", fake / "__init__.py")
        monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: spec)
        assert cuda._torch_has_gpus() is expected


@pytest.mark.parametrize("limit, total, expected", [
    ("0", 16, 16 * 2 / 3), ("0", 64, 48), ("20480", 32, 20), ("", 8, 16 / 3)])
def test_metals_share_of_a_macs_memory(limit, total, expected, monkeypatch):
    answers = {"iogpu.wired_limit_mb": limit}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total << 30))
    monkeypatch.setattr(mlx.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(mlx.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda command, **kw: subprocess.CompletedProcess(
        command, 0, answers[command[-1]] + "\n", ""))
    described = mlx.describe({}, Gpus())
    assert described.gpu is True and described.memory_is == "an estimate"
    assert described.memory_bytes == pytest.approx(expected * (1 << 30), rel=1e-6)
