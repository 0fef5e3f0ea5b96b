"""The promises on real checkpoints: company, chunks, prefixes, speculation, narrow keys and
activations, sessions, cache files.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from machine import device_of, open_backend, to_run

from mlx_llama import load
from mlx_llama.core.proofs.batches import compare_batches, make_prompts, promise_of
from mlx_llama.core.proofs.cache_ways import compare_ways
from mlx_llama.core.proofs.perplexity import measure_perplexity
from real.golden import read_golden
from real.texts import CHATS, GREEDY, LOGITS

TOLERANCE = 1e-4  # largest relative difference of a position's logits, keys or values at float32
README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
REPEAT = (
    "Repeat after me, word for word: the quick brown fox jumps over the lazy dog, and the lazy dog "
    "sleeps."
)


def test_rows_of_a_batch(name, open_real):
    """Rows at once, joining in turn, and from a prefix: the same tokens as alone, on cpu the same
    bits.
    """
    llm = open_real(name)
    rows = 32 if llm.model.is_batch_invariant else 6  # the others are slow without a GPU
    prompts = make_prompts(llm.encode(LOGITS[-1])[: rows + 8], rows, 64)
    for result in compare_batches(
        llm.backend, llm.model, prompts, promise_of(llm.model, "float32"), TOLERANCE, sizes=(rows,)
    ):
        assert result.is_kept, result.report()


def test_ways_to_fill_the_cache(name, open_real):
    """Chunks, single tokens, trims, prefixes, saved states: the logits of one call over all
    tokens.
    """
    llm = open_real(name)
    for way in compare_ways(
        llm, llm.encode(LOGITS[4])[: 48 if llm.model.is_batch_invariant else 16], TOLERANCE
    ):
        assert way.within and (way.same_bits or not llm.model.is_batch_invariant), way


def test_speculation(open_real):
    """Drafts from the prompt change no token, and some are accepted."""
    llm = open_real("smollm2")
    for text in (REPEAT, CHATS[0]):
        question = [{"role": "user", "content": text}]
        plain, guessed = (
            llm.generate(question, max_tokens=40, temperature=0.0, speculate=how)
            for how in ("none", "prompt")
        )
        assert guessed.tokens == plain.tokens and guessed.text == plain.text
        assert text != REPEAT or guessed.accepted > 2


def test_a_chat_goes_on_from_its_prefix(open_real):
    llm = open_real("smollm2")
    chat = llm.chat(max_tokens=24, temperature=0.0)
    first, second = chat.send(CHATS[0]), chat.send("And of Italy?")
    cold = load(
        llm.checkpoint.path,
        backend=llm.backend.name,
        device=device_of(llm.backend),
        dtype="float32",
    )
    assert "Paris" in first.text and second.reused_tokens > first.prompt_tokens
    assert cold.generate(chat.messages[:-1], max_tokens=24, temperature=0.0).tokens == second.tokens


@pytest.mark.parametrize("bits, most", [(16, 1.0005), (8, 1.01)])
def test_narrow_keys_and_values(name, bits, most, open_real):
    """Perplexity of the README's beginning, beside that with keys and values as wide as the
    activations.
    """
    plain, narrow = open_real(name), open_real(name, cache_bits=bits)
    tokens = plain.encode(README)[:256]
    ours, wanted = (measure_perplexity(llm, tokens, 256, 255).value for llm in (narrow, plain))
    assert 0.99 < ours / wanted < most
    assert narrow.model.make_cache(256).nbytes_for(256) < plain.model.make_cache(256).nbytes_for(
        256
    )


@pytest.mark.parametrize("bits, most, distance", [(16, 1.0005, 1e-3), (8, 1.05, 0.3)])
def test_narrow_activations(name, golden, bits, most, distance):
    """The cpu backend's fixed-point activations, beside transformers' likeliest tokens and
    float32's perplexity.
    """
    from real.conftest import fetch

    plain, narrow = (
        load(fetch(name), backend="cpu", activation_bits=width) for width in (32, bits)
    )
    tokens = plain.encode(README)[:256]
    ours, wanted = (measure_perplexity(llm, tokens, 256, 255).value for llm in (narrow, plain))
    assert 0.98 < ours / wanted < most
    for ids, argmax in zip(golden.ids[1:], golden.argmax[1:]):
        logits, exact = narrow.logits(ids), plain.logits(ids)
        assert np.sqrt(((logits - exact) ** 2).mean() / (exact**2).mean()) < distance
        assert (logits.argmax(-1) == argmax).mean() > (0.97 if bits == 16 else 0.7)


def test_gemma_answers_in_its_own_dtype(backend):
    """Its activations exceed float16 (transformers' issue 36822)."""
    from real.conftest import fetch

    llm = load(fetch("gemma3"), backend=backend.name, device=device_of(backend))
    assert backend.runtime.dtype_name(llm.model.dtype) == (
        "float32" if backend.name == "cpu" else "bfloat16"
    )
    assert (
        llm.generate(GREEDY[0], max_tokens=2, temperature=0.0).tokens
        == read_golden("gemma3").greedy[0][:2]
    )


def test_cache_files_between_backends(widen, smollm2, tmp_path):
    """A prompt that one backend computed and saved goes on on each, with the same tokens as
    cold.
    """
    names = [name for name in ("cpu", "mlx", "cuda") if name in to_run()]
    path = widen("smollm2")
    llms = {
        name: load(path, backend=name, device=device_of(open_backend(name)), dtype="float32")
        for name in names
    }
    cold = {}
    for name, llm in llms.items():
        cold[name] = llm.generate(LOGITS[1], max_tokens=8, temperature=0.0).tokens
        llm.save_cache(tmp_path / name)
    assert len(set(map(tuple, cold.values()))) == 1
    for made, used in itertools.permutations(names, 2):
        other = load(path, backend=used, device=device_of(open_backend(used)), dtype="float32")
        count = other.load_cache(tmp_path / made)
        warm = other.generate(LOGITS[1], max_tokens=8, temperature=0.0)
        assert warm.tokens == cold[used] and warm.reused_tokens == warm.prompt_tokens - 1 < count, (
            made,
            used,
        )
