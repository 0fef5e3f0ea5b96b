"""A small model's endless answers are ended, and its ordinary long ones are not."""

from __future__ import annotations

import pytest

from mlx_llama import load
from mlx_llama.core.answers.stops import REPETITION_LIMIT

ENDLESS = [
    "List 40 countries with their capitals as a Markdown table.",
    "Write an essay on the history of Rome.",
    "Write a poem with 20 stanzas about the sea.",
]
ORDINARY = [
    "Why is the sky blue?",
    "Explain photosynthesis in detail.",
    "Write the 7 times table up to 7 x 30.",
    "What are the differences between TCP and UDP?",
]


@pytest.mark.slow
def test_loops_are_ended_and_long_answers_are_not(smollm2):
    llm = load(smollm2, backend="cpu", ctx_size=1024)
    prompts = [[{"role": "user", "content": text}] for text in (*ENDLESS, *ORDINARY)]
    whole = llm.batch(prompts, max_tokens=450)
    done = llm.batch(prompts, max_tokens=450, repetition_limit=REPETITION_LIMIT)
    # another processor may round another way: judge each answer by its own end
    for free, ended in zip(whole, done, strict=True):
        if free.finish_reason == "eos":
            assert ended.text == free.text and not ended.repeated
        if ended.repeated:
            assert ended.finish_reason == "length"
            assert ended.tokens == free.tokens[: len(ended.tokens)]
            rest = free.tokens[len(ended.tokens) :]
            assert rest[:40] == free.tokens[len(ended.tokens) - ended.repeated :][: len(rest[:40])]
    assert sum(answer.finish_reason == "eos" for answer in done) >= 2
    assert sum(answer.repeated > 0 for answer in done) >= 2
