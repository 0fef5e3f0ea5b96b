"""Fixtures of core's tests."""

from __future__ import annotations

import os
import stat

import pytest

from cuda_fallback import facts as cuda
from mlx_llama.core.system import gpus


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
