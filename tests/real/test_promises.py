"""The promises on real checkpoints: company, chunks, prefixes, speculation, narrow keys and
activations, sessions, cache files.
"""

from __future__ import annotations

import itertools

import pytest
from backends.conftest import relative_rms
from machine import device_of, open_backend, to_run

from mlx_llama import load
from mlx_llama.parity.batches import compare_batches, compare_ways, make_prompts, promise_of
from real.conftest import fetch, perplexity
from real.golden import read_golden
from real.texts import CHATS, GREEDY, LOGITS

TOLERANCE = 1e-4  # largest relative difference of a position's logits, keys or values at float32
REPEAT = (
    "Repeat after me, word for word: the quick brown fox jumps over the lazy dog, and the lazy dog "
    "sleeps."
)


@pytest.mark.slow
def test_rows_of_a_batch(name, open_real):
    """Rows at once, joining in turn, and from a prefix: the same tokens as alone, on cpu the same
    bits.
    """
    llm = open_real(name)
    rows = 32 if llm.model.is_batch_invariant else 3  # the others are slow without a GPU
    prompts = make_prompts(llm.encode(LOGITS[-1])[: rows + 8], rows, 64)
    promise = promise_of(llm.model, "float32")
    for result in compare_batches(llm.backend, llm.model, prompts, promise, TOLERANCE, (rows,)):
        assert result.is_kept, result.report()


@pytest.mark.slow_for("*-cuda", "*-mlx", "gemma3")
def test_ways_to_fill_the_cache(name, open_real):
    """Chunks, single tokens, trims, prefixes, saved states: the logits of one call over all
    tokens.
    """
    llm = open_real(name)
    count = 48 if llm.model.is_batch_invariant else 16
    for way in compare_ways(llm, llm.encode(LOGITS[4])[:count], TOLERANCE):
        assert way.within and (way.same_bits or not llm.model.is_batch_invariant), way


@pytest.mark.slow_for("cuda", "mlx")
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


@pytest.mark.slow_for("cuda", "mlx")
def test_a_chat_goes_on_from_its_prefix(open_real):
    llm = open_real("smollm2")
    chat = llm.chat(max_tokens=24, temperature=0.0)
    first, second = chat.send(CHATS[0]), chat.send("And of Italy?")
    device = device_of(llm.backend)
    cold = load(llm.checkpoint.path, backend=llm.backend.name, device=device, dtype="float32")
    assert "Paris" in first.text and second.reused_tokens > first.prompt_tokens
    assert cold.generate(chat.messages[:-1], max_tokens=24, temperature=0.0).tokens == second.tokens


@pytest.mark.slow
@pytest.mark.parametrize("bits, most", [(16, 1.0005), (8, 1.01)])
def test_narrow_keys_and_values(name, bits, most, open_real):
    """Perplexity beside that with keys and values as wide as the activations."""
    plain, narrow = open_real(name), open_real(name, cache_bits=bits)
    assert 0.99 < perplexity(narrow) / perplexity(plain) < most
    sizes = (llm.model.make_cache(256).nbytes_for(256) for llm in (narrow, plain))
    assert next(sizes) < next(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("bits, most, distance", [(16, 1.0005, 1e-3), (8, 1.05, 0.3)])
def test_narrow_activations(name, golden, bits, most, distance):
    """The cpu backend's fixed-point activations, beside transformers' most likely tokens and
    float32's perplexity.
    """
    path = fetch(name)
    plain, narrow = (load(path, backend="cpu", activation_bits=width) for width in (32, bits))
    assert 0.98 < perplexity(narrow) / perplexity(plain) < most
    for ids, argmax in zip(golden.ids[1:], golden.argmax[1:]):
        logits, exact = narrow.logits(ids), plain.logits(ids)
        assert relative_rms(logits, exact) < distance
        assert (logits.argmax(-1) == argmax).mean() > (0.97 if bits == 16 else 0.7)


@pytest.mark.slow_for("cuda", "mlx")
def test_gemma_answers_in_its_own_dtype(backend):
    """Its activations exceed float16 (transformers' issue 36822)."""
    llm = load(fetch("gemma3"), backend=backend.name, device=device_of(backend))
    dtype = "float32" if backend.name == "cpu" else "bfloat16"
    assert llm.model.dtype_name == dtype
    done = llm.generate(GREEDY[0], max_tokens=2, temperature=0.0)
    assert done.tokens == read_golden("gemma3").greedy[0][:2]


@pytest.mark.slow
def test_cache_files_between_backends(widen, smollm2, tmp_path):
    """A prompt that one backend computed and saved goes on on each, with the same tokens as
    cold.
    """
    names = [name for name in ("cpu", "mlx", "cuda") if name in to_run()]

    def open_on(name):
        device = device_of(open_backend(name))
        return load(widen("smollm2"), backend=name, device=device, dtype="float32")

    cold = {}
    for name in names:
        llm = open_on(name)
        cold[name] = llm.generate(LOGITS[1], max_tokens=8, temperature=0.0).tokens
        llm.save_cache(tmp_path / name)
    assert len(set(map(tuple, cold.values()))) == 1
    for made, used in itertools.permutations(names, 2):
        llm = open_on(used)
        count = llm.load_cache(tmp_path / made)
        warm = llm.generate(LOGITS[1], max_tokens=8, temperature=0.0)
        assert warm.tokens == cold[used], (made, used)
        assert warm.reused_tokens == warm.prompt_tokens - 1 < count, (made, used)
