"""A model against the memory of backends: what is said to fit does fit, and the command runs within
it.
"""

from __future__ import annotations

import os

import pytest
from cases.diagnosis import fit, messages_of
from making import make_checkpoint

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.backends.positions import CHUNK, SLACK
from mlx_llama.core.errors import ContextError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import CHECKPOINTS
from mlx_llama.core.system import machine
from mlx_llama.doctor.command import next_command
from mlx_llama.doctor.diagnose import diagnose
from mlx_llama.doctor.diagnosis import Diagnosis, fit_backends


def test_the_longest_context_is_bounded_by_memory_and_by_the_model(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=100_000)
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 30)
    diagnosis = diagnose(folder)
    cpu = fit(diagnosis, "cpu")
    per_position = cpu.cache_bytes_per_token
    # keys and values twice, while they move into larger storage
    needed = cpu.weights_bytes + 2 * per_position * cpu.longest_context
    assert needed <= 1 << 30 or cpu.longest_context == 100_000
    monkeypatch.setattr(machine, "free_memory", lambda: 30 << 20)
    cpu = fit(diagnose(folder), "cpu")
    assert cpu.longest_context < 100_000
    assert cpu.weights_bytes + 2 * per_position * cpu.longest_context <= 30 << 20
    assert cpu.weights_bytes + 2 * per_position * (cpu.longest_context + 1) > 30 << 20
    monkeypatch.setattr(machine, "free_memory", lambda: None)
    diagnosis = diagnose(folder)
    assert diagnosis.ok and fit(diagnosis, "cpu").longest_context is None
    assert fit(diagnosis, "cpu").fits is None


def test_a_context_that_memory_is_said_to_hold_is_held(tmp_path, monkeypatch):
    """The cpu's cache grows to the longest context; free memory shrinks by the bytes that it
    holds.
    """
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=100_000)
    monkeypatch.setattr(machine, "free_memory", lambda: 30 << 20)
    cpu = fit(diagnose(folder), "cpu")
    model = backends.select("cpu").load(open_checkpoint(folder))
    filled = model.make_cache(cpu.longest_context)
    free = lambda: (30 << 20) - cpu.weights_bytes - filled.nbytes  # noqa: E731
    monkeypatch.setattr(machine, "free_memory", free)
    while filled.length < cpu.longest_context:
        count = min(4096, cpu.longest_context - filled.length)
        filled.reserve({0: filled.length + count})  # raises ContextError where it does not fit
        filled.lengths[0] += count
    filled = model.make_cache(4 * cpu.longest_context)
    with pytest.raises(ContextError, match="of memory are free"):
        filled.check_memory({0: 4 * cpu.longest_context})


def test_recurrent_states_and_their_checkpoints_take_room(tmp_path, monkeypatch):
    fields = dict(architectures=["Lfm2ForCausalLM"], model_type="lfm2", full_attn_idxs=[1])
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=1 << 20, **fields)
    monkeypatch.setattr(machine, "free_memory", lambda: 8 << 20)
    diagnosis = diagnose(folder)
    state = 4 * 2 * 64  # a layer's last two inputs
    assert diagnosis.model["state_bytes"] == state
    cpu = fit(diagnosis, "cpu")
    room = (8 << 20) - cpu.weights_bytes - (2 + CHECKPOINTS) * state
    assert cpu.longest_context == room // (2 * cpu.cache_bytes_per_token)


def test_layers_with_a_window_take_room_for_it(tmp_path, monkeypatch):
    fields = dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=1 << 20, **fields)
    for nbytes in (8 << 20, 2 << 20):
        monkeypatch.setattr(machine, "free_memory", lambda: nbytes)
        cpu = fit(diagnose(folder), "cpu")
        room = nbytes - cpu.weights_bytes
        enough = (64 + SLACK + CHUNK + 64) * cpu.cache_bytes_per_token
        least = room // (2 * cpu.cache_bytes_per_token)
        assert cpu.longest_context == (1 << 20 if room > enough else least)


def test_tokens_of_many_conversations_and_8_bits(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=100_000)
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 30)
    wide, narrow = (fit(diagnose(folder, cache_bits=bits), "cpu") for bits in (None, 8))
    assert (wide.cache_bits, narrow.cache_bits) == (None, 8)
    for fit_of in (wide, narrow):
        room = (1 << 30) - fit_of.weights_bytes
        used = fit_of.tokens * fit_of.cache_bytes_per_token
        assert used <= room // 2 < used + fit_of.cache_bytes_per_token
        assert fit_of.longest_with_8_bits == narrow.longest_context
    # 16 codes and a float16, not 16 float32
    assert narrow.tokens * 18 // 64 == pytest.approx(wide.tokens, rel=1e-3)
    monkeypatch.setattr(machine, "free_memory", lambda: None)
    assert (fit_of := fit(diagnose(folder), "cpu")).tokens is None
    assert fit_of.longest_with_8_bits is None


@pytest.mark.skipif(os.name == "nt", reason="a shell script stands in for nvidia-smi")
def test_a_model_too_large_for_the_gpu_goes_to_the_cpu(smi, tmp_path):
    smi('echo "Tiny, 0, 8.6"')
    diagnosis = diagnose(make_checkpoint(tmp_path / "m"))
    assert diagnosis.ok and diagnosis.auto == "cuda" and fit(diagnosis, "cuda").fits is False
    assert diagnosis.command.options["backend"] != "cuda"
    notes = " ".join(messages_of(diagnosis, "note"))
    assert "chooses cuda, whose memory is too small" in notes


@pytest.mark.parametrize(
    "memory, auto, expected",
    [
        ("mlx 30 cpu 30 cuda 30", "cuda", "chat --model toy"),
        ("mlx 30 cpu 20 cuda 10", "cuda", "chat --model toy --backend mlx"),
        ("mlx None cpu 10 cuda 10", "cpu", "chat --model toy --backend mlx"),
        ("mlx 10 cpu 10 cuda 30", "cpu", "chat --model toy --backend cuda --device cpu"),
        ("cuda 30 cpu 10 mlx 30", "cpu", "chat --model toy --backend mlx"),
        ("mlx 10 cpu 10 cuda 10", "cpu", None),
    ],
)
def test_the_command_takes_a_backend_with_room(memory, auto, expected, toy):
    """memory: the binary logarithm of the bytes of each backend, in order."""
    words, facts = iter(memory.split()), []
    for name, bits in zip(words, words):
        options = (("device", "cpu"),) if name == "cuda" and auto != "cuda" else ()
        nbytes = None if bits == "None" else 1 << int(bits)
        facts.append(BackendFacts(name, True, "", {}, options=options, memory_bytes=nbytes))
    diagnosis = Diagnosis({}, facts, auto, "toy", template={"name": "any"})
    fit_backends(diagnosis, open_checkpoint(toy), None, None, False)
    assert next_command(diagnosis) == (expected and f"python -m mlx_llama.{expected}")
    assert diagnosis.ok is (expected is not None)
    assert bool(messages_of(diagnosis, "note")) is ("--backend" in (expected or ""))


def test_a_backend_that_is_not_available_has_no_fit(toy):
    diagnosis = Diagnosis({}, [BackendFacts("cpu", False, "why", {})], "cpu", "toy")
    fit_backends(diagnosis, open_checkpoint(toy), None, None, False)
    assert diagnosis.fits == []
    assert "no backend can be used here" in messages_of(diagnosis, "error")[0]
