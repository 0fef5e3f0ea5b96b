"""A decoded token costs one launch and one wait, counted at the framework's entry points."""

from __future__ import annotations

import importlib

import pytest
from machine import device_of

from backends.conftest import EVERYTHING
from backends.evaluations import counted, watch_events
from mlx_llama import load


def loaded(backend, toy, **how):
    if backend.name == "cpu":
        pytest.skip("NumPy computes at once: there is nothing to launch or wait for")
    device = device_of(backend)
    return load(toy, backend=backend.name, device=device, dtype="float32", **how)


@pytest.mark.slow_for("mlx-everything-True")
@pytest.mark.parametrize("compile", [None, True, False])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["greedy", "everything"])
def test_one_launch_and_one_wait_per_token(options, compile, toy, backend, monkeypatch):
    n = 20
    if compile and backend.name == "cuda" and device_of(backend) == "cpu":
        pytest.skip("CUDA graphs are for a GPU")
    llm = loaded(backend, toy, compile=compile)
    # the first use builds tables, and traces or captures steps
    llm.generate("A fox", max_tokens=4, **options)
    with counted(backend, monkeypatch) as count:
        completion = llm.generate("Once upon", max_tokens=n, **options)
    assert len(completion.tokens) == n
    assert count["wait"] == completion.waits == n
    assert completion.launches == n
    assert count["bytes"] == completion.read_bytes == 4 * n
    assert completion.receipt()["bytes_per_token"] == 4
    said = f"evaluations per token: 1 ({n} launched, {n} read, 4 bytes per token)"
    assert said in completion.summary()
    if backend.name == "mlx":
        assert count["launch"] == n


STRAYS = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if (x.sum() > 0) else 0,
    "tolist": lambda x: x.tolist(),
    "float": lambda x: float(x.sum()),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_wait_in_the_model_is_seen(stray, toy, backend, monkeypatch):
    """The counter above sees one hidden wait per layer."""
    on_gpu = backend.name == "cuda" and device_of(backend) == "gpu"
    llm = loaded(backend, toy, compile=False if on_gpu else None)  # a captured step runs no Python
    package = type(llm.model).__module__.removesuffix(".model")
    words = [importlib.import_module(f"{package}.ops")]
    if on_gpu:
        words.append(importlib.import_module(f"{package}.kernels.ops"))
    for ops in words:

        def leaky(x, *arguments, original=ops.add_rms_norm):
            STRAYS[stray](x)
            return original(x, *arguments)

        monkeypatch.setattr(ops, "add_rms_norm", leaky)
    with counted(backend, monkeypatch) as count:
        llm.generate("Once upon", max_tokens=5)
    assert count["wait"] >= 5 + 5 * 2


def test_the_next_step_is_launched_before_the_token_is_read(toy, backend, monkeypatch):
    if not backend.runs_ahead:
        pytest.skip(f"{backend.device_name} computes at once")
    llm, events = loaded(backend, toy), watch_events(backend, monkeypatch)
    llm.generate("Once upon", max_tokens=4)
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]
