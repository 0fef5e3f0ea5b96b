"""The backends as described without a framework, against the backends themselves."""

from __future__ import annotations

import pytest
import torch

from cpu_fallback.kernels import find_target
from mlx_llama.core.backends import selection as backends
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.system.machine import Gpus
from mlx_llama.doctor import diagnose as doctor


def test_it_agrees_with_the_backends_here():
    stock = doctor.take_stock(Gpus())
    facts = {entry.name: entry for entry in stock}
    assert doctor.predict_auto(stock) == backends.auto()
    for name, entry in facts.items():
        assert entry.available == (not backends.missing(name))
        if entry.available and entry.gpu is not None:
            runtime = backends.select(name, "gpu" if entry.gpu else "cpu").runtime
            assert runtime.has_gpu() is entry.gpu
    assert facts["cuda"].packages["torch"] == torch.__version__

    target, _ = find_target()
    assert facts["cpu"].kernels == (target and target.name)


def test_a_missing_package_comes_with_its_command(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("MLX_LLAMA_CPU_TARGET", "numpy")
    facts = {entry.name: entry for entry in doctor.take_stock(Gpus())}
    assert not facts["mlx"].available and "pip install mlx" in facts["mlx"].reason
    assert not facts["cuda"].available and "pip install torch" in facts["cuda"].reason


@pytest.mark.parametrize(
    "system, machine, mlx, cuda, expected",
    [
        ("Darwin", "arm64", True, False, "mlx"),
        ("Darwin", "arm64", False, False, "cpu"),
        ("Darwin", "x86_64", True, False, "cpu"),
        ("Linux", "x86_64", True, True, "cuda"),
        ("Linux", "x86_64", True, None, "cuda"),
        ("Linux", "x86_64", True, False, "cpu"),
    ],
)
def test_auto_is_predicted(system, machine, mlx, cuda, expected, monkeypatch):
    """As backends.auto() chooses, where a GPU that is unknown is one."""
    monkeypatch.setattr(doctor.platform, "system", lambda: system)
    monkeypatch.setattr(doctor.platform, "machine", lambda: machine)
    stock = [
        BackendFacts("mlx", mlx, "", {}),
        BackendFacts("cpu", True, "", {}),
        BackendFacts("cuda", True, "", {}, cuda),
    ]
    assert doctor.predict_auto(stock) == expected
