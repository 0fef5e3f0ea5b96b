"""The choice of `auto`, and errors for a backend that is not installed."""

from __future__ import annotations

import os
from unittest.mock import Mock

import pytest
from launching import run_python

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import BackendError


@pytest.mark.parametrize(
    "system, machine, metal, driver, cuda, wanted",
    [
        ("Darwin", "arm64", True, False, False, "mlx"),
        ("Darwin", "arm64", False, False, False, "cpu"),
        ("Darwin", "x86_64", True, False, False, "cpu"),
        ("Linux", "x86_64", True, True, True, "cuda"),
        ("Linux", "x86_64", True, True, False, "cpu"),
        ("Linux", "x86_64", True, False, True, "cpu"),
        ("Linux", "aarch64", False, True, True, "cuda"),
        ("Windows", "AMD64", False, True, True, "cuda"),
    ],
)
def test_auto(system, machine, metal, driver, cuda, wanted, monkeypatch):
    monkeypatch.setattr(backends.platform, "system", lambda: system)
    monkeypatch.setattr(backends.platform, "machine", lambda: machine)
    monkeypatch.setattr(backends, "has_gpu_driver", lambda: driver)
    monkeypatch.setattr(backends, "_has_gpu", {"mlx": metal, "cuda": cuda}.get)
    assert backends.auto() == wanted


@pytest.mark.parametrize("error", [ImportError("no libfoo.so"), OSError("[WinError 126]")])
def test_a_broken_installation_is_passed_over_by_auto_and_named_when_asked_for(
    error, monkeypatch, capsys
):
    monkeypatch.setattr(backends, "missing", lambda name: "")
    monkeypatch.setattr(backends, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(backends.platform, "system", lambda: "Linux")
    monkeypatch.setattr(backends.importlib, "import_module", Mock(side_effect=error))
    assert backends.auto() == "cpu" and str(error) in capsys.readouterr().err
    with pytest.raises(BackendError, match="does not import.*Reinstall"):
        backends.select("cuda")


def test_a_gpu_that_is_not_there(backend):
    if backend.runtime.has_gpu():
        pytest.skip("there is a GPU here")
    with pytest.raises(BackendError, match="no .*GPU"):
        backends.select(backend.name, "gpu")


@pytest.mark.parametrize("set_by_user, expected", [(None, "0"), ("1", "1")])
def test_mlx_keeps_float32_products_unless_the_user_says_otherwise(set_by_user, expected):
    """MLX reads MLX_ENABLE_TF32 at its first product: it stands once the device is picked, and no
    dtype changes it.
    """
    pytest.importorskip("mlx.core")
    code = """
import os
from mlx_llama.core.backends.selection import select
backend = select("mlx", "cpu")
setting = os.environ.get("MLX_ENABLE_TF32")
backend.runtime.pick_dtype("float32", "float32", backend.device)
print(setting, os.environ.get("MLX_ENABLE_TF32"))
"""
    environment = {name: value for name, value in os.environ.items() if name != "MLX_ENABLE_TF32"}
    environment |= {} if set_by_user is None else {"MLX_ENABLE_TF32": set_by_user}
    done = run_python("-c", code, env=environment)
    assert done.stdout.split() == [expected, expected], done.stderr
