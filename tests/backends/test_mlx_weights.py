"""MLX's weights: their bytes, matrices read once, and weights that do not fit memory."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from machine import open_backend
from making import fail_at, make_checkpoint
from making_gguf import make_gguf

from mlx_llama import load
from mlx_llama.core.errors import OutOfMemoryError
from mlx_llama.core.files.checkpoint import open_checkpoint

mx = pytest.importorskip("mlx.core")

from mlx_llama.mlx_native import runtime, weights
from mlx_llama.mlx_native.weights import Weights

SIZES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
MODELS = {
    "float32": dict(),
    "bfloat16": dict(dtype="bfloat16"),
    "tied": dict(tie_word_embeddings=True),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], head_dim=64),
    "Q4_0": dict(kinds="Q4_0"),
    "Q6_K": dict(kinds="Q6_K"),
    "mixed": dict(
        kinds=lambda name: {"q_proj": "F16", "down_proj": "Q6_K"}.get(name.split(".")[-2], "Q4_K")
    ),
}


@pytest.fixture(scope="module")
def mlx():
    return open_backend("mlx")


@pytest.fixture
def path(request, tmp_path):
    fields = MODELS[getattr(request, "param", "float32")]
    if "kinds" in fields:
        make_gguf(tmp_path / "m.gguf", tokenizer=None, **SIZES, **fields)
        return tmp_path / "m.gguf"
    return make_checkpoint(tmp_path / "m", **SIZES, **fields)


def make_weights(mlx, path, dtype="auto"):
    checkpoint = open_checkpoint(path)
    return Weights(
        checkpoint, mlx.runtime.pick_dtype(dtype, checkpoint.dtype, mlx.device), mlx.device
    )


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("path", MODELS, indirect=True)
def test_the_bytes_planned_are_those_that_mlx_allocates(path, dtype, mlx):
    """Against MLX's own count, which rounds arrays up to a fraction of a page."""
    planned = make_weights(mlx, path, dtype).nbytes
    gc.collect()
    # a freed buffer of an earlier test counts whole when a smaller array reuses it
    mx.clear_cache()
    before = mx.get_active_memory()
    model = mlx.load(open_checkpoint(path), dtype)
    assert planned <= mx.get_active_memory() - before < 1.02 * planned + 20000
    assert model.decoder.blocks


@pytest.mark.parametrize("path", MODELS, indirect=True)
def test_weights_that_do_not_fit_are_refused_before_any_is_read(path, mlx, monkeypatch):
    needed, read = make_weights(mlx, path).nbytes, []
    original = Weights._read
    monkeypatch.setattr(
        Weights, "_read", lambda self, *keys: (read.append(keys), original(self, *keys))[1]
    )
    monkeypatch.setattr(mlx.runtime, "free_memory", lambda device: needed - 1)
    with pytest.raises(
        OutOfMemoryError,
        match=r"the weights take 0\.0\d GB, and MLX on the CPU has 0\.0\d GB free: choose",
    ):
        mlx.load(open_checkpoint(path))
    assert not read
    for free in (needed, None):
        monkeypatch.setattr(mlx.runtime, "free_memory", lambda device: free)
        mlx.load(open_checkpoint(path))
    assert read


def test_memory_of_a_model_that_was_dropped_counts_as_free(path, mlx, monkeypatch):
    """A dropped model needs the garbage collector: it and its compiled steps refer to each
    other.
    """
    collect, free = gc.collect, [0]
    monkeypatch.setattr(
        gc, "collect", lambda *how: (free.__setitem__(0, 1 << 40), collect(*how))[1]
    )
    monkeypatch.setattr(mlx.runtime, "free_memory", lambda device: free[0])
    mlx.load(open_checkpoint(path))


def test_a_working_set_that_metal_recommends_is_no_limit(mlx, monkeypatch):
    gpu = mx.Device(mx.gpu)
    monkeypatch.setattr(mlx.runtime, "free_memory", lambda device: 20 << 30)
    for info, least in (
        ({"memory_size": 32 << 30, "max_recommended_working_set_size": 20 << 30}, 31 << 30),
        ({}, 20 << 30),
    ):
        monkeypatch.setattr(mx, "device_info", lambda device: info)
        assert least <= weights._free_memory(gpu) <= 32 << 30
        assert weights._free_memory(mlx.device) == 20 << 30
    monkeypatch.setattr(mlx.runtime, "free_memory", lambda device: None)
    assert weights._free_memory(gpu) is None


# as MLX 0.32 writes them in mlx/backend/metal/allocator.cpp, mlx/backend/cuda/allocator.cpp, and
# NumPy
FAILURES = [
    RuntimeError(
        "[metal::malloc] Attempting to allocate 9663676416 bytes which is greater than the "
        "maximum allowed "
        "buffer size of 8589934592 bytes."
    ),
    RuntimeError("[malloc_or_wait] Unable to allocate 9663676416 bytes."),
    RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
    MemoryError(
        "Unable to allocate 3.00 GiB for an array with shape (3221225472,) and data type uint8"
    ),
]


@pytest.mark.parametrize("failure", FAILURES, ids=str)
@pytest.mark.parametrize("at", [0, 5, 9])
def test_an_allocation_that_fails_while_loading(at, failure, path, toy, mlx, monkeypatch):
    original = Weights._dense
    monkeypatch.setattr(Weights, "_dense", fail_at(at + 1, failure)(original))
    with pytest.raises(
        OutOfMemoryError,
        match="the weights take .* GB, and MLX on the CPU does not give that much memory",
    ):
        mlx.load(open_checkpoint(path))
    monkeypatch.setattr(Weights, "_dense", fail_at(at + 1, failure)(original))
    with pytest.raises(OutOfMemoryError):
        load(toy, backend="mlx", device="cpu")


def test_other_errors_while_loading_are_unchanged(path, mlx, monkeypatch):
    for error in (
        RuntimeError("[eval] Attempting to eval an array during function transformations"),
        ValueError("malloc]"),
    ):
        monkeypatch.setattr(Weights, "_dense", Mock(side_effect=error))
        with pytest.raises(type(error)) as raised:
            mlx.load(open_checkpoint(path))
        assert raised.value is error


@pytest.mark.parametrize("path", ["tied", "Q4_0"], indirect=True)
def test_a_matrix_is_read_once(path, mlx):
    """The tied head shares the embedding's memory; a second request for a name gives the same
    arrays.
    """
    weights = make_weights(mlx, path)
    embedding, head = (
        weights.embedding("model.embed_tokens"),
        weights.linear(["model.embed_tokens"]),
    )
    again = weights.linear(["model.embed_tokens"])
    if hasattr(embedding.weight, "packed"):
        assert head.weight is again.weight is embedding.weight
        return
    addresses = [
        np.array(array, copy=False).ctypes.data
        for array in (embedding.weight, head.weight.columns, again.weight.columns)
    ]
    assert len(set(addresses)) == 1
    assert head.weight.shape == tuple(embedding.weight.shape)


# Metal's memory, by a stand-in


@pytest.mark.parametrize(
    "gigabytes, recommended, wanted", [(8, 5.3, 4), (16, 10.7, 8), (24, 16, 16), (64, 48, 48)]
)
def test_memory_is_wired_until_the_last_model_goes(gigabytes, recommended, wanted, monkeypatch):
    limits, gpu = [0], SimpleNamespace(type=mx.gpu)
    monkeypatch.setattr(runtime.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(
        runtime.mx,
        "device_info",
        lambda: {
            "memory_size": gigabytes << 30,
            "max_recommended_working_set_size": int(recommended * (1 << 30)),
        },
    )
    monkeypatch.setattr(
        runtime.mx, "set_wired_limit", lambda limit: (limits.append(limit), limits[-2])[1]
    )
    models = [set(), set()]
    for model in models:
        runtime.wire(model, gpu)
    assert limits[-1] == int(wanted * (1 << 30))
    runtime.wire(models[0], SimpleNamespace(type=mx.cpu))
    del model
    models.pop(0), gc.collect()
    assert limits[-1] == int(wanted * (1 << 30))  # the other one still runs
    models.pop(), gc.collect()
    assert limits[-1] == 0


def test_buffers_are_given_back_after_chunks_and_steps(tmp_path, monkeypatch):
    """mlx-lm does so after each chunk of a prompt and every 256 tokens."""
    llm = load(
        make_checkpoint(tmp_path / "m", max_position_embeddings=2048),
        backend="mlx",
        device="cpu",
        dtype="float32",
    )
    calls = []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(1))
    llm.generate(list(range(3, 303)), max_tokens=1, prefill_step_size=100)
    assert len(calls) == 3
    llm.generate(
        [7, 9], max_tokens=600, logit_bias=dict.fromkeys(llm.checkpoint.eos_token_ids, -1000)
    )
    assert len(calls) == 3 + 2
