"""The torch backend's memory: uploads, models and answers that do not fit, hidden waits."""

from __future__ import annotations

import sys
from unittest.mock import Mock

import numpy as np
import pytest
from machine import device_of, to_run
from making import make_checkpoint

from backends.conftest import EVERYTHING
from mlx_llama import load
from mlx_llama.core.errors import BackendError, OutOfMemoryError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import LoadOptions

torch = pytest.importorskip("torch")

from cuda_fallback import kernels, model, ops, runtime, weights

GPU = torch.device("cuda", 0)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=[name for name in to_run() if name.startswith("cuda")])
def device(request) -> str:
    return "gpu" if request.param.endswith("gpu") else "cpu"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (16,), (7, 33), (64, 64)], ids=str)
def test_an_upload_in_parts_equals_the_stored_tensor(shape, stored, kind, device):
    upload = weights.Upload(torch.device(device), nbytes=64)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    source = torch.from_numpy(values).to(stored)
    for _ in range(2):  # the second upload reuses the buffers
        target = torch.empty(shape, dtype=kind, device=device)
        upload(target, source)
        assert torch.equal(target.cpu(), source.to(kind))


def test_an_upload_goes_into_a_part_of_a_matrix():
    upload, target = weights.Upload(torch.device("cpu"), nbytes=32), torch.zeros(6, 10)
    upload(target[2:5], torch.arange(30).reshape(3, 10))
    assert target.reshape(-1).tolist() == [0] * 20 + list(range(30)) + [0] * 10


class Reached(Exception):
    pass


def test_a_model_that_does_not_fit_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m"))
    nbytes = 4 * sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
    free = nbytes
    monkeypatch.setattr(runtime, "free_memory", lambda device: free)
    monkeypatch.setattr(runtime, "device_name", lambda device: "a small card")
    # the first request to the GPU
    monkeypatch.setattr(kernels, "find_kernels", Mock(side_effect=Reached))
    with pytest.raises(Reached):
        model.Llama.load(checkpoint, LoadOptions(dtype="float32"), GPU)
    free -= 1
    with pytest.raises(OutOfMemoryError) as caught:
        model.Llama.load(checkpoint, LoadOptions(dtype="float32"), GPU)
    text = str(caught.value)
    assert f"take {nbytes / 1e9:.2f} GB" in text
    assert f"a small card has {free / 1e9:.2f} GB free" in text
    assert "quantize" in text and "\n" not in text
    with pytest.raises(Reached):
        model.Llama.load(checkpoint, LoadOptions(dtype="float16"), GPU)  # half as large


def test_a_low_bit_model_is_judged_by_its_own_size(guide_q8, monkeypatch):
    checkpoint = open_checkpoint(guide_q8)
    monkeypatch.setattr(runtime, "device_name", lambda device: "a small card")
    monkeypatch.setattr(runtime, "free_memory", lambda device: 0.9 * checkpoint.nbytes)
    with pytest.raises(OutOfMemoryError, match="GB free"):
        weights.Weights(checkpoint, "float16", GPU)
    monkeypatch.setattr(runtime, "free_memory", lambda device: 1.1 * checkpoint.nbytes)
    assert weights.Weights(checkpoint, "float16", GPU).nbytes <= checkpoint.nbytes


def test_a_card_too_old_for_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Turing")
    assert runtime.pick_dtype("auto", "bfloat16", GPU) == torch.float16
    assert runtime.pick_dtype("auto", "bfloat16", GPU, exceeds_float16=True) == torch.float32
    assert runtime.pick_dtype("float32", "bfloat16", GPU) == torch.float32
    with pytest.raises(BackendError, match="Turing has no bfloat16: use `dtype='float16'`"):
        runtime.pick_dtype("bfloat16", "float16", GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert runtime.pick_dtype("auto", "bfloat16", GPU) == torch.bfloat16
    assert runtime.pick_dtype("auto", "bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize(
    "capability, expected, notices",
    [
        ((8, 9), torch.bfloat16, ()),
        ((7, 5), torch.float16, ("a card has no bfloat16: computing in float16",)),
    ],
)
def test_a_low_bit_gguf_model_computes_in_bfloat16_where_the_card_has_it(
    capability, expected, notices, guide_q8, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(runtime, "device_name", lambda device: "a card")
    monkeypatch.setattr(runtime, "free_memory", lambda device: None)
    made = weights.Weights(open_checkpoint(guide_q8), "auto", GPU)
    assert (made.dtype, made.notices) == (expected, notices)


BY_GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
BY_CPU = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you"
MESSAGES = [torch.OutOfMemoryError(BY_GPU), RuntimeError(BY_CPU)]


@pytest.mark.parametrize("error", [*MESSAGES, MemoryError()], ids=["gpu", "cpu", "numpy"])
@pytest.mark.parametrize("name", ["toy", "guide_q8"])
def test_out_of_memory_while_loading_is_the_same_error(name, error, device, request, monkeypatch):
    """Fail at the fifth tensor, plain or packed."""
    path, count = request.getfixturevalue(name), 0

    def failing(original):
        def wrapped(*args, **named):
            nonlocal count
            count += 1
            if count == 5:
                raise error
            return original(*args, **named)

        return wrapped

    monkeypatch.setattr(weights, "_mapped", failing(weights._mapped))
    monkeypatch.setattr(weights.QuantizedMatrix, "pack", failing(weights.QuantizedMatrix.pack))
    said = "^the weights take 0.00 GB, and .* does not give that much memory"
    with pytest.raises(OutOfMemoryError, match=said) as caught:
        load(path, backend="cuda", device=device)
    assert "\n" not in str(caught.value) and count == 5
    # the memory was freed
    assert load(path, backend="cuda", device=device).generate("a", max_tokens=1).tokens


def test_a_tied_head_is_read_once(device, tmp_path):
    checkpoint = open_checkpoint(
        make_checkpoint(tmp_path / "m", dtype="float16", tie_word_embeddings=True)
    )
    llama = load(tmp_path / "m", backend="cuda", device=device, dtype="float32").model
    assert llama.decoder.head.weight is llama.decoder.embedding.weight
    assert llama.decoder.head.weight.dtype == torch.float32
    loaded = weights.Weights(checkpoint, "float16", llama.device)
    name = "model.embed_tokens"
    assert loaded.linear([name]).weight is loaded.embedding(name).weight
    assert loaded.norm(None) is None


@pytest.mark.parametrize("error", MESSAGES, ids=["gpu", "cpu"])
def test_out_of_memory_ends_an_answer_and_leaves_the_session(error, device, toy, monkeypatch):
    """Fail from each product of a short answer on: one clear error, and a retry gives the right
    answer.
    """
    llm = load(toy, backend="cuda", device=device, dtype="float32", compile=False)
    wanted = [llm.chat().send(text, max_tokens=4, temperature=0).tokens for text in ("one", "two")]
    chat, calls, failing = llm.chat(), 0, 0
    for words in {ops, sys.modules.get("cuda_fallback.kernels.ops", ops)}:  # prompts' and steps'

        def norm(*args, original=words.add_rms_norm):
            nonlocal calls
            calls += 1
            if calls >= failing:
                raise error
            return original(*args)

        monkeypatch.setattr(words, "add_rms_norm", norm)
    failed, limit = 0, 60
    while failing < limit:
        failing += 3
        chat.clear()
        calls = 0
        try:
            assert chat.send("one", max_tokens=4, temperature=0).tokens == wanted[0]
            break
        except BackendError as caught:
            assert "is out of memory (" in str(caught) and "the conversation is kept" in str(caught)
            assert "\n" not in str(caught)
            failed += 1
        chat.clear()
        calls = -limit  # memory is there again
        assert chat.send("two", max_tokens=4, temperature=0).tokens == wanted[1]
    assert failed >= 4 and failing < limit


@pytest.mark.parametrize("owner, name", [(weights, "_mapped"), (ops, "embed")])
def test_other_errors_are_not_taken_for_it(owner, name, device, toy, monkeypatch):
    """While loading, and in an answer."""
    broken = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    monkeypatch.setattr(owner, name, Mock(side_effect=broken))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        load(toy, backend="cuda", device=device, dtype="float32").generate("a", max_tokens=1)


def test_nothing_waits_in_secret(device, toy):
    """In torch's sync debug mode every wait for the GPU, except reading a token, raises."""
    if device == "cpu":
        pytest.skip("torch computes at once on the CPU: there is nothing to wait for")
    for options in (dict(temperature=0), EVERYTHING):
        for compile in (True, False):
            llm = load(toy, backend="cuda", device="gpu", compile=compile)
            chat = llm.chat(**options)
            chat.send("kernels are compiled and steps captured", max_tokens=4)
            torch.cuda.set_sync_debug_mode("error")
            try:
                done = chat.send("and now", max_tokens=20)
                with pytest.raises(RuntimeError):  # the mode is on
                    torch.ones(1, device="cuda").item()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert done.tokens


@pytest.mark.parametrize("compile", [None, False])
def test_notices_tell_how_tokens_are_decoded(compile, device, toy):
    llm = load(toy, backend="cuda", device=device, compile=compile)
    notices = llm.generate(llm.encode("a"), max_tokens=6).notices
    assert device_of(llm.backend) == device
    if device == "cpu":
        assert notices == []
    elif compile is None:
        assert any("captured as a CUDA graph in" in notice for notice in notices)
    else:
        assert notices == ["decoding is not captured: `compile=False` asks for it"]


@pytest.mark.parametrize(
    "capability, built, wanted",
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((6, 1), ["sm_75", "sm_80", "compute_90"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_a_card_that_torch_was_not_built_for_is_not_chosen(capability, built, wanted, monkeypatch):
    for name, value in (
        ("is_available", True),
        ("current_device", 0),
        ("get_device_capability", capability),
        ("get_arch_list", built),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert runtime.has_gpu() is wanted
