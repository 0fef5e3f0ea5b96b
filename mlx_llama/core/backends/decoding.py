"""Prefill and decode rows with the model alone: no requests, no text, no scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mlx_llama.core.backends.interface import Cache, Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.options import GenerationOptions

CHUNK = 512  # prompt tokens per evaluation
GREEDY = GenerationOptions(temperature=0.0)


def prefill(
    backend: Backend,
    model: Model,
    cache: Cache,
    prompts: Mapping[int, Sequence[int]],
    chunk: int = CHUNK,
) -> list[int]:
    """Append {row: prompt}, `chunk` tokens per evaluation; returns the next token of each."""
    sampling, sampled = backend.sampling_batch([GREEDY]), []
    for row, prompt in prompts.items():
        rest = (len(prompt) - 1) // chunk * chunk
        for start in range(0, rest, chunk):
            tokens = np.array([prompt[start : start + chunk]], np.int32)
            model.forward(tokens, cache.lengths[row], cache, rows=[row])
            backend.runtime.launch(cache.arrays())
        tokens = np.array([prompt[rest:]], np.int32)
        sampled.append(model.step(tokens, cache.lengths[row], cache, sampling, rows=[row]))
        backend.runtime.launch(sampled[-1:])
    return backend.runtime.read(sampled)


def decode(
    backend: Backend, model: Model, cache: Cache, tokens: Sequence[int], count: int
) -> Iterator[list[int]]:
    """Decode `count` tokens of each of the first rows after `tokens`; yields each step's. An
    asynchronous device receives step n+1 before step n is read, as in the scheduler.
    """
    rows = list(range(len(tokens)))
    sampling, unread = backend.sampling_batch([GREEDY] * len(rows)), None
    current = np.array(tokens, np.int32)[:, None]
    for _ in range(count):
        starts = cache.lengths[: len(rows)]
        sampled = model.step(
            current, starts if len(rows) > 1 else starts[0], cache, sampling, rows=rows
        )
        backend.runtime.launch([sampled])
        if backend.runs_ahead:
            if unread is not None:
                yield backend.runtime.read([unread])
            unread = current = sampled
        else:
            values = backend.runtime.read([sampled])
            current = np.array(values, np.int32)[:, None]
            yield values
    if unread is not None:
        yield backend.runtime.read([unread])
