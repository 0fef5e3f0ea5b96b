"""The three backends implement one interface, and have the same errors."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from cases.mirror import members
from machine import ALL, missing, open_backend

from mlx_llama.core import ops, options
from mlx_llama.core.backends import interface
from mlx_llama.core.backends.weights import BaseWeights
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.ops import Ops
from mlx_llama.core.sample import Words

NAMES = ("mlx", "cpu", "cuda")


def parameters(function) -> list[tuple]:
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


@pytest.mark.parametrize(
    "file, protocol", [("runtime", interface.Runtime), ("facts", interface.Facts)]
)
def test_the_modules_are_implemented(backend, file, protocol):
    """Functions have the names, parameters and defaults of their Protocols; constants are there."""
    module = importlib.import_module(f"{backend.model.__package__}.{file}")
    assert len(members(protocol)) >= 3
    for name, wanted in members(protocol).items():
        assert parameters(getattr(module, name)) == parameters(wanted), name
    assert all(hasattr(module, name) for name in protocol.__annotations__)


@pytest.mark.parametrize(
    "file, name, protocol",
    [
        ("model", "Llama", interface.Model),
        ("cache", "Cache", interface.Cache),
        ("arrays", "SamplingBatch", interface.SamplingBatch),
        ("weights", "Weights", BaseWeights),
    ],
)
def test_the_classes_are_implemented(backend, file, name, protocol):
    """A base class leaves to them what it only annotates or does not implement."""
    real = getattr(importlib.import_module(f"{backend.model.__package__}.{file}"), name)
    assert real is not protocol
    of_instances = {"config", "device"}
    if backend.name == "mlx":
        of_instances |= {"_zeros", "_own"}  # its views share the states of several rows
    if not importlib.import_module(f"{backend.model.__package__}.facts").DROPS_POSITIONS:
        of_instances |= {"_slide", "_keep_windows", "_put_windows"}
    assert all(hasattr(real, member) for member in protocol.__annotations__.keys() - of_instances)
    for member, wanted in members(protocol).items():
        assert parameters(getattr(real, member)) == parameters(wanted), member
        assert "NotImplementedError" not in getattr(real, member).__code__.co_names, member


@pytest.mark.parametrize("kernels", ["", "kernels."])
def test_a_vocabulary_has_the_words_of_the_forward(backend, kernels):
    """With the number of parameters that core.ops gives them; by kernels, too."""
    if kernels and backend.name == "mlx":
        pytest.skip("mlx.compile traces the plain words")
    words = importlib.import_module(f"{backend.model.__package__}.{kernels}ops")
    for name, wanted in members(Ops).items():
        spoken = [default for _, _, default in parameters(getattr(words, name))]
        assert spoken == [default for _, _, default in parameters(wanted)], name


@pytest.mark.parametrize("kernels", ["", "kernels."])
def test_arrays_have_the_words_of_sampling_and_of_the_forward(backend, kernels):
    """By kernels, too, but for those that only SamplingBatch says."""
    if kernels and backend.name != "cuda":
        pytest.skip("kernels replace no word of sampling")
    package = backend.model.__package__
    words = importlib.import_module(f"{package}.kernels.decode" if kernels else f"{package}.arrays")
    words = words.words if kernels else words
    of_batches = {"scope", "launch", "send", "send_all"} if kernels else set()
    forward = set() if kernels else ops.Words.__annotations__.keys()
    assert all(hasattr(words, name) for name in Words.__annotations__.keys() - of_batches | forward)
    for name, wanted in members(Words).items():
        assert parameters(getattr(words, name)) == parameters(wanted), name


@pytest.mark.parametrize("name", ALL)
def test_the_backend_is_here(name):
    """Skip with the reason if a backend is missing; fail if it is required."""
    assert open_backend(name).name == name.split("-")[0]


# ---- the same behaviour


def refused(call) -> str:
    """The kind and text of the error that a call must raise."""
    with pytest.raises(LlamaError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def misuse(name: str, folder: Path) -> dict[str, str]:
    """A backend's errors, by kind of misuse."""
    backend = open_backend(name)
    checkpoint = open_checkpoint(folder)
    model = backend.load(checkpoint, "float32")
    sampling, cache = backend.sampling_batch([options.resolve({}).options] * 2), model.make_cache(8)
    several = model.make_cache(8, 3)
    model.forward([[1, 2, 3]], 0, cache)
    state = cache.state()
    other = {part: array[..., :8] if part != "tokens" else array for part, array in state.items()}
    calls = {
        "empty": lambda: model.forward([[]], 3, cache),
        "ragged": lambda: model.forward([[1], [2, 3]], 3, cache),
        "fractions": lambda: model.forward([[0.5]], 3, cache),
        "foreign": lambda: model.forward([[10**6]], 3, cache),
        "negative": lambda: model.forward([[-1]], 3, cache),
        "elsewhere": lambda: model.forward([[1]], 1, cache),
        "too long": lambda: model.forward([[1] * 6], 3, cache),
        "another batch": lambda: model.forward([[1], [2]], 3, cache),
        "no capacity": lambda: model.make_cache(0),
        "trim": lambda: cache.trim(4),
        "restore another": lambda: cache.restore(other),
        "restore more": lambda: model.make_cache(2).restore(state),
        "step of a batch": lambda: model.step([[1], [2]], 3, cache, sampling),
        "step elsewhere": lambda: model.step([[1]], 2, cache, sampling),
        "step foreign": lambda: model.step([[10**6]], 3, cache, sampling),
        "verify a batch": lambda: model.verify([[1], [2]], 3, cache, sampling),
        "verify too many": lambda: model.verify([[1] * 6], 3, cache, sampling),
        "no rows": lambda: model.make_cache(8, 0),
        "row beyond": lambda: model.forward([[1]], 0, several, rows=[3]),
        "row twice": lambda: model.forward([[1], [2]], 0, several, rows=[1, 1]),
        "rows and batch": lambda: model.step([[1], [2]], 0, several, sampling, rows=[1]),
        "positions and batch": lambda: model.step([[1], [2]], [0], several, sampling, rows=[1, 2]),
        "row elsewhere": lambda: model.step([[1], [2]], [0, 1], several, sampling, rows=[1, 2]),
        "trim a row": lambda: several.trim(1, 2),
        "copy too much": lambda: several.copy_prefix(0, 1, 1),
        "copy to itself": lambda: several.copy_prefix(1, 1, 0),
        "copy to nowhere": lambda: several.copy_prefix(1, 7, 0),
        "dtype": lambda: backend.load(checkpoint, "float8"),
        "threads": lambda: backend.load(
            checkpoint, threads="many" if name == "cpu" else None, dtype="int4"
        ),
    }
    messages = {case: refused(call) for case, call in calls.items()}
    assert cache.length == 3 and several.lengths == [0, 0, 0]  # unchanged
    return messages


def test_the_same_misuse_has_the_same_error(toy):
    mine, *others = [misuse(name, toy) for name in NAMES if not missing(name)]
    for other in others:
        assert other == mine


def test_the_same_choice_has_the_same_notice(toy):
    for name in NAMES:
        if missing(name):
            continue
        backend = open_backend(name)
        said = " ".join(backend.load(open_checkpoint(toy), compile=False).notices)
        assert "`compile=False` asks for it" in said or backend.device_name.startswith(
            "torch on the CPU"
        )
