"""Perplexity of a text over overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlx_llama.api.llm import LLM
from mlx_llama.core.errors import ContextError

from .differences import log_softmax
from .probes import run_logits

CHUNK = 128  # positions whose logits are held in memory


@dataclass
class Perplexity:
    """Perplexity of a text."""

    value: float  # exp(nll)
    nll: float  # mean negative log likelihood per token, nats
    count: int  # of scored tokens


def measure_perplexity(
    llm: LLM,
    tokens: list[int],
    window: int,
    stride: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Measure perplexity over windows of `window` tokens, one every `stride` tokens. Each token but
    the first is scored once, with at least `window - stride` tokens of context if there are that
    many (as in transformers' guide to perplexity). Raises ContextError.
    """
    if len(tokens) < 2:
        raise ContextError(f"the text has {len(tokens)} tokens: a perplexity needs at least 2")
    if not 2 <= window <= llm.engine.context:
        raise ContextError(
            f"`ctx_size` {window}: a window has 2 to {llm.engine.context} tokens here"
        )
    if not 1 <= stride < window:
        raise ContextError(
            f"`stride` {stride}: must be 1 to {window - 1}, below the window of {window} tokens"
        )
    total, scored = 0.0, 1  # nothing predicts the first token
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        cache = llm.model.make_cache(end - begin)
        for start in range(begin, end, CHUNK):
            stop = min(start + CHUNK, end)
            logits = run_logits(llm.backend, llm.model, tokens[start:stop], cache)
            # The logits of position i score token i + 1.
            first, last = max(start, scored - 1), min(stop, end - 1)
            if first < last:
                rows = log_softmax(logits[first - start : last - start])
                total -= float(rows[np.arange(last - first), tokens[first + 1 : last + 1]].sum())
        scored = end
        progress(end, len(tokens))
        if end == len(tokens):
            break
    count = len(tokens) - 1
    return Perplexity(math.exp(min(total / count, 700)), total / count, count)
