"""A prompt of 16 384 tokens: memory is linear in its length."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from launching import run_python
from machine import device_of
from making import make_checkpoint
from transformers import AutoModelForCausalLM

from backends.conftest import relative_rms
from mlx_llama.core.files.checkpoint import open_checkpoint

LENGTH = 16_384
# bytes; the scores of all pairs of positions would take 4.3 GB, half of it behind a causal mask
BUDGET = 260e6
CODE = """
import sys, time
import numpy as np
from mlx_llama.core.generation import options
from mlx_llama.core.system import machine
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.engine.request import Request
from mlx_llama.core.engine.loop import Loop

folder, name, device, length = *sys.argv[1:4], int(sys.argv[4])
backend = select(name, device)
model = backend.load(open_checkpoint(folder))
tokens = np.random.default_rng(0).integers(0, 384, length).tolist()

def answer(prompt):
    resolved = options.resolve({"max_tokens": 2, "temperature": 0.0})
    loop = Loop(backend, model, None, frozenset(), 20_000)
    return list(loop.submit(Request(prompt, resolved, wants_text=False)).tokens())

answer(tokens[:600])
before = max(machine.peak_memory(), 0 if device == "cpu" else backend.runtime.peak_memory(backend.device))
print(*answer(tokens))
after = max(machine.peak_memory(), 0 if device == "cpu" else backend.runtime.peak_memory(backend.device))
print(after - before)
"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("long") / "m",
        max_position_embeddings=20_000,
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=1,
    )


def test_memory_grows_with_the_length_only(backend, folder):
    done = run_python("-c", CODE, folder, backend.name, device_of(backend), LENGTH, timeout=300)
    assert done.returncode == 0, done.stderr
    answer, grown = done.stdout.splitlines()
    assert int(grown) < BUDGET
    assert answer == reference(str(folder))


@functools.cache
def reference(folder: str) -> str:
    """transformers' greedy answer to the same prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 384, LENGTH))[None]
    with torch.no_grad():
        answer = model.generate(tokens, max_new_tokens=2, do_sample=False, eos_token_id=None)[
            0, LENGTH:
        ]
    return " ".join(map(str, answer.tolist()))


def test_angles_far_in_a_prompt_are_not_rounded_to_the_activations_width(backend, tmp_path):
    """In bfloat16 position 16,000 would be 16,000 or 16,064, and an angle some turns off."""
    if backend.name == "cpu":
        pytest.skip("the cpu backend computes in float32")
    folder = make_checkpoint(
        tmp_path / "m",
        dtype="bfloat16",
        max_position_embeddings=32_768,
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    start, count, step = 16_001, 8, 500
    tokens = np.random.default_rng(0).integers(3, 384, start + count).tolist()
    logits, probes = [], {}
    for dtype in ("bfloat16", "float32"):
        model = backend.load(open_checkpoint(folder), dtype)
        cache = model.make_cache(start + count)
        for first in range(0, start, step):
            model.forward([tokens[first : min(first + step, start)]], first, cache)

        def listen(name, x, dtype=dtype):
            probes[dtype, name] = backend.runtime.to_numpy(x).astype(np.float32)

        out = model.forward([tokens[start:]], start, cache, all_positions=True, probe=listen)
        logits.append(backend.runtime.to_numpy(out).astype(np.float32))
    half = np.arange(32)
    angles = np.arange(start, start + count)[:, None] * 10000.0 ** (-half / 32)  # float64
    cosines, sines = np.cos(angles), np.sin(angles)
    for dtype, tolerance in (("bfloat16", 2**-6), ("float32", 2e-3)):
        query = probes[dtype, "0.query"]
        first, second = query[..., :32], query[..., 32:]
        wanted = [first * cosines - second * sines, second * cosines + first * sines]
        wanted = np.concatenate(wanted, axis=-1)
        error = np.abs(probes[dtype, "0.query_rope"] - wanted).max()
        assert error < tolerance * np.abs(wanted).max()
    assert relative_rms(*logits) < 0.03
