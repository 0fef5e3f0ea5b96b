"""Real checkpoints against transformers' own GGUF loader, float32: logits, token ids, greedy
answers.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends.conftest import relative_rms

from mlx_llama.core.files.checkpoint import open_checkpoint
from real.conftest import fetch
from real.golden import ANSWER
from real.texts import CHATS, GREEDY, LOGITS, make_tokenizer_texts


@pytest.mark.slow_for(
    "*-1",
    "*-3",
    "*-4",
    "*-5",
    "*-7",
    "*-cuda-6",
    "*-mlx-2",
    "*-mlx-6",
    "gemma3-*-6",
    "gemma3-cpu-2",
    "gemma3-cuda-0",
    "gemma3-cuda-2",
    "gemma3-mlx-0",
    "smollm2-cuda-2",
    "smollm2-mlx-0",
)
@pytest.mark.parametrize("number", range(len(LOGITS)))
def test_logits(name, number, golden, open_real):
    """Within 1e-5 of transformers', with the same most likely token at every position."""
    logits = open_real(name, as_stored=number == 0).logits(golden.ids[number])
    assert logits.argmax(-1).tolist() == golden.argmax[number]
    assert golden.distance(logits, number) < 1e-5


@pytest.mark.slow
def test_all_logits_of_transformers_itself(name, golden, judge, open_real):
    llm = open_real(name)
    for text, ids in zip(LOGITS, golden.ids):
        ids = ids if llm.model.is_batch_invariant else ids[:8]  # the others are slow without a GPU
        wanted = judge.logits(ids)
        logits = llm.logits(ids)
        assert relative_rms(logits, wanted) < 1e-5, text
        assert (logits.argmax(-1) == wanted.argmax(-1)).all(), text


@pytest.mark.slow
def test_the_recorded_answers_are_those_of_transformers(name, golden, judge):
    again = judge.record()
    for field in ("ids", "argmax", "tokenized", "greedy", "chats"):
        assert getattr(again, field) == getattr(golden, field)
    for sketched, wanted in zip(again.sketches, golden.sketches):
        assert relative_rms(np.array(sketched), np.array(wanted)) < 1e-5


def test_token_ids(name, golden):
    tokenizer = open_checkpoint(fetch(name)).tokenizer
    texts = [*make_tokenizer_texts(), *LOGITS]
    assert len(golden.tokenized) == 200
    for text, ids in zip(texts, golden.tokenized + golden.ids, strict=True):
        assert tokenizer.encode(text, add_bos=tokenizer.adds_bos, parse_special=True) == ids, text


@pytest.mark.slow_for("*-48", "*-cuda-6", "*-mlx-6", "gemma3-cpu", "gemma3-cuda", "gemma3-mlx")
@pytest.mark.parametrize("count", [6, ANSWER])
def test_greedy_answers(name, count, golden, open_real):
    """Texts, and questions through the chat template, computed together."""
    chats = [[{"role": "user", "content": text}] for text in CHATS[: len(golden.chats)]]
    answers = open_real(name).batch([*GREEDY, *chats], max_tokens=count, temperature=0.0)
    wanted = [tokens[:count] for tokens in golden.greedy + golden.chats]
    assert [done.tokens for done in answers] == wanted
