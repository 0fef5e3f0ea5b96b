"""Every word of every backend's vocabulary against NumPy's, call by call of a forward.

NumPy records the inputs and results of each call. Another backend then runs the same forward over
its own weights and cache, but each word gets NumPy's inputs. The words of compiled programs have no
arrays before they run, so these are compared at the probes between them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from cases.mirror import members
from making import make_checkpoint
from making_adapters import write_random

from backends import test_architectures as families
from backends.conftest import probes, relative_error
from mlx_llama.core.backends.selection import Backend, select
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint
from mlx_llama.core.ops import Ops
from mlx_llama.core.options import resolve

torch = pytest.importorskip("torch")

from backends.triton_process import DEVICE_NAME, call, computing  # noqa: F401

ADAPTED = "a LoRA adapter"
CASES = "Gemma 2", "OLMo 2", "Hunyuan", "Apertus", "gpt-oss", "Granite 3", "Qwen2-MoE", ADAPTED
CASES += "LFM2", "Qwen3.5", "Gemma 4 E4B", "Gemma 4 26B-A4B"
TOKENS = np.random.default_rng(3).integers(3, 300, (1, 9)).astype(np.int32)
# {word: its first arguments that are activations}; others have one
ACTIVATIONS = {"embed": 0, "add": 2, "add_rms_norm": 2, "experts": 2, "adapt": 2}
ACTIVATIONS |= {"gate_output": 2}
Calls = list[tuple[str, list, list]]  # (word, inputs, results)


class Words:
    """`ops` whose calls go to listen(word, function, arguments)."""

    def __init__(self, ops, listen):
        self.ops, self.listen = ops, listen

    def __getattr__(self, word):
        function = getattr(self.ops, word)
        return lambda *arguments: self.listen(word, function, arguments)


def make(case: str) -> tuple[Path, list[Path]]:
    """(the model, its adapters)."""
    if case != ADAPTED:
        return families.made(case)[0], []
    folder = Path(tempfile.mkdtemp())
    base = make_checkpoint(folder / "base")
    return base, [write_random(base, folder / "adapter")]


def flatten(result) -> list:
    return list(result) if isinstance(result, tuple) else [result]


def run(backend: Backend, model) -> None:
    """A prompt, a step and a prompt with probes."""
    cache, sampling = model.make_cache(20), backend.sampling_batch([resolve({}).options])
    model.forward(TOKENS[:, :5], 0, cache)
    model.step(TOKENS[:, 5:6], 5, cache, sampling)
    model.forward(TOKENS[:, 6:], 6, cache, probe=lambda name, array: None)


def record(checkpoint: Checkpoint) -> Calls:
    backend, calls = select("cpu"), []
    model = backend.load(checkpoint, "float32", compile=False)

    def listen(word, function, arguments):
        count = ACTIVATIONS.get(word, 1)
        inputs = [x if x is None else np.array(x) for x in arguments[:count]]
        result = function(*arguments)
        calls.append((word, inputs, [np.array(x) for x in flatten(result)]))
        return result

    model.decoder = model.decoder.over(Words(model.ops, listen))
    run(backend, model)
    return calls


def replay(backend: Backend, checkpoint: Checkpoint, calls: Calls) -> set[str]:
    """Run the same words on the backend, each with NumPy's inputs; returns those by kernels."""
    to_numpy, waiting, by_kernels = backend.runtime.to_numpy, list(calls), set()
    convert = torch.from_numpy if backend.name == "cuda" else __import__("mlx.core").core.array
    model = backend.load(checkpoint, "float32")

    def listen(word, function, arguments):
        recorded, inputs, expected = waiting.pop(0)
        assert word == recorded
        same = [x if x is None else convert(x).reshape(a.shape) for x, a in zip(inputs, arguments)]
        result = function(*same, *arguments[len(same) :])
        for array, wanted in zip(flatten(result), expected, strict=True):
            if wanted.size:  # a layer may read another's keys and values, and has none
                assert relative_error(to_numpy(array).ravel(), wanted.ravel()) < 1e-5, word
        if function.__module__.startswith("cuda_fallback.kernels"):
            by_kernels.add(word)
        return result

    model.decoder = model.decoder.over(Words(model.ops, listen))
    if backend.name == "cuda" and model.runner:
        words = model.runner.compute.ops
        model.runner.compute = model.runner.compute.over(Words(words, listen))
    run(backend, model)
    assert not waiting
    return by_kernels


def replay_by_kernels(path: Path, adapters: list[Path], calls: Calls) -> set[str]:
    """In Triton's process."""
    with computing(by_kernels=True):
        return replay(select("cuda", DEVICE_NAME), open_checkpoint(path, adapters=adapters), calls)


def test_all_words_are_numpys(backend, request):
    """CUDA's are also compared where Triton's kernels compute them."""
    words = set()
    for case in CASES:
        path, adapters = make(case)
        checkpoint = open_checkpoint(path, adapters=adapters)
        calls = record(checkpoint)
        words |= {word for word, *_ in calls}
        if backend.name != "cpu":
            assert not replay(backend, checkpoint, calls)
            continue
        compiled, plain = (backend.load(checkpoint, "float32", compile=c) for c in (True, False))
        for tokens in (TOKENS, TOKENS[:, :1]):
            expected = probes(plain, backend.runtime.to_numpy, tokens)
            for name, array in probes(compiled, backend.runtime.to_numpy, tokens).items():
                # the delta rule sums differences of sums
                tolerance = 5e-5 if case == "Qwen3.5" else 1e-5
                assert relative_error(array, expected[name]) < tolerance, (case, name)
    assert words == set(members(Ops))


@pytest.mark.slow
def test_all_words_by_kernels_are_numpys(call):
    by_kernels = set()
    for case in CASES:
        path, adapters = make(case)
        calls = record(open_checkpoint(path, adapters=adapters))
        by_kernels |= call(replay_by_kernels, path, adapters, calls)
    kernels = "linear gated_linear gate xielu experts adapt add_rms_norm rms_norm norm_heads"
    kernels += " short_conv gated_delta gate_output rope_and_store attend layer_inputs gate_input"
    assert by_kernels == {*kernels.split()}
