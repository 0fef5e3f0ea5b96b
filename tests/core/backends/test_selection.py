"""Which backend `auto` takes, and what is said when one is not there."""

from __future__ import annotations

import pytest

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import BackendError


@pytest.mark.parametrize("system, machine, metal, driver, cuda, wanted", [
    ("Darwin", "arm64", True, False, False, "mlx"), ("Darwin", "arm64", False, False, False, "cpu"),
    ("Darwin", "x86_64", True, False, False, "cpu"), ("Linux", "x86_64", True, True, True, "cuda"),
    ("Linux", "x86_64", True, True, False, "cpu"), ("Linux", "x86_64", True, False, True, "cpu"),
    ("Linux", "aarch64", False, True, True, "cuda"), ("Windows", "AMD64", False, True, True, "cuda"),
])
def test_auto(system, machine, metal, driver, cuda, wanted, monkeypatch):
    monkeypatch.setattr(backends.platform, "system", lambda: system)
    monkeypatch.setattr(backends.platform, "machine", lambda: machine)
    monkeypatch.setattr(backends, "_gpu_driver", lambda: driver)
    monkeypatch.setattr(backends, "_has_gpu", {"mlx": metal, "cuda": cuda}.get)
    assert backends.auto() == wanted


@pytest.mark.parametrize("error", [ImportError("no libfoo.so"), OSError("[WinError 126]")])
def test_a_broken_installation_is_passed_over_by_auto_and_named_when_asked_for(error, monkeypatch, capsys):
    def broken(name):
        raise error

    monkeypatch.setattr(backends, "missing", lambda name: "")
    monkeypatch.setattr(backends, "_gpu_driver", lambda: True)
    monkeypatch.setattr(backends.platform, "system", lambda: "Linux")
    monkeypatch.setattr(backends.importlib, "import_module", broken)
    assert backends.auto() == "cpu" and str(error) in capsys.readouterr().err
    with pytest.raises(BackendError, match="does not import.*Reinstall"):
        backends.select("cuda")


def test_a_gpu_that_is_not_there(backend):
    if backend.runtime.has_gpu():
        pytest.skip("there is a GPU here")
    with pytest.raises(BackendError, match="no .*GPU"):
        backends.select(backend.name, "gpu")


@pytest.mark.parametrize("name, value", [("threads", 2), ("threads", "2"), ("activation_bits", 8), ("activation_bits", "16")])
def test_what_only_the_cpu_backend_takes(name, value, backend):
    if backend.name == "cpu":
        assert backend.load_options(**{name: value}) == {name: int(value)}
        return
    with pytest.raises(BackendError, match=f"{name} {value}: is for the cpu backend"):
        backend.load_options(**{name: value})


@pytest.mark.parametrize("name, value", [("threads", 0), ("threads", -1), ("threads", 1025), ("threads", "1.5"),
                                         ("threads", True), ("threads", "٣"), ("threads", 2.0), ("activation_bits", 4),
                                         ("activation_bits", ""), ("activation_bits", "all")])
def test_threads_and_activation_bits_that_are_none(name, value):
    with pytest.raises(BackendError, match="must be a whole number"):
        backends.select("cpu").load_options(**{name: value})
