"""On the CPU layers with a window keep what it sees: a row is computed with the same bits as by a
cache that keeps all positions, cold, cut, copied, saved and in a batch.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from backends.conftest import same_state
from cpu_fallback.pages import Pages
from mlx_llama.core.backends.positions import SLACK, Positions
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint

SIZES = dict(
    vocab_size=384,
    hidden_size=64,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # whole vectors: pages have no padding, which stays zero
    max_position_embeddings=4096,
    eos_token_id=None,
)
MODELS = {
    "gemma3_text": dict(num_hidden_layers=6, sliding_window=24),
    "mistral": dict(num_hidden_layers=2, sliding_window=40),
    "gpt_oss": dict(num_hidden_layers=2, sliding_window=70, num_local_experts=4),
    "llama4_text": dict(  # a window since the last multiple
        num_hidden_layers=4, attention_chunk_size=100, num_local_experts=2, intermediate_size_mlp=48
    ),
}
PROMPT, END, STEP = 600, 1040, 20
TEXT = np.random.default_rng(0).integers(3, 384, (1, END + 40)).astype(np.int32)


@functools.cache
def made(kind: str) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(
                0.2 * torch.randn(value.shape) + float("norm" in key and kind[:5] != "gemma")
            )
    folder = Path(tempfile.mkdtemp(prefix="windows"))
    model.save_pretrained(folder)
    return folder


@functools.cache
def loaded(kind, bits=None):
    return select("cpu").load(open_checkpoint(made(kind)), "float32", cache_bits=bits)


def go(model, cache, row: int = 0) -> np.ndarray:
    """Logits of a row's next positions: of a prompt in chunks, an answer, and single tokens."""
    parts = []
    while (start := cache.lengths[row]) < END + 3:
        end = min(start + 256, PROMPT) if start < PROMPT else start + (STEP if start < END else 1)
        logits = model.forward(TEXT[:, start:end], start, cache, rows=[row], all_positions=True)
        parts.append(logits[0])
    return np.concatenate(parts)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Pages of nobody have no numbers."""

    def drop(self, pages):
        pages = list(pages)
        original(self, pages)
        for page in pages:
            if not page.holders:
                page.memory.fill(0xFF)

    original = Pages.drop
    monkeypatch.setattr(Pages, "drop", drop)


@pytest.mark.slow_for("gpt_oss", "llama4", "gemma3", "mistral-8")
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_a_row_goes_on_with_the_same_bits_after_a_cut(kind, bits, monkeypatch):
    model = loaded(kind, bits)
    run = functools.partial(go, model)
    with monkeypatch.context() as patch:
        patch.setattr(Positions, "slide", lambda self, span: None)
        whole = model.make_cache(2048, 2)
        wanted, full = run(whole), whole.state()
    cache = model.make_cache(2048, 4)
    is_same = np.array_equal(run(cache), wanted)
    assert is_same and cache.nbytes < whole.nbytes
    assert same_state(cache.state(), full)
    oldest = cache.oldest[0]
    assert PROMPT < oldest <= END + 3 - SLACK
    held = -(-oldest // STEP) * STEP
    # other rows, of what is held and from the end of the prompt
    assert cache.copy_prefix(0, 1, held) == held and cache.copy_prefix(0, 2, oldest - 1) == PROMPT
    assert cache.oldest[:3] == [oldest, oldest, PROMPT]
    states = cache.state(0, held), cache.state(0, oldest - 1)
    assert [len(state["tokens"]) for state in states] == [held, PROMPT]
    assert np.array_equal(run(cache, 1), wanted[held:])
    assert np.array_equal(run(cache, 2), wanted[PROMPT:])
    # a cut
    for length, cut in ((END, END), (held, held), (oldest - 1, PROMPT), (PROMPT - 1, 0)):
        assert cache.find_cut(length) == cut == cache.trim(length) == cache.length
        is_same = np.array_equal(run(cache), wanted[cut:])
        assert is_same, cut
    if bits is None:  # files have codes that are rounded again
        for state, start in zip(states, (held, PROMPT)):
            cache.restore(state, 3)
            assert np.array_equal(run(cache, 3), wanted[start:])
            assert cache.trim(start, 3) == start and cache.trim(start - 1, 3) == 0
    # together
    tokens = np.repeat(TEXT[:, END + 3 : END + 4], 3, axis=0)
    logits = model.forward(tokens, END + 3, cache, rows=[0, 1, 2])
    assert np.array_equal(logits, np.repeat(logits[:1], 3, axis=0))
    for row in range(4):
        cache.reset(row)
    assert cache.nbytes == 0


@pytest.mark.slow_for("gpt_oss", "llama4", "gemma3")
@pytest.mark.parametrize("kind", MODELS)
def test_memory_is_that_of_the_windows(kind):
    model = loaded(kind)
    cache = model.make_cache(4096)
    for start in range(0, 3000, 500):
        tokens = np.resize(TEXT, (1, 500))
        model.forward(tokens, start, cache)
    nbytes = sum(window.size * each for window, each in cache.window_nbytes.items())
    needed = 3000 * cache.lasting_nbytes + nbytes
    kept = sum((SLACK + 128) * each for each in cache.window_nbytes.values())
    assert needed <= cache.nbytes - 4 * 4096 <= 1.05 * needed + kept + 2 * nbytes
    assert cache.nbytes <= cache.nbytes_for(3000) <= cache.nbytes + 600 * cache.position_nbytes


def test_swa_full_keeps_all_positions():
    """As llama.cpp's flag: a row can be cut anywhere, and takes as much memory as on a GPU."""
    checkpoint, kept = open_checkpoint(made("mistral")), []
    for swa_full in (True, False):
        model = select("cpu").load(checkpoint, "float32", swa_full=swa_full)
        cache = model.make_cache(1100)
        logits = go(model, cache)
        nbytes, length = cache.nbytes, cache.trim(90)
        again = model.forward(TEXT[:, length:95], length, cache, all_positions=True)
        assert np.array_equal(again[0], logits[length:95])
        kept.append((nbytes, length))
    assert kept[0][1] == 90 and kept[1][1] == 0 and kept[0][0] > 2 * kept[1][0]
