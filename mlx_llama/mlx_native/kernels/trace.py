"""Decode steps as one unit of work: traced once by mx.compile for each kind of sampling, replayed for every token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from mlx_llama.core.backends.positions import CallView
from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import sampling_key

from ..cache import Cache
from ..sampling import Sampler

KEPT = 8  # compiled functions per model; the one used longest ago is evicted


class Runner:
    """Runs decode steps, by kind of sampling.

    decode: (sampler, token, position, seed, tokens, keys, values, tables) -> (next token, tokens, keys, values), arrays
    alone after the sampler. compile: False runs it as it is, every time.
    """

    def __init__(self, decode: Callable, compile: bool):
        self.decode, self.compile = decode, compile
        self._functions: OrderedDict[tuple, Callable] = OrderedDict()

    def step(self, token: mx.array, index_pos: int, cache: Cache, sampler: Sampler) -> mx.array:
        """The next token, int32 [1, 1]; the cache takes over the step's arrays. Raises ContextError."""
        with CallView(cache, 1, 1, index_pos):
            step = self._find(sampler)
            seed = mx.array(rng.split_seed(sampler.options.seed), mx.uint32)
            following, cache.tokens, cache.keys, cache.values = step(
                token, mx.array(index_pos, mx.int32), seed, cache.tokens, cache.keys, cache.values, cache.tables)
        return following

    def _find(self, sampler: Sampler) -> Callable:
        key = sampling_key(sampler.options)
        step = self._functions.pop(key, None)
        if step is None:
            step = partial(self.decode, sampler)
            if self.compile:
                step = mx.compile(step)
        self._functions[key] = step
        while len(self._functions) > KEPT:
            self._functions.popitem(last=False)
        return step
