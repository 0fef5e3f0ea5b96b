"""Fixtures of core's tests."""

from __future__ import annotations

import os
import stat

import pytest
from machine import device_of

from cuda_fallback import facts as cuda
from mlx_llama.core.system import gpus


@pytest.fixture(params=[False, True])
def runs_ahead(request) -> bool:
    """Whether the toy backend works by itself, as a GPU does."""
    return request.param


@pytest.fixture(scope="session")
def where(backend) -> dict[str, str]:
    """Options of load: this backend, at float32."""
    return dict(backend=backend.name, device=device_of(backend), dtype="float32")


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """smi(script): a driver in sight, and a nvidia-smi that is this shell script."""

    def install(script):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text("#!/bin/sh\n" + script)
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(gpus, "has_gpu_driver", lambda: True)
        monkeypatch.setattr(cuda, "_torch_has_gpus", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install
