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

LENGTH = 16_384
# bytes; the scores of all pairs of positions would take 4.3 GB, half of it behind a causal mask
BUDGET = 260e6
CODE = """
import sys, time
import numpy as np
from mlx_llama.core import options
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


@pytest.mark.slow
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
