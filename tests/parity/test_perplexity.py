"""Perplexities are those of transformers' guide."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from mlx_llama.core.errors import ContextError
from mlx_llama.parity.probes import measure_perplexity

TEXT = " ".join(["Once upon a time there was a little llama who lived on a hill."] * 9)


@pytest.mark.slow_for("*-40-17", "mlx", "cuda")
@pytest.mark.parametrize("window, stride", [(64, 32), (40, 17), (256, 128)])
def test_perplexity_is_that_of_transformers(window, stride, backend, open_llm, small):
    llm = open_llm(backend)
    tokens = llm.tokenizer.encode(TEXT, add_bos=True)
    assert len(tokens) > 100
    peer = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    ids = torch.tensor([tokens])
    total, before = 0.0, 0
    # as in https://huggingface.co/docs/transformers/perplexity
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        labels = ids[:, begin:end].clone()
        labels[:, : -(end - before)] = -100
        with torch.no_grad():
            loss = peer(ids[:, begin:end], labels=labels).loss
        total += float(loss) * int((labels[:, 1:] != -100).sum())
        before = end
        if end == len(tokens):
            break
    measured = measure_perplexity(llm, tokens, window, stride)
    assert measured.value == pytest.approx(math.exp(total / (len(tokens) - 1)), rel=1e-5)
    assert measured.count == len(tokens) - 1
    assert measured.value == pytest.approx(math.exp(measured.nll))


@pytest.mark.parametrize(
    "count, window, stride, expected",
    [
        (1, 64, 32, "needs at least 2"),
        (100, 1, 1, "2 to 256 tokens"),
        (100, 257, 1, "2 to 256 tokens"),
        (100, 8, 8, "1 to 7"),
        (100, 8, 0, "1 to 7"),
    ],
)
def test_windows_that_do_not_fit(count, window, stride, expected, open_llm):
    with pytest.raises(ContextError, match=expected):
        measure_perplexity(open_llm(), [1] * count, window, stride)
